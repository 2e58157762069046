"""One call in the shape of an engine, and its answer in the shape of the caller.

An endpoint has OpenAI's shapes or Anthropic's, and so has an engine. If the two agree, bytes pass
through untouched. A field that cannot be translated for an engine is refused with a 400 that names
it. This module sends nothing.
"""

from collections.abc import Iterable
from typing import NamedTuple

import msgspec

from tidegate.core import translate
from tidegate.core.answers.results import refused_body
from tidegate.core.audio_file import AudioFile
from tidegate.core.deployments import Deployment, EngineKind
from tidegate.core.errors import AnswerUnusable, ApiProblem, Untranslatable, UpstreamError
from tidegate.core.translate.audio import form_of

CHAT = "/v1/chat/completions"
MESSAGES = "/v1/messages"
_VLLM_LIKE = (EngineKind.VLLM, EngineKind.SGLANG)


class Shaped(NamedTuple):
    """A request as one kind of engine takes it: endpoint, body, and more header lines.

    With `hides_usage` we asked for the stream's usage, and the caller must not see the chunk with
    it.
    """

    endpoint: str
    body: bytes
    headers: bytes = b""
    hides_usage: bool = False


def is_translated(endpoint: str, engine: EngineKind) -> bool:
    """Return whether calls to this endpoint are translated for this engine."""
    return (engine is EngineKind.ANTHROPIC) is not (endpoint == MESSAGES)


def as_form(shaped: Shaped, file: AudioFile, deployment: Deployment, name: str) -> Shaped:
    """Return the request as a form with its file.

    Raise Untranslatable for a queue, which takes only JSON.
    """
    if deployment.queue is not None:
        message = f"this model is served through a queue, which takes no files: {shaped.endpoint} needs a server that is called itself"
        body = refused_body(message, "unsupported_endpoint", None)
        raise Untranslatable(message, status=400, body=body, code="unsupported_endpoint")
    header, form = form_of(shaped.body, file, name)
    return Shaped(shaped.endpoint, form, header)


def beta_header(betas: str, engine: EngineKind) -> bytes:
    """Return the header line that asks one of Anthropic's engines for these betas.

    Other engines have none.
    """
    return f"anthropic-beta: {betas}\r\n".encode() if betas and engine is EngineKind.ANTHROPIC else b""


def unserved_endpoints(engine: EngineKind, endpoints: Iterable[str]) -> list[str]:
    """Return those of these endpoints that an engine is known not to have, even by translation."""
    return [one for one in endpoints if is_translated(one, engine) and one not in (CHAT, MESSAGES)]


class Translation(msgspec.Struct, eq=False):
    """One call of one endpoint.

    `shape` sets `is_translated`, and `left_out`: the hints that the engine does not get.
    """

    endpoint: str
    body: bytes
    now_s: int
    beta: str = ""
    left_out: tuple[str, ...] = ()
    include_usage: bool = False
    is_translated: bool = False

    @property
    def is_anthropic(self) -> bool:
        return self.endpoint == MESSAGES

    def shape(self, engine: EngineKind) -> Shaped:
        """Return the request as this engine takes it.

        Raise ApiProblem if it cannot be translated.
        """
        self.is_translated = is_translated(self.endpoint, engine)
        self.left_out = ()
        if not self.is_translated:
            return Shaped(self.endpoint, self.body, beta_header(self.beta, engine))
        if self.is_anthropic:
            translated = translate.request_to_openai(
                self.body, translate.VLLM if engine in _VLLM_LIKE else translate.OPENAI
            )
        elif self.endpoint == CHAT:
            translated = translate.request_to_anthropic(self.body)
        else:
            raise ApiProblem(
                400,
                "unsupported_endpoint",
                f"This model is served by an engine that has no {self.endpoint}: use {CHAT} or {MESSAGES}.",
            )
        self.left_out = translated.left_out
        self.include_usage = translated.include_usage
        return Shaped(CHAT if self.is_anthropic else MESSAGES, translated.body)

    def answer(self, body: bytes) -> bytes:
        """Return a whole answer in the caller's shape."""
        if not self.is_translated:
            return body
        if self.is_anthropic:
            return translate.answer_to_anthropic(body).body
        return translate.answer_to_openai(body, self.now_s).body

    def refusal(self, status: int, body: bytes, request_id: str | None = None) -> bytes:
        """Return an engine's refusal in the caller's shape, unchanged if it has it already."""
        is_ours = not self.is_translated and translate.is_error_of(body, anthropic=self.is_anthropic)
        if is_ours:
            return body
        if self.is_anthropic:
            return translate.error_to_anthropic(status, body, request_id)
        return translate.error_to_openai(status, body)


class ItemTranslation:
    """An item on its way to an engine of the other shape.

    A failed translation is the item's UpstreamError.
    """

    def __init__(self, endpoint: str, body: bytes, engine: EngineKind, now_s: int) -> None:
        self._translation = Translation(endpoint, body, now_s)
        problem = None
        try:
            self.shaped = self._translation.shape(engine)
        except ApiProblem as wrong:
            problem = wrong
        if problem is not None:
            refused = refused_body(problem.message, problem.code, problem.param)
            body = self._refusal(problem.status, refused)
            raise Untranslatable(problem.message, status=problem.status, body=body, code=problem.code)

    def answer(self, line: bytes) -> bytes:
        """Return the answer in the shape of the item's endpoint.

        Raise AnswerUnusable if that fails.
        """
        try:
            return self._translation.answer(line)
        except ApiProblem as wrong:
            why = wrong.message
        raise AnswerUnusable(f"the answer cannot be translated: {why}", status=200, body=line)

    def failed(self, error: UpstreamError) -> None:
        """Put the text of the engine's error into the shape of the item's endpoint."""
        if error.status >= 400 and error.body:
            error.body = self._refusal(error.status, error.body)

    def _refusal(self, status: int, body: bytes) -> bytes:
        return self._translation.refusal(status, body)
