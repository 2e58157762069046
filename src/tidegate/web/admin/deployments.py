"""Deployments, resources and terms of models, which an operator adds, changes and removes at run
time.

They are in the store, and every process follows within seconds. Entries of the settings are listed
with them, but calls cannot change them. A secret is never stored, only its place. Names may contain
slashes, so a change names its entry in the body.
"""

from collections.abc import Callable, Iterable
from typing import Any, Literal

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from tidegate.core.deployments import Deployment, Resource
from tidegate.core.errors import ApiProblem, LostRace, SettingsError
from tidegate.core.nouns import Caller
from tidegate.settings import Settings, deployments, resources
from tidegate.settings.added import Added, DrainState, EntryKind, added, check, drain_state
from tidegate.store.fleet.routing import DEPLOYMENT, DRAIN_STATE, MODEL, RESOURCE, RoutingEntry, RoutingFull
from tidegate.store.store import Store
from tidegate.web.admin.audit import READ, WRITE, AuditTrail, trail_of
from tidegate.web.context import WebContext
from tidegate.web.http.answers import json_answer
from tidegate.web.http.routes import Guarded, RouteHandler
from tidegate.web.jobs.reported_health import reported_status, reported_troubles
from tidegate.web.requests import requests

FORCE = "give `force` (`--force`)"
DRAIN, RESUME, REFRESH = STATE_VERBS = ("drain", "resume", "refresh")
# A server of many adapters lists thousands of models.
MODELS_SHOWN_MAX = 100


class RoutingRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The entry to add, change or remove.

    `set` has the fields of an entry under `models` or `resources`, for a model all but its
    deployments; in a change, null removes a field.

    With `revision` the call fails if the entry has changed since. `force` removes an entry that is
    still in use.
    """

    name: str
    set: dict[str, Any] = {}
    revision: int | None = None
    force: bool = False


class RoutingDone(msgspec.Struct, frozen=True):
    """`revision` is the entry's new revision; 0 when it is gone.

    `warnings` name the parts that have no effect.
    """

    name: str
    revision: int
    warnings: list[str] = []


class RoutingShown(msgspec.Struct, frozen=True):
    """One deployment, resource or model.

    `why` is what keeps this process from using it. `state` is what workers reported of it, else the
    state in this process; `in_flight` counts calls of this process. A drained deployment gets no
    new calls.
    """

    kind: EntryKind
    name: str
    origin: Literal["settings", "added"]
    model: str
    url: str = ""
    fallbacks: list[str] = []
    revision: int = 0
    changed_at: int = 0
    document: dict[str, Any] = {}
    state: str = ""
    is_drained: bool = False
    in_flight: int = 0
    why: str = ""


class DeploymentRefreshed(msgspec.Struct, frozen=True):
    """The answer of a deployment to this process just now.

    Every process tries it again within seconds, healthy or not.
    """

    name: str
    reachable: bool
    status: int
    models: list[str]
    took_ms: float
    message: str


class RoutingList(msgspec.Struct, frozen=True):
    object: str
    data: list[RoutingShown]
    has_more: bool = False


class RoutingEditor:
    """The editor of the store's entries.

    `looks_up` is set if this process must itself be able to use what is added.
    """

    def __init__(self, store: Store, settings: Callable[[], Settings], *, looks_up: bool) -> None:
        self._store = store
        self._read_settings = settings
        self._looks_up = looks_up

    @property
    def _settings(self) -> Settings:
        return self._read_settings()

    async def list(self, unusable: dict[tuple[str, str], str] | None = None) -> list[RoutingShown]:
        """Return the entries of the settings first, then those that were added."""
        _, entries = await self._store.routing()
        found = self._read(entries)
        configured: list[Deployment | Resource] = [*deployments(self._settings), *resources(self._settings)]
        shown = [_shown(one, "settings") for one in configured]
        for name, model in self._settings.models.items():
            document: dict[str, Any] = {
                "in_flight_max": model.in_flight_max,
                "retry": msgspec.structs.asdict(model.retry),
                "allowed_fields": model.allowed_fields,
                "media_hosts": model.media_hosts,
            }
            shown.append(RoutingShown("model", name, "settings", name, document=_without_empty(document)))
        nouns: dict[tuple[str, str], Deployment | Resource] = {(DEPLOYMENT, one.name): one for one in found.deployments}
        nouns |= {(RESOURCE, one.name): one for one in found.resources}
        troubles = found.unusable | (unusable or {})
        for entry in (one for one in entries if one.kind != DRAIN_STATE):
            noun, why = nouns.get((entry.kind, entry.name)), troubles.get((entry.kind, entry.name), "")
            shown.append(_stored(entry, noun, why))
        drained = {name for name, state in found.states.items() if state.is_drained}
        return [
            msgspec.structs.replace(one, is_drained=True) if one.kind == DEPLOYMENT and one.name in drained else one
            for one in shown
        ]

    async def set_state(self, trail: AuditTrail, verb: str, name: str) -> RoutingDone:
        """Drain, resume or refresh a deployment, and note it.

        Draining or resuming twice changes nothing.
        """
        _, entries = await self._store.routing()
        if not self._is_configured(DEPLOYMENT, name) and not any(
            (one.kind, one.name) == (DEPLOYMENT, name) for one in entries
        ):
            raise ApiProblem(
                404,
                "entry_not_found",
                f"There is no deployment {name!r}: `tidegate deployments list` shows what there is.",
            )
        entry = next((one for one in entries if (one.kind, one.name) == (DRAIN_STATE, name)), None)
        before = DrainState() if entry is None else drain_state(entry.document)
        after = msgspec.structs.replace(
            before,
            is_drained=before.is_drained if verb == REFRESH else verb == DRAIN,
            refresh_count=before.refresh_count + (verb == REFRESH),
        )
        revision = 0 if entry is None else entry.revision
        if after == before:
            return RoutingDone(name, revision)
        text = msgspec.json.encode(after).decode()
        noting = trail.noting(f"deployment.{verb}", DRAIN_STATE, name)
        try:
            return RoutingDone(name, await noting.put_routing(DRAIN_STATE, name, text, revision))
        except RoutingFull as full:
            raise ApiProblem(409, "too_many_entries", f"{full}.") from None
        except LostRace:
            raise _changed_meanwhile(DEPLOYMENT, name) from None

    async def do(self, trail: AuditTrail, verb: str, kind: str, wanted: RoutingRequest) -> RoutingDone:
        """Add, change or remove an entry, and note it."""
        verbs = {"add": self._add, "change": self._change, "remove": self._remove}
        return await verbs[verb](trail.noting(f"{kind}.{verb}", kind, wanted.name), kind, wanted)

    async def _add(self, noting: Store, kind: str, wanted: RoutingRequest) -> RoutingDone:
        self._refuse_configured(kind, wanted.name)
        document = {name: value for name, value in wanted.set.items() if value is not None}
        return await self._write(noting, kind, wanted.name, document, seen=0)

    async def _change(self, noting: Store, kind: str, wanted: RoutingRequest) -> RoutingDone:
        self._refuse_configured(kind, wanted.name)
        entry = await self._entry(kind, wanted.name)
        document: dict[str, Any] = {**msgspec.json.decode(entry.document), **wanted.set}
        document = {name: value for name, value in document.items() if value is not None}
        seen = entry.revision if wanted.revision is None else wanted.revision
        return await self._write(noting, kind, wanted.name, document, seen=seen)

    async def _remove(self, noting: Store, kind: str, wanted: RoutingRequest) -> RoutingDone:
        entry = await self._entry(kind, wanted.name)
        if not wanted.force:
            await self._refuse_in_use(kind, wanted.name)
        seen = entry.revision if wanted.revision is None else wanted.revision
        try:
            await noting.drop_routing(kind, wanted.name, seen)
        except LostRace:
            raise _changed_meanwhile(kind, wanted.name) from None
        return RoutingDone(wanted.name, 0)

    async def _write(self, noting: Store, kind: str, name: str, document: dict[str, Any], *, seen: int) -> RoutingDone:
        try:
            check(kind, name, document)
        except SettingsError as error:
            raise _unusable(kind, str(error)) from None
        text = msgspec.json.encode(document, order="sorted").decode()
        found = await self._refuse_what_leads_nowhere(kind, name, text)
        warnings = [
            text for one in found.deployments if (kind, name) == (DEPLOYMENT, one.name) for text in one.warnings
        ]
        try:
            return RoutingDone(name, await noting.put_routing(kind, name, text, seen), warnings)
        except RoutingFull as full:
            raise ApiProblem(409, "too_many_entries", f"{full}.") from None
        except LostRace:
            if seen:
                raise _changed_meanwhile(kind, name) from None
            raise ApiProblem(409, "already_exists", f"There is a {kind} {name!r} already: change it instead.") from None

    async def _refuse_what_leads_nowhere(self, kind: str, name: str, text: str) -> Added:
        """Refuse an entry that is of no use among all others; return all entries that were added,
        with this one.
        """
        _, entries = await self._store.routing()
        kept = [(one.kind, one.name, one.document) for one in entries if (one.kind, one.name) != (kind, name)]
        found = added(self._settings, [*kept, (kind, name, text)], looks_up=self._looks_up)
        if (kind, name) in found.unusable:
            raise _unusable(kind, found.unusable[kind, name])
        if kind == MODEL and not any(name in two.models for two in found.deployments):
            message = f"No deployment serves the model {name!r}: add one first, or fix the name."
            raise ApiProblem(400, "invalid_parameter", message)
        if kind == RESOURCE:
            one = next(one for one in found.resources if one.name == name)
            served = {*self._settings.models, *(model for two in found.deployments for model in two.models)}
            if name in served and one.model != name:
                raise ApiProblem(
                    400, "invalid_parameter", f"{name!r} is itself a model: give the resource another name."
                )
            known = served | {*self._settings.resources, *(two.name for two in found.resources)}
            for lost in [
                *([] if one.model in served else [one.model]),
                *(two for two in one.fallbacks if two not in known),
            ]:
                message = (
                    f"No deployment serves {lost!r}, which this resource leads to: add one first, or fix the name."
                )
                raise ApiProblem(400, "invalid_parameter", message)
        return found

    async def _refuse_in_use(self, kind: str, name: str) -> None:
        """Refuse to remove an entry that a resource or a batch still needs."""
        if kind == MODEL:
            # Without terms of its own a model uses those of all other models.
            return
        _, entries = await self._store.routing()
        found = self._read(entries)
        left = [name]
        if kind == DEPLOYMENT:
            gone = next((one for one in found.deployments if one.name == name), None)
            others = (*deployments(self._settings), *(one for one in found.deployments if one is not gone))
            left = [model for model in (gone.models if gone else ()) if not any(model in one.models for one in others)]
        for one in (*resources(self._settings), *found.resources):
            lost = [
                model for model in left if model in (one.model, *one.fallbacks) and (kind, name) != (RESOURCE, one.name)
            ]
            if lost:
                message = f"The resource {one.name!r} leads to {lost[0]!r}, which nothing would serve: change it first, or {FORCE}."
                raise ApiProblem(409, "still_in_use", message)
        for model in left:
            if await self._store.is_wanted(model):
                message = (
                    f"Batches that have not ended ask for {model!r}: their items would fail. Let them end, or {FORCE}."
                )
                raise ApiProblem(409, "still_in_use", message)

    def _read(self, entries: Iterable[RoutingEntry]) -> Added:
        documents = [(one.kind, one.name, one.document) for one in entries]
        return added(self._settings, documents, looks_up=self._looks_up)

    def _refuse_configured(self, kind: str, name: str) -> None:
        if self._settings.upstream.url:
            message = "The settings name one gateway for every model (upstream.url): take it away there, and restart, to serve by model."
            raise ApiProblem(409, "set_in_settings", message)
        if self._is_configured(kind, name):
            raise ApiProblem(
                409,
                "set_in_settings",
                f"The {kind} {name!r} is in the settings: change it there; running processes follow within seconds.",
            )

    def _is_configured(self, kind: str, name: str) -> bool:
        if kind == MODEL:
            return name in self._settings.models
        if kind == RESOURCE:
            return name in self._settings.resources
        return any(one.name == name for one in deployments(self._settings))

    async def _entry(self, kind: str, name: str) -> RoutingEntry:
        _, entries = await self._store.routing()
        for entry in entries:
            if (entry.kind, entry.name) == (kind, name):
                return entry
        if self._is_configured(kind, name):
            raise ApiProblem(
                409,
                "set_in_settings",
                f"The {kind} {name!r} is in the settings: change it there; running processes follow within seconds.",
            )
        message = f"No {kind} {name!r} was added at run time: `tidegate {kind}s list` shows what there is."
        raise ApiProblem(404, "entry_not_found", message)


class DeploymentRoutes:
    def __init__(self, context: WebContext) -> None:
        self._context = context
        self._editor = RoutingEditor(context.store, context.live_settings, looks_up=True)
        self._router = context.router
        self._live_config = context.live_config
        self._body_bytes_max = context.settings.limits.body_bytes_max

    def routes(self) -> list[Guarded]:
        found = []
        for kind in (DEPLOYMENT, RESOURCE, MODEL):
            found.append(Guarded("GET", f"/admin/v1/{kind}s", READ, self._listing(kind)))
            for verb in ("add", "change", "remove"):
                found.append(Guarded("POST", f"/admin/v1/{kind}s/{verb}", WRITE, self._doing(kind, verb)))
        for verb in STATE_VERBS:
            found.append(Guarded("POST", f"/admin/v1/deployments/{{name:path}}/{verb}", WRITE, self._setting(verb)))
        return found

    async def list(self, kind: str) -> list[RoutingShown]:
        """Return the entries of one kind, with their state in this process."""
        status = {one.name: one for one in self._router.status()}
        troubles = reported_troubles(await self._context.store.worker_reports()) if kind == DEPLOYMENT else {}
        shown = []
        for one in await self._editor.list(self._live_config.unusable if self._live_config else None):
            if one.kind == DEPLOYMENT and (now := status.get(one.name)) is not None:
                state = reported_status(now, troubles.get(one.name)).state
                one = msgspec.structs.replace(one, state=state, in_flight=now.in_flight)
            if one.kind == kind:
                shown.append(one)
        return shown

    async def do(self, trail: AuditTrail, verb: str, kind: str, wanted: RoutingRequest) -> RoutingDone:
        """Add, change or remove an entry; this process follows at once, the others within
        seconds."""
        done = await self._editor.do(trail, verb, kind, wanted)
        await self._follow()
        return done

    async def set_state(self, trail: AuditTrail, verb: str, name: str) -> RoutingDone:
        """Drain, resume or refresh a deployment; this process follows at once, the others within
        seconds.
        """
        done = await self._editor.set_state(trail, verb, name)
        await self._follow()
        return done

    async def refresh(self, trail: AuditTrail, name: str) -> DeploymentRefreshed:
        """Have every process try a deployment again, and probe it from here."""
        await self.set_state(trail, REFRESH, name)
        try:
            found = await self._router.probe(name)
        except KeyError:
            # This process cannot use the deployment, so it cannot probe it either.
            why = "This process cannot use it: GET /admin/v1/deployments says why."
            return DeploymentRefreshed(name, False, 0, [], 0.0, why)
        models = list(found.models[:MODELS_SHOWN_MAX])
        return DeploymentRefreshed(name, found.reachable, found.status, models, round(found.took_ms, 1), found.message)

    async def _follow(self) -> None:
        if self._live_config is not None:
            await self._live_config.look()

    def _setting(self, verb: str) -> RouteHandler:
        async def act(request: Request, caller: Caller) -> Response:
            name, trail = str(request.path_params["name"]), trail_of(self._context, request, caller)
            if verb == REFRESH:
                return json_answer(await self.refresh(trail, name))
            return json_answer(await self.set_state(trail, verb, name))

        return act

    def _listing(self, kind: str) -> RouteHandler:
        async def show(request: Request, caller: Caller) -> Response:
            requests.refuse_unknown(request.query_params, ())
            return json_answer(RoutingList("list", await self.list(kind)))

        return show

    def _doing(self, kind: str, verb: str) -> RouteHandler:
        async def do(request: Request, caller: Caller) -> Response:
            wanted = await requests.json_body(request, RoutingRequest, self._body_bytes_max)
            return json_answer(await self.do(trail_of(self._context, request, caller), verb, kind, wanted))

        return do


def _without_empty(document: dict[str, Any]) -> dict[str, Any]:
    """Return a document without its empty values."""
    inner = {name: _without_empty(one) if isinstance(one, dict) else one for name, one in document.items()}
    return {name: one for name, one in inner.items() if one not in (None, 0, {})}


def _shown(noun: Deployment | Resource, origin: Literal["settings", "added"]) -> RoutingShown:
    if isinstance(noun, Deployment):
        return RoutingShown("deployment", noun.name, origin, ", ".join(noun.models), noun.url)
    return RoutingShown("resource", noun.name, origin, noun.model, fallbacks=list(noun.fallbacks))


def _stored(entry: RoutingEntry, noun: Deployment | Resource | None, why: str) -> RoutingShown:
    try:
        document = msgspec.json.decode(entry.document, type=dict[str, Any])
    except msgspec.MsgspecError:
        document = {}
    kind = msgspec.convert(entry.kind, EntryKind)
    plain = RoutingShown(
        kind, entry.name, "added", str(document.get("model", entry.name)), str(document.get("url", ""))
    )
    shown = plain if noun is None else _shown(noun, "added")
    return msgspec.structs.replace(
        shown, revision=entry.revision, changed_at=entry.changed_at, document=document, why=why
    )


def _unusable(kind: str, why: str) -> ApiProblem:
    """Return the refusal of an entry as one sentence, without the prefix of the settings check."""
    reason = why.removeprefix("cannot be used: ")
    end = "" if reason.endswith(("?", ".")) else "."
    return ApiProblem(400, "invalid_parameter", f"This {kind} cannot be used: {reason}{end}")


def _changed_meanwhile(kind: str, name: str) -> ApiProblem:
    return ApiProblem(409, "changed_meanwhile", f"The {kind} {name!r} was changed meanwhile: look at it again first.")
