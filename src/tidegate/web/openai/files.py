"""OpenAI's Files API."""

from starlette.requests import Request
from starlette.responses import Response

from tidegate.core import ids
from tidegate.core.files import File
from tidegate.core.nouns import Caller
from tidegate.core.problems import no_such_file
from tidegate.core.states import FileState
from tidegate.stages.accept import Reception, too_large
from tidegate.web.context import WebContext
from tidegate.web.http.answers import json_answer, page_of
from tidegate.web.http.content import FileContents
from tidegate.web.http.filename import attachment
from tidegate.web.http.multipart import UploadForm
from tidegate.web.http.routes import Guarded
from tidegate.web.http.tenant_slots import TenantSlots
from tidegate.web.openai import schemas
from tidegate.web.openai.result_progress import ResultProgress, result_progress
from tidegate.web.requests import requests
from tidegate.web.requests.incoming_file import received_file

LIST_COUNT_MAX = 10_000
INCOMPLETE_HEADER = "X-Incomplete"
LAST_LINE_HEADER = "X-Last-Line"


class FileRoutes:
    def __init__(self, context: WebContext, reception: Reception, slots: TenantSlots) -> None:
        self._store = context.store
        self._contents = FileContents(context.store, context.blobs)
        self._limits = context.settings.limits
        self._keep_s = context.settings.retention.file_s
        self._reception = reception
        self._slots = slots

    def routes(self) -> list[Guarded]:
        return [
            Guarded("POST", "/v1/files", "files:write", self.upload, makes_work=True),
            Guarded("GET", "/v1/files", "files:read", self.list),
            Guarded("GET", "/v1/files/{file_id}", "files:read", self.retrieve),
            Guarded("DELETE", "/v1/files/{file_id}", "files:write", self.delete),
            Guarded("GET", "/v1/files/{file_id}/content", "files:read", self.content),
        ]

    async def upload(self, request: Request, caller: Caller) -> Response:
        key = requests.idempotency_key(request)
        form = UploadForm(request.headers.get("content-type"))
        size_bytes_max = self._limits.file_bytes_max
        async with (
            self._reception.running_keys.hold_key(caller.tenant_id, "files", key),
            self._slots.taken(caller.tenant_id),
            received_file(request, form, self._reception, size_bytes_max, too_large(size_bytes_max)) as upload,
        ):
            filename = form.finish()
            purpose = requests.purpose(form.fields)
            expires_after_s = requests.upload_expires_after_s(form.fields, self._keep_s)
            file = await upload.keep(
                caller,
                purpose=purpose,
                filename=filename,
                expires_after_ms=expires_after_s * 1000,
                idempotency_key=key,
                quotas=self._limits.quotas(),
            )
        return json_answer(schemas.file_object(file))

    async def list(self, request: Request, caller: Caller) -> Response:
        query = request.query_params
        requests.refuse_unknown(query, ("after", "limit", "order", "purpose"))
        count = requests.limit(query, LIST_COUNT_MAX, LIST_COUNT_MAX)
        found = await self._store.list_files(
            caller.tenant_id,
            after=requests.after(query, "file"),
            count_max=count + 1,
            order=requests.choice(query, "order", ("asc", "desc")) or "desc",
            purpose=requests.choice(query, "purpose", requests.LISTED_PURPOSES),
        )
        if found is None:
            raise requests.unknown_cursor()
        shown = found[:count]
        page = page_of(
            [schemas.file_object(file) for file in shown], [file.id for file in shown], has_more=len(found) > count
        )
        return json_answer(page)

    async def retrieve(self, request: Request, caller: Caller) -> Response:
        return json_answer(schemas.file_object(await self._file(request, caller)))

    async def delete(self, request: Request, caller: Caller) -> Response:
        file_id = request.path_params["file_id"]
        if not ids.is_valid("file", file_id) or not await self._reception.delete_file(caller.tenant_id, file_id):
            raise no_such_file(file_id)
        return json_answer(schemas.FileDeleted(file_id, "file", deleted=True))

    async def content(self, request: Request, caller: Caller) -> Response:
        """Send a file's bytes, or what a running batch has written to it so far."""
        lines = requests.offset(request.query_params)
        file = await self._file(request, caller, may_grow=True)
        results = await self._results(caller, file)
        headers = {"Content-Disposition": attachment(file.filename)}
        size_bytes, from_at = file.size_bytes, 0
        if file.state is FileState.READY:
            # The bytes under an id never change, so the id can be the ETag.
            headers["ETag"] = f'"{file.id}"'
        if results is not None:
            size_bytes = results.size_bytes
            headers[INCOMPLETE_HEADER] = "true" if results.grows else "false"
            headers[LAST_LINE_HEADER] = str(results.line_count)
        if lines:
            if results is None:
                raise requests.offset_of_other_file()
            from_at = await self._line_place(results, lines)
        return await self._contents.answer(request, file.id, size_bytes, headers, from_at=from_at)

    async def _file(self, request: Request, caller: Caller, *, may_grow: bool = False) -> File:
        file_id = request.path_params["file_id"]
        if not ids.is_valid("file", file_id):
            raise no_such_file(file_id)
        file = await self._store.get_file(caller.tenant_id, file_id)
        if file is None and may_grow:
            file = await self._store.get_growing_file(caller.tenant_id, file_id)
        if file is None:
            raise no_such_file(file_id)
        return file

    async def _results(self, caller: Caller, file: File) -> ResultProgress | None:
        """Return the progress of a job in one of its two result files; None for any other file."""
        job = await self._store.get_job(caller.tenant_id, file.job_id) if file.job_id else None
        if job is None:
            return None
        if file.state is FileState.GROWING and job.ordered:
            # The file is rewritten in the order of the input at the end, so no place in it is
            # final.
            raise no_such_file(file.id)
        return result_progress(job, file.id)

    async def _line_place(self, results: ResultProgress, lines: int) -> int:
        if lines >= results.line_count:
            return results.size_bytes
        place = await self._store.result_line_place(results.job_id, lines, is_output=results.is_output)
        return results.size_bytes if place is None else place
