"""How a door's requests, answers, streams and errors are said to an engine and by it: as they are, or translated.

A door speaks OpenAI's shapes or Anthropic's, and so does an engine; where the two agree, bytes pass through untouched. What cannot be said
to an engine is refused with a 400 that names the field. Nothing here sends anything.
"""

from typing import Protocol

import msgspec

from tidegate.core import translate
from tidegate.core.deployments import Engine
from tidegate.core.errors import ApiProblem
from tidegate.upstream.interactive import Shaped

CHAT = "/v1/chat/completions"
MESSAGES = "/v1/messages"
RESPONSES = "/v1/responses"
_VLLM_LIKE = (Engine.VLLM, Engine.SGLANG)


class Translator(Protocol):
    """A stream on its way into the other shape."""

    ended: bool

    def feed(self, piece: bytes) -> bytes: ...

    def end(self) -> bytes: ...


class Dialect:
    """One call at one door. `left_out` are the hints that its engine was not told, known once it was shaped."""

    def __init__(self, endpoint: str, body: bytes, now_s: int, beta: str = "") -> None:
        self.endpoint = endpoint
        self.left_out: tuple[str, ...] = ()
        self._body = body
        self._now_s = now_s
        self._beta = beta
        self._include_usage = False
        self._is_translated = False

    @property
    def is_anthropic(self) -> bool:
        return self.endpoint == MESSAGES

    def shape(self, engine: Engine) -> Shaped:
        """The request as this engine takes it; ApiProblem when it cannot be said there."""
        takes_anthropic = engine is Engine.ANTHROPIC
        self._is_translated = takes_anthropic is not self.is_anthropic
        self.left_out = ()
        if not self._is_translated:
            more = f"anthropic-beta: {self._beta}\r\n".encode() if self._beta and takes_anthropic else b""
            return Shaped(self.endpoint, self._body, more)
        if self.is_anthropic:
            said = translate.request_to_openai(self._body, translate.VLLM if engine in _VLLM_LIKE else translate.OPENAI)
        elif self.endpoint == CHAT:
            said = translate.request_to_anthropic(self._body)
        else:
            raise ApiProblem(
                400,
                "unsupported_endpoint",
                f"This model is served by an engine that has no {self.endpoint}: use {CHAT} or {MESSAGES}.",
            )
        self.left_out = said.left_out
        self._include_usage = said.include_usage
        return Shaped(CHAT if self.is_anthropic else MESSAGES, said.body)

    def answer(self, body: bytes) -> bytes:
        """A whole answer as the door's client takes it."""
        if not self._is_translated:
            return body
        if self.is_anthropic:
            return translate.answer_to_anthropic(body).body
        return translate.answer_to_openai(body, self._now_s).body

    def translator(self) -> Translator | None:
        """What a stream goes through; None when its bytes are passed on as they are."""
        if not self._is_translated:
            return None
        if self.is_anthropic:
            return translate.StreamToAnthropic()
        return translate.StreamToOpenai(self._now_s, include_usage=self._include_usage)

    def refusal(self, status: int, body: bytes, request_id: str) -> bytes:
        """An engine's refusal in the door's shape: its own bytes where they are an object of that shape already."""
        is_ours = not self._is_translated and translate.is_error_of(body, anthropic=self.is_anthropic)
        if is_ours:
            return body
        if self.is_anthropic:
            return translate.error_to_anthropic(status, body, request_id)
        return translate.error_to_openai(status, body)

    def broken_off(self, code: str, message: str) -> bytes:
        """The event that says that a stream ends here, and why."""
        if self.is_anthropic:
            error = {"type": "error", "error": {"type": "api_error", "message": message, "code": code}}
            return b"event: error\ndata: %b\n\n" % msgspec.json.encode(error)
        if self.endpoint == RESPONSES:
            event = {"type": "error", "code": code, "message": message, "param": None, "sequence_number": 0}
            return b"event: error\ndata: %b\n\n" % msgspec.json.encode(event)
        detail = {"message": message, "type": "server_error", "param": None, "code": code}
        return b"data: %b\n\n" % msgspec.json.encode({"error": detail})
