"""Pages that show deployments, and drain, refresh, add, change and remove them."""

import json
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route

from tidegate.core.errors import ApiProblem, SettingsError
from tidegate.settings.capacity import ModelDeployment
from tidegate.settings.yaml_file import parse
from tidegate.store.fleet.routing import DEPLOYMENT
from tidegate.web.admin.deployments import (
    REFRESH,
    STATE_VERBS,
    DeploymentRefreshed,
    DeploymentRoutes,
    RoutingRequest,
    RoutingShown,
)
from tidegate.web.admin.overview import Overviews
from tidegate.web.console.guard import ConsoleGuard
from tidegate.web.console.live_pages import LiveView
from tidegate.web.console.session import Visitor
from tidegate.web.context import WebContext
from tidegate.web.http.pages import page
from tidegate.web.requests import requests

LIST_PATH = "/console/deployments"
# Fields with an input of their own; every other key of a deployment is a line of the form's text.
INPUTS = ("model", "url", "engine", "api_key", "max_in_flight", "weight", "order", "serves")
_ENGINES = next(field for field in msgspec.structs.fields(ModelDeployment) if field.name == "engine").type.__args__
_SERVES = next(field for field in msgspec.structs.fields(ModelDeployment) if field.name == "serves").type.__args__


class DeploymentPages:
    def __init__(self, context: WebContext, guard: ConsoleGuard) -> None:
        self._guard = guard
        self._overviews = Overviews(context)
        self._deployments = DeploymentRoutes(context)

    def routes(self) -> list[Route]:
        changes = {f"/deployments/{verb}": self.act for verb in (*STATE_VERBS, "remove")}
        return [
            *self._guard.live_routes({"/deployments": (self.deployments, 3)}),
            *self._guard.routes({"/deployments/edit": self.edit}, {**changes, "/deployments/edit": self.save}),
        ]

    async def deployments(self, request: Request, visitor: Visitor) -> LiveView:
        requests.refuse_unknown(request.query_params, ())
        return await self._list(visitor, None)

    async def _list(self, visitor: Visitor, asked: DeploymentRefreshed | None) -> LiveView:
        overview = await self._overviews.look()
        values = {
            "visitor": visitor,
            "here": "deployments",
            "health": {one.name: one for one in overview.deployments},
            "listed": await self._deployments.list(DEPLOYMENT),
            "asked": asked,
        }
        return LiveView("console/deployments.html", values)

    async def act(self, request: Request, visitor: Visitor) -> Response:
        """Drain, resume, refresh or remove the deployment that the form names."""
        form = await self._guard.form(request, visitor)
        verb, name = request.url.path.rpartition("/")[2], form.get("name", "")
        trail = self._guard.trail(visitor)
        if verb == REFRESH:
            view = await self._list(visitor, await self._deployments.refresh(trail, name))
            return page(view.template, live_url=LIST_PATH, **view.values)
        if verb == "remove":
            await self._deployments.do(trail, verb, DEPLOYMENT, RoutingRequest(name))
        else:
            await self._deployments.set_state(trail, verb, name)
        return RedirectResponse(LIST_PATH, 303)

    async def edit(self, request: Request, visitor: Visitor) -> Response:
        """Show the form of a new deployment, or of the one that is named."""
        requests.refuse_unknown(request.query_params, ("name",))
        name = requests.one(request.query_params, "name")
        if not visitor.may_write:
            raise ApiProblem(403, "insufficient_scope", "Your key may look, and change nothing.")
        found = None if name is None else await self._added(name)
        fields = {} if found is None else found.document
        shown = {key: str(fields.get(key, "")) for key in INPUTS} | {"more": _as_lines(fields)}
        return _form(visitor, found, shown)

    async def save(self, request: Request, visitor: Visitor) -> Response:
        """Add or change a deployment; after a mistake show the form again, with what is wrong."""
        form = await self._guard.form(request, visitor)
        name, seen = form.get("name", "").strip(), form.get("revision", "")
        found = None
        try:
            fields = _fields(form)
            if seen:
                found = await self._added(name)
                # Fields that the form leaves out are removed.
                fields = dict.fromkeys(found.document) | fields
            revision = int(seen) if seen.isdecimal() and len(seen) < 16 else None
            wanted = RoutingRequest(name, fields, revision)
            verb = "change" if seen else "add"
            await self._deployments.do(self._guard.trail(visitor), verb, DEPLOYMENT, wanted)
        except ApiProblem as problem:
            return _form(visitor, found, form, problem)
        return RedirectResponse(LIST_PATH, 303)

    async def _added(self, name: str) -> RoutingShown:
        for one in await self._deployments.list(DEPLOYMENT):
            if one.name == name and one.origin == "added":
                return one
        raise ApiProblem(
            404, "entry_not_found", "No deployment of this name was added; the settings' own are changed there."
        )


def _form(
    visitor: Visitor, found: RoutingShown | None, shown: dict[str, str], problem: ApiProblem | None = None
) -> Response:
    return page(
        "console/deployment_edit.html",
        200 if problem is None else problem.status,
        visitor=visitor,
        here="deployments",
        found=found,
        shown={key: shown.get(key, "") for key in ("name", *INPUTS, "more")},
        engines=_ENGINES,
        serves=_SERVES,
        problem=problem,
    )


def _fields(form: dict[str, str]) -> dict[str, Any]:
    """Return the document that a form describes; raise if its text is no mapping."""
    fields: dict[str, Any] = {}
    try:
        for key in INPUTS:
            if text := form.get(key, "").strip():
                fields[key] = parse(text, key).values if key in ("max_in_flight", "weight", "order") else text
        more = parse(form.get("more", ""), "More settings").values
    except SettingsError as error:
        raise ApiProblem(400, "invalid_parameter", f"{error}.") from None
    if more is not None and not isinstance(more, dict):
        raise ApiProblem(400, "invalid_parameter", "More settings are lines such as `batch_fraction: 0.5`.")
    return (more or {}) | fields


def _as_lines(fields: dict[str, Any]) -> str:
    """Write the fields without an input of their own as YAML, one on a line."""
    return "\n".join(
        f"{key}: {json.dumps(value, ensure_ascii=False)}" for key, value in fields.items() if key not in INPUTS
    )
