"""The opening of an interactive call within its span, which ends with the last byte of the answer.

The span covers the wait for a slot and a permit, and the answer up to its end, but not the client's
use of it.
"""

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from tidegate.core.deployments import Deployment
from tidegate.core.nouns import Answer, Call, Usage
from tidegate.upstream.calls.exchange import UpstreamResponse
from tidegate.upstream.calls.traffic import Traffic

if TYPE_CHECKING:
    from tidegate.tracing.spans import Spans


async def open_traced(
    spans: "Spans",
    open_call: Callable[[Call, Traffic], Awaitable[Answer | UpstreamResponse]],
    call: Call,
    traffic: Traffic,
) -> Answer | UpstreamResponse:
    """Open a call; if its trace is sampled, the trace goes on in the model server."""
    span = spans.begin_interactive(call, is_stream=traffic.is_stream)
    if span is None:
        return await open_call(call, traffic)
    on_usage = traffic.on_usage

    def note(deployment: Deployment, usage: Usage) -> None:
        span.note_usage(deployment.name, usage)
        if on_usage is not None:
            on_usage(deployment, usage)

    try:
        response = await open_call(span.call, traffic._replace(on_usage=note))
    except BaseException as error:
        span.end_span(error)
        raise
    if isinstance(response, Answer):
        span.end_span(None, response.status)
        return response
    span.note_first_chunk()
    status = response.status
    response.when_ended(lambda error: span.end_span(error, status))
    return response
