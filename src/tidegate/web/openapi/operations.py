"""What each route is for, and the structs that check its body and write its answer: the OpenAPI document is printed from these."""

from collections.abc import Mapping
from typing import Any

import msgspec

from tidegate.web.admin import (
    audit,
    autoscale,
    batches,
    budgets,
    deliveries,
    deployments,
    keys,
    operations,
    overview,
    scheduler,
)
from tidegate.web.completion_batch import shapes as completion_batch
from tidegate.web.http import requests
from tidegate.web.http.answers import Page
from tidegate.web.http.control_requests import BatchChange, CanaryWord
from tidegate.web.http.filter_requests import FILTERS
from tidegate.web.http.retry_requests import OperatorRetryWish, RetryWish
from tidegate.web.jobs.error_groups import ErrorKinds
from tidegate.web.jobs.explanation import Explanation
from tidegate.web.jobs.job_items import ItemDetail, ItemShown
from tidegate.web.message_batches import schemas as message_batches
from tidegate.web.openai import schemas, uploads
from tidegate.web.webhooks import webhooks

PAGE = ("after", "limit")
_COMPLETION = "/v1/completion-batch/{workspace_id}/{environment_id}"
_ONE = "/admin/v1/batches/{batch_id}"


class Operation(msgspec.Struct, frozen=True):
    """`takes` and `gives` are the structs of the body and the answer; None where bytes pass through as they are."""

    summary: str
    takes: Any = None
    gives: Any = None
    query: tuple[str, ...] = ()


OPERATIONS: Mapping[tuple[str, str], Operation] = {
    ("POST", "/v1/files"): Operation("Upload a file", gives=schemas.FileObject),
    ("GET", "/v1/files"): Operation("List files", gives=Page[schemas.FileObject], query=(*PAGE, "order", "purpose")),
    ("GET", "/v1/files/{file_id}"): Operation("Show a file", gives=schemas.FileObject),
    ("DELETE", "/v1/files/{file_id}"): Operation("Delete a file", gives=schemas.FileDeleted),
    ("GET", "/v1/files/{file_id}/content"): Operation("Download a file"),
    ("POST", "/v1/uploads"): Operation("Begin a file in parts", uploads.UploadCreate, schemas.UploadObject),
    ("POST", "/v1/uploads/{upload_id}/parts"): Operation("Add a part", gives=schemas.UploadPartObject),
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
        "Run failed requests again", takes=RetryWish, gives=schemas.Batch
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
    ("GET", "/v1/messages/batches"): Operation(
        "List message batches",
        gives=message_batches.MessageBatchPage,
        query=("after_id", "before_id", "limit", "beta"),
    ),
    ("POST", "/v1/messages/batches"): Operation("Create a message batch", gives=message_batches.MessageBatch),
    ("GET", "/v1/messages/batches/{message_batch_id}"): Operation(
        "Show a message batch", gives=message_batches.MessageBatch
    ),
    ("DELETE", "/v1/messages/batches/{message_batch_id}"): Operation(
        "Delete an ended message batch", gives=message_batches.MessageBatchDeleted
    ),
    ("POST", "/v1/messages/batches/{message_batch_id}/cancel"): Operation(
        "Cancel a message batch", gives=message_batches.MessageBatch
    ),
    ("GET", "/v1/messages/batches/{message_batch_id}/results"): Operation("Read the results of a message batch"),
    ("POST", _COMPLETION): Operation("Create a completion batch", gives=completion_batch.BatchEntity),
    ("GET", _COMPLETION + "/{completion_batch_id}"): Operation(
        "Show a completion batch", gives=completion_batch.BatchEntity, query=("includesItems", "includesUsers")
    ),
    ("POST", _COMPLETION + "/{completion_batch_id}/cancel"): Operation("Cancel a completion batch"),
    ("GET", _COMPLETION + "/{completion_batch_id}/events"): Operation("Follow a completion batch by its events"),
    ("GET", _COMPLETION + "/{completion_batch_id}/{item_id}"): Operation(
        "Show an item", gives=completion_batch.ItemEntity
    ),
    ("POST", "/v1/webhook_endpoints"): Operation(
        "Create a webhook endpoint", webhooks.EndpointCreate, webhooks.EndpointObject
    ),
    ("GET", "/v1/webhook_endpoints"): Operation(
        "List webhook endpoints", gives=Page[webhooks.EndpointObject], query=PAGE
    ),
    ("GET", "/v1/webhook_endpoints/{webhook_endpoint_id}"): Operation(
        "Show a webhook endpoint", gives=webhooks.EndpointObject
    ),
    ("POST", "/v1/webhook_endpoints/{webhook_endpoint_id}"): Operation(
        "Change a webhook endpoint", webhooks.EndpointChange, webhooks.EndpointObject
    ),
    ("DELETE", "/v1/webhook_endpoints/{webhook_endpoint_id}"): Operation(
        "Delete a webhook endpoint", gives=webhooks.EndpointDeleted
    ),
    ("POST", "/v1/webhook_endpoints/{webhook_endpoint_id}/rotate_secret"): Operation(
        "Rotate a signing secret", webhooks.SecretRotation, webhooks.EndpointObject
    ),
    ("POST", "/v1/webhook_endpoints/{webhook_endpoint_id}/test"): Operation(
        "Send a test event", webhooks.EndpointTest, webhooks.EndpointTestResult
    ),
    ("GET", "/v1/webhook_event_types"): Operation("List types of events", gives=webhooks.EventTypeList),
    ("GET", "/v1/webhook_deliveries"): Operation(
        "List deliveries", gives=Page[webhooks.DeliveryObject], query=(*PAGE, "status")
    ),
    ("POST", "/v1/webhook_deliveries/{delivery_id}/replay"): Operation(
        "Send a delivery again", gives=webhooks.DeliveryObject
    ),
    ("GET", "/admin/v1/overview"): Operation("What runs, waits and is stuck", gives=overview.Overview),
    ("GET", "/admin/v1/batches"): Operation(
        "List batches of every tenant", gives=Page[batches.AdminBatch], query=(*PAGE, "org", "sort", *FILTERS)
    ),
    ("GET", _ONE): Operation("Show a batch of any tenant", gives=batches.AdminBatch),
    ("GET", f"{_ONE}/timeline"): Operation("Show the life of a batch", gives=batches.Timeline),
    ("GET", f"{_ONE}/explain"): Operation("Say why a batch of any tenant runs or waits", gives=Explanation),
    **{
        ("POST", f"{_ONE}/{verb}"): Operation(summary, gives=batches.AdminBatch)
        for verb, summary in {
            "cancel": "Cancel a batch of any tenant",
            "pause": "Pause a batch of any tenant",
            "resume": "Resume a batch of any tenant",
            "retry_finalization": "Try again to publish a batch",
            "requeue": "Look again at what of a batch rests",
            "fail": "End a batch as failed, and keep its results",
            "abandon": "Give up a batch that cannot be published",
        }.items()
    },
    ("POST", f"{_ONE}/retry"): Operation(
        "Run a batch's failed requests again, as a new batch", OperatorRetryWish, batches.AdminBatch
    ),
    ("GET", f"{_ONE}/errors"): Operation("List the kinds of errors of a batch", gives=ErrorKinds),
    ("GET", f"{_ONE}/items"): Operation(
        "List what became of a batch's requests, of any tenant", gives=Page[ItemShown], query=(*PAGE, "outcome", "code")
    ),
    ("GET", f"{_ONE}/items/{{custom_id:path}}"): Operation(
        "Show one request of a batch of any tenant", gives=ItemDetail
    ),
    ("POST", "/admin/v1/operations"): Operation(
        "Change every batch that matches a filter", operations.OperationWish, operations.OperationShown
    ),
    ("GET", "/admin/v1/operations"): Operation("List operations", gives=Page[operations.OperationShown], query=PAGE),
    ("GET", "/admin/v1/operations/{operation_id}"): Operation(
        "Show an operation and its progress", gives=operations.OperationShown
    ),
    ("POST", "/admin/v1/operations/{operation_id}/cancel"): Operation(
        "Let an operation change nothing more", gives=operations.OperationShown
    ),
    ("GET", "/admin/v1/autoscale"): Operation("Show how many replicas are needed", gives=autoscale.Autoscale),
    ("GET", "/admin/v1/autoscale/workers"): Operation(
        "Show how many workers are needed", gives=autoscale.ReplicasShown
    ),
    ("GET", "/admin/v1/autoscale/models/{model:path}"): Operation(
        "Show how many replicas of a model are needed", gives=autoscale.ModelReplicas
    ),
    ("GET", "/admin/v1/workers"): Operation("List processes", gives=Page[overview.WorkerShown]),
    ("GET", "/admin/v1/flows"): Operation("List flows", gives=Page[overview.FlowShown], query=("limit", "model")),
    ("POST", "/admin/v1/flows/refresh"): Operation("Look again at resting flows", gives=overview.FlowsRefreshed),
    ("GET", "/admin/v1/orgs"): Operation("List organizations", gives=Page[overview.OrgShown], query=PAGE),
    ("GET", "/admin/v1/budgets"): Operation(
        "List what organizations' limits have left", gives=Page[budgets.OrgBudgets], query=(*PAGE, "org")
    ),
    ("GET", "/admin/v1/model_capacity"): Operation(
        "Show what may be sent to each model", gives=Page[overview.ModelCapacity]
    ),
    **{
        (method, f"/admin/v1/{kind}s{rest}"): Operation(f"{verb} {kind}s", takes, gives)
        for kind in ("deployment", "resource", "model")
        for method, rest, verb, takes, gives in (
            ("GET", "", "List", None, deployments.RoutingList),
            ("POST", "/add", "Add", deployments.RoutingWish, deployments.RoutingDone),
            ("POST", "/change", "Change", deployments.RoutingWish, deployments.RoutingDone),
            ("POST", "/remove", "Remove", deployments.RoutingWish, deployments.RoutingDone),
        )
    },
    **{
        ("POST", f"/admin/v1/deployments/{{name:path}}/{verb}"): Operation(summary, gives=deployments.RoutingDone)
        for verb, summary in (
            ("drain", "Send a deployment no new calls"),
            ("resume", "Send a drained deployment calls again"),
        )
    },
    ("POST", "/admin/v1/deployments/{name:path}/refresh"): Operation(
        "Try a deployment at once", gives=deployments.DeploymentRefreshed
    ),
    ("GET", "/admin/v1/scheduler"): Operation("Show the scheduler's modes", gives=scheduler.SchedulerStatus),
    ("POST", "/admin/v1/scheduler"): Operation(
        "Switch the scheduler's modes", scheduler.SchedulerWish, scheduler.SchedulerStatus
    ),
    ("GET", "/admin/v1/keys"): Operation("List keys", gives=Page[keys.KeyShown], query=(*PAGE, "org")),
    ("POST", "/admin/v1/keys"): Operation("Create a key", keys.KeyWish, keys.KeyMade),
    ("POST", "/admin/v1/keys/{key_id}/change"): Operation("Change a key", keys.KeyChange, keys.KeyChanged),
    ("POST", "/admin/v1/keys/{key_id}/rotate"): Operation("Rotate a key", keys.KeyRotation, keys.KeyMade),
    ("POST", "/admin/v1/keys/{key_id}/revoke"): Operation("Revoke a key", gives=keys.KeyRevoked),
    ("POST", "/admin/v1/keys/delete"): Operation("Delete keys", keys.KeyDeletion, keys.KeysDeleted),
    ("GET", "/admin/v1/usage"): Operation("Export usage", query=("by", "format", "from", "org", "to")),
    ("GET", "/admin/v1/deliveries"): Operation(
        "List deliveries of every tenant", gives=Page[deliveries.AdminDelivery], query=(*PAGE, "org", "status")
    ),
    ("POST", "/admin/v1/deliveries/{delivery_id}/replay"): Operation(
        "Send any tenant's delivery again", gives=webhooks.DeliveryObject
    ),
    ("GET", "/admin/v1/audit"): Operation(
        "List what operators changed",
        gives=Page[audit.ChangeShown],
        query=(*PAGE, "actor", "action", "target"),
    ),
}
