"""Hints about a call for the engine or router that gets it, and the upstream's name of its model.

The hints are a field of the body and headers.

- The field is put in front of the caller's bytes without parsing the body.
- Only a call whose model has another name upstream is built again, with the original bytes of all
  other values.
- Headers distinguish tenants but never name them.
"""

from hashlib import blake2b

import msgspec

from tidegate.core.deployments import Deployment
from tidegate.core.nouns import Call

_object = msgspec.json.Decoder(dict[str, msgspec.Raw])

NAMES_MAX = 4_096


class PriorityHints:
    """The hints for one deployment.

    Without hints `is_silent` is true, so that most calls skip this.
    """

    def __init__(self, deployment: Deployment) -> None:
        self._hints = hints = deployment.hints
        self._field = msgspec.json.encode(hints.priority_field) if hints.priority_field else b""
        self._member = self._field + b":%d" % hints.priority
        self._names: dict[str, bytes] = {}
        headers = (hints.objective_header, hints.fairness_header, hints.deadline_header, hints.prefix_header)
        self.is_silent = not self._field and not any(headers)

    def body(self, body: bytes) -> bytes:
        """Return the body with the priority in front, unless the caller gave one."""
        if not self._field:
            return body
        if self._field in body and _has(body, self._hints.priority_field):
            return body
        at = body.find(b"{") + 1
        if not at or body[: at - 1].strip():
            return body
        rest = body[at:]
        comma = b"" if rest.lstrip().startswith(b"}") else b","
        return b"%b%b%b%b" % (body[:at], self._member, comma, rest)

    def headers(self, call: Call, left_ms: float) -> bytes:
        """Return header lines for this call, each with its line end."""
        hints = self._hints
        lines = b""
        if hints.objective_header:
            lines += f"{hints.objective_header}: {hints.objective}\r\n".encode()
        if hints.fairness_header and call.share_owner:
            lines += f"{hints.fairness_header}: ".encode() + self._name_of(call.share_owner) + b"\r\n"
        if hints.deadline_header:
            lines += f"{hints.deadline_header}: {max(0, int(left_ms))}\r\n".encode()
        if hints.prefix_header and call.prefix_group:
            lines += f"{hints.prefix_header}: ".encode() + self._name_of(call.prefix_group) + b"\r\n"
        return lines

    def _name_of(self, text: str) -> bytes:
        """Return a name for a header that differs for each text but does not reveal it."""
        name = self._names.get(text)
        if name is None:
            if len(self._names) >= NAMES_MAX:
                self._names.clear()
            name = self._names[text] = blake2b(text.encode("utf-8", "replace"), digest_size=8).hexdigest().encode()
        return name


def renamed(body: bytes, model: str) -> bytes:
    """Return the same request with another name of its model; every other value keeps its bytes."""
    try:
        members = _object.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return body
    members["model"] = msgspec.Raw(msgspec.json.encode(model))
    return msgspec.json.encode(members)


def _has(body: bytes, name: str) -> bool:
    try:
        return name in _object.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        # The body is no object, so it is sent unchanged and the upstream answers it.
        return True
