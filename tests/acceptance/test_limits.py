"""Limits over real workers, judged by the moment of sending: used to the last request at once, exceeded in no window.

A minute's budget frees only when a minute has passed, so these look at the first one: `test_limits_long.py` looks at several.
Failures that other batch gateways were measured to have come back here as tests.
"""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import httpx2
import pytest

from tests.acceptance.conftest import MakeCrew
from tests.support.crew import deployment, per_minute
from tests.support.processes import wait_until
from tests.support.redis import RedisServer
from tests.support.tidegate import END_S, IN_FLIGHT, behaving, chat_line, requests
from tests.support.windows import fullest
from tidegate.core.ids import job_part

LIMIT = 40
TOKENS = 4_000
WORKERS_TWO = 2


def _redis(request: pytest.FixtureRequest, kind: str) -> RedisServer | None:
    found: RedisServer | None = request.getfixturevalue("private_redis") if kind == "redis" else None
    return found


@pytest.mark.parametrize("kind", ["redis", pytest.param("store", marks=pytest.mark.soak)])
def test_limits_are_used_fully_and_never_exceeded(
    make_crew: MakeCrew, request: pytest.FixtureRequest, kind: str
) -> None:
    """Requests and tokens, on four workers; then one dies with grants in its hands, Redis forgets, and a new one begins."""
    redis = _redis(request, kind)
    crew = make_crew(
        lambda url: {
            "models": {
                "m": deployment(url, limits=per_minute(LIMIT)),
                "t": deployment(url, limits=per_minute(tokens=TOKENS), estimate="bound"),
                "free": deployment(url),
            }
        },
        redis=redis,
    )
    crew.start()
    batch_id = crew.site.submit(requests(LIMIT + 30))
    crew.site.submit(requests(TOKENS // 10, model="t"))
    # An answer of Redis that comes too late on a busy machine loses what it granted; the store's own never do.
    crew.until_called(LIMIT if redis is None else LIMIT * 9 // 10, "m")
    # What a call did not take is given back, so that the last of the tokens are used by calls that were put off at first.
    wait_until(lambda: fullest(crew.sent_tokens("t")) >= TOKENS * 9 // 10, END_S, "the tokens to be used", poll_s=0.2)
    victim = crew.kill_one()
    if redis is not None:
        redis.command("FLUSHALL")
    crew.add_worker()
    crew.site.submit(requests(10))
    # The dead worker's slices go to the others, and all of them lease and send meanwhile: now each could pass a limit.
    wait_until(lambda: crew.site.is_gone(victim), END_S, "the dead worker to be missed", poll_s=0.2)
    free = crew.site.submit(requests(60, model="free"))
    assert crew.site.ended(free).batch["request_counts"]["completed"] == 60
    assert fullest(crew.sent("m")) <= LIMIT
    assert fullest(crew.sent_tokens("t")) <= TOKENS
    assert crew.site.batch(batch_id)["request_counts"]["failed"] == 0


def test_nine_then_thirty_under_ten_a_minute(make_crew: MakeCrew) -> None:
    """Measured elsewhere: 23 calls in that minute. A batch of another model that runs meanwhile gives everyone time to do it here."""
    crew = make_crew(
        lambda url: {"models": {"m": deployment(url, limits=per_minute(10)), "free": deployment(url)}}, latency_ms=20
    )
    crew.start(WORKERS_TWO)
    first = crew.site.submit(requests(9))
    assert crew.site.ended(first).batch["request_counts"]["completed"] == 9
    second = crew.site.submit(requests(30))
    crew.until_called(10, "m")
    free = crew.site.submit(requests(40, model="free"))
    assert crew.site.ended(free).batch["request_counts"]["completed"] == 40
    assert fullest(crew.sent("m")) == 10
    assert crew.site.batch(second)["request_counts"]["failed"] == 0


def test_a_batch_is_held_to_the_limit_that_it_asked_for(make_crew: MakeCrew) -> None:
    """Measured elsewhere: ten a minute, forty items in 3.57 s. Others of the same model and tenant are not held up by it."""
    crew = make_crew(lambda url: {"models": {"m": deployment(url)}}, latency_ms=20)
    crew.start(WORKERS_TWO)
    held = crew.site.submit(requests(40), limits=per_minute(10))
    crew.until_called(10, "m")
    free = crew.site.submit(requests(60))
    assert crew.site.ended(free).batch["request_counts"]["completed"] == 60
    own = [(at, 1) for at, key in crew.sends.sent() if key.startswith(f"batch_req_{job_part(held)}")]
    assert fullest(own) == 10
    wait_until(lambda: crew.site.batch(held)["request_counts"]["completed"] >= 10, END_S, "ten to be done", poll_s=0.2)


def test_an_eleventh_resource_runs_beside_ten_that_wait(make_crew: MakeCrew) -> None:
    """Measured elsewhere: of more than ten resources some never had a turn."""
    names = [f"route-{number}" for number in range(10)]
    crew = make_crew(
        lambda url: {
            "models": {"m": deployment(url)},
            "resources": {name: {"model": "m", "limits": per_minute(3)} for name in names} | {"last": {"model": "m"}},
        },
        latency_ms=20,
    )
    crew.start(WORKERS_TWO)
    lines = [chat_line(f"{name}-{number}", "say", name) for name in names for number in range(20)]
    crew.site.submit(lines)
    last = crew.site.submit(requests(12, model="last"))
    # A batch for a model without a deployment waits for no turn: its items fail and say so.
    unknown = crew.site.submit(requests(12, model="never-configured"))
    assert crew.site.ended(last).batch["request_counts"]["completed"] == 12
    assert set(crew.site.ended(unknown).error_codes()) == {"model_not_found"}
    crew.until_called(10 * 3 + 12, "m")
    assert fullest(crew.sent("m")) == 10 * 3 + 12


@pytest.mark.parametrize("share_owner", ["deployment", pytest.param("global", marks=pytest.mark.soak)])
def test_calls_in_flight_never_exceed_the_cap_of_all_workers(make_crew: MakeCrew, share_owner: str) -> None:
    cap = 8
    # Longer than a busy machine may keep a worker from beating: the slots of one that is taken for dead are given to others.
    more = {"TIDEGATE_WORKER_LEASE_MS": "8000"}
    if share_owner == "global":
        more["TIDEGATE_WORKER_IN_FLIGHT_MAX_GLOBAL"] = str(cap)
    slots = cap if share_owner == "deployment" else 64
    crew = make_crew(lambda url: {"models": {"m": deployment(url, max_in_flight=slots)}}, latency_ms=500, more=more)
    crew.start()
    lines = requests(80)
    batch_id = crew.site.submit(lines)
    wait_until(lambda: crew.most_at_once() == cap, END_S, "all slots to be used", poll_s=0.2)
    crew.kill_one()
    crew.add_worker()
    # What was in flight or unrecorded when the one died is called again.
    crew.site.judge(batch_id, lines, repeats_max=4 * IN_FLIGHT)
    assert crew.most_at_once() == cap


def test_interactive_calls_count_under_the_same_cap_in_every_process(make_crew: MakeCrew) -> None:
    """Two API processes and a worker, all at once, against a cap of four: the engine is the witness."""
    cap = 4
    more = {"TIDEGATE_WORKER_LEASE_MS": "8000"}
    crew = make_crew(lambda url: {"models": {"m": deployment(url, max_in_flight=cap)}}, latency_ms=200, more=more)
    crew.start(1)
    doors = [crew.site.url]
    crew.site.api()
    doors.append(crew.site.url)
    lines = requests(40)
    batch_id = crew.site.submit(lines)
    wait_until(lambda: crew.most_at_once() == cap, END_S, "all slots to be used by the batch", poll_s=0.2)
    ask = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
    with ThreadPoolExecutor(16) as pool:
        asked = [
            pool.submit(httpx2.post, f"{door}/v1/chat/completions", json=ask, timeout=60, trust_env=False)
            for _ in range(8)
            for door in doors
        ]
        answers = [one.result() for one in asked]
    assert {one.status_code for one in answers} == {200}, [one.text for one in answers if one.status_code != 200][:1]
    crew.site.judge(batch_id, lines)
    assert crew.most_at_once() == cap


@pytest.mark.soak
def test_a_short_deferral_never_overwrites_a_longer_one(make_crew: MakeCrew) -> None:
    """One call is asked to come back in ten minutes, and then another, which was on its way already, in a second."""
    crew = make_crew(lambda url: {"models": {"m": deployment(url)}}, latency_ms=20)
    crew.start(1)
    scripts = ["latency=3000,429:ra=600x1", "latency=6000,429:ra=1x1", "latency=6000", "latency=6000"]
    assert len(scripts) == IN_FLIGHT
    batch_id = crew.site.submit(
        requests(12, lambda number: behaving(scripts[number]) if number < IN_FLIGHT else f"say {number}")
    )
    wait_until(lambda: crew.site.batch(batch_id)["request_counts"]["completed"] == 2, END_S, "the two good ones")

    def given_back() -> bool:
        slices = crew.site.rows("select state, ready_at from slices where lease_count > 0")
        return all(one["state"] == "ready" and one["ready_at"] > (time.time() + 500) * 1000 for one in slices)

    wait_until(given_back, END_S, "what was put off to rest for the longer time", poll_s=0.2)
    assert len(crew.calls("m")) == IN_FLIGHT
    assert crew.site.rows("select max(count) as most from attempts")[0]["most"] in (None, 0)
