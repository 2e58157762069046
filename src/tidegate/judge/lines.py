"""The judge's own reader of lines: requests of an input, and OpenAI's shape of result lines.

It notes all faults of a line's shape. The rules decide whether a line is in its place.
"""

import json
import re
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any
from zlib import crc32

from tidegate.judge.jsonl import JsonlLine, NamedTwice, NotJson, read_json

BOM = b"\xef\xbb\xbf"
TOKENS_MAX = 1 << 28
COPIED = ("deduplicated", "reused")
_BASE62 = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
_ITEM_ID = re.compile(r"batch_req_([0-9A-Za-z]{16})([0-9A-Za-z]{6})", re.ASCII)
_MONEY = re.compile(r"[0-9]{1,12}(\.[0-9]{1,9})?", re.ASCII)
_REQUEST_ID = re.compile(r"req_[0-9A-Za-z]{22}", re.ASCII)


@dataclass(frozen=True, slots=True)
class JudgedInputLine:
    """One request of an input: its line number from 1, and its custom_id if that can be read."""

    line: int
    custom_id: str | None


@dataclass(frozen=True, slots=True)
class ClaimedUsage:
    input_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    reasoning_tokens: int = 0


@dataclass(slots=True)
class ResultLine:
    """One line of an output or error file.

    - `faults` are its departures from the shape.
    - `refusal` is the code in an HTTP error's body. `named_refusal` and `refusal_message` are its
      code and message if both are texts.
    - `tries` is the usage of each answer if the first did not fit; `usage` is then their sum.
    - A `copied` line names the item that it is a `copy_of`; both must have the same `content`.
    """

    name: str
    line: int
    at: int
    size_bytes: int
    crc32: int
    id: str = ""
    job_part: str = ""
    number: int = -1
    custom_id: str | None = None
    status: int | None = None
    code: str | None = None
    refusal: str = ""
    named_refusal: str = ""
    refusal_message: str = ""
    message: str = ""
    usage: ClaimedUsage = field(default_factory=ClaimedUsage)
    cost_nano: int = 0
    tries: list[ClaimedUsage] = field(default_factory=list)
    copied: str = ""
    copy_of: str = ""
    content: str = ""
    faults: list[str] = field(default_factory=list)

    @property
    def where(self) -> str:
        return f"{self.name} line {self.line}"

    @property
    def good(self) -> bool:
        return self.status is not None and 200 <= self.status <= 299


def split_item_id(text: str) -> tuple[str, int] | None:
    """Return the job's letters and the item's number from an item's id; None for any other text."""
    found = _ITEM_ID.fullmatch(text)
    if found is None:
        return None
    number = 0
    for letter in found[2]:
        number = number * 62 + _BASE62.index(letter)
    return found[1], number


def read_parameters(data: bytes, names: frozenset[str]) -> dict[str, Any] | None:
    """Return the parameters of these names from a line's body; None if the line is no request."""
    try:
        line = read_json(data.removeprefix(BOM))
    except NotJson:
        return None
    body = line.get("body") if isinstance(line, dict) else None
    return {name: body[name] for name in names & body.keys()} if isinstance(body, dict) else None


def text_key(value: Any) -> str:
    """Return a hash of a JSON value that does not depend on white space."""
    return sha256(json.dumps(value, separators=(",", ":")).encode()).hexdigest()


def read_input_line(line: JsonlLine, number: int, before: int = 0) -> JudgedInputLine | None:
    """Read a request of an input; return None for a line of white space.

    The files before its own have `before` lines.
    """
    data = line.data.removeprefix(BOM) if number == 1 else line.data
    if not data.strip(b" \t\r"):
        return None
    try:
        fields = read_json(data)
    except NotJson:
        return JudgedInputLine(before + number, None)
    custom_id = fields.get("custom_id") if isinstance(fields, dict) else None
    return JudgedInputLine(before + number, custom_id if isinstance(custom_id, str) else None)


def read_result_line(line: JsonlLine, name: str, number: int, *, has_copies: bool = False) -> ResultLine:
    """Read one finished line, with all faults of its shape.

    `has_copies` keeps its content's hash.
    """
    read = ResultLine(name, number, line.at, line.size_bytes, crc32(line.data + b"\n" * line.whole))
    if not line.whole:
        read.faults.append("it does not end with a newline")
    try:
        fields = read_json(line.data)
    except NotJson as error:
        read.faults.append(str(error))
        return read
    if isinstance(fields, dict) and "tidegate" in fields:
        _read_extras(read, fields.pop("tidegate"), fields.get("error"))
    if not _is_object(read, fields, "the line", ("id", "custom_id", "response", "error")):
        return read
    if isinstance(fields["id"], str):
        read.id = fields["id"]
    split = split_item_id(read.id)
    if split is None:
        read.faults.append("id is not `batch_req_` and 22 letters or digits")
    else:
        read.job_part, read.number = split
    if fields["custom_id"] is None or isinstance(fields["custom_id"], str):
        read.custom_id = fields["custom_id"]
    else:
        read.faults.append("custom_id is no string")
    if (fields["response"] is None) == (fields["error"] is None):
        read.faults.append("exactly one of response and error must be null")
    if has_copies:
        read.content = text_key([fields["response"], fields["error"]])
    if fields["response"] is not None:
        _read_response(read, fields["response"])
    if fields["error"] is not None:
        _read_error(read, fields["error"])
    if read.tries:
        names = ClaimedUsage.__dataclass_fields__
        read.usage = ClaimedUsage(*(sum(getattr(one, name) for one in read.tries) for name in names))
    return read


def _read_extras(read: ResultLine, fields: Any, error: Any) -> None:
    """Read the `tidegate` part: costs, tries, a copy's source, and the upstream's raw text."""
    if not isinstance(fields, dict) or not fields:
        read.faults.append("tidegate is no object, or an empty one")
        return
    if "raw" in fields and (not isinstance(fields.pop("raw"), str) or error is None):
        read.faults.append("tidegate.raw must be a text beside an error")
    if "tries" in fields:
        _read_tries(read, fields.pop("tries"))
    if "service_tier" in fields and fields.pop("service_tier") != "default":
        read.faults.append("tidegate.service_tier must be `default`, or absent")
    for copied in COPIED:
        if copied in fields:
            read.copied, name = copied, fields.pop(copied)
            read.copy_of = name if isinstance(name, str) else ""
            if split_item_id(read.copy_of) is None or fields or read.tries:
                read.faults.append(f"tidegate.{copied} must be the id of an item, without costs or tries")
    if fields:
        _read_cost(read, fields)


def _read_tries(read: ResultLine, tries: Any) -> None:
    """Read the answers that were paid for. All but the last must name a problem."""
    if not isinstance(tries, list) or not tries or not all(isinstance(one, dict) for one in tries):
        read.faults.append("tidegate.tries must be a list of objects")
        return
    names = ("input_tokens", "cached_tokens", "output_tokens", "reasoning_tokens")
    for one in tries:
        if not _is_object(read, one, "tidegate.tries", ("model", *names, "cost", "problem")):
            return
        if any(type(one[name]) is not int or not 0 <= one[name] <= TOKENS_MAX for name in names):
            read.faults.append("tidegate.tries must count tokens in whole numbers")
            return
    read.tries = [ClaimedUsage(*(one[name] for name in names)) for one in tries]
    if any(not isinstance(one["problem"], str) for one in tries[:-1]):
        read.faults.append("tidegate.tries must say what was wrong with each answer but the last")


def _read_cost(read: ResultLine, fields: Any) -> None:
    """Read the cost of an answer in billionths; its parts must add up to it."""
    if not _is_object(read, fields, "tidegate", ("cost", "input_cost", "cached_cost", "output_cost")):
        return
    nano = {name: _nano(text) for name, text in fields.items()}
    if None in nano.values() or nano["cost"] != sum(nano[name] or 0 for name in nano if name != "cost"):
        read.faults.append("tidegate.cost must be a decimal text, and the sum of its parts")
    else:
        read.cost_nano = nano["cost"] or 0


def _nano(text: Any) -> int | None:
    if not isinstance(text, str) or _MONEY.fullmatch(text) is None:
        return None
    whole, _, rest = text.partition(".")
    return int(whole) * 10**9 + int(rest.ljust(9, "0"))


def _is_object(read: ResultLine, fields: Any, what: str, keys: tuple[str, ...]) -> bool:
    if not isinstance(fields, dict):
        read.faults.append(f"{what} is no object")
        return False
    if isinstance(fields, NamedTwice):
        read.faults.append(f"{what} names a key twice")
    if set(fields) != set(keys):
        read.faults.append(f"{what} has the keys {sorted(fields)!r:.120} and not {sorted(keys)!r}")
    return set(fields) >= set(keys)


def _read_response(read: ResultLine, fields: Any) -> None:
    if not _is_object(read, fields, "response", ("status_code", "request_id", "body")):
        return
    status = fields["status_code"]
    if type(status) is int and 100 <= status <= 599:
        read.status = status
    else:
        read.faults.append("response.status_code is no HTTP status")
    if not isinstance(fields["request_id"], str) or _REQUEST_ID.fullmatch(fields["request_id"]) is None:
        read.faults.append("response.request_id is not `req_` and 22 letters or digits")
    if not isinstance(fields["body"], dict):
        read.faults.append("response.body is no object")
    elif read.good:
        read.usage = read_usage(fields["body"].get("usage"))
    elif isinstance(error := fields["body"].get("error"), dict):
        read.refusal = str(error.get("code") or "")
        code, message = error.get("code"), error.get("message", "")
        if isinstance(code, str | None) and isinstance(message, str):
            read.named_refusal, read.refusal_message = code or "", message


def _read_error(read: ResultLine, fields: Any) -> None:
    if not _is_object(read, fields, "error", ("code", "message")):
        return
    if isinstance(fields["code"], str) and fields["code"] and isinstance(fields["message"], str) and fields["message"]:
        read.code, read.message = fields["code"], fields["message"]
    else:
        read.faults.append("error.code and error.message must be texts")


def read_usage(usage: Any) -> ClaimedUsage:
    """Read the usage of an answer.

    A number that is no token count is left out; the others count.
    """
    if not isinstance(usage, dict):
        return ClaimedUsage()
    prompt, completion = _tokens(usage, "prompt_tokens"), _tokens(usage, "completion_tokens")
    read, thought = _tokens(usage, "input_tokens"), _tokens(usage, "output_tokens")
    from_cache, to_cache = _tokens(usage, "cache_read_input_tokens"), _tokens(usage, "cache_creation_input_tokens")
    cached = _tokens(_details(usage, "prompt_tokens_details", "input_tokens_details"), "cached_tokens") or 0
    written = _details(usage, "completion_tokens_details", "output_tokens_details")
    reasoning = _tokens(written, "reasoning_tokens") or _tokens(written, "thinking_tokens") or 0
    summed_up = ClaimedUsage()
    if prompt is None:
        # Anthropic counts cache reads and writes apart from the other input, and compaction apart
        # from everything.
        summed_up = _compaction(usage.get("iterations"))
        prompt = min((read or 0) + (from_cache or 0) + (to_cache or 0) + summed_up.input_tokens, TOKENS_MAX)
        cached = (cached or from_cache or 0) + summed_up.cached_tokens
    output = completion if completion is not None else thought or 0
    if _tokens(usage, "total_tokens") == prompt + output + reasoning:
        # xAI and Gemini count thoughts apart from the answer.
        output += reasoning
    output = min(output + summed_up.output_tokens, TOKENS_MAX)
    return ClaimedUsage(prompt, min(cached, prompt), output, min(reasoning, output))


def _compaction(iterations: Any) -> ClaimedUsage:
    """Return what the calls used in which a server summed up a conversation before it answered."""
    calls = [one for one in (iterations if isinstance(iterations, list) else ()) if isinstance(one, dict)]
    calls = [one for one in calls if one.get("type") == "compaction"]
    read, to_cache, from_cache, output = (
        sum(_tokens(one, name) or 0 for one in calls)
        for name in ("input_tokens", "cache_creation_input_tokens", "cache_read_input_tokens", "output_tokens")
    )
    return ClaimedUsage(read + to_cache + from_cache, from_cache, output, 0)


def _tokens(usage: dict[str, Any], key: str) -> int | None:
    value = usage.get(key)
    if type(value) is float and value == value // 1:
        value = int(value)
    return value if type(value) is int and 0 <= value <= TOKENS_MAX else None


def _details(usage: dict[str, Any], *keys: str) -> dict[str, Any]:
    """Return the first of these fields that is an object; an empty one if none is."""
    return next((usage[key] for key in keys if isinstance(usage.get(key), dict)), {})
