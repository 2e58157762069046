"""The answers: words that follow from the prompt alone, whole or streamed, in an endpoint's shape.

The first eight letters of an answer in words are the hash of its prompt, so that a test can match
the two. A token is four bytes of plain ASCII, so each piece of a stream is a slice of the text, and
only JSON needs escaping. This module knows no sockets, no time and no faults.
"""

from collections.abc import Iterator
from random import Random

import msgspec

from tidegate.simulate.engine.forms import Form, json_text
from tidegate.simulate.engine.kv_cache import BLOCK_TOKENS, TOKEN_BYTES
from tidegate.simulate.engine.requests import SimulatedRequest, prompt_hash, token_count

SSE_DONE = b"data: [DONE]\n\n"

_WORDS = b"sea ebb bay oar fog sun sky cod eel ray net rod rig bow hut wet dry low top ice mud log jib tar".split()
_CORPUS_TOKENS = 1 << 14


def _corpus() -> bytes:
    """Return random words of three letters and a space, each a whole token."""
    random = Random(8)
    return b"".join(random.choice(_WORDS).ljust(TOKEN_BYTES) for _ in range(_CORPUS_TOKENS))


_TEXT = _corpus()
_encode = msgspec.json.Encoder().encode


class SimulatedCall(msgspec.Struct, frozen=True):
    """The tool that an answer calls; the answer's text is the call's input. `name` is JSON."""

    id: bytes
    name: bytes
    custom: bool


class SimulatedChoice(msgspec.Struct):
    """One answer to one prompt.

    The engine found `cached_tokens` of the prompt in its cache, and put `written_tokens` there.
    """

    prompt: bytes
    prompt_tokens: int
    digest: bytes
    text: bytes = b""
    output_tokens: int = 0
    finish: str = "stop"
    cached_tokens: int = 0
    written_tokens: int = 0
    call: SimulatedCall | None = None
    plain: bool = True
    """True if the text needs no escaping in a JSON string."""

    def note_cache(self, found_tokens: int) -> None:
        """Note how many tokens of the prompt the engine found in its cache.

        It put every other whole block of the prompt there.
        """
        self.cached_tokens = found_tokens
        self.written_tokens = self.prompt_tokens // BLOCK_TOKENS * BLOCK_TOKENS - found_tokens


class SimulatedAnswer(msgspec.Struct):
    """The contents of an answer, to be written in any shape."""

    ask: SimulatedRequest
    name: bytes
    created: int
    model: bytes
    choices: list[SimulatedChoice]
    prompt_tokens: int
    output_tokens: int
    sent_events: int = 0

    def next_event_number(self) -> int:
        """Return the number of the next event of a stream of typed events."""
        number, self.sent_events = self.sent_events, self.sent_events + 1
        return number

    @property
    def cached_tokens(self) -> int:
        """Return how many tokens the engine found cached.

        A prompt counts once for all its choices.
        """
        if len(self.choices) == 1:
            return self.choices[0].cached_tokens
        return sum(choice.cached_tokens for choice in self.choices[:: self.ask.n])

    @property
    def written_tokens(self) -> int:
        """Return how many tokens the engine put into its cache. A prompt counts once."""
        return sum(choice.written_tokens for choice in self.choices[:: self.ask.n])


def answer_for(ask: SimulatedRequest, number: int, created: int, tokens_mean: int) -> SimulatedAnswer:
    """Return the answer to `ask`; `tokens_mean` is 0 for endpoints that answer without words."""
    choices: list[SimulatedChoice] = []
    prompt_tokens = output_tokens = 0
    for place, prompt in enumerate(ask.prompts):
        form = ask.forms[place] if ask.forms else None
        digest = prompt_hash(prompt)
        tokens = token_count(prompt)
        prompt_tokens += tokens
        for copy in range(ask.n):
            choice = SimulatedChoice(prompt, tokens, digest)
            if tokens_mean:
                if form is None:
                    _write(choice, ask, copy, tokens_mean)
                else:
                    _write_formed(choice, ask, form, copy, tokens_mean)
                output_tokens += choice.output_tokens
            choices.append(choice)
    name = b"%s%08x" % (choices[0].digest.hex().encode(), number)
    return SimulatedAnswer(ask, name, created, _encode(ask.model), choices, prompt_tokens, output_tokens)


def _write(choice: SimulatedChoice, ask: SimulatedRequest, copy: int, tokens_mean: int) -> None:
    luck = int.from_bytes(choice.digest, "little") + copy
    tokens = max(1, tokens_mean // 2 + luck % tokens_mean, ask.output_tokens_min)
    limit = ask.output_tokens_max
    if limit is not None and (ask.ignore_eos or tokens > limit):
        tokens = limit
        choice.finish = "length"
    start = (luck >> 16) % _CORPUS_TOKENS * TOKEN_BYTES
    size = tokens * TOKEN_BYTES
    text = choice.digest[:4].hex().encode() + _TEXT[start : start + size]
    while len(text) < size:
        text += _TEXT
    choice.text = text[:size]
    choice.output_tokens = tokens


def _write_formed(choice: SimulatedChoice, ask: SimulatedRequest, form: Form, copy: int, tokens_mean: int) -> None:
    """Write a tool call or JSON, cut at the token limit as a real server does."""
    luck = int.from_bytes(choice.digest, "little") + copy
    tool = form.tool_for(luck)
    if tool is None and not form.as_json:
        _write(choice, ask, copy, tokens_mean)
        return
    mark = choice.digest[:4].hex()
    if tool is not None:
        name = b"call_%s%02x" % (choice.digest.hex().encode(), copy)
        choice.call = SimulatedCall(name, _encode(tool.name), tool.custom)
        choice.finish = "tool_calls"
        text = b"%s sea" % mark.encode() if tool.custom else json_text(tool.schema, luck, mark)
    elif form.schema is not None:
        text = json_text(form.schema, luck, mark)
    else:
        _write(choice, ask, copy, min(tokens_mean, max(2, (ask.output_tokens_max or tokens_mean) // 2)))
        text = b'{"answer":"%s"}' % choice.text.rstrip()
        choice.finish = "stop"
    tokens = token_count(text)
    if ask.output_tokens_max is not None and tokens > ask.output_tokens_max:
        tokens, choice.finish = ask.output_tokens_max, "length"
    choice.text = text[: tokens * TOKEN_BYTES]
    choice.output_tokens = tokens
    choice.plain = False


def quoted(choice: SimulatedChoice, text: bytes) -> bytes:
    """Return the text, or a piece of it, escaped for a JSON string."""
    return text if choice.plain else text.replace(b"\\", b"\\\\").replace(b'"', b'\\"')


def chunks(choice: SimulatedChoice) -> Iterator[bytes]:
    """Yield the answer's tokens, one by one."""
    for start in range(0, len(choice.text), TOKEN_BYTES):
        yield choice.text[start : start + TOKEN_BYTES]


def _usage(answer: SimulatedAnswer) -> bytes:
    prompt, output = answer.prompt_tokens, answer.output_tokens
    return (
        b'{"prompt_tokens":%d,"completion_tokens":%d,"total_tokens":%d,'
        b'"prompt_tokens_details":{"cached_tokens":%d,"cache_write_tokens":%d}}'
        % (prompt, output, prompt + output, answer.cached_tokens, answer.written_tokens)
    )


class Chat:
    """The shape of answers of /v1/chat/completions."""

    @staticmethod
    def whole(answer: SimulatedAnswer) -> bytes:
        """Return the body of an answer that is not streamed."""
        choices = b",".join(
            b'{"index":%d,"message":{"role":"assistant",%s,"refusal":null},"logprobs":null,"finish_reason":"%s"}'
            % (index, _chat_content(choice), choice.finish.encode())
            for index, choice in enumerate(answer.choices)
        )
        return b'{"id":"chatcmpl-%s","object":"chat.completion","created":%d,"model":%s,"choices":[%s],"usage":%s}' % (
            answer.name,
            answer.created,
            answer.model,
            choices,
            _usage(answer),
        )

    @staticmethod
    def opening(answer: SimulatedAnswer) -> bytes:
        """Return the events before the first token."""
        events = []
        for index, choice in enumerate(answer.choices):
            content = b'""' if choice.call is None else b"null"
            events.append(_chat_event(answer, index, b'{"role":"assistant","content":%s}' % content, b"null"))
            if choice.call is not None:
                events.append(_chat_event(answer, index, b'{"tool_calls":[%s]}' % _chat_call(choice.call), b"null"))
        return b"".join(events)

    @staticmethod
    def token(answer: SimulatedAnswer, index: int, chunk: bytes) -> bytes:
        """Return the event of one token."""
        choice = answer.choices[index]
        if choice.call is None:
            return _chat_event(answer, index, b'{"content":"%s"}' % quoted(choice, chunk), b"null")
        kind, field = _CUSTOM if choice.call.custom else _FUNCTION
        delta = b'{"tool_calls":[{"index":0,"%s":{"%s":"%s"}}]}' % (kind, field, quoted(choice, chunk))
        return _chat_event(answer, index, delta, b"null")

    @staticmethod
    def closing(answer: SimulatedAnswer) -> bytes:
        """Return the events after the last token."""
        events = [
            _chat_event(answer, index, b"{}", b'"%s"' % choice.finish.encode())
            for index, choice in enumerate(answer.choices)
        ]
        if answer.ask.include_usage:
            events.append(
                b'data: {"id":"chatcmpl-%s","object":"chat.completion.chunk","created":%d,"model":%s,"choices":[],"usage":%s}\n\n'
                % (answer.name, answer.created, answer.model, _usage(answer))
            )
        events.append(SSE_DONE)
        return b"".join(events)


# The field for a call's kind, and the field for its input.
_FUNCTION = (b"function", b"arguments")
_CUSTOM = (b"custom", b"input")


def _chat_content(choice: SimulatedChoice) -> bytes:
    text = quoted(choice, choice.text)
    if choice.call is None:
        return b'"content":"%s"' % text
    kind, field = _CUSTOM if choice.call.custom else _FUNCTION
    return b'"content":null,"tool_calls":[{"id":"%s","type":"%s","%s":{"name":%s,"%s":"%s"}}]' % (
        choice.call.id,
        kind,
        kind,
        choice.call.name,
        field,
        text,
    )


def _chat_call(call: SimulatedCall) -> bytes:
    """Return the first event of a call: its name, with an empty input."""
    kind, field = _CUSTOM if call.custom else _FUNCTION
    return b'{"index":0,"id":"%s","type":"%s","%s":{"name":%s,"%s":""}}' % (call.id, kind, kind, call.name, field)


def _chat_event(answer: SimulatedAnswer, index: int, delta: bytes, finish: bytes) -> bytes:
    return (
        b'data: {"id":"chatcmpl-%s","object":"chat.completion.chunk","created":%d,"model":%s,'
        b'"choices":[{"index":%d,"delta":%s,"logprobs":null,"finish_reason":%s}]}\n\n'
        % (answer.name, answer.created, answer.model, index, delta, finish)
    )


class ChatBatch:
    """The shape of answers of /v1/chat/completions/batch: a result for each conversation."""

    @staticmethod
    def whole(answer: SimulatedAnswer) -> bytes:
        """Return the body."""
        results = []
        for index, choice in enumerate(answer.choices):
            name = b"%s-%d" % (answer.name, index)
            one = SimulatedAnswer(
                answer.ask, name, answer.created, answer.model, [choice], choice.prompt_tokens, choice.output_tokens
            )
            results.append(b'{"index":%d,"body":%s}' % (index, Chat.whole(one)))
        return b'{"object":"list","results":[%s],"usage":%s}' % (b",".join(results), _usage(answer))


class Completion:
    """The shape of answers of /v1/completions."""

    @staticmethod
    def whole(answer: SimulatedAnswer) -> bytes:
        """Return the body of an answer that is not streamed."""
        choices = b",".join(
            _completion_choice(index, choice.text, b'"%s"' % choice.finish.encode())
            for index, choice in enumerate(answer.choices)
        )
        return b'{%s,"choices":[%s],"usage":%s}' % (_completion_head(answer), choices, _usage(answer))

    @staticmethod
    def opening(answer: SimulatedAnswer) -> bytes:
        """Return the events before the first token: none."""
        return b""

    @staticmethod
    def token(answer: SimulatedAnswer, index: int, chunk: bytes) -> bytes:
        """Return the event of one token."""
        choice = _completion_choice(index, chunk, b"null")
        return b'data: {%s,"choices":[%s]}\n\n' % (_completion_head(answer), choice)

    @staticmethod
    def closing(answer: SimulatedAnswer) -> bytes:
        """Return the events after the last token."""
        head = _completion_head(answer)
        events = [
            b'data: {%s,"choices":[%s]}\n\n' % (head, _completion_choice(index, b"", b'"%s"' % choice.finish.encode()))
            for index, choice in enumerate(answer.choices)
        ]
        if answer.ask.include_usage:
            events.append(b'data: {%s,"choices":[],"usage":%s}\n\n' % (head, _usage(answer)))
        events.append(SSE_DONE)
        return b"".join(events)


def _completion_head(answer: SimulatedAnswer) -> bytes:
    return b'"id":"cmpl-%s","object":"text_completion","created":%d,"model":%s' % (
        answer.name,
        answer.created,
        answer.model,
    )


def _completion_choice(index: int, text: bytes, finish: bytes) -> bytes:
    return b'{"index":%d,"text":"%s","logprobs":null,"finish_reason":%s}' % (index, text, finish)
