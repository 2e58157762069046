"""The items of a create as lines of an input file.

The body is `{"items": [{"resourceId": …, "request": {…}}, …]}`.

The resource determines `model`, `stream` and `vmx`: these are replaced or removed, and the rest of
a request keeps the caller's bytes. A line's custom_id has the item's number and the place of its
request in the input file, so that a result leads to its request. A fault in an item's frame refuses
the whole body. A fault inside `request` is found by ingest and fails only that item.
"""

import re
from collections.abc import Callable, Iterator
from typing import NamedTuple

import msgspec
from msgspec import Raw

from tidegate.core.usage import estimate
from tidegate.core.usage.inline_files import unread_bytes
from tidegate.core.wording import in_words
from tidegate.web.jobs.inline_list import InlineList, bad, invalid

CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"
OTHER_FIELDS = ("type", "callbackOptions", "capacity")
# The most bytes that a line adds to its request, without the names of the resource and the
# endpoint.
FRAME_BYTES = 512
# Fields of a request that the resource determines.
DECIDED = ("model", "stream", "vmx")
# Only Anthropic's Messages have these fields beside `messages`, and these blocks in their content.
_MESSAGES_FIELDS = ("system", "stop_sequences", "anthropic_version")
_MESSAGES_BLOCKS = frozenset(
    [
        "image",
        "document",
        "tool_use",
        "tool_result",
        "thinking",
        "redacted_thinking",
        "search_result",
        "server_tool_use",
        "web_search_tool_result",
    ]
)
_PROMPT_FIELDS = ("messages", "input", "prompt", "tools", "instructions", "system")
_NAME = re.compile(r"(?P<place>[0-9]{7})-(?P<at>[0-9a-f]{10})-(?P<size>[0-9a-f]{8})", re.ASCII)
_ONE_LINE = bytes.maketrans(b"\r\n", b"  ")


class InlineItem(msgspec.Struct, rename="camel", forbid_unknown_fields=True):
    """One item of a create.

    `endpoint` is our own field: it names the API of a request whose fields do not show it.
    """

    resource_id: str
    request: Raw
    endpoint: str | None = None


class ItemName(NamedTuple):
    """A line's custom_id: the item's index in the create, and the place of its request in the input
    file.
    """

    place: int
    at: int
    size_bytes: int

    def text(self) -> str:
        return f"{self.place:07}-{self.at:010x}-{self.size_bytes:08x}"


class _ContentBlock(msgspec.Struct):
    type: str = ""


class _ContentOfMessage(msgspec.Struct):
    content: Raw = Raw(b"")


# The end of a line's custom_id.
_NAME_END = len(b'{"custom_id":"') + len(ItemName(0, 0, 0).text())
_decode = msgspec.json.Decoder(InlineItem).decode
_decode_fields = msgspec.json.Decoder(dict[str, Raw]).decode
_decode_messages = msgspec.json.Decoder(list[_ContentOfMessage]).decode
_decode_blocks = msgspec.json.Decoder(list[_ContentBlock]).decode


def read_name(text: str | None) -> ItemName | None:
    """Parse a custom_id; return None if this door did not write it."""
    found = _NAME.fullmatch(text or "")
    return ItemName(int(found["place"]), int(found["at"], 16), int(found["size"], 16)) if found else None


class InlineItems:
    """The parser of the body of a create, which yields the lines of its whole items.

    `admit` refuses resources that are unknown or not allowed to the caller; `endpoints` are those
    that an item may name.
    """

    def __init__(
        self, admit: Callable[[str, str], None], endpoints: tuple[str, ...], count_max: int, item_bytes_max: int
    ) -> None:
        self._admit = admit
        self._endpoints = endpoints
        self._count_max = count_max
        self._list = InlineList("items", item_bytes_max, OTHER_FIELDS)
        self._admitted: set[str] = set()
        self._written_bytes = 0
        self.estimated_tokens = 0

    @property
    def count(self) -> int:
        return self._list.count

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Parse the next bytes of the body; yield the lines that they complete."""
        return map(self._line, self._list.feed(data))

    def finish(self) -> dict[str, Raw]:
        """Raise unless the body was whole and had at least one item; return its other fields."""
        self._list.finish()
        return self._list.fields

    def _line(self, text: bytes) -> bytes:
        param = self._list.param
        if self.count >= self._count_max:
            raise bad(
                "items", f"`items` has more than {in_words(self._count_max, 'item')}: make several batches of them."
            )
        try:
            if not text.isascii():
                # Raises unless it is UTF-8: the bytes are echoed later.
                text.decode()
            item = _decode(text)
        except msgspec.ValidationError as error:
            raise bad(param, f"`{param}`: {str(error)[:1].lower()}{str(error)[1:200]}.") from None
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            raise invalid(f"`{param}` is not valid JSON.") from None
        if item.resource_id not in self._admitted:
            self._admit(item.resource_id, f"{param}.resourceId")
            self._admitted.add(item.resource_id)
        try:
            fields = _decode_fields(item.request)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            raise bad(
                f"{param}.request", f"`{param}.request` must be an object: what you would send by itself."
            ) from None
        if item.endpoint is not None and item.endpoint not in self._endpoints:
            known = ", ".join(self._endpoints)
            raise bad(f"{param}.endpoint", f"`{param}.endpoint` must be one of: {known}.")
        self.estimated_tokens += estimated_tokens(fields)
        return self._written(item.endpoint or endpoint_of(fields), body_of(item.resource_id, fields))

    def _written(self, endpoint: str, body: bytes) -> bytes:
        """Return the input line of an item.

        Its name has a fixed size, so that the place of the request is known beforehand.
        """
        tail = b'","method":"POST","url":"%b","body":' % endpoint.encode()
        begin = self._written_bytes + _NAME_END + len(tail)
        name = ItemName(self.count, begin, len(body)).text()
        line = b'{"custom_id":"%b%b%b}\n' % (name.encode(), tail, body)
        self._written_bytes += len(line)
        return line


def body_of(resource_id: str, fields: dict[str, Raw]) -> bytes:
    """Return the request to send: the caller's bytes on one line, with the resource as its
    model."""
    parts = [b'{"model":' + msgspec.json.encode(resource_id)]
    parts += [msgspec.json.encode(name) + b":" + raw for name, raw in fields.items() if name not in DECIDED]
    return b",".join(parts).translate(_ONE_LINE) + b"}"


def endpoint_of(fields: dict[str, Raw]) -> str:
    """Return the API that a request is for, by its fields."""
    if "input" in fields:
        return RESPONSES
    if "messages" in fields and (
        any(name in fields for name in _MESSAGES_FIELDS) or _has_anthropic_blocks(fields["messages"])
    ):
        return MESSAGES
    return CHAT


def estimated_tokens(fields: dict[str, Raw]) -> int:
    """Estimate the tokens of a request's prompt."""
    prompts = [bytes(fields[name]) for name in _PROMPT_FIELDS if name in fields]
    return estimate.prompt_tokens(sum(len(text) - unread_bytes(text) for text in prompts))


def _has_anthropic_blocks(messages: Raw) -> bool:
    try:
        for message in _decode_messages(messages):
            if bytes(message.content).startswith(b"[") and any(
                block.type in _MESSAGES_BLOCKS for block in _decode_blocks(message.content)
            ):
                return True
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        # Ingest reports the fault.
        return False
    return False
