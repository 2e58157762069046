"""The shape of /v1/responses: a message or a tool call, whole or as numbered events."""

from tidegate.simulate.engine.answers import SimulatedAnswer, quoted

_PLAIN = b'"tools":[],"tool_choice":"auto","parallel_tool_calls":true,"text":{"format":{"type":"text"}}'


class Responses:
    """The shape of answers of /v1/responses."""

    @staticmethod
    def whole(answer: SimulatedAnswer) -> bytes:
        """Return the body of an answer that is not streamed."""
        return _response(answer, b"completed", b"[%s]" % _item(answer, b"completed", whole=True))

    @staticmethod
    def opening(answer: SimulatedAnswer) -> bytes:
        """Return the events before the first token."""
        begun = _response(answer, b"in_progress", b"[]")
        item = _item(answer, b"in_progress", whole=False)
        events = [
            _event(answer, b"response.created", b'"response":%s' % begun),
            _event(answer, b"response.in_progress", b'"response":%s' % begun),
            _event(answer, b"response.output_item.added", b'"output_index":0,"item":%s' % item),
        ]
        if answer.choices[0].call is None:
            part = b'%s,"part":%s' % (_place(answer), _part(b""))
            events.append(_event(answer, b"response.content_part.added", part))
        return b"".join(events)

    @staticmethod
    def token(answer: SimulatedAnswer, index: int, chunk: bytes) -> bytes:
        """Return the event of one token; there is only one output, so `index` is always 0."""
        choice = answer.choices[0]
        text = quoted(choice, chunk)
        if choice.call is None:
            fields = b'%s,"delta":"%s","logprobs":[]' % (_place(answer), text)
            return _event(answer, b"response.output_text.delta", fields)
        kind, _ = _CUSTOM if choice.call.custom else _FUNCTION
        return _event(answer, b"response.%s.delta" % kind, b'%s,"delta":"%s"' % (_place(answer), text))

    @staticmethod
    def closing(answer: SimulatedAnswer) -> bytes:
        """Return the events after the last token."""
        choice = answer.choices[0]
        text = quoted(choice, choice.text)
        item = _item(answer, b"completed", whole=True)
        if choice.call is None:
            done = b'%s,"text":"%s","logprobs":[]' % (_place(answer), text)
            events = [
                _event(answer, b"response.output_text.done", done),
                _event(answer, b"response.content_part.done", b'%s,"part":%s' % (_place(answer), _part(text))),
            ]
        else:
            kind, field = _CUSTOM if choice.call.custom else _FUNCTION
            fields = b'%s,"%s":"%s"' % (_place(answer), field, text)
            events = [_event(answer, b"response.%s.done" % kind, fields)]
        events.append(_event(answer, b"response.output_item.done", b'"output_index":0,"item":%s' % item))
        events.append(_event(answer, b"response.completed", b'"response":%s' % Responses.whole(answer)))
        return b"".join(events)


# The name of a call's events, and the field for its input.
_FUNCTION = (b"function_call_arguments", b"arguments")
_CUSTOM = (b"custom_tool_call_input", b"input")


def _event(answer: SimulatedAnswer, kind: bytes, fields: bytes) -> bytes:
    number = answer.next_event_number()
    return b'event: %s\ndata: {"type":"%s","sequence_number":%d,%s}\n\n' % (kind, kind, number, fields)


def _place(answer: SimulatedAnswer) -> bytes:
    if answer.choices[0].call is not None:
        return b'"item_id":"fc_%s","output_index":0' % answer.name
    return b'"item_id":"msg_%s","output_index":0,"content_index":0' % answer.name


def _part(text: bytes) -> bytes:
    return b'{"type":"output_text","text":"%s","annotations":[],"logprobs":[]}' % text


def _item(answer: SimulatedAnswer, status: bytes, *, whole: bool) -> bytes:
    choice = answer.choices[0]
    text = quoted(choice, choice.text) if whole else b""
    if whole and choice.finish == "length":
        status = b"incomplete"
    if choice.call is not None:
        kind, field, stated = b"custom_tool_call", b"input", b""
        if not choice.call.custom:
            kind, field, stated = b"function_call", b"arguments", b',"status":"%s"' % status
        return b'{"id":"fc_%s","type":"%s"%s,"call_id":"%s","name":%s,"%s":"%s"}' % (
            answer.name,
            kind,
            stated,
            choice.call.id,
            choice.call.name,
            field,
            text,
        )
    content = _part(text) if whole else b""
    return b'{"id":"msg_%s","type":"message","status":"%s","role":"assistant","content":[%s]}' % (
        answer.name,
        status,
        content,
    )


def _response(answer: SimulatedAnswer, status: bytes, output: bytes) -> bytes:
    prompt, tokens, cached = answer.prompt_tokens, answer.output_tokens, answer.cached_tokens
    usage = b"null"
    cut = b"null"
    if status == b"completed":
        usage = (
            b'{"input_tokens":%d,"input_tokens_details":{"cached_tokens":%d,"cache_write_tokens":%d},"output_tokens":%d,'
            b'"output_tokens_details":{"reasoning_tokens":0},"total_tokens":%d}'
            % (prompt, cached, answer.written_tokens, tokens, prompt + tokens)
        )
        if answer.choices[0].finish == "length":
            status, cut = b"incomplete", b'{"reason":"max_output_tokens"}'
    return (
        b'{"id":"resp_%s","object":"response","created_at":%d,"status":"%s","error":null,"incomplete_details":%s,'
        b'"instructions":null,"metadata":%s,"model":%s,"output":%s,%s,"temperature":1.0,"top_p":1.0,"usage":%s}'
        % (
            answer.name,
            answer.created,
            status,
            cut,
            answer.ask.metadata,
            answer.model,
            output,
            answer.ask.echo or _PLAIN,
            usage,
        )
    )
