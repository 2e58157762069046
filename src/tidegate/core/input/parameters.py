"""Parameters that are put into the bodies of requests: the ones that hold for a line, and the
changed line.

A default fills in what a body leaves out; an override replaces its value. The more particular level
counts: the operator's for all, for an endpoint, for a model, then the job's. Only the names at the
top of a body are looked at. A line without changes keeps its bytes. So does a line that cannot be
read: the check that follows says what is wrong with it.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from msgspec import Raw

from tidegate.core.input.line_faults import LineFault, check_exactly, shown
from tidegate.core.input.lines import DEFAULT_MODELS, LineRules, check_depth, check_line, endpoint_of, path_of
from tidegate.core.job_shape import ParameterLevel
from tidegate.core.json_limits import is_utf8

PARAMETERS_MAX = 64
PARAMETERS_BYTES_MAX = 64 << 10
_NAME_CHARS_MAX = 128
# Each line, or the batch as a whole, decides on these.
FIXED_NAMES = ("model", "stream")
_SETS_MAX = 1_000


class _ShapedLine(msgspec.Struct, gc=False):
    body: dict[str, Raw]
    url: str | None = None


class _RawLine(msgspec.Struct, gc=False):
    body: Raw


_decode_line = msgspec.json.Decoder(_ShapedLine).decode
_decode_raw = msgspec.json.Decoder(_RawLine).decode
_decode_object = msgspec.json.Decoder(dict[str, Raw]).decode
_decode_any = msgspec.json.Decoder().decode


class BodyShaper:
    """The writer of the parameters of some levels, the least particular first, into lines."""

    def __init__(self, levels: Sequence[ParameterLevel], rules: LineRules) -> None:
        self._levels = levels
        self._rules = rules
        self._sets: dict[tuple[str, str], tuple[dict[str, bytes], dict[str, bytes]]] = {}

    def shaped(self, line: bytes) -> bytes:
        """Return the line with all parameters that hold for it; the same bytes where nothing
        changes.
        """
        if not is_utf8(line):
            return line
        try:
            check_depth(line, self._rules.depth_max)
            request = _decode_line(line)
        except (ValueError, RecursionError, LineFault):
            return line
        path = path_of(request.url, self._rules)
        defaults, overrides = self._set_of(path, _model_of(request.body, path))
        changed = {name: value for name, value in overrides.items() if not _is_same(request.body.get(name), value)}
        changed |= {name: value for name, value in defaults.items() if name not in request.body}
        if not changed:
            return line
        try:
            return _with(line, request.body, changed)
        except LineFault:
            return line

    def _set_of(self, path: str, model: str) -> tuple[dict[str, bytes], dict[str, bytes]]:
        """Return the encoded defaults and overrides for an endpoint and a model; an override drops
        the default of its name.
        """
        known = self._sets.get((path, model))
        if known is not None:
            return known
        defaults: dict[str, Any] = {}
        overrides: dict[str, Any] = {}
        for level in self._levels:
            if level.endpoint in ("", path) and level.model in ("", model):
                defaults |= level.defaults
                overrides |= level.overrides
        encoded = (
            {name: msgspec.json.encode(value) for name, value in defaults.items() if name not in overrides},
            {name: msgspec.json.encode(value) for name, value in overrides.items()},
        )
        if len(self._sets) < _SETS_MAX:
            self._sets[path, model] = encoded
        return encoded


def named(levels: Sequence[ParameterLevel]) -> frozenset[str]:
    """Return every name that some level sets."""
    return frozenset(name for level in levels for name in (*level.defaults, *level.overrides))


def check_parameters(values: Mapping[str, Any], endpoint: str) -> None:
    """Raise LineFault for parameters that no line may have: too many, a reserved name, a value of a
    wrong kind.

    An empty endpoint stands for all of them.
    """
    if len(values) > PARAMETERS_MAX:
        raise LineFault("invalid_request", f"has {len(values)} names; {PARAMETERS_MAX} are allowed.")
    size = len(msgspec.json.encode(values))
    if size > PARAMETERS_BYTES_MAX:
        raise LineFault("invalid_request", f"has {size:,} bytes; {PARAMETERS_BYTES_MAX:,} are allowed.")
    prompt = endpoint_of(endpoint).prompt if endpoint else None
    for name in values:
        if not name or len(name) > _NAME_CHARS_MAX or not name.isprintable():
            message = f"must name parameters of a body in 1 to {_NAME_CHARS_MAX} printable characters."
            raise LineFault("invalid_request", message)
        if name in (*FIXED_NAMES, prompt):
            raise LineFault("unsupported_parameter", f"may not set {shown(name)}: each line says it.", name)
    sample: dict[str, Any] = {"model": "m"}
    if prompt is not None:
        sample[prompt] = [{"role": "user", "content": "x"}] if endpoint_of(endpoint).has_messages else "x"
    line = msgspec.json.encode({"custom_id": "x", "body": {**sample, **values}})
    try:
        check_line(line, LineRules(endpoint, line_bytes_max=2 * PARAMETERS_BYTES_MAX))
    except LineFault as fault:
        name = (fault.param or "").removeprefix("body.")
        raise LineFault(fault.code, f"cannot be used: {fault.message}", name if name in values else None) from None


def _model_of(body: dict[str, Raw], path: str) -> str:
    raw = body.get("model")
    if raw is None:
        return DEFAULT_MODELS.get(path, "")
    model = _decode_any(raw)
    return model if isinstance(model, str) else ""


def _is_same(there: Raw | None, value: bytes) -> bool:
    if there is None:
        return False
    return bytes(there) == value or _decode_any(there) == _decode_any(value)


def _with(line: bytes, body: dict[str, Raw], changed: dict[str, bytes]) -> bytes:
    """Return the line with these members in its body; all else keeps its bytes and its order."""
    raw = bytes(_decode_raw(line).body)
    if changed.keys().isdisjoint(body):
        added = b",".join(_member(name, value) for name, value in changed.items())
        new = b"{" + added + (b"," + raw[1:] if body else b"}")
    else:
        # Refuse a name that occurs twice: one of its values would be lost silently.
        check_exactly(line, len(line))
        new = _object({name: bytes(value) for name, value in body.items()} | changed)
    if line.count(raw) == 1:
        return line.replace(raw, new)
    check_exactly(line, len(line))
    return _object({name: bytes(value) for name, value in _decode_object(line).items()} | {"body": new})


def _object(members: Mapping[str, bytes]) -> bytes:
    return b"{" + b",".join(_member(name, value) for name, value in members.items()) + b"}"


def _member(name: str, value: bytes) -> bytes:
    return msgspec.json.encode(name) + b":" + value
