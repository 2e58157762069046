"""The judge's own test of whether two requests are the same."""

from dataclasses import dataclass, field
from typing import Any

from tidegate.judge.jsonl import NotJson, read_json
from tidegate.judge.lines import BOM, ResultLine, text_key


@dataclass(frozen=True, slots=True)
class RequestKey:
    """A request of an input: a key that equal bodies share, its endpoint, and its temperature."""

    key: str = ""
    url: str | None = None
    temperature: Any = None


@dataclass(frozen=True, slots=True)
class EarlierAnswers:
    """The earlier job whose answers are reused: its parameters, and its kept requests and lines."""

    parameters: frozenset[str]
    request_keys: dict[str | None, RequestKey] = field(default_factory=dict)
    lines: dict[str, ResultLine] = field(default_factory=dict)


def read_request_key(data: bytes, left_out: frozenset[str]) -> RequestKey:
    """Read the request of an input line.

    Its batch or the operator sets the parameters in `left_out`, so its key leaves them out.
    """
    try:
        line = read_json(data.removeprefix(BOM))
    except NotJson:
        return RequestKey()
    body = line.get("body") if isinstance(line, dict) else None
    if not isinstance(body, dict):
        return RequestKey()
    own = {name: value for name, value in body.items() if name not in left_out}
    return RequestKey(text_key(own), line.get("url"), body.get("temperature"))
