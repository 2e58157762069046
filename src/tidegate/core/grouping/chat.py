"""Several chat items as one provider call, where a provider answers each of them with its own
usage.

Grouping happens after routing: items share a call only when they go to the same deployment, with
the same failover and with the same everything but their messages. Items that could spoil a group
(streams, tools, several choices, large prompts) go alone, and the reason is named. An item without
an exact usage of its own fails: a share of another item's number is no usage. Adapters do the
sending; this module reads and writes the one shape that they speak.
"""

from collections.abc import Sequence
from enum import StrEnum
from typing import Any

import msgspec

from tidegate.core.answers import answer
from tidegate.core.errors import Ambiguous, BrokenAnswer, Refused, SettingsError, Throttled, UpstreamError
from tidegate.core.nouns import Usage
from tidegate.core.retry import GiveUp
from tidegate.core.translate import error_to_openai
from tidegate.core.usage.estimate import prompt_tokens

ENDPOINT = "/v1/chat/completions"
BATCH_ENDPOINT = answer.SHARED_CHAT
ERROR_BYTES_MAX = 4096
USAGE_MISSING = "chat_usage_missing"


_decode_fields = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_encode = msgspec.json.encode


class ChatMode(StrEnum):
    """The ways in which a deployment takes chat items."""

    DISABLED = "disabled"
    CONCURRENT = "concurrent"
    SYNC_MICROBATCH = "sync_microbatch"


class ChatAdapter(StrEnum):
    """The ways in which a provider takes several conversations in one call.

    `results`: a POST to `/v1/chat/completions/batch` with a list of conversations as `messages`,
    answered with one result for each, every one with its own usage. vLLM has this path too but
    reports only the sum of the usage: that is not enough.
    """

    NONE = "none"
    RESULTS = "results"


class Singly(StrEnum):
    """The reasons why an item is sent by itself."""

    ENDPOINT = "endpoint"
    MODE = "mode"
    NO_EXECUTOR = "no_executor"
    STREAM = "stream"
    MCP_TOOLS = "mcp_tools"
    TOOLS = "tools"
    RESPONSE_FORMAT = "response_format"
    CHOICES = "choices"
    TOKENS = "tokens"
    MALFORMED = "malformed"


class ChatBatching(msgspec.Struct, frozen=True):
    """An operator's settings for a deployment's chat items.

    A missing section is `concurrent`.

    `upstream_max_batch_size` is the most items in one call, `max_total_input_tokens` the most
    prompt tokens (estimated; 0: no cap).
    """

    mode: ChatMode = ChatMode.CONCURRENT
    max_in_flight: int | None = None
    upstream_max_batch_size: int = 1
    max_total_input_tokens: int = 0
    require_homogeneous_params: bool = True
    adapter: ChatAdapter = ChatAdapter.NONE

    @property
    def groups(self) -> bool:
        """Return whether items ever share a call here."""
        return self.mode is ChatMode.SYNC_MICROBATCH and self.upstream_max_batch_size > 1 and self.has_executor

    @property
    def has_executor(self) -> bool:
        return self.adapter is not ChatAdapter.NONE

    @property
    def ineffective(self) -> str:
        """Return why no items share a call although the settings ask for it; empty where they do,
        or do not ask.
        """
        if self.mode is not ChatMode.SYNC_MICROBATCH or self.groups:
            return ""
        if not self.has_executor:
            return "no adapter is named: set chat_batching.adapter to results, or use mode concurrent"
        return "upstream_max_batch_size is 1: raise chat_batching.upstream_max_batch_size, or use mode concurrent"

    @classmethod
    def named(cls, mode: str, **limits: Any) -> "ChatBatching":
        """Return the settings from an operator's words; SettingsError names a word that is not one
        of ours.
        """
        if mode == "native_async_batch":
            raise SettingsError("chat_batching.mode: native_async_batch is reserved and not supported: use concurrent")
        if mode not in tuple(ChatMode):
            raise SettingsError(f"chat_batching.mode is {mode!r}: use one of {', '.join(ChatMode)}")
        return cls(ChatMode(mode), **limits)

    def __post_init__(self) -> None:
        if not self.require_homogeneous_params:
            raise SettingsError(
                "chat_batching.require_homogeneous_params can only be true: items with different parameters never share a call"
            )
        if self.mode is ChatMode.DISABLED and self.max_in_flight is not None:
            raise SettingsError(
                "chat_batching.max_in_flight says nothing in mode disabled: use mode concurrent, or the deployment's max_in_flight"
            )
        if self.max_in_flight is not None and self.max_in_flight < 1:
            raise SettingsError(f"chat_batching.max_in_flight is {self.max_in_flight}: use 1 or more, or leave it out")
        if self.upstream_max_batch_size < 1:
            raise SettingsError(
                f"chat_batching.upstream_max_batch_size is {self.upstream_max_batch_size}: use 1 or more"
            )
        if self.max_total_input_tokens < 0:
            raise SettingsError(
                f"chat_batching.max_total_input_tokens is {self.max_total_input_tokens}: use 0 to lift it, or more"
            )


class ChatRoute(msgspec.Struct, frozen=True):
    """The route of an item: everything that must agree before two items share a call."""

    deployment: str
    provider: str
    api_base: str
    public_model: str
    deployment_model: str
    failover: tuple[str, ...] = ()


class ChatPart(msgspec.Struct, frozen=True, gc=False):
    """One item that may share a call. Parts with equal `key` fit together."""

    key: bytes
    fields: bytes
    messages: bytes
    tokens: int


def read(
    endpoint: str, body: bytes, route: ChatRoute, batching: ChatBatching, *, executor: bool = True
) -> ChatPart | Singly:
    """Return an item's part in a group, or why it goes alone.

    `executor`: this provider has an adapter.
    """
    if endpoint != ENDPOINT:
        return Singly.ENDPOINT
    if batching.mode is not ChatMode.SYNC_MICROBATCH or batching.upstream_max_batch_size < 2:
        return Singly.MODE
    if not executor:
        return Singly.NO_EXECUTOR
    try:
        fields = _decode_fields(body)
        messages = bytes(fields.pop("messages", b""))
        reason = _spoils(fields)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return Singly.MALFORMED
    if reason is not None:
        return reason
    if messages[:1] != b"[":
        return Singly.MALFORMED
    tokens = max(1, prompt_tokens(len(messages)))
    if batching.max_total_input_tokens and tokens > batching.max_total_input_tokens:
        return Singly.TOKENS
    same = b",".join(_encode(name) + b":" + bytes(fields[name]) for name in sorted(fields))
    return ChatPart(_encode(route) + b"\n" + same, same, messages, tokens)


def _spoils(fields: dict[str, msgspec.Raw]) -> Singly | None:
    def parameter(name: str) -> Any:
        return msgspec.json.decode(fields[name]) if name in fields else None

    if parameter("stream") not in (None, False):
        return Singly.STREAM
    tools = parameter("tools")
    if isinstance(tools, list) and any(isinstance(tool, dict) and tool.get("type") == "mcp" for tool in tools):
        return Singly.MCP_TOOLS
    if tools or parameter("functions"):
        return Singly.TOOLS
    if parameter("response_format") not in (None, {"type": "text"}):
        return Singly.RESPONSE_FORMAT
    if parameter("n") not in (None, 1) or parameter("best_of") not in (None, 1):
        return Singly.CHOICES
    return None


def plan(parts: Sequence[ChatPart | Singly], batching: ChatBatching) -> list[list[int]]:
    """Return which items go together, as places in `parts`: each exactly once, in order, within the
    size and the token cap.
    """
    calls: list[list[int]] = []
    open_calls: dict[bytes, tuple[list[int], int]] = {}
    cap = batching.max_total_input_tokens
    for place, part in enumerate(parts):
        if isinstance(part, Singly):
            calls.append([place])
            continue
        call, tokens = open_calls.get(part.key, ([], 0))
        if not call or len(call) >= batching.upstream_max_batch_size or (cap and tokens + part.tokens > cap):
            call, tokens = [], 0
            calls.append(call)
        call.append(place)
        open_calls[part.key] = (call, tokens + part.tokens)
    return calls


def build(parts: Sequence[ChatPart]) -> bytes:
    """Build one request for all of these parts: like a chat request, but `messages` is a list of
    conversations.
    """
    first = parts[0]
    if any(part.key != first.key for part in parts):
        raise ValueError("only parts with the same key share a call")
    conversations = b",".join([part.messages for part in parts])
    return b'{%b%b"messages":[%b]}' % (first.fields, b"," if first.fields else b"", conversations)


class ChatAnswer(msgspec.Struct, frozen=True, gc=False):
    """One item's own answer, as a call of its own would have got it."""

    body: bytes
    usage: Usage


def split(body: bytes, count: int) -> list[ChatAnswer | UpstreamError | GiveUp]:
    """Return the result of each of `count` items: an answer, a failure for the retry policy to
    judge, or the end.

    The provider's answer is `{"results": [{"index", "body"} or {"index", "error"}]}`: a body is a
    chat completion with its usage, an error is structured when it has a `status_code`. Raises
    BrokenAnswer when the whole answer says nothing about any item.
    """
    try:
        answer = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
        rows = msgspec.json.decode(answer.get("results", b"null"), type=list[dict[str, msgspec.Raw]])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        raise BrokenAnswer("the provider's answer has no list of `results`", body=body[:ERROR_BYTES_MAX]) from None
    found: dict[int, ChatAnswer | UpstreamError | GiveUp] = {}
    for row in rows:
        try:
            index = msgspec.json.decode(row.get("index", b"null"), type=int)
        except msgspec.MsgspecError:
            continue
        if 0 <= index < count:
            twice = index in found
            found[index] = BrokenAnswer("the provider named this item twice") if twice else _one(row)
    missing = BrokenAnswer("the provider's answer leaves this item out")
    return [found.get(index, missing) for index in range(count)]


def _one(row: dict[str, msgspec.Raw]) -> ChatAnswer | UpstreamError | GiveUp:
    error = row.get("error")
    if error is not None and bytes(error) != b"null":
        return _item_error(bytes(error))
    try:
        line, usage = answer.read(ENDPOINT, bytes(row.get("body", b"")))
    except answer.NotAnAnswer as wrong:
        return BrokenAnswer(str(wrong))
    if not _has_usage(line):
        return GiveUp(
            USAGE_MISSING,
            "The provider answered this item without its own usage, and a share of the group's is not exact: "
            "set chat_batching.mode to concurrent for this deployment.",
        )
    return ChatAnswer(line, usage)


class _Counted(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int


class _WithUsage(msgspec.Struct):
    usage: _Counted


def _has_usage(line: bytes) -> bool:
    try:
        counted = msgspec.json.decode(line, type=_WithUsage).usage
    except msgspec.MsgspecError:
        return False
    return counted.prompt_tokens >= 0 and counted.completion_tokens >= 0


def _item_error(raw: bytes) -> UpstreamError:
    """Return one item's failure as from a call of its own: its class by the status, its text in
    OpenAI's shape.
    """
    try:
        error = msgspec.json.decode(raw)
    except (msgspec.MsgspecError, RecursionError):
        error = None
    status = error.get("status_code") if isinstance(error, dict) else None
    if type(status) is not int or not 400 <= status <= 599:
        shown = error_to_openai(400, b'{"error":%b}' % raw)
        return Refused(
            "the provider refused this item without a status", status=400, body=shown, code="invalid_request"
        )
    # An answer that rejects our own key may quote it.
    shown = error_to_openai(status, b'{"error":%b}' % raw) if status not in (401, 403) else b""
    message = f"the provider answered this item with status {status}"
    if status == 429:
        return Throttled(message, status=status, body=shown, retry_after_ms=_retry_after_ms(error))
    if status in (408, 425) or status >= 500:
        return Ambiguous(message, status=status, body=shown, retry_after_ms=_retry_after_ms(error))
    return Refused(message, status=status, body=shown)


def _retry_after_ms(error: Any) -> int | None:
    seconds = error.get("retry_after")
    return int(seconds * 1000) if type(seconds) in (int, float) and 0 <= seconds < 10**9 else None
