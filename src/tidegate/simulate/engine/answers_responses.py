"""The shape of /v1/responses: one message of output text, whole or as its numbered events."""

from tidegate.simulate.engine.answers import Answer


class Responses:
    """/v1/responses."""

    @staticmethod
    def whole(answer: Answer) -> bytes:
        """The body of an answer that is not streamed."""
        return _response(answer, b"completed", b"[%s]" % _item(answer, b"completed", whole=True))

    @staticmethod
    def opening(answer: Answer) -> bytes:
        """The events before the first token."""
        begun = _response(answer, b"in_progress", b"[]")
        return b"".join(
            (
                _event(answer, b"response.created", b'"response":%s' % begun),
                _event(answer, b"response.in_progress", b'"response":%s' % begun),
                _event(
                    answer,
                    b"response.output_item.added",
                    b'"output_index":0,"item":%s' % _item(answer, b"in_progress", whole=False),
                ),
                _event(answer, b"response.content_part.added", b'%s,"part":%s' % (_place(answer), _part(b""))),
            )
        )

    @staticmethod
    def token(answer: Answer, index: int, piece: bytes) -> bytes:
        """The event of one token; there is only one output, so `index` is always 0."""
        return _event(answer, b"response.output_text.delta", b'%s,"delta":"%s","logprobs":[]' % (_place(answer), piece))

    @staticmethod
    def closing(answer: Answer) -> bytes:
        """The events after the last token."""
        text = answer.choices[0].text
        item = _item(answer, b"completed", whole=True)
        return b"".join(
            (
                _event(answer, b"response.output_text.done", b'%s,"text":"%s","logprobs":[]' % (_place(answer), text)),
                _event(answer, b"response.content_part.done", b'%s,"part":%s' % (_place(answer), _part(text))),
                _event(answer, b"response.output_item.done", b'"output_index":0,"item":%s' % item),
                _event(answer, b"response.completed", b'"response":%s' % Responses.whole(answer)),
            )
        )


def _event(answer: Answer, kind: bytes, fields: bytes) -> bytes:
    number = answer.sent_events
    answer.sent_events += 1
    return b'event: %s\ndata: {"type":"%s","sequence_number":%d,%s}\n\n' % (kind, kind, number, fields)


def _place(answer: Answer) -> bytes:
    return b'"item_id":"msg_%s","output_index":0,"content_index":0' % answer.name


def _part(text: bytes) -> bytes:
    return b'{"type":"output_text","text":"%s","annotations":[],"logprobs":[]}' % text


def _item(answer: Answer, status: bytes, *, whole: bool) -> bytes:
    content = _part(answer.choices[0].text) if whole else b""
    return b'{"id":"msg_%s","type":"message","status":"%s","role":"assistant","content":[%s]}' % (
        answer.name,
        status,
        content,
    )


def _response(answer: Answer, status: bytes, output: bytes) -> bytes:
    prompt, tokens, cached = answer.prompt_tokens, answer.output_tokens, answer.cached_tokens
    usage = b"null"
    cut = b"null"
    if status == b"completed":
        usage = (
            b'{"input_tokens":%d,"input_tokens_details":{"cached_tokens":%d},"output_tokens":%d,'
            b'"output_tokens_details":{"reasoning_tokens":0},"total_tokens":%d}'
            % (prompt, cached, tokens, prompt + tokens)
        )
        if answer.choices[0].finish == "length":
            status, cut = b"incomplete", b'{"reason":"max_output_tokens"}'
    return (
        b'{"id":"resp_%s","object":"response","created_at":%d,"status":"%s","error":null,"incomplete_details":%s,'
        b'"instructions":null,"metadata":{},"model":%s,"output":%s,"parallel_tool_calls":true,"temperature":1.0,'
        b'"tool_choice":"auto","tools":[],"top_p":1.0,"usage":%s}'
        % (answer.name, answer.created, status, cut, answer.model, output, usage)
    )
