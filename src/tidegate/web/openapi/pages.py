"""The first page of a server, the document of its routes, and a page that shows it."""

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from tidegate import __version__
from tidegate.web.http.pages import page
from tidegate.web.http.routes import Guarded
from tidegate.web.openapi.document import openapi


class DocumentPages:
    """The routes of the pages.

    The document is made when it is first needed, because it would take a quarter of a server's
    start.
    """

    def __init__(self, entries: Sequence[Guarded]) -> None:
        self._entries = entries

    @cached_property
    def _document(self) -> dict[str, Any]:
        return openapi(self._entries)

    @cached_property
    def _encoded(self) -> bytes:
        return msgspec.json.encode(self._document)

    @cached_property
    def _sections(self) -> dict[str, list[dict[str, Any]]]:
        return sections(self._document)

    def routes(self) -> list[Route]:
        return [Route("/", self.start), Route("/docs", self.docs), Route("/openapi.json", self.document)]

    async def start(self, request: Request) -> Response:
        return page("start.html", version=__version__, url=str(request.base_url).rstrip("/"))

    async def docs(self, request: Request) -> Response:
        return page("docs.html", version=__version__, sections=self._sections)

    async def document(self, request: Request) -> Response:
        return Response(self._encoded, media_type="application/json")


def sections(document: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """Return a document's operations by tag, each with the fields of its body."""
    schemas = document["components"]["schemas"]
    found: dict[str, list[dict[str, Any]]] = {}
    for path, methods in document["paths"].items():
        for method, one in methods.items():
            body = one.get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema", {})
            fields = schemas.get(body.get("$ref", "").rpartition("/")[2], {})
            found.setdefault(one["tags"][0], []).append(
                {
                    "method": method.upper(),
                    "path": path,
                    "id": one["operationId"],
                    "summary": one["summary"],
                    "scope": one["x-scope"],
                    "query": [each["name"] for each in one["parameters"] if each["in"] == "query"],
                    "about": fields.get("description", ""),
                    "fields": {
                        name: _kind(each, name in fields.get("required", ()))
                        for name, each in fields.get("properties", {}).items()
                    },
                }
            )
    return dict(sorted(found.items()))


def _kind(schema: dict[str, Any], is_required: bool) -> str:
    """Return a short description of the values that a field takes."""
    options = [one for one in schema.get("anyOf", [schema]) if one.get("type") != "null"]
    words = [
        one.get("type") or one.get("$ref", "").rpartition("/")[2] or ", ".join(map(str, one.get("enum", ["any"])))
        for one in options
    ]
    return f"{' or '.join(map(str, words))}{', required' if is_required else ''}"
