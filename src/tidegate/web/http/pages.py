"""Pages for people.

Templates escape everything, and headers allow no foreign scripts and no outside requests.
"""

import json
import re
from datetime import UTC, datetime
from importlib.resources import files
from typing import Any
from urllib.parse import urlencode

import jinja2
from markupsafe import Markup, escape
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from tidegate.core.nouns import Job
from tidegate.core.states import JobState
from tidegate.core.usage.prices import units_text
from tidegate.core.wording import in_words

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
# The files that pages load, with their types; nothing else in the folder is served.
STATIC = {
    "style.css": "text/css; charset=utf-8",
    "console.js": "text/javascript; charset=utf-8",
    "htmx.min.js": "text/javascript; charset=utf-8",
    "htmx-sse.min.js": "text/javascript; charset=utf-8",
    "charts.js": "text/javascript; charset=utf-8",
    "uplot.min.js": "text/javascript; charset=utf-8",
    "uplot.min.css": "text/css; charset=utf-8",
}
STATIC_PATH = "/static/{name}"

_BACKQUOTED = re.compile("`([^`]+)`")
_TEMPLATES = jinja2.Environment(
    loader=jinja2.PackageLoader("tidegate.web"),
    autoescape=True,
    undefined=jinja2.StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)


def number(count: int) -> str:
    """Write a count with its thousands apart."""
    return f"{count:,}"


def rate(per_second: float) -> str:
    """Write a rate, with digits after the point only where they matter."""
    if 0 < per_second < 1:
        return f"{per_second:.2f}"
    return f"{per_second:,.1f}" if 0 < per_second < 100 else f"{per_second:,.0f}"


def moment(at_s: int) -> str:
    """Write a moment in UTC."""
    return datetime.fromtimestamp(at_s, UTC).strftime("%Y-%m-%d %H:%M:%SZ")


def duration(seconds: int) -> str:
    """Write a duration in the largest unit that fits, and the next."""
    sign, left = ("-", -seconds) if seconds < 0 else ("", seconds)
    for name, unit, below, below_name in (("d", 86_400, 3_600, "h"), ("h", 3_600, 60, "m"), ("m", 60, 1, "s")):
        if left >= unit:
            return f"{sign}{left // unit}{name} {left % unit // below}{below_name}"
    return f"{sign}{left}s"


def json_text(value: Any) -> str:
    """Write a value as JSON on one line; nothing for null."""
    return "" if value is None else json.dumps(value, ensure_ascii=False)


def tone(job: Job) -> str:
    """Return the style of a job's status. A job with failures is never shown as good."""
    if job.state in (JobState.FAILED, JobState.EXPIRED):
        return "bad"
    if job.failed_count or job.state in (JobState.CANCELLED, JobState.CANCELLING) or job.closing is JobState.FAILED:
        return "warn"
    return "good" if job.state is JobState.COMPLETED else ""


def health_tone(health: Any) -> str:
    """Return the style of a deployment's state."""
    return {"closed": "good", "open": "bad", "paused": "bad"}.get(health.state, "warn")


def health_word(health: Any) -> str:
    """Write a deployment's state.

    An operator would misread a breaker's "closed" as out of order.
    """
    words = {"closed": "healthy", "open": "circuit open", "paused": "key rejected"}
    word = words.get(health.state, health.state)
    if health.unhealthy_seconds:
        word += f" for {duration(health.unhealthy_seconds)}"
    return f"{word}, next try in {duration(-(-health.rests_for_ms // 1000))}" if health.rests_for_ms else word


def commands(text: str) -> Markup:
    """Write a sentence with the text in backquotes as code; everything is escaped."""
    return Markup(_BACKQUOTED.sub(r"<code>\1</code>", str(escape(text))))


_TEMPLATES.filters.update(number=number, rate=rate, moment=moment, duration=duration, tone=tone, money=units_text)
_TEMPLATES.filters.update(in_words=in_words, health_tone=health_tone, health_word=health_word, json_text=json_text)
_TEMPLATES.filters.update(commands=commands)


def page(template: str, status: int = 200, **values: Any) -> Response:
    """Return a page from this template; every value is escaped."""
    text = _TEMPLATES.get_template(template).render(**values)
    return Response(text, status, HEADERS, "text/html; charset=utf-8")


def live_part(template: str, **values: Any) -> str:
    """Return a page's block `live` alone; every value is escaped."""
    found = _TEMPLATES.get_template(template)
    return "".join(found.blocks["live"](found.new_context(values)))


def older_link(request: Request, last_id: str) -> str:
    """Return the address of a list's next page: the same query, after this id."""
    kept = [(name, value) for name, value in request.query_params.multi_items() if value and name != "after"]
    return f"{request.url.path}?{urlencode([*kept, ('after', last_id)])}"


def static_route() -> Route:
    """Return the route of style sheets and scripts.

    They are in memory: no path of a request names a file.
    """
    folder = files("tidegate.web") / "static"
    kept = {name: (folder / name).read_bytes() for name in STATIC}

    async def show(request: Request) -> Response:
        name = str(request.path_params["name"])
        if name not in kept:
            raise HTTPException(404)
        return Response(kept[name], media_type=STATIC[name], headers=HEADERS)

    return Route(STATIC_PATH, show)
