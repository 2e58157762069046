"""Read lines of result files: the outcome of an item, and its code."""

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


# How a response may end; one without a status is complete.
COMPLETED = "completed"
_RESPONSE_ENDS = (COMPLETED, "incomplete", "failed", "cancelled")
# The exceptions of reading a damaged line.
DAMAGE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
_ID = re.compile(rb'\{"id":"(?P<id>batch_req_[0-9a-zA-Z_]{1,64})"', re.ASCII)
# The custom_id stands right after the id, or first.
_CUSTOM_ID_AT_MAX = 64
_CODE = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.:/-]{0,63}")
_CUSTOM_ID = re.compile(rb'[{,]"custom_id":(?P<text>"(?:[^"\\\x00-\x1f]|\\.)*")', re.ASCII)


class _ResponseBody(msgspec.Struct):
    status: msgspec.Raw = msgspec.Raw()


class ItemError(msgspec.Struct):
    code: str | None = None
    message: str = ""


# The error of a line whose stored bytes were damaged.
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
    """The parts of a line outside OpenAI's shape, as far as they are read again."""

    service_tier: str | None = None


class OutcomeLine(msgspec.Struct):
    """A line of the output or the error file; the answer's body keeps its bytes."""

    id: str
    custom_id: str | None = None
    response: ItemResponse | None = None
    error: ItemError | None = None
    tidegate: LineExtras | None = None

    @property
    def is_unreadable(self) -> bool:
        return self.response is None and self.error is not None and self.error.code == UNREADABLE

    def failure(self) -> ItemError | None:
        """Return the error of a line of the error file: ours, or the model server's where it has
        the usual shape.
        """
        if self.error is not None or self.response is None:
            return self.error
        try:
            return _decode_error(self.response.body).error or ItemError()
        except msgspec.MsgspecError:
            return ItemError()

    def response_status(self) -> str:
        """Return how the answer says that it ended."""
        if self.response is None:
            return COMPLETED
        try:
            status = msgspec.json.decode(_decode_response(self.response.body).status)
        except msgspec.MsgspecError:
            return COMPLETED
        return status if status in _RESPONSE_ENDS else COMPLETED

    def failure_code(self) -> str:
        """Return the code by which a line of the error file is found.

        Where a model server named no code, or wrote text there that may quote the request, it is
        `http_` and the status.
        """
        failure = self.failure()
        if failure is not None and failure.code and _CODE.fullmatch(failure.code):
            return failure.code
        return f"http_{self.response.status_code}" if self.response is not None else ""

    def failure_kind(self) -> ErrorKind:
        """Return the kind of the error in a line of the error file."""
        failure = self.failure()
        status = self.response.status_code if self.response is not None else 0
        return ErrorKind(self.failure_code(), status, fingerprint(failure.message if failure is not None else ""))

    def failure_outcome(self) -> Outcome:
        """Return the outcome of the item of a line of the error file."""
        code = self.error.code if self.error is not None else None
        return _OUTCOME_OF.get(code or "", Outcome.FAILED)


_decode = msgspec.json.Decoder(OutcomeLine).decode
_decode_response = msgspec.json.Decoder(_ResponseBody).decode
_decode_error = msgspec.json.Decoder(_FailureBody).decode


def read_line(text: bytes) -> OutcomeLine:
    """Read one line of a result file; raise one of DAMAGE when it is not what was written."""
    if not text.isascii():
        # The body is not decoded, and may hide bytes that are not UTF-8.
        text.decode()
    return _decode(text)


def readable_line(text: bytes, name: str = "") -> OutcomeLine:
    """Read one line of a result file; a damaged line has an error that says so. `name` is its id.

    Of a damaged line's ids, the result has what is left.
    """
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
    """Return the custom_id that can still be read in a damaged line."""
    found = _CUSTOM_ID.search(text)
    try:
        is_its_own = found is not None and found.start() <= _CUSTOM_ID_AT_MAX
        return msgspec.json.decode(found["text"], type=str) if found is not None and is_its_own else None
    except DAMAGE:
        return None


def response_status(text: bytes) -> str:
    """Return how the answer in this line says that it ended; a damaged line counts as complete and
    must not stop anything.
    """
    return readable_line(text).response_status()
