"""Requests, read from their bodies: the prompts as canonical bytes, and how much to answer.

- There is no tokenizer: four bytes of the rendering are one token.
- Each message is padded to whole tokens, so that the next turn of a conversation repeats the bytes,
  and the cache blocks, of its earlier turns.
- Only the fields that matter to an answer are decoded.

This module knows no HTTP and writes no answers.
"""

import re
from collections.abc import Callable, Iterable
from functools import lru_cache
from hashlib import blake2b
from typing import Any

import msgspec

from tidegate.simulate.engine.forms import BadFields, Form, chat_form, message_form, response_form
from tidegate.simulate.engine.kv_cache import TOKEN_BYTES

PROMPT_COUNT_MAX = 2048
CHOICE_COUNT_MAX = 128

_PADDING = (b"", b"   ", b"  ", b" ")
# The end of a message, padded for each number of bytes that its text has beyond whole tokens.
_ENDS = (b"<|end|> ", b"<|end|>", b"<|end|>   ", b"<|end|>  ")
_NOTHING = msgspec.Raw()
_BEHAVE = re.compile(r'"behave"\s*:\s*"([^"]{0,200})"')


class SimulatedRequest(msgspec.Struct):
    """One decoded request, in the same shape for all endpoints."""

    model: str
    prompts: list[bytes]
    marked: str | None
    """The behaviour that the text asks for, if any."""
    stream: bool = False
    include_usage: bool = False
    n: int = 1
    output_tokens_max: int | None = None
    output_tokens_min: int = 0
    ignore_eos: bool = False
    priority: int = 0
    base64: bool = False
    dimensions: int | None = None
    forms: list[Form | None] = []
    """The form of each prompt's answer beside plain words; empty if all are plain words."""
    echo: bytes = b""
    """The fields of the request that a response repeats, as JSON members."""
    metadata: bytes = b"{}"


class _StreamOptions(msgspec.Struct):
    include_usage: bool | None = False


class _ChatMessage(msgspec.Struct):
    role: str = "user"
    content: str | list[msgspec.Raw] | None = None
    tool_calls: msgspec.Raw = _NOTHING


class _Sampling(msgspec.Struct, kw_only=True):
    model: str
    stream: bool | None = False
    stream_options: _StreamOptions | None = None
    n: int | None = 1
    ignore_eos: bool | None = False
    min_tokens: int | None = 0
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    max_output_tokens: int | None = None
    priority: int | None = 0


class _ChatRequest(_Sampling):
    messages: list[_ChatMessage]
    tools: msgspec.Raw = _NOTHING
    tool_choice: Any = None
    response_format: Any = None


class _ChatBatchRequest(_Sampling):
    messages: list[list[_ChatMessage]]
    tools: msgspec.Raw = _NOTHING
    tool_choice: Any = None
    response_format: Any = None


class _CompletionRequest(_Sampling):
    prompt: str | list[str | int | list[int]]


class _ResponseRequest(_Sampling):
    input: str | list[msgspec.Raw]
    instructions: str | None = None
    tools: msgspec.Raw = _NOTHING
    tool_choice: Any = None
    parallel_tool_calls: bool | None = True
    text: Any = None
    metadata: msgspec.Raw = _NOTHING


class _OutputConfig(msgspec.Struct):
    format: Any = None


class _MessagesRequest(msgspec.Struct, kw_only=True):
    """Anthropic's request. `output_format` is the older name of `output_config.format`."""

    model: str
    messages: list[_ChatMessage]
    max_tokens: int
    system: str | list[msgspec.Raw] | None = None
    stream: bool | None = False
    tools: msgspec.Raw = _NOTHING
    tool_choice: Any = None
    output_config: _OutputConfig | None = None
    output_format: Any = None


class _EmbeddingRequest(msgspec.Struct):
    model: str
    input: str | list[str | int | list[int]]
    encoding_format: str | None = None
    dimensions: int | None = None
    priority: int | None = 0


class _ModerationInput(msgspec.Struct):
    text: str = ""


class _ModerationRequest(msgspec.Struct):
    input: str | list[str | _ModerationInput]
    model: str = "omni-moderation-latest"


_Texts = str | list[str]


class _ScoreRequest(msgspec.Struct):
    """The two sides of a comparison, under any of the names that vLLM takes."""

    model: str
    text_1: _Texts | None = None
    text_2: _Texts | None = None
    data_1: _Texts | None = None
    data_2: _Texts | None = None
    queries: _Texts | None = None
    documents: _Texts | None = None
    items: _Texts | None = None


class _RerankRequest(msgspec.Struct):
    model: str
    query: str
    documents: list[str]


_chat = msgspec.json.Decoder(_ChatRequest)
_score = msgspec.json.Decoder(_ScoreRequest)
_rerank = msgspec.json.Decoder(_RerankRequest)
_chat_batch = msgspec.json.Decoder(_ChatBatchRequest)
_completion = msgspec.json.Decoder(_CompletionRequest)
_response = msgspec.json.Decoder(_ResponseRequest)
_embedding = msgspec.json.Decoder(_EmbeddingRequest)
_moderation = msgspec.json.Decoder(_ModerationRequest)
_messages = msgspec.json.Decoder(_MessagesRequest)
_message = msgspec.json.Decoder(_ChatMessage)
_part = msgspec.json.Decoder(_ModerationInput)


def prompt_hash(prompt: bytes) -> bytes:
    """Return the hash of a prompt in eight bytes; it decides its answer's words and length."""
    return blake2b(prompt, digest_size=8).digest()


def token_count(prompt: bytes) -> int:
    """Return how many tokens a rendering has; even an empty prompt has one."""
    return max(1, -(-len(prompt) // TOKEN_BYTES))


def chat_request(body: bytes) -> SimulatedRequest:
    """Read a chat completion."""
    seen = _chat.decode(body)
    if not seen.messages:
        raise BadFields("messages must not be empty: send at least one message", "messages")
    prompt = _render(seen.tools, seen.messages)
    marked = _marker(body, lambda: _last_user_texts(seen.messages))
    ask = _sampled(seen, [prompt], marked, seen.max_completion_tokens or seen.max_tokens)
    ask.forms = _chat_forms(seen, [seen.messages])
    return ask


def chat_batch_request(body: bytes) -> SimulatedRequest:
    """Read several conversations that share all other fields; each gets its own answer."""
    seen = _chat_batch.decode(body)
    if not seen.messages or len(seen.messages) > PROMPT_COUNT_MAX or not all(seen.messages):
        raise BadFields(f"messages must be 1 to {PROMPT_COUNT_MAX} conversations, none of them empty", "messages")
    if seen.stream or seen.n not in (None, 1):
        raise BadFields("several conversations are neither streamed nor answered more than once each", "n")
    marked = _marker(body, lambda: (text for one in seen.messages for text in _last_user_texts(one)))
    prompts = [_render(seen.tools, one) for one in seen.messages]
    ask = _sampled(seen, prompts, marked, seen.max_completion_tokens or seen.max_tokens)
    ask.forms = _chat_forms(seen, seen.messages)
    return ask


def _chat_forms(seen: _ChatRequest | _ChatBatchRequest, conversations: list[list[_ChatMessage]]) -> list[Form | None]:
    if not seen.tools and seen.response_format is None:
        return []
    tools = _tools(seen.tools)
    ended = (one[-1].role in ("tool", "function") for one in conversations)
    return [chat_form(tools, seen.tool_choice, seen.response_format, answered=answered) for answered in ended]


def completion_request(body: bytes) -> SimulatedRequest:
    """Read a text completion; a list of prompts has one choice for each."""
    seen = _completion.decode(body)
    prompts = _texts(seen.prompt, "prompt")
    marked = _marker(body, lambda: (text.decode() for text in reversed(prompts)))
    return _sampled(seen, prompts, marked, seen.max_tokens)


def response_request(body: bytes) -> SimulatedRequest:
    """Read a response."""
    seen = _response.decode(body)
    messages = (
        [_ChatMessage(content=seen.input)]
        if isinstance(seen.input, str)
        else [_response_item(one) for one in seen.input]
    )
    if not messages:
        raise BadFields("input must not be empty: send a text or at least one message", "input")
    if seen.instructions:
        messages = [_ChatMessage(role="system", content=seen.instructions), *messages]
    marked = _marker(body, lambda: _last_user_texts(messages))
    ask = _sampled(seen, [_render(seen.tools, messages)], marked, seen.max_output_tokens)
    if seen.tools or seen.text is not None:
        tools = _tools(seen.tools)
        answered = messages[-1].role == "tool"
        ask.forms = [response_form(tools, seen.tool_choice, seen.text, answered=answered)]
        ask.echo = _echo(seen, tools)
    if _given(seen.metadata):
        ask.metadata = bytes(seen.metadata)
    return ask


def messages_request(body: bytes) -> SimulatedRequest:
    """Read a message of Anthropic's API."""
    seen = _messages.decode(body)
    if not seen.messages:
        raise BadFields("messages must not be empty: send at least one message", "messages")
    if seen.max_tokens < 1:
        raise BadFields("max_tokens must be at least 1", "max_tokens")
    messages = seen.messages
    if seen.system:
        messages = [_ChatMessage(role="system", content=seen.system), *messages]
    ask = SimulatedRequest(
        model=seen.model,
        prompts=[_render(seen.tools, messages)],
        marked=_marker(body, lambda: _last_user_texts(messages)),
        stream=bool(seen.stream),
        output_tokens_max=seen.max_tokens,
    )
    wanted = seen.output_config.format if seen.output_config else seen.output_format
    if seen.tools or wanted is not None:
        last = messages[-1].content
        answered = isinstance(last, list) and any(b"tool_result" in bytes(part) for part in last)
        ask.forms = [message_form(_tools(seen.tools), seen.tool_choice, wanted, answered=answered)]
    return ask


def embedding_request(body: bytes) -> SimulatedRequest:
    """Read a call for embeddings: one vector for each input."""
    seen = _embedding.decode(body)
    if seen.encoding_format not in (None, "float", "base64"):
        raise BadFields("encoding_format must be float or base64", "encoding_format")
    if seen.dimensions is not None and not 1 <= seen.dimensions <= 16384:
        raise BadFields("dimensions must be between 1 and 16384", "dimensions")
    prompts = _texts(seen.input, "input")
    return SimulatedRequest(
        model=seen.model,
        prompts=prompts,
        marked=_marker(body, lambda: (text.decode() for text in prompts)),
        base64=seen.encoding_format == "base64",
        dimensions=seen.dimensions,
        priority=seen.priority or 0,
    )


def moderation_request(body: bytes) -> SimulatedRequest:
    """Read a call for moderations: one verdict for each input."""
    seen = _moderation.decode(body)
    inputs = [seen.input] if isinstance(seen.input, str) else seen.input
    prompts = [(one if isinstance(one, str) else one.text).encode() for one in inputs]
    if not prompts:
        raise BadFields("input must not be empty", "input")
    marked = _marker(body, lambda: (text.decode() for text in prompts))
    return SimulatedRequest(model=seen.model, prompts=prompts, marked=marked)


def score_request(body: bytes) -> SimulatedRequest:
    """Read a call for scores: one for each pair of texts."""
    seen = _score.decode(body)
    left = _side(seen.text_1, seen.data_1, seen.queries)
    right = _side(seen.text_2, seen.data_2, seen.documents, seen.items)
    if len(left) not in (1, len(right)) or not right:
        raise BadFields("text_1 must be one text, or as many as text_2", "text_1")
    return _paired(body, seen.model, list(zip(left * (len(right) // len(left)), right, strict=True)))


def _side(*given: _Texts | None) -> list[str]:
    """Return the texts under the first of these names that a request uses."""
    for texts in given:
        if texts is not None:
            return [texts] if isinstance(texts, str) else texts
    raise BadFields("Object missing required field `text_1` or `text_2`")


def rerank_request(body: bytes) -> SimulatedRequest:
    """Read a call for a reranking: one score for each document."""
    seen = _rerank.decode(body)
    if not seen.documents:
        raise BadFields("documents must not be empty", "documents")
    return _paired(body, seen.model, [(seen.query, one) for one in seen.documents])


def _paired(body: bytes, model: str, pairs: list[tuple[str, str]]) -> SimulatedRequest:
    marked = _marker(body, lambda: (text for pair in pairs for text in pair))
    return SimulatedRequest(model=model, prompts=[f"{one}\n{other}".encode() for one, other in pairs], marked=marked)


def _sampled(seen: _Sampling, prompts: list[bytes], marked: str | None, tokens_max: int | None) -> SimulatedRequest:
    n = 1 if seen.n is None else seen.n
    if not 1 <= n <= CHOICE_COUNT_MAX:
        raise BadFields(f"n must be between 1 and {CHOICE_COUNT_MAX}", "n")
    if tokens_max is not None and tokens_max < 1:
        raise BadFields("max_tokens must be at least 1", "max_tokens")
    return SimulatedRequest(
        model=seen.model,
        prompts=prompts,
        marked=marked,
        stream=bool(seen.stream),
        include_usage=bool(seen.stream_options and seen.stream_options.include_usage),
        n=n,
        output_tokens_max=tokens_max,
        output_tokens_min=seen.min_tokens or 0,
        ignore_eos=bool(seen.ignore_eos),
        priority=seen.priority or 0,
    )


def _given(raw: msgspec.Raw) -> bool:
    return len(bytes(raw)) > 0 and bytes(raw) != b"null"


def _tools(raw: msgspec.Raw) -> Any:
    tools = msgspec.json.decode(raw) if raw else None
    if isinstance(tools, list) and not all(isinstance(one, dict) for one in tools):
        raise BadFields("tools must be objects", "tools")
    return tools


def _response_item(raw: msgspec.Raw) -> _ChatMessage:
    """Read one item of a response's input: a message, or all bytes of a tool's call or output."""
    item = _message.decode(raw)
    if item.content is None:
        answered = b'_output"' in bytes(raw)
        return _ChatMessage(role="tool" if answered else "assistant", content=bytes(raw).decode())
    return item


def _echo(seen: _ResponseRequest, tools: Any) -> bytes:
    """Return the fields of the request that a response repeats.

    A function tool has `strict` and `parameters` there even if the request left them out.
    """
    shown = [
        {"strict": True, "parameters": None, **tool} if tool.get("type") == "function" else tool for tool in tools or ()
    ]
    fields = {
        "tools": shown,
        "tool_choice": "auto" if seen.tool_choice is None else seen.tool_choice,
        "parallel_tool_calls": seen.parallel_tool_calls is not False,
        "text": {"format": {"type": "text"}} | (seen.text if isinstance(seen.text, dict) else {}),
    }
    return msgspec.json.encode(fields)[1:-1]


def _render(tools: msgspec.Raw, messages: list[_ChatMessage]) -> bytes:
    chunks: list[bytes] = []
    if _given(tools):
        chunks.append(_padded(b"<|tools|>" + bytes(tools)))
    for message in messages:
        content = message.content
        if isinstance(content, str):
            text = content.encode()
        elif content is None:
            text = b""
        else:
            text = b"\n".join(_part_bytes(part) for part in content)
        if _given(message.tool_calls):
            text += bytes(message.tool_calls)
        # The header is padded too, so that an answer begins on a whole token.
        chunks.append(_header(message.role))
        chunks.append(text)
        chunks.append(_ENDS[len(text) & 3])
    chunks.append(_header("assistant"))
    return b"".join(chunks)


@lru_cache(maxsize=64)
def _header(role: str) -> bytes:
    return _padded(b"<|" + role.encode() + b"|>")


def _padded(text: bytes) -> bytes:
    return text + _PADDING[len(text) & 3]


def _part_bytes(part: msgspec.Raw) -> bytes:
    try:
        return _part.decode(part).text.encode() or bytes(part)
    except msgspec.MsgspecError:
        return bytes(part)


def _texts(given: str | list[str | int | list[int]], param: str) -> list[bytes]:
    """Return each input of a call as bytes: its text, or four bytes for each token number."""
    if isinstance(given, str):
        return [given.encode()]
    if not given or len(given) > PROMPT_COUNT_MAX:
        raise BadFields(f"{param} must have between 1 and {PROMPT_COUNT_MAX} entries", param)
    texts: list[bytes] = []
    numbers: list[int] = []
    for one in given:
        if isinstance(one, str):
            texts.append(one.encode())
        elif isinstance(one, int):
            numbers.append(one)
        else:
            texts.append(_numbers(one))
    if numbers and texts:
        raise BadFields(f"{param} must be texts or token numbers, not both", param)
    return [_numbers(numbers)] if numbers else texts


def _numbers(tokens: list[int]) -> bytes:
    return b"".join((token & 0x7F7F7F7F).to_bytes(TOKEN_BYTES, "little") for token in tokens)


def _last_user_texts(messages: list[_ChatMessage]) -> Iterable[str]:
    for message in reversed(messages):
        if message.role == "user":
            content = message.content
            if isinstance(content, list):
                yield "\n".join(_part_bytes(part).decode() for part in content)
            elif content:
                yield content
            return


def _marker(body: bytes, texts: Callable[[], Iterable[str]]) -> str | None:
    """Return the behaviour that one of the texts names.

    Nearly all bodies lack the word, and those cost only one search.
    """
    if b"behave" not in body:
        return None
    for text in texts():
        found = behaviour_in(text)
        if found is not None:
            return found
    return None


def behaviour_in(text: str) -> str | None:
    """Return the behaviour that a text names; None if it names none."""
    found = _BEHAVE.search(text)
    return None if found is None else found[1]
