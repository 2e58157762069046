"""The router against the simulated engine and its scripted faults, with the calls log as witness."""

import asyncio
import json

import pytest

from tests.support.engine import Engine
from tests.upstream.world import CHAT_ENDPOINT, RouterWorld, deployment
from tidegate.core.deployments import HttpLimits
from tidegate.core.errors import Ambiguous, AnswerTooLong, BrokenAnswer, KeyRejected, Refused, Throttled, UpstreamError
from tidegate.core.nouns import Call
from tidegate.upstream.calls.router import Router

pytestmark = pytest.mark.anyio

LIMITS = HttpLimits(
    read_timeout_s=0.3, response_bytes_max=1 << 20, body_rate_min_bytes_per_s=10_000, body_rate_grace_s=0.1
)

FAULTS: list[tuple[str, type[UpstreamError]]] = [
    ("429", Throttled),
    ("429:ra=2", Throttled),
    ("429:ra=date", Throttled),
    ("500", Ambiguous),
    ("502", Ambiguous),
    ("503:ra=1", Ambiguous),
    ("504", Ambiguous),
    ("529", Ambiguous),
    ("408", Ambiguous),
    ("425", Ambiguous),
    ("400", Refused),
    ("404", Refused),
    ("413", Refused),
    ("422", Refused),
    ("401", KeyRejected),
    ("403", KeyRejected),
    ("redirect", Refused),
    ("hang", Ambiguous),
    ("hang_body", Ambiguous),
    ("half", Ambiguous),
    ("reset", Ambiguous),
    ("reset_before", Ambiguous),
    ("longlength", Ambiguous),
    ("badgzip", Ambiguous),
    ("slowloris", Ambiguous),
    ("malformed", BrokenAnswer),
    ("html", BrokenAnswer),
    ("empty", BrokenAnswer),
    ("null", BrokenAnswer),
    ("nochoices", BrokenAnswer),
    ("error200", BrokenAnswer),
    ("huge=3000000", AnswerTooLong),
    ("bomb=30000000", AnswerTooLong),
]


def call(world: RouterWorld, behaviour: str | None = None, number: int = 0) -> Call:
    content = "hello" if behaviour is None else json.dumps({"behave": behaviour})
    body = json.dumps({"model": "m", "messages": [{"role": "user", "content": content}]}).encode()
    deadline_ms = world.clock.monotonic + 30_000
    return Call("batch_1", number, CHAT_ENDPOINT, "m", body, f"batch_1:{number}:{behaviour}", deadline_ms)


async def end_of(router: Router, made: Call) -> object:
    return (await asyncio.gather(router.send(made), return_exceptions=True))[0]


async def test_every_scripted_fault_is_its_class_and_exactly_one_call(engine: Engine) -> None:
    met: dict[str, object] = {}
    for behaviour, _ in FAULTS:
        # A fresh router each, so that a rest or an open breaker of one fault does not hide the next.
        world = RouterWorld()
        async with world.router(deployment(engine.url), limits=LIMITS) as router:
            met[behaviour] = type(await end_of(router, call(world, behaviour)))
    assert met == dict(FAULTS)
    keys = [seen["idempotency_key"] for seen in engine.calls() if seen["path"] == CHAT_ENDPOINT]
    assert sorted(keys) == sorted(f"batch_1:0:{behaviour}" for behaviour, _ in FAULTS)


async def test_a_pretty_printed_answer_is_one_line(engine: Engine) -> None:
    world = RouterWorld()
    async with world.router(deployment(engine.url)) as router:
        answer = await router.send(call(world, "pretty"))
    assert b"\n" not in answer.body
    assert json.loads(answer.body)["choices"]


async def test_a_quiet_run_makes_every_call_exactly_once(engine: Engine) -> None:
    world = RouterWorld()
    async with world.router(deployment(engine.url, max_in_flight=32)) as router:
        answers = await asyncio.gather(*(router.send(call(world, number=number)) for number in range(1_000)))
        assert router.status()[0].failures == {}
    assert all(answer.usage.output_tokens > 0 for answer in answers)
    keys = [seen["idempotency_key"] for seen in engine.calls() if seen["path"] == CHAT_ENDPOINT]
    assert sorted(keys) == sorted(f"batch_1:{number}:None" for number in range(1_000))


async def test_doctor_finds_the_engine(engine: Engine) -> None:
    world = RouterWorld()
    async with world.router(deployment(engine.url)) as router:
        probe = await router.probe("one")
    assert probe.reachable
    assert probe.message == ""
