"""Hooks and guardrails on interactive calls.

Their verdict is another body, or a refusal for the caller.

Requests and whole answers are always judged. A stream is passed on as it comes, so a call that asks
for one is refused if its answer must be judged, unless the rule lets streams pass or holds them
back until they are whole and judged.
"""

import math

from tidegate import metrics
from tidegate.core.answers.stream_assembly import WholeAnswer
from tidegate.core.answers.stream_synthesis import stream_of
from tidegate.core.errors import ApiProblem, BrokenAnswer
from tidegate.core.hooks import About, Stop
from tidegate.core.translate.sse import StreamBroken
from tidegate.guards.guard import Guard
from tidegate.upstream.calls.exchange import UpstreamResponse
from tidegate.web.gateway.dialects import Dialect, Translator
from tidegate.web.gateway.interactive_request import InteractiveRequest
from tidegate.web.gateway.proxy_response import read_rest


async def guarded_request(guard: Guard, about: About, wanted: InteractiveRequest) -> InteractiveRequest:
    """Return the request as the rules let it be sent."""
    if wanted.is_stream and guard.refuses_streams:
        raise ApiProblem(
            400,
            "stream_not_allowed",
            "Answers of this model are checked as a whole before they are handed on: send the request without `stream`.",
            param="stream",
        )
    return wanted._replace(body=_passed(await guard.before(wanted.body, lambda: about), about.endpoint))


async def guarded_answer(guard: Guard, about: About, body: bytes) -> bytes:
    """Return a whole answer as the rules let it be passed on."""
    return _passed(await guard.after(body, lambda: about), about.endpoint)


async def guarded_stream(guard: Guard, about: About, response: UpstreamResponse, dialect: Dialect) -> bytes:
    """Return a whole stream as the rules let it be passed on: its own bytes, or a new stream of an
    answer that a rule changed.
    """
    endpoint = dialect.endpoint
    whole = WholeAnswer(endpoint, response.bytes_max)
    try:
        collected = await _collected(response, dialect.translator(), whole)
        answer = whole.end_stream()
    except StreamBroken as wrong:
        raise BrokenAnswer(str(wrong), status=response.status) from None
    judged = _passed(await guard.after_stream(answer, lambda: about), about.endpoint)
    if judged is answer:
        return collected
    stream = stream_of(endpoint, judged)
    if stream is None:
        message = f"A rule changed this answer, and a changed answer of {endpoint} cannot be streamed: send the request without `stream`."
        raise ApiProblem(400, "stream_not_allowed", message, param="stream")
    return stream


async def _collected(response: UpstreamResponse, translator: Translator | None, whole: WholeAnswer) -> bytes:
    """Return the whole stream as the client would get it, and feed all of it to `whole`."""
    chunks = []
    size = 0
    while chunk := await response.read():
        if translator is not None:
            chunk = translator.feed(chunk)
        size += len(chunk)
        if size > response.bytes_max:
            raise BrokenAnswer(
                f"the upstream's stream is longer than {response.bytes_max:,} bytes", status=response.status
            )
        chunks.append(chunk)
        whole.feed(chunk)
        if translator is not None and translator.ended:
            await read_rest(response)
            break
    if translator is not None and not translator.ended:
        chunks.append(translator.end_stream())
        whole.feed(chunks[-1])
    return b"".join(chunks)


def _passed(verdict: bytes | Stop, endpoint: str) -> bytes:
    if not isinstance(verdict, Stop):
        return verdict
    (metrics.policy_waits if verdict.retryable else metrics.policy_refusals).of(
        metrics.endpoint_of(endpoint), verdict.code
    ).inc()
    wait_s = max(1, math.ceil(verdict.wait_ms / 1000)) if verdict.retryable else None
    raise ApiProblem(verdict.status, verdict.code, verdict.message, retry_after_s=wait_s)
