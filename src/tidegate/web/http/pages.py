"""Pages for people: templates that escape everything, and headers under which no script but ours runs and nothing outside is asked."""

from importlib.resources import files
from typing import Any

import jinja2
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; form-action 'self'; "
    "frame-ancestors 'none'; base-uri 'none'; require-trusted-types-for 'script'; trusted-types default"
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "X-Frame-Options": "DENY",
}
# What pages load, and as what; nothing else in the folder is served.
STATIC = {
    "style.css": "text/css; charset=utf-8",
}
STATIC_PATH = "/static/{name}"

_TEMPLATES = jinja2.Environment(
    loader=jinja2.PackageLoader("tidegate.web"),
    autoescape=True,
    undefined=jinja2.StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)


def page(template: str, status: int = 200, **values: Any) -> Response:
    """Return a page made of this template; every value is escaped."""
    text = _TEMPLATES.get_template(template).render(**values)
    return Response(text, status, HEADERS, "text/html; charset=utf-8")


def static_route() -> Route:
    """Return the route of style sheets and scripts. They are in memory: no path of a request ever names a file."""
    folder = files("tidegate.web") / "static"
    kept = {name: (folder / name).read_bytes() for name in STATIC}

    async def show(request: Request) -> Response:
        name = str(request.path_params["name"])
        if name not in kept:
            raise HTTPException(404)
        return Response(kept[name], media_type=STATIC[name], headers=HEADERS)

    return Route(STATIC_PATH, show)
