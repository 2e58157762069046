"""The OpenAPI document, made from the routes and the structs that check their bodies."""

import re
from collections.abc import Sequence
from typing import Any

import msgspec

from tidegate import __version__
from tidegate.web.doors import DOORS
from tidegate.web.http.operations import Operation
from tidegate.web.http.problems import ErrorBody
from tidegate.web.http.routes import Guarded
from tidegate.web.openapi.operations import OPERATIONS

_REF = "#/components/schemas/{name}"
_PARAMETER = re.compile(r"\{(?P<name>[a-z_]+)(?::path)?\}")
_KEY = {"type": "http", "scheme": "bearer", "description": "An API key, `tg_live_…`."}
ABOUT = f"{', '.join(door.about for door in DOORS)}, over one durable queue; `/admin/v1` is for operators."


def openapi(entries: Sequence[Guarded]) -> dict[str, Any]:
    """Return the document of these routes."""
    operations = {(one.method, one.path): OPERATIONS.get((one.method, one.path)) for one in entries}
    shapes = [shape for one in operations.values() if one for shape in (one.takes, one.gives) if shape is not None]
    refs, components = msgspec.json.schema_components([ErrorBody, *shapes], schema_hook=_any, ref_template=_REF)
    schema_of = dict(zip(shapes, refs[1:], strict=True))
    paths: dict[str, dict[str, Any]] = {}
    for entry in entries:
        known = operations[entry.method, entry.path] or Operation(_words(entry))
        paths.setdefault(_PARAMETER.sub(r"{\g<name>}", entry.path), {})[entry.method.lower()] = _operation(
            entry, known, schema_of, refs[0]
        )
    return {
        "openapi": "3.1.0",
        "info": {"title": "Tidegate", "version": __version__, "description": ABOUT},
        "servers": [{"url": "/"}],
        "security": [{"key": []}],
        "paths": paths,
        "components": {"schemas": components, "securitySchemes": {"key": _KEY}},
    }


def _operation(entry: Guarded, known: Operation, schema_of: dict[Any, Any], error: Any) -> dict[str, Any]:
    parameters = [
        {"name": match["name"], "in": "path", "required": True, "schema": {"type": "string"}}
        for match in _PARAMETER.finditer(entry.path)
    ]
    parameters += [{"name": name, "in": "query", "schema": {"type": "string"}} for name in known.query]
    answer: dict[str, Any] = {"description": "Done."}
    if known.gives is not None:
        answer["content"] = {"application/json": {"schema": schema_of[known.gives]}}
    shown: dict[str, Any] = {
        "summary": known.summary,
        "operationId": _name(entry),
        "tags": [_tag(entry.path)],
        "x-scope": entry.scope,
        "parameters": parameters,
        "responses": {
            "200": answer,
            "default": {"description": "Refused.", "content": {"application/json": {"schema": error}}},
        },
    }
    if known.takes is not None:
        shown["requestBody"] = {
            "required": True,
            "content": {"application/json": {"schema": schema_of[known.takes]}},
        }
    elif known.takes_form:
        shown["requestBody"] = {"content": {"multipart/form-data": {"schema": {"type": "object"}}}}
    elif entry.method == "POST":
        shown["requestBody"] = {"content": {"application/json": {"schema": {"type": "object"}}}}
    return shown


def _any(kind: type) -> dict[str, Any]:
    """Return the schema of a value that is passed on unchanged."""
    return {"description": "Any value."}


def _name(entry: Guarded) -> str:
    return re.sub(r"[^a-z0-9]+", "_", f"{entry.method} {entry.path}".lower()).strip("_")


def _words(entry: Guarded) -> str:
    """Return a summary for a route that has none: its verb and the last word of its path."""
    last = [part for part in entry.path.split("/") if part and not part.startswith("{")][-1]
    return f"{entry.method.capitalize()} {last.replace('_', ' ')}"


def _tag(path: str) -> str:
    parts = path.strip("/").split("/")
    return "admin" if parts[0] == "admin" else parts[1] if len(parts) > 1 else parts[0]
