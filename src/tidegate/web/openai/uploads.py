"""OpenAI's Uploads API: a file in parts, each up to 64 MiB, in any order, and several at once."""

import re
from typing import Annotated

import msgspec
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response

from tidegate.core import ids
from tidegate.core.errors import ApiProblem
from tidegate.core.files import UploadRequest
from tidegate.core.nouns import Caller
from tidegate.core.problems import no_such_upload, upload_not_pending
from tidegate.core.states import UploadState
from tidegate.stages.accept import Reception
from tidegate.stages.upload_parts import PART_BYTES_MAX, PartedUploads
from tidegate.store.tenants.uploads import PARTS_MAX
from tidegate.web.context import WebContext
from tidegate.web.http.answers import json_answer
from tidegate.web.http.filename import harmless
from tidegate.web.http.multipart import UploadForm
from tidegate.web.http.routes import Guarded
from tidegate.web.http.tenant_slots import TenantSlots
from tidegate.web.openai import schemas
from tidegate.web.requests import requests
from tidegate.web.requests.incoming_file import received_file

FILE_FIELD = "data"
_MD5 = re.compile(r"[0-9a-fA-F]{32}", re.ASCII)
_MIME_TYPE = re.compile(r"[\x20-\x7e]{1,255}", re.ASCII)


class UploadCreate(msgspec.Struct, forbid_unknown_fields=True):
    bytes: Annotated[int, Meta(ge=1)]
    filename: str
    mime_type: str
    purpose: str
    expires_after: requests.ExpiresAfter | None = None


class UploadComplete(msgspec.Struct, forbid_unknown_fields=True):
    part_ids: Annotated[list[str], Meta(min_length=1, max_length=PARTS_MAX)]
    md5: str | None = None


class UploadRoutes:
    def __init__(self, context: WebContext, reception: Reception, slots: TenantSlots) -> None:
        self._limits = context.settings.limits
        self._keep_s = context.settings.retention.file_s
        self._reception = reception
        self._uploads = PartedUploads(context.store, context.blobs, reception)
        self._slots = slots

    def routes(self) -> list[Guarded]:
        one = "/v1/uploads/{upload_id}"
        return [
            Guarded("POST", "/v1/uploads", "files:write", self.create, makes_work=True),
            Guarded("POST", f"{one}/parts", "files:write", self.add_part, makes_work=True),
            Guarded("POST", f"{one}/complete", "files:write", self.complete, makes_work=True),
            Guarded("POST", f"{one}/cancel", "files:write", self.cancel),
        ]

    async def create(self, request: Request, caller: Caller) -> Response:
        key = requests.idempotency_key(request)
        async with self._reception.running_keys.hold_key(caller.tenant_id, "uploads", key):
            body = await requests.json_body(request, UploadCreate, self._limits.body_bytes_max)
            upload = await self._uploads.create(
                caller, self._checked(body), idempotency_key=key, quotas=self._limits.quotas()
            )
        return json_answer(schemas.upload_object(upload))

    async def add_part(self, request: Request, caller: Caller) -> Response:
        key = requests.idempotency_key(request)
        upload = await self._uploads.find(caller, _upload_id(request))
        if upload.state is not UploadState.PENDING:
            raise upload_not_pending(upload.state)
        form = UploadForm(request.headers.get("content-type"), FILE_FIELD)
        async with (
            self._reception.running_keys.hold_key(caller.tenant_id, "uploads/parts", key),
            self._slots.taken(caller.tenant_id),
            received_file(request, form, self._reception, PART_BYTES_MAX, _part_too_large()) as incoming,
        ):
            part = await self._uploads.keep_part(
                caller, upload.id, incoming, idempotency_key=key, quotas=self._limits.quotas()
            )
        return json_answer(schemas.UploadPartObject(part.id, "upload.part", part.created_at // 1000, part.upload_id))

    async def complete(self, request: Request, caller: Caller) -> Response:
        found = await self._uploads.find(caller, _upload_id(request))
        body = await requests.json_body(request, UploadComplete, self._limits.body_bytes_max)
        if body.md5 is not None and not _MD5.fullmatch(body.md5):
            raise ApiProblem(400, "invalid_parameter", "`md5` must be 32 hexadecimal digits.", param="md5")
        async with self._slots.taken(caller.tenant_id):
            md5 = body.md5.lower() if body.md5 else None
            upload, file = await self._uploads.complete(caller, found, body.part_ids, md5)
        return json_answer(schemas.upload_object(upload, file))

    async def cancel(self, request: Request, caller: Caller) -> Response:
        return json_answer(schemas.upload_object(await self._uploads.cancel(caller, _upload_id(request))))

    def _checked(self, body: UploadCreate) -> UploadRequest:
        bytes_max = self._limits.upload_bytes_max
        if body.bytes > bytes_max:
            message = (
                f"The file would have {body.bytes:,} bytes, and {bytes_max:,} are allowed. Split it into several files."
            )
            raise ApiProblem(413, "file_too_large", message, param="bytes")
        if not _MIME_TYPE.fullmatch(body.mime_type):
            message = "`mime_type` must be 1 to 255 printable ASCII characters, such as application/jsonl."
            raise ApiProblem(400, "invalid_parameter", message, param="mime_type")
        return UploadRequest(
            body.bytes,
            requests.purpose({"purpose": body.purpose}),
            harmless(body.filename),
            body.mime_type,
            1000 * (body.expires_after.seconds if body.expires_after else self._keep_s),
        )


def _upload_id(request: Request) -> str:
    upload_id: str = request.path_params["upload_id"]
    if not ids.is_valid("upload", upload_id):
        raise no_such_upload(upload_id)
    return upload_id


def _part_too_large() -> ApiProblem:
    message = f"A part may have {PART_BYTES_MAX:,} bytes. Send the file in smaller parts."
    return ApiProblem(413, "part_too_large", message, param=FILE_FIELD)
