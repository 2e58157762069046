"""The messages for a bad line or a bad file: what is wrong, where, and what its author should do.

Only input that has already failed a check comes here, so these functions may be slow. They know
JSON and the names of a line's parts; `lines` knows the limits and the endpoints.
"""

import math
from collections import Counter
from json import JSONDecoder
from typing import Any, NoReturn

import msgspec
from msgspec import Raw

from tidegate.core.nouns import LineError

NUMBER_DIGITS_MAX = 128
SHOWN_CHARS_MAX = 80

_decode_object = msgspec.json.Decoder(dict[str, Raw]).decode
_decode_str = msgspec.json.Decoder(str).decode
_decode_raw = msgspec.json.Decoder(Raw).decode


class LineFault(Exception):
    """The reason why a line may not run, in words for its author."""

    def __init__(self, code: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.param = param

    def at(self, line: int) -> LineError:
        return LineError(self.code, self.message, self.param, line)


class BodyFault(LineFault):
    """The reason why one request may not run, though the batch may: a wrong parameter in its body.

    The caller reads a 400 for this item alone. `custom_id` and `model` are set once the rest of the
    line proved good.
    """

    custom_id = ""
    model = ""


def shown(text: str) -> str:
    """Return a caller's text, safe and short enough for a message."""
    cut = text[:SHOWN_CHARS_MAX]
    return ascii(cut) + ("…" if len(cut) < len(text) else "")


def explain(line: bytes, *, needs_model: bool = True) -> NoReturn:
    """Raise the LineFault that kept a line from being read as a request."""
    _explain_json(line)
    try:
        request = _decode_object(line)
    except msgspec.ValidationError:
        message = (
            'Each line must be one JSON object like {"custom_id": …, "body": {…}}; this one is another kind of value.'
        )
        raise LineFault("invalid_json_line", message) from None
    _need(request, "custom_id", "")
    _need_kind(request, "custom_id", "", b'"', "a string", "invalid_custom_id")
    _need_kind(request, "method", "", b'"n', 'the string "POST"', "invalid_method")
    _need_kind(request, "url", "", b'"n', "a string", "url_mismatch")
    _need(request, "body", "")
    _need_kind(request, "body", "", b"{", "an object", "invalid_request")
    body = _decode_object(request["body"])
    if needs_model:
        _need(body, "model", "body.")
    _need_kind(body, "model", "body.", b'"' if needs_model else b'"n', "a string")
    if "stream" in body and bytes(body["stream"])[0] not in b"tfn":
        raise BodyFault("invalid_request", "body.stream must be true or false.", "body.stream")
    for key in ("max_tokens", "max_completion_tokens", "max_output_tokens", "n"):
        if key in body and not bytes(body[key]).isdigit() and body[key] != Raw(b"null"):
            raise BodyFault("invalid_request", f"body.{key} must be a whole number above zero.", f"body.{key}")
    raise BodyFault(
        "invalid_request", "The body could not be read as a request: compare it with the documented shape.", "body"
    )


def _explain_json(line: bytes) -> None:
    try:
        line.decode()
        _decode_raw(line)
    except UnicodeDecodeError as error:
        message = f"Byte {error.start + 1} of this line is not UTF-8: save the file as UTF-8 and send it again."
        raise LineFault("invalid_json_line", message) from None
    except msgspec.DecodeError as error:
        if line.startswith(b"\xef\xbb\xbf"):
            hint = "a byte order mark stands in front of this line: only the file's first line may have one"
        elif "trailing characters" in str(error):
            hint = "something follows the object: put every object on a line of its own"
        elif "truncated" in str(error):
            hint = "the line ends too early: write every object on one line, without line breaks inside"
        elif "surrogate" in str(error) or "hex escape" in str(error):
            hint = "it holds half of a surrogate pair: write the whole character"
        else:
            hint = "write it with a JSON library, one object a line; NaN and Infinity are not JSON"
        raise LineFault("invalid_json_line", f"This line is not valid JSON ({error}): {hint}.") from None
    except RecursionError:
        raise LineFault("invalid_json_line", "This line is nested too deeply: flatten it.") from None


def _need(owner: dict[str, Raw], key: str, path: str) -> None:
    if key not in owner or owner[key] == Raw(b"null"):
        raise LineFault("missing_required_parameter", f"Every line needs {path}{key}: add it.", path + key)


def _need_kind(
    owner: dict[str, Raw], key: str, path: str, starts: bytes, kind: str, code: str = "invalid_request"
) -> None:
    value = owner.get(key)
    if value is not None and bytes(value)[0] not in starts:
        raise LineFault(code, f"{path}{key} must be {kind}.", path + key)


def custom_id_of(line: bytes, bytes_max: int) -> str | None:
    """Return the custom_id of a bad line, by which its author finds it; None where it cannot be
    read or is too long.
    """
    try:
        line.decode()
        custom_id = _decode_str(_decode_object(line)["custom_id"])
    except (ValueError, KeyError, RecursionError):
        return None
    return custom_id if len(custom_id.encode()) <= bytes_max else None


class _Pairs(list[tuple[str, Any]]):
    """A JSON object as a list of pairs, which shows a key named twice."""


def _finite(text: str) -> float:
    number = float(text)
    digits = sum(character.isdigit() for character in text)
    if math.isinf(number) or digits > NUMBER_DIGITS_MAX:
        message = f"The number {shown(text)} does not fit a double: write one of at most {NUMBER_DIGITS_MAX} digits."
        raise LineFault("invalid_json_line", message)
    return number


_exact = JSONDecoder(object_pairs_hook=_Pairs, parse_float=_finite, parse_int=_finite)


def check_exactly(line: bytes, body_keys_max: int) -> None:
    """Refuse a key named twice in the line or its body, numbers that are not finite, and too many
    keys in the body.
    """
    pairs = _exact.decode(line.decode())
    _refuse_twice(pairs, "")
    for key, value in pairs:
        if key == "body" and isinstance(value, _Pairs):
            _refuse_twice(value, "body.")
            if len(value) > body_keys_max:
                message = f"The body has {len(value)} keys, more than {body_keys_max}: remove what the endpoint does not know."
                raise BodyFault("invalid_request", message, "body")


def _refuse_twice(pairs: _Pairs, path: str) -> None:
    for key, count in Counter(key for key, _ in pairs).items():
        if count > 1:
            message = (
                f"{shown(path + key)} is named {count} times, and readers differ in which one counts: name it once."
            )
            raise LineFault("invalid_request", message, path + key[:SHOWN_CHARS_MAX])


_MAGIC = (
    (b"\x1f\x8b", "gzip data", "decompress it"),
    (b"PK\x03\x04", "a zip archive", "unpack it"),
    (b"\x28\xb5\x2f\xfd", "zstd data", "decompress it"),
    (b"BZh", "bzip2 data", "decompress it"),
    (b"\xfd7zXZ", "xz data", "decompress it"),
    (b"%PDF", "a PDF document", "write one JSON object a line"),
    (b"\xff\xfe\x00\x00", "UTF-32 text", "save it as UTF-8"),
    (b"\x00\x00\xfe\xff", "UTF-32 text", "save it as UTF-8"),
    (b"{\x00\x00\x00", "UTF-32 text", "save it as UTF-8"),
    (b"\xff\xfe", "UTF-16 text", "save it as UTF-8"),
    (b"\xfe\xff", "UTF-16 text", "save it as UTF-8"),
    (b"{\x00", "UTF-16 text", "save it as UTF-8"),
    (b"\x00{", "UTF-16 text", "save it as UTF-8"),
    (b"\x00\x00", "binary data or UTF-32 text", "save it as UTF-8 text with one JSON object a line"),
)


def strange_file(start: bytes) -> LineFault | None:
    """Return the fault of a file whose first bytes cannot begin JSON Lines, named by what it seems
    to be; else None.
    """
    for magic, kind, remedy in _MAGIC:
        if start.startswith(magic):
            return LineFault("invalid_json_line", f"The file seems to be {kind}: {remedy} and send it again.")
    text = start.removeprefix(b"\xef\xbb\xbf").lstrip(b" \t\r\n")
    first = text.split(b"\n", 1)[0].rstrip(b" \t\r")
    if first.startswith(b"["):
        message = (
            "The file seems to be a JSON array: write one object a line, without the brackets and commas around them."
        )
        return LineFault("invalid_json_line", message)
    if b"\n" in text and (first == b"{" or (first.startswith(b"{") and first.endswith((b",", b"{", b"[")))):
        message = "The file seems to be pretty-printed JSON: write each object on a single line."
        return LineFault("invalid_json_line", message)
    return None
