"""The causes of failed lines, each with its count and one example."""

from collections.abc import AsyncIterator, Iterable, Sequence
from itertools import chain
from typing import Any

import msgspec
from msgspec.structs import replace

from tidegate.core.answers.whole_lines import whole_lines

CAUSES_MAX = 100


class _FailedBody(msgspec.Struct, frozen=True):
    error: Any = None


class _FailedResponse(msgspec.Struct, frozen=True):
    status_code: int = 0
    body: _FailedBody = _FailedBody()


class _FailedError(msgspec.Struct):
    code: str = ""
    message: str = ""


class _FailedLine(msgspec.Struct):
    custom_id: str | None = None
    response: _FailedResponse | None = None
    error: _FailedError | None = None


class Cause(msgspec.Struct):
    """One cause of failures. `words` are its status and code; `message` and `custom_id` come from
    the first line with this cause."""

    words: str
    message: str
    custom_id: str
    count: int = 0


_line = msgspec.json.Decoder(_FailedLine).decode


async def causes(chunks: AsyncIterator[bytes]) -> list[Cause]:
    """Return the causes of failed lines, the most frequent first."""
    found: dict[str, Cause] = {}
    async for line in whole_lines(chunks):
        words, message, custom_id = _read(line)
        if words not in found and len(found) < CAUSES_MAX:
            found[words] = Cause(words, message, custom_id)
        if words in found:
            found[words].count += 1
    return sorted(found.values(), key=lambda cause: -cause.count)


def merged(parts: Iterable[Sequence[Cause]]) -> list[Cause]:
    """Return the causes of several batches together, the most frequent first."""
    found: dict[str, Cause] = {}
    for cause in chain.from_iterable(parts):
        known = found.setdefault(cause.words, replace(cause, count=0))
        known.count += cause.count
    return sorted(found.values(), key=lambda cause: -cause.count)


def _read(line: bytes) -> tuple[str, str, str]:
    try:
        failed = _line(line)
    except msgspec.MsgspecError:
        return "unreadable", "", ""
    custom_id = failed.custom_id or ""
    if failed.error is not None:
        return failed.error.code, failed.error.message, custom_id
    response = failed.response or _FailedResponse()
    error = response.body.error if isinstance(response.body.error, dict) else {}
    status = str(response.status_code)
    # vLLM repeats the status in `code`; its `type` says more.
    named = [str(error[name]) for name in ("code", "type") if error.get(name) and str(error[name]) != status]
    return " ".join([status, *named[:1]]), str(error.get("message") or ""), custom_id
