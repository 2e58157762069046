"""Items that are not run: each takes the line of another item, under its own id and custom_id.

The work file has a `WorkCopy` for such an item. A copied line names the line that was paid for, and
has no cost of its own.
"""

import msgspec
from msgspec import Raw

NOTHING = Raw(b"")


class WorkCopy(msgspec.Struct, omit_defaults=True, gc=False):
    """A line of the work file for an item that is not run.

    It takes the line of the item with the number `of`, or this `response`, which an earlier job had
    under the id `source`. `custom_id` is the caller's own JSON text.
    """

    custom_id: Raw
    of: int | None = None
    source: str = ""
    response: Raw = NOTHING


class _SourceExtras(msgspec.Struct, gc=False):
    raw: Raw = NOTHING


class _SourceError(msgspec.Struct, gc=False):
    code: str = ""


class SourceLine(msgspec.Struct, gc=False):
    """A line of a result file that is copied."""

    id: str
    custom_id: str | None
    response: Raw
    error: Raw
    tidegate: _SourceExtras | None = None

    @property
    def code(self) -> str:
        """Return the code of an item without an answer; empty where it has one."""
        error = _read_error(self.error)
        return error.code if error is not None else ""


read_copy = msgspec.json.Decoder(WorkCopy).decode
_read_error = msgspec.json.Decoder(_SourceError | None).decode
_decode_source = msgspec.json.Decoder(SourceLine).decode


def read_source(text: bytes) -> SourceLine:
    """Read a line that is copied; raise one of `outcome_lines.DAMAGE` when it is not what was
    written.
    """
    if not text.isascii():
        text.decode()
    return _decode_source(text)


def deduplicated_line(name: str, custom_id: bytes, source: SourceLine) -> bytes:
    """Return the line of an item that is identical to one that was run."""
    raw = b""
    if source.tidegate is not None and source.tidegate.raw:
        raw = b'"raw":%b,' % bytes(source.tidegate.raw)
    return b'{"id":"%b","custom_id":%b,"response":%b,"error":%b,"tidegate":{%b"deduplicated":"%b"}}\n' % (
        name.encode(),
        custom_id,
        bytes(source.response),
        bytes(source.error),
        raw,
        source.id.encode(),
    )


def reused_line(name: str, copy: WorkCopy) -> bytes:
    """Return the line of an item that an earlier job has answered."""
    return b'{"id":"%b","custom_id":%b,"response":%b,"error":null,"tidegate":{"reused":"%b"}}\n' % (
        name.encode(),
        bytes(copy.custom_id),
        bytes(copy.response),
        copy.source.encode(),
    )
