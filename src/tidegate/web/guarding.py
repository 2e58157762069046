"""Hooks and guardrails at the interactive door: what they say becomes another body, or a refusal in words for the caller.

Requests are judged always, whole answers too. A stream is passed on as it comes, so where an answer must be judged a call that asks for one
is refused, unless the operator wrote that this rule lets streams pass.
"""

import math

from tidegate import metrics
from tidegate.core.errors import ApiProblem
from tidegate.core.hooks import About, Stop
from tidegate.flow.guard import Guard
from tidegate.web.wishes import Wish


async def guarded_wish(guard: Guard, about: About, wish: Wish) -> Wish:
    """The wish as it may be sent."""
    if wish.is_stream and guard.refuses_streams:
        raise ApiProblem(
            400,
            "stream_not_allowed",
            "Answers of this model are checked as a whole before they are handed on: send the request without `stream`.",
            param="stream",
        )
    return wish._replace(body=_passed(await guard.before(wish.body, lambda: about)))


async def guarded_answer(guard: Guard, about: About, body: bytes) -> bytes:
    """A whole answer as it may be handed on."""
    return _passed(await guard.after(body, lambda: about))


def _passed(said: bytes | Stop) -> bytes:
    if not isinstance(said, Stop):
        return said
    (metrics.policy_waits if said.retryable else metrics.policy_refusals).of(said.code).inc()
    wait_s = max(1, math.ceil(said.wait_ms / 1000)) if said.retryable else None
    raise ApiProblem(said.status, said.code, said.message, retry_after_s=wait_s)
