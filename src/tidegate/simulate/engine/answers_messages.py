"""The shape of Anthropic's /v1/messages: a block of text or a tool use, whole or as events."""

from tidegate.simulate.engine.answers import SimulatedAnswer, SimulatedChoice, quoted

_STOPS = {"stop": b"end_turn", "length": b"max_tokens", "tool_calls": b"tool_use"}


class Messages:
    """The shape of answers of /v1/messages."""

    @staticmethod
    def whole(answer: SimulatedAnswer) -> bytes:
        """Return the body of an answer that is not streamed."""
        choice = answer.choices[0]
        if choice.call is None:
            block = b'{"type":"text","text":"%s","citations":null}' % quoted(choice, choice.text)
        else:
            # Arguments that were cut at the limit are no JSON, so the API leaves them out.
            given = choice.text if choice.finish == "tool_calls" else b"{}"
            block = _tool_use(choice, given)
        return _message(answer, b"[%s]" % block, b'"%s"' % _STOPS[choice.finish], answer.output_tokens)

    @staticmethod
    def opening(answer: SimulatedAnswer) -> bytes:
        """Return the events before the first token."""
        choice = answer.choices[0]
        block = b'{"type":"text","text":"","citations":null}' if choice.call is None else _tool_use(choice, b"{}")
        return b"".join(
            (
                _event(b"message_start", b'"message":%s' % _message(answer, b"[]", b"null", 1)),
                _event(b"content_block_start", b'"index":0,"content_block":%s' % block),
                b'event: ping\ndata: {"type":"ping"}\n\n',
            )
        )

    @staticmethod
    def token(answer: SimulatedAnswer, index: int, chunk: bytes) -> bytes:
        """Return the event of one token; there is only one block, so `index` is always 0."""
        choice = answer.choices[index]
        kind, field = (b"text_delta", b"text") if choice.call is None else (b"input_json_delta", b"partial_json")
        delta = b'{"type":"%s","%s":"%s"}' % (kind, field, quoted(choice, chunk))
        return _event(b"content_block_delta", b'"index":0,"delta":%s' % delta)

    @staticmethod
    def closing(answer: SimulatedAnswer) -> bytes:
        """Return the events after the last token."""
        stop = b'"delta":{"stop_reason":"%s","stop_sequence":null}' % _STOPS[answer.choices[0].finish]
        return b"".join(
            (
                _event(b"content_block_stop", b'"index":0'),
                _event(b"message_delta", b'%s,"usage":{"output_tokens":%d}' % (stop, answer.output_tokens)),
                b'event: message_stop\ndata: {"type":"message_stop"}\n\n',
            )
        )


def _event(kind: bytes, fields: bytes) -> bytes:
    return b'event: %s\ndata: {"type":"%s",%s}\n\n' % (kind, kind, fields)


def _tool_use(choice: SimulatedChoice, given: bytes) -> bytes:
    assert choice.call is not None
    name = choice.call.id.replace(b"call_", b"toolu_")
    return b'{"type":"tool_use","id":"%s","name":%s,"input":%s}' % (name, choice.call.name, given)


def _message(answer: SimulatedAnswer, content: bytes, stop: bytes, output_tokens: int) -> bytes:
    cached, written = answer.cached_tokens, answer.written_tokens
    usage = (
        b'{"input_tokens":%d,"cache_creation_input_tokens":%d,"cache_read_input_tokens":%d,"output_tokens":%d,'
        b'"service_tier":"standard"}' % (answer.prompt_tokens - cached - written, written, cached, output_tokens)
    )
    return (
        b'{"id":"msg_%s","type":"message","role":"assistant","model":%s,"content":%s,"stop_reason":%s,'
        b'"stop_sequence":null,"usage":%s}' % (answer.name, answer.model, content, stop, usage)
    )
