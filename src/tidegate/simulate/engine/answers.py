"""The answers: words that follow from the prompt alone, in the shape of each endpoint, whole or as a stream of events.

The first eight letters of every answer are the hash of its prompt, so a test can tell whose answer it holds. A token is
four bytes of plain ASCII, so nothing needs escaping and a piece of a stream is a slice. This module knows no socket, no time
and no fault.
"""

from collections.abc import Iterator
from random import Random

import msgspec

from tidegate.simulate.engine.asks import Ask, prompt_hash, token_count
from tidegate.simulate.engine.kv_cache import TOKEN_BYTES

SSE_DONE = b"data: [DONE]\n\n"

_WORDS = b"sea ebb bay oar fog sun sky cod eel ray net rod rig bow hut wet dry low top ice mud log jib tar".split()
_CORPUS_TOKENS = 1 << 14


def _corpus() -> bytes:
    """Words of three letters and a space: whole tokens."""
    random = Random(8)
    return b"".join(random.choice(_WORDS).ljust(TOKEN_BYTES) for _ in range(_CORPUS_TOKENS))


_TEXT = _corpus()
_encode = msgspec.json.Encoder().encode


class Choice(msgspec.Struct):
    """One answer to one prompt; `cached_tokens` is what the engine found of it in its cache."""

    prompt: bytes
    prompt_tokens: int
    digest: bytes
    text: bytes = b""
    output_tokens: int = 0
    finish: str = "stop"
    cached_tokens: int = 0


class Answer(msgspec.Struct):
    """All that is needed to write an answer in any shape."""

    ask: Ask
    name: bytes
    created: int
    model: bytes
    choices: list[Choice]
    prompt_tokens: int
    output_tokens: int
    sent_events: int = 0

    @property
    def cached_tokens(self) -> int:
        """What the engine found cached; a prompt counts once, however many choices it has."""
        if len(self.choices) == 1:
            return self.choices[0].cached_tokens
        return sum(choice.cached_tokens for choice in self.choices[:: self.ask.n])


def answer_for(ask: Ask, number: int, created: int, tokens_mean: int) -> Answer:
    """The answer to `ask`; `tokens_mean` 0 for endpoints that answer without words."""
    choices: list[Choice] = []
    prompt_tokens = output_tokens = 0
    for prompt in ask.prompts:
        digest = prompt_hash(prompt)
        tokens = token_count(prompt)
        prompt_tokens += tokens
        for copy in range(ask.n):
            choice = Choice(prompt, tokens, digest)
            if tokens_mean:
                _write(choice, ask, copy, tokens_mean)
                output_tokens += choice.output_tokens
            choices.append(choice)
    name = b"%s%08x" % (choices[0].digest.hex().encode(), number)
    return Answer(ask, name, created, _encode(ask.model), choices, prompt_tokens, output_tokens)


def _write(choice: Choice, ask: Ask, copy: int, tokens_mean: int) -> None:
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


def pieces(choice: Choice) -> Iterator[bytes]:
    """The answer's tokens, one by one."""
    for start in range(0, len(choice.text), TOKEN_BYTES):
        yield choice.text[start : start + TOKEN_BYTES]


def _usage(answer: Answer) -> bytes:
    prompt, output = answer.prompt_tokens, answer.output_tokens
    return (
        b'{"prompt_tokens":%d,"completion_tokens":%d,"total_tokens":%d,"prompt_tokens_details":{"cached_tokens":%d}}'
        % (prompt, output, prompt + output, answer.cached_tokens)
    )


class Chat:
    """/v1/chat/completions."""

    @staticmethod
    def whole(answer: Answer) -> bytes:
        """The body of an answer that is not streamed."""
        choices = b",".join(
            b'{"index":%d,"message":{"role":"assistant","content":"%s","refusal":null},"logprobs":null,"finish_reason":"%s"}'
            % (index, choice.text, choice.finish.encode())
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
    def opening(answer: Answer) -> bytes:
        """The events before the first token."""
        return b"".join(
            _chat_event(answer, index, b'{"role":"assistant","content":""}', b"null")
            for index in range(len(answer.choices))
        )

    @staticmethod
    def token(answer: Answer, index: int, piece: bytes) -> bytes:
        """The event of one token."""
        return _chat_event(answer, index, b'{"content":"%s"}' % piece, b"null")

    @staticmethod
    def closing(answer: Answer) -> bytes:
        """The events after the last token."""
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


def _chat_event(answer: Answer, index: int, delta: bytes, finish: bytes) -> bytes:
    return (
        b'data: {"id":"chatcmpl-%s","object":"chat.completion.chunk","created":%d,"model":%s,'
        b'"choices":[{"index":%d,"delta":%s,"logprobs":null,"finish_reason":%s}]}\n\n'
        % (answer.name, answer.created, answer.model, index, delta, finish)
    )


class ChatBatch:
    """/v1/chat/completions/batch: a result for each conversation, with its own usage, and the sum of all."""

    @staticmethod
    def whole(answer: Answer) -> bytes:
        """The body."""
        results = []
        for index, choice in enumerate(answer.choices):
            name = b"%s-%d" % (answer.name, index)
            one = Answer(
                answer.ask, name, answer.created, answer.model, [choice], choice.prompt_tokens, choice.output_tokens
            )
            results.append(b'{"index":%d,"body":%s}' % (index, Chat.whole(one)))
        return b'{"object":"list","results":[%s],"usage":%s}' % (b",".join(results), _usage(answer))


class Completion:
    """/v1/completions."""

    @staticmethod
    def whole(answer: Answer) -> bytes:
        """The body of an answer that is not streamed."""
        choices = b",".join(
            _completion_choice(index, choice.text, b'"%s"' % choice.finish.encode())
            for index, choice in enumerate(answer.choices)
        )
        return b'{%s,"choices":[%s],"usage":%s}' % (_completion_head(answer), choices, _usage(answer))

    @staticmethod
    def opening(answer: Answer) -> bytes:
        """The events before the first token: none."""
        return b""

    @staticmethod
    def token(answer: Answer, index: int, piece: bytes) -> bytes:
        """The event of one token."""
        choice = _completion_choice(index, piece, b"null")
        return b'data: {%s,"choices":[%s]}\n\n' % (_completion_head(answer), choice)

    @staticmethod
    def closing(answer: Answer) -> bytes:
        """The events after the last token."""
        head = _completion_head(answer)
        events = [
            b'data: {%s,"choices":[%s]}\n\n' % (head, _completion_choice(index, b"", b'"%s"' % choice.finish.encode()))
            for index, choice in enumerate(answer.choices)
        ]
        if answer.ask.include_usage:
            events.append(b'data: {%s,"choices":[],"usage":%s}\n\n' % (head, _usage(answer)))
        events.append(SSE_DONE)
        return b"".join(events)


def _completion_head(answer: Answer) -> bytes:
    return b'"id":"cmpl-%s","object":"text_completion","created":%d,"model":%s' % (
        answer.name,
        answer.created,
        answer.model,
    )


def _completion_choice(index: int, text: bytes, finish: bytes) -> bytes:
    return b'{"index":%d,"text":"%s","logprobs":null,"finish_reason":%s}' % (index, text, finish)
