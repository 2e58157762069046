"""Every status is an answer or exactly one class of error, and what came of an answer is settled."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from tests.upstream.raw_server import CHAT as CHAT_ANSWER
from tests.upstream.raw_server import Peer, RawServer, Request, answers_with, eventually
from tests.upstream.world import RouterWorld, deployment
from tidegate.core.answers.redaction import KeyRedactor
from tidegate.core.errors import Ambiguous, BrokenAnswer, KeyRejected, Refused, Throttled, UpstreamError, Withheld
from tidegate.core.nouns import Usage
from tidegate.upstream.calls import admission as admissions
from tidegate.upstream.calls.admission import accept
from tidegate.upstream.calls.exchange import Exchange, UpstreamResponse
from tidegate.upstream.calls.traffic import Traffic
from tidegate.upstream.calls.translation import Shaped
from tidegate.upstream.routing import key_slots

CHAT = "/v1/chat/completions"
NOW_MS = 1_700_000_000_000


def now() -> int:
    return NOW_MS


def expected(status: int) -> type[UpstreamError]:
    special = {401: KeyRejected, 403: KeyRejected, 408: Ambiguous, 425: Ambiguous, 429: Throttled}
    if status in special:
        return special[status]
    by_hundred = {1: BrokenAnswer, 2: BrokenAnswer, 3: Refused, 4: Refused, 5: Ambiguous}
    return by_hundred.get(status // 100, BrokenAnswer)


def test_every_status_is_one_class() -> None:
    for status in range(100, 1_000):
        with pytest.raises(UpstreamError) as caught:
            accept(CHAT, status, {}, b'{"error": {"message": "no"}}', now)
        assert type(caught.value) is expected(status), status
        assert caught.value.status == status


def test_a_success_is_an_answer() -> None:
    line, usage = accept(CHAT, 200, {}, b'{"choices":[{}],"usage":{"prompt_tokens":2}}', now)
    assert (line, usage.input_tokens) == (b'{"choices":[{}],"usage":{"prompt_tokens":2}}', 2)


def test_what_came_of_a_stream_is_settled_though_its_reader_left_before_it_took_any() -> None:
    settled: list[tuple[Usage | None, int]] = []
    state = SimpleNamespace(deployment=None, key_redactor=KeyRedactor(""))
    ports: Any = (
        SimpleNamespace(end_call=lambda *_, **__: None),
        SimpleNamespace(state=state),
        SimpleNamespace(status=200, headers={}, close=lambda: None),
        SimpleNamespace(settle_answer=lambda usage, uncounted: settled.append((usage, uncounted))),
    )
    first = b'data: {"choices":[{"text":"a"}],"usage":{"prompt_tokens":2,"completion_tokens":1}}\n\n'
    UpstreamResponse(*ports, first=first, hides_usage=False).close()
    assert settled == [(Usage(2, 0, 1, 0), 0)]


@pytest.mark.anyio
async def test_a_stream_that_is_answered_in_one_piece_has_its_first_token_while_it_is_read(
    world: RouterWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Batch work would be held back for a user who only waits for the rest of a long answer."""
    monkeypatch.setattr(admissions, "UNSEEN_FIRST_TOKEN_S", 0.0)
    rest = asyncio.Event()

    async def script(_: Request, peer: Peer) -> None:
        head = f"HTTP/1.1 200 X\r\nContent-Type: application/json\r\nContent-Length: {len(CHAT_ANSWER)}\r\n\r\n"
        await peer.send(head.encode(), CHAT_ANSWER[:9])
        await rest.wait()
        await peer.send(CHAT_ANSWER[9:])

    traffic = Traffic(lambda engine: Shaped(CHAT, b"{}"), is_stream=True)
    async with RawServer(script) as server, world.router(deployment(server.url)) as router:
        state = router._states["one"]
        reading = asyncio.create_task(router.open(world.call(), traffic))
        await eventually(lambda: state.interactive_in_flight and not state.interactive_awaiting, "the first token")
        assert not reading.done()
        rest.set()
        assert (await reading).status == 200


async def streams(_: Request, peer: Peer) -> None:
    """One event, and then nothing for as long as the reader stays."""
    await peer.send(
        b"HTTP/1.1 200 X\r\nContent-Type: text/event-stream\r\nContent-Length: 999\r\n\r\n", b"data: {}\n\n"
    )
    await peer.until_gone()


@pytest.mark.anyio
async def test_a_stream_keeps_a_slot_of_its_key_until_it_ends(
    world: RouterWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(key_slots, "WAIT_S", 0.0)
    traffic = Traffic(lambda engine: Shaped(CHAT, b"{}"), is_stream=True)
    async with RawServer(streams) as server, world.router(deployment(server.url)) as router:
        for _ in range(2):
            stream = await router.open(world.call(parallel=(("key:k", 1),)), traffic)
            assert isinstance(stream, UpstreamResponse)
            with pytest.raises(Withheld):
                await router.open(world.call(parallel=(("key:k", 1),)), traffic)
            stream.close()


@pytest.mark.anyio
async def test_a_stream_that_its_reader_leaves_shows_no_healthy_deployment(world: RouterWorld) -> None:
    """It may have hung: then its answer must not close the circuit."""
    traffic = Traffic(lambda engine: Shaped(CHAT, b"{}"), is_stream=True)
    async with RawServer(streams) as server, world.router(deployment(server.url)) as router:
        stream = await router.open(world.call(), traffic)
        assert isinstance(stream, UpstreamResponse)
        stream.close()
        assert router.status()[0].answered == 0


@pytest.mark.anyio
@pytest.mark.parametrize("status", [300, 299])
@pytest.mark.parametrize("is_stream", [False, True])
async def test_a_user_gets_an_answer_with_a_good_status_alone(world: RouterWorld, status: int, is_stream: bool) -> None:
    traffic = Traffic(lambda engine: Shaped(CHAT, b"{}"), is_stream=is_stream)
    async with RawServer(answers_with(status, CHAT_ANSWER)) as server, world.router(deployment(server.url)) as router:
        if status == 299:
            assert (await router.open(world.call(), traffic)).status == status
        else:
            with pytest.raises(Refused):
                await router.open(world.call(), traffic)


def quota(opens_at_ms: float) -> Any:
    return SimpleNamespace(opens_at_ms=lambda tokens: opens_at_ms if tokens == 7 else 0.0)


LOOK: dict[str, Any] = {
    "quota": None,
    "rests_until_ms": 0.0,
    "begin_by_ms": 900.0,
    "deadline_ms": 800.0,
    "may_begin": None,
}


@pytest.mark.parametrize(
    ("changed", "code", "until_ms"),
    [
        ({}, "", 0),
        ({"quota": quota(100.0), "rests_until_ms": 100.0, "may_begin": lambda: True}, "", 0),
        ({"quota": quota(101.0)}, "upstream_rests", 101),
        ({"rests_until_ms": 400.0}, "upstream_rests", 300),
        ({"rests_until_ms": 200.0}, "upstream_rests", 200),
        ({"begin_by_ms": 100.0}, "lease_over", 100),
        ({"begin_by_ms": 101.0, "may_begin": lambda: False}, "lease_over", 100),
        ({"deadline_ms": 100.0}, "deadline_passed", 100),
    ],
)
def test_a_call_that_waited_for_its_permit_is_sent_only_if_it_still_may(
    changed: dict[str, Any], code: str, until_ms: float
) -> None:
    """It is 100 ms; the job, the lease or the deployment may have changed meanwhile."""
    held, expiries = SimpleNamespace(**LOOK | changed), list[Any]()
    state = SimpleNamespace(quota=held.quota, rests_until_ms=held.rests_until_ms, rest_ends_ms=lambda now_ms: 300.0)
    call = SimpleNamespace(may_begin=held.may_begin, deadline_ms=held.deadline_ms)
    admission = SimpleNamespace(call=call, state=state, begin_by_ms=held.begin_by_ms)
    permit = SimpleNamespace(expire_by=lambda *terms: expiries.append(terms))
    exchange: Any = SimpleNamespace(_clock=SimpleNamespace(monotonic_ms=lambda: 100.0))
    ports: Any = (exchange, admission, permit, 7)
    if not code:
        Exchange._look_again(*ports)
        assert expiries == [(800.0, held.may_begin)]
        return
    with pytest.raises(Withheld) as withheld:
        Exchange._look_again(*ports)
    assert (withheld.value.code, withheld.value.until_ms, expiries) == (code, until_ms, [])
