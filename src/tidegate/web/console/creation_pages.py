"""Pages that make a batch from a file in two steps: upload the file and show what a batch would be,
then create it.

The file goes straight to the blobs, whatever its size. Nothing is sent to a model before the second
step.
"""

from typing import Any
from urllib.parse import urlencode

import msgspec
from starlette.datastructures import QueryParams
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route

from tidegate.core import ids
from tidegate.core.errors import ApiProblem
from tidegate.core.nouns import Caller
from tidegate.core.problems import shown_id
from tidegate.stages.accept import Reception, too_large
from tidegate.store.store import Store
from tidegate.web.console.guard import ConsoleGuard
from tidegate.web.console.session import Visitor, refuse_foreign
from tidegate.web.context import WebContext
from tidegate.web.http.multipart import UploadForm
from tidegate.web.http.pages import page
from tidegate.web.http.tenant_slots import upload_slots
from tidegate.web.jobs.creation import JobCreation
from tidegate.web.jobs.validation import JobValidation
from tidegate.web.openai.schemas import validation
from tidegate.web.requests import requests
from tidegate.web.requests.incoming_file import received_file
from tidegate.web.requests.requests import ENDPOINTS, BatchCreate, decoded, job_request

ORGS_MAX = 200
ERRORS_SHOWN_MAX = 50
# The fields of a batch that a form may set, beside its file and its owner.
TEXTS = ("endpoint", "completion_window", "max_cost")
CHOICES = ("ordered", "skip_invalid")
FIELDS = ("org", *TEXTS, "priority", *CHOICES)


class CreationPages:
    def __init__(self, context: WebContext, guard: ConsoleGuard) -> None:
        self._context = context
        self._store = context.store
        self._guard = guard
        self._slots = upload_slots(context.settings.limits.uploads_max)
        self._validation = JobValidation(context, JobCreation(context, self._reception(context.store)))

    def routes(self) -> list[Route]:
        return self._guard.routes(
            {"/batches/new": self.form, "/batches/check": self.check},
            {"/batches/upload": self.upload, "/batches/new": self.create},
        )

    async def form(self, request: Request, visitor: Visitor) -> Response:
        requests.refuse_unknown(request.query_params, ())
        _require_write(visitor)
        orgs = await self._store.list_orgs(after=None, count_max=ORGS_MAX) or []
        own = await self._own_org(visitor)
        names = sorted({*(row["name"] for row in orgs), own} - {""})
        return page(
            "console/new_batch.html",
            visitor=visitor,
            here="batches",
            orgs=names,
            own=own,
            endpoints=ENDPOINTS,
            size_bytes_max=self._context.settings.limits.file_bytes_max,
        )

    async def upload(self, request: Request, visitor: Visitor) -> Response:
        """Store the file once the form is known to be ours, and go on to the check."""
        refuse_foreign(request)
        if not visitor.may_write:
            self._guard.admit(request, visitor, visitor.csrf)
        limits = self._context.settings.limits
        form = UploadForm(request.headers.get("content-type"), fields=("csrf", *FIELDS))
        trail = self._guard.trail(visitor)
        size_bytes_max = limits.file_bytes_max
        reception = self._reception(self._store)
        async with (
            self._slots.taken(str(visitor.key_id)),
            received_file(
                request,
                form,
                reception,
                size_bytes_max,
                too_large(size_bytes_max),
                admit=lambda fields: self._guard.admit(request, visitor, fields.get("csrf")),
            ) as upload,
        ):
            caller = await self._caller(form.fields.get("org", ""))
            upload.note_with(trail.noting("file.upload", "file", upload.file_id))
            file = await upload.keep(
                caller,
                purpose="batch",
                filename=form.finish(),
                expires_after_ms=self._context.settings.retention.file_s * 1000,
                quotas=limits.quotas(),
            )
        asked = {name: form.fields[name] for name in FIELDS if form.fields.get(name)}
        return RedirectResponse(f"/console/batches/check?{urlencode({'file': file.id, **asked})}", 303)

    async def check(self, request: Request, visitor: Visitor) -> Response:
        """Show what a batch would be. Nothing is sent or created."""
        _require_write(visitor)
        requests.refuse_unknown(request.query_params, ("file", *FIELDS))
        asked = _asked(request.query_params)
        caller = await self._caller(asked["org"])
        wanted = job_request(_wanted(asked), self._context.settings)
        found = validation(await self._validation.validate(caller, wanted))
        file = await self._store.get_file(caller.tenant_id, asked["file"])
        return page(
            "console/check_batch.html",
            visitor=visitor,
            here="batches",
            asked={name: value for name, value in asked.items() if value},
            file=file,
            found=found,
            errors=found.errors.data[:ERRORS_SHOWN_MAX],
        )

    async def create(self, request: Request, visitor: Visitor) -> Response:
        form = await self._guard.form(request, visitor)
        asked = _asked(QueryParams([(name, value) for name, value in form.items() if name != "csrf"]))
        caller = await self._caller(asked["org"])
        wanted = job_request(_wanted(asked), self._context.settings)
        noting = self._guard.trail(visitor).noting("batch.create", "input", wanted.input_file_id)
        job, _ = await JobCreation(self._context, self._reception(noting)).create(caller, wanted, None)
        return RedirectResponse(f"/console/batches/{job.id}", 303)

    def _reception(self, store: Store) -> Reception:
        context = self._context
        return Reception(store, context.blobs, context.clock, context.entropy, context.worker_id)

    async def _own_org(self, visitor: Visitor) -> str:
        row = await self._store.get_key(str(visitor.key_id))
        return (await self._store.tenant_name(row["tenant_id"]) if row else None) or ""

    async def _caller(self, org: str) -> Caller:
        """Return the owner of the file and the batch."""
        tenant_id = await self._store.tenant_by_name(org) if org else None
        if tenant_id is None:
            raise ApiProblem(404, "tenant_not_found", "There is no organization of this name.", param="org")
        return Caller(tenant_id)


def _require_write(visitor: Visitor) -> None:
    if not visitor.may_write:
        raise ApiProblem(403, "insufficient_scope", "Your key may look, and change nothing: it lacks `admin:write`.")


def _asked(query: QueryParams) -> dict[str, str]:
    """Return the fields of a form; refuse one that is given twice, and a file's id that cannot
    exist.
    """
    asked = {name: requests.one(query, name) or "" for name in ("file", *FIELDS)}
    if not ids.is_valid("file", asked["file"]):
        name = shown_id(asked["file"])
        message = f"No file {name!r}: files expire and can be deleted. Give it again on the page for a new batch."
        raise ApiProblem(404, "file_not_found", message, param="file")
    return asked


def _wanted(asked: dict[str, str]) -> BatchCreate:
    """Return a form as the body of the API, so that the same rules hold for both."""
    body: dict[str, Any] = {name: asked[name].strip() for name in TEXTS if asked[name].strip()}
    body |= {"input_file_id": asked["file"], "ordered": bool(asked["ordered"])}
    if asked["skip_invalid"]:
        body["invalid_lines"] = "error_file"
    if priority := asked["priority"].strip():
        is_number = priority.removeprefix("-").isdecimal() and len(priority) < 10
        body["priority"] = int(priority) if is_number else priority
    return decoded(msgspec.json.encode(body), BatchCreate)
