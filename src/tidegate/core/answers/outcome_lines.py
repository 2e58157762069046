"""Lines of result files, read: what became of an item, and with which code."""

import re

import msgspec

from tidegate.core.answers.error_kinds import ErrorKind, fingerprint
from tidegate.core.states import Outcome

NEVER_RAN = {
    Outcome.EXPIRED: ("batch_expired", "This request could not be executed before the completion window expired."),
    Outcome.CANCELLED: ("batch_cancelled", "This request was not executed because the batch was cancelled."),
    Outcome.FAILED: ("batch_failed", "This request was not executed because the batch failed."),
}
_OUTCOME_OF = {code: outcome for outcome, (code, _) in NEVER_RAN.items()}


# How a response may end; one that says nothing of it is complete.
COMPLETED = "completed"
_RESPONSE_ENDS = (COMPLETED, "incomplete", "failed", "cancelled")
# How reading a damaged line fails.
DAMAGE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
_ID = re.compile(rb'\{"id":"(?P<id>batch_req_[0-9a-zA-Z_]{1,64})"', re.ASCII)
# It stands behind the id, or first.
_CUSTOM_ID_AT_MAX = 64
_CODE = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.:/-]{0,63}")
_CUSTOM_ID = re.compile(rb'[{,]"custom_id":(?P<text>"(?:[^"\\\x00-\x1f]|\\.)*")', re.ASCII)


class _ResponseBody(msgspec.Struct):
    status: msgspec.Raw = msgspec.Raw()


class ItemError(msgspec.Struct):
    code: str | None = None
    message: str = ""


# What a reader gets for a line whose bytes were damaged where they are kept.
DAMAGED = ItemError(
    "result_unreadable",
    "The stored result of this request cannot be read: its bytes are damaged. Send the request again in another batch, or ask "
    "your operator to restore the file from a backup.",
)
UNREADABLE = str(DAMAGED.code)


class _FailureBody(msgspec.Struct):
    error: ItemError | None = None


class ItemResponse(msgspec.Struct):
    status_code: int
    body: msgspec.Raw


class LineExtras(msgspec.Struct):
    """What a line says beside OpenAI's shape, as far as it is read again."""

    service_tier: str | None = None


class OutcomeLine(msgspec.Struct):
    """A line of the output or the error file, with the answer's body as the bytes that it is."""

    id: str
    custom_id: str | None = None
    response: ItemResponse | None = None
    error: ItemError | None = None
    tidegate: LineExtras | None = None

    @property
    def is_unreadable(self) -> bool:
        return self.response is None and self.error is not None and self.error.code == UNREADABLE

    def failure(self) -> ItemError | None:
        """What a line of the error file says went wrong: in our words, or in the model server's as far as they have the usual shape."""
        if self.error is not None or self.response is None:
            return self.error
        try:
            return _decode_error(self.response.body).error or ItemError()
        except msgspec.MsgspecError:
            return ItemError()

    def response_status(self) -> str:
        """How the answer of a response says that it ended."""
        if self.response is None:
            return COMPLETED
        try:
            status = msgspec.json.decode(_decode_response(self.response.body).status)
        except msgspec.MsgspecError:
            return COMPLETED
        return status if status in _RESPONSE_ENDS else COMPLETED

    def failure_code(self) -> str:
        """The code that a line of the error file is found by; `http_` and the status where a model server named none, or wrote a text
        there, which may quote the request."""
        failure = self.failure()
        if failure is not None and failure.code and _CODE.fullmatch(failure.code):
            return failure.code
        return f"http_{self.response.status_code}" if self.response is not None else ""

    def failure_kind(self) -> ErrorKind:
        """The kind of error that a line of the error file is one of."""
        failure = self.failure()
        status = self.response.status_code if self.response is not None else 0
        return ErrorKind(self.failure_code(), status, fingerprint(failure.message if failure is not None else ""))

    def failure_outcome(self) -> Outcome:
        """What became of the item of a line of the error file."""
        code = self.error.code if self.error is not None else None
        return _OUTCOME_OF.get(code or "", Outcome.FAILED)


_decode = msgspec.json.Decoder(OutcomeLine).decode
_decode_response = msgspec.json.Decoder(_ResponseBody).decode
_decode_error = msgspec.json.Decoder(_FailureBody).decode


def read_line(text: bytes) -> OutcomeLine:
    """Read one line of a result file; one of DAMAGE when it is not what was written."""
    if not text.isascii():
        # A body is not looked into, and may hide bytes that are no text.
        text.decode()
    return _decode(text)


def readable_line(text: bytes, name: str = "") -> OutcomeLine:
    """Read one line of a result file. A damaged one has an error that says so, and of its names what is left; `name` is its id."""
    try:
        return read_line(text)
    except DAMAGE:
        known = _ID.match(text)
        return OutcomeLine(
            name or (known["id"].decode() if known else ""),
            salvaged_custom_id(text),
            error=DAMAGED,
        )


def salvaged_custom_id(text: bytes) -> str | None:
    """Return the custom_id that a damaged line still says."""
    found = _CUSTOM_ID.search(text)
    try:
        is_its_own = found is not None and found.start() <= _CUSTOM_ID_AT_MAX
        return msgspec.json.decode(found["text"], type=str) if found is not None and is_its_own else None
    except DAMAGE:
        return None


def response_status(text: bytes) -> str:
    """How the answer in this line of a result file says that it ended. A line that is damaged says nothing, and must hold nothing up."""
    return readable_line(text).response_status()
