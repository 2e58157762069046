"""The descriptions of this door's routes, with the structs that check their bodies and write their
answers.
"""

from tidegate.web.http.answers import Page
from tidegate.web.http.operations import PAGE, Operation, OperationTable
from tidegate.web.jobs.explanation import Explanation
from tidegate.web.jobs.job_items import ItemDetail, ItemShown
from tidegate.web.openai import schemas, uploads
from tidegate.web.requests import requests
from tidegate.web.requests.control_requests import BatchChange, CanaryWord
from tidegate.web.requests.filter_requests import FILTERS
from tidegate.web.requests.retry_requests import RetryRequest

OPERATIONS: OperationTable = {
    ("POST", "/v1/files"): Operation("Upload a file", gives=schemas.FileObject, takes_form=True),
    ("GET", "/v1/files"): Operation("List files", gives=Page[schemas.FileObject], query=(*PAGE, "order", "purpose")),
    ("GET", "/v1/files/{file_id}"): Operation("Show a file", gives=schemas.FileObject),
    ("DELETE", "/v1/files/{file_id}"): Operation("Delete a file", gives=schemas.FileDeleted),
    ("GET", "/v1/files/{file_id}/content"): Operation("Download a file"),
    ("POST", "/v1/uploads"): Operation("Begin a file in parts", uploads.UploadCreate, schemas.UploadObject),
    ("POST", "/v1/uploads/{upload_id}/parts"): Operation("Add a part", gives=schemas.UploadPartObject, takes_form=True),
    ("POST", "/v1/uploads/{upload_id}/complete"): Operation(
        "Make a file of the parts", uploads.UploadComplete, schemas.UploadObject
    ),
    ("POST", "/v1/uploads/{upload_id}/cancel"): Operation("Drop the parts", gives=schemas.UploadObject),
    ("POST", "/v1/batches"): Operation("Create a batch", requests.BatchCreate, schemas.Batch),
    ("GET", "/v1/batches"): Operation("List batches", gives=Page[schemas.Batch], query=(*PAGE, "sort", *FILTERS)),
    ("GET", "/v1/batches/{batch_id}"): Operation("Show a batch", gives=schemas.Batch),
    ("POST", "/v1/batches/{batch_id}"): Operation("Change a batch", BatchChange, schemas.Batch),
    ("DELETE", "/v1/batches/{batch_id}"): Operation("Delete an ended batch", gives=schemas.BatchDeleted),
    ("POST", "/v1/batches/{batch_id}/cancel"): Operation("Cancel a batch", gives=schemas.Batch),
    ("POST", "/v1/batches/{batch_id}/pause"): Operation("Pause a batch", gives=schemas.Batch),
    ("POST", "/v1/batches/{batch_id}/resume"): Operation("Resume a batch", gives=schemas.Batch),
    ("POST", "/v1/batches/{batch_id}/canary"): Operation("Say what follows a canary", CanaryWord, schemas.Batch),
    ("POST", "/v1/batches/{batch_id}/retry"): Operation(
        "Run failed requests again", takes=RetryRequest, gives=schemas.Batch
    ),
    ("GET", "/v1/batches/{batch_id}/items"): Operation(
        "List what became of a batch's requests", gives=Page[ItemShown], query=(*PAGE, "outcome", "code")
    ),
    ("GET", "/v1/batches/{batch_id}/items/{custom_id:path}"): Operation(
        "Show one request of a batch", gives=ItemDetail
    ),
    ("GET", "/v1/batches/{batch_id}/explain"): Operation("Say why a batch runs or waits", gives=Explanation),
    ("GET", "/v1/batches/{batch_id}/output"): Operation("Read the answers so far"),
    ("GET", "/v1/batches/{batch_id}/errors"): Operation("Read the errors so far"),
    ("GET", "/v1/batches/{batch_id}/events"): Operation("Follow a batch by its events"),
    ("GET", "/v1/limits"): Operation("Show what limits have left", gives=schemas.LimitList),
    ("GET", "/v1/models"): Operation("List models", gives=schemas.ModelList),
    ("GET", "/v1/models/{model:path}"): Operation("Show a model", gives=schemas.ModelObject),
}
