"""The lines of result files, as doors read them."""

import msgspec


class ItemError(msgspec.Struct):
    code: str | None = None
    message: str = ""


class _FailureBody(msgspec.Struct):
    error: ItemError | None = None


class ItemResponse(msgspec.Struct):
    status_code: int
    body: msgspec.Raw


class OutcomeLine(msgspec.Struct):
    """A line of the output or the error file, with the answer's body as the bytes that it is."""

    id: str
    custom_id: str | None = None
    response: ItemResponse | None = None
    error: ItemError | None = None

    def failure(self) -> ItemError | None:
        """What a line of the error file says went wrong: in our words, or in the model server's as far as they have the usual shape."""
        if self.error is not None or self.response is None:
            return self.error
        try:
            return _decode_error(self.response.body).error or ItemError()
        except msgspec.MsgspecError:
            return ItemError()


_decode = msgspec.json.Decoder(OutcomeLine).decode
_decode_error = msgspec.json.Decoder(_FailureBody).decode


def read_line(text: bytes) -> OutcomeLine:
    """Read one line of a result file."""
    return _decode(text)
