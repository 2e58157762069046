"""Asynchronous sending with workers, a real Redis and a stand-in for the processor: whichever dies, no answer is lost or paid for twice."""

from __future__ import annotations

import json
import secrets
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from redis import Redis

from tests.support.engine import Engine
from tests.support.processes import Proc, Processes, wait_until
from tests.support.redis import RedisServer
from tests.support.tidegate import ASK_S, END_S, UNRECORDED_MAX, Site, requests

ITEMS = 24


class Queued:
    """A site whose one deployment has a queue, and the processors that take from it."""

    def __init__(self, site: Site, redis_url: str, **more: Any) -> None:
        self.site = site
        self.redis_url = redis_url
        self.pool = f"pool-{secrets.token_hex(6)}"
        self.redis: Any = Redis.from_url(redis_url)
        self.requests = f"llm-d-async:requests:{self.pool}"
        self.results = f"llm-d-async:results:{self.pool}:tidegate"
        queue = {"url": redis_url, "pool": self.pool, **more}
        deployment = {"url": site.engine.url, "queue": queue, "max_in_flight": 64, "name": "queued"}
        site.configure(models={"m": {"deployments": [deployment]}})
        site.env["TIDEGATE_UPSTREAM_URL"] = ""

    def processor(self) -> Proc:
        command = [sys.executable, "-m", "tidegate.simulate.processor", "--redis", self.redis_url]
        command += ["--pool", self.pool, "--upstream", self.site.engine.url]
        proc = self.site.processes.start(command, name="processor")
        proc.wait_for_line(r"simulated processor takes from")
        return proc

    def until(self, there: Callable[[], Any], what: str) -> None:
        wait_until(there, END_S, what, poll_s=ASK_S)

    def waiting(self) -> int:
        return int(self.redis.zcard(self.requests))

    def kept(self) -> int:
        return int(self.redis.hlen(self.results + ":kept"))

    def dead(self) -> list[bytes]:
        return list(self.redis.lrange(self.results + ":dead", 0, -1))

    def is_clean(self) -> bool:
        """Nothing of ours is left in Redis but the memory of what was recorded."""
        sent = [self.redis.get(key) for key in self.redis.scan_iter(self.results + ":sent:*")]
        return not self.waiting() and not self.kept() and all(state in (b"done", None) for state in sent)

    def judge(self, batch_id: str, lines: list[str], **more: Any) -> None:
        self.site.judge(batch_id, lines, **more)
        self.until(self.is_clean, "every result to be acknowledged")

    def judge_but_for_what_died(self, batch_id: str, lines: list[str]) -> None:
        """The same after a kill: what was recorded and not acknowledged by then lies there until its time is over; nothing else does."""
        self.site.judge(batch_id, lines, repeats_max=0)
        self.until(lambda: self.waiting() == 0, "the queue to be empty")
        self.until(lambda: self.kept() <= UNRECORDED_MAX, "all others to be acknowledged")
        assert not self.dead()


@pytest.fixture
def queue_site(processes: Processes, tmp_path: Path, slow_engine: Engine, migrated_postgres_url: str) -> Iterator[Site]:
    """PostgreSQL, and blobs in a directory that all its processes share."""
    yield Site("cluster", processes, tmp_path, slow_engine, {"TIDEGATE_STORE_URL": migrated_postgres_url})
    processes.close()


@pytest.fixture
def queued(queue_site: Site, redis_url: str) -> Queued:
    return Queued(queue_site, redis_url)


def test_a_batch_goes_through_the_queue_with_two_workers_at_it(queued: Queued) -> None:
    """llm-d's #644: two replicas over one list of results took each other's."""
    lines = requests(ITEMS)
    queued.site.begin()
    queued.site.worker(name="second")
    queued.processor()
    batch_id = queued.site.submit(lines)
    queued.judge(batch_id, lines)
    assert not queued.dead()


@pytest.mark.parametrize(
    "border",
    [
        "record_durable=kill",
        pytest.param("after_answer=5*kill", marks=pytest.mark.soak),
        pytest.param("after_answer=kill", marks=pytest.mark.soak),
        pytest.param("record_committed=kill", marks=pytest.mark.soak),
    ],
)
def test_an_answer_that_came_before_its_worker_died_is_found_again(queued: Queued, border: str) -> None:
    """llm-d's async_result_destruction: taking a result out of the list before it is recorded loses it."""
    lines = requests(ITEMS)
    queued.processor()
    victim = queued.site.begin(border)
    batch_id = queued.site.submit(lines)
    assert victim.wait() == -9
    queued.site.relieve()
    queued.judge_but_for_what_died(batch_id, lines)


def test_requests_of_a_dead_worker_are_adopted_while_they_lie_in_the_queue(queued: Queued) -> None:
    lines = requests(ITEMS)
    victim = queued.site.begin()
    batch_id = queued.site.submit(lines)
    queued.until(lambda: queued.waiting() > 0, "requests in the queue")
    victim.kill()
    before = {message for message, _ in queued.redis.zrange(queued.requests, 0, -1, withscores=True)}
    queued.site.relieve()
    queued.processor()
    queued.judge(batch_id, lines, repeats_max=0)
    called = {str(call["idempotency_key"]) for call in queued.site.calls()}
    assert {json.loads(message)["data"]["headers"]["Idempotency-Key"] for message in before} <= called


@pytest.mark.soak
def test_requests_of_a_dead_worker_are_adopted_while_they_run(queued: Queued) -> None:
    lines = requests(ITEMS)
    victim = queued.site.begin()
    processor = queued.processor()
    processor.stop()
    batch_id = queued.site.submit(lines)
    queued.until(lambda: queued.waiting() > 0, "requests in the queue")
    processor.cont()
    queued.site.until_called(1)
    victim.kill()
    queued.site.relieve()
    queued.judge_but_for_what_died(batch_id, lines)


def test_cancelling_takes_back_what_no_processor_has_taken(queued: Queued) -> None:
    lines = requests(ITEMS)
    queued.site.begin(more={"TIDEGATE_WORKER_GRACE_MS": "200"})
    batch_id = queued.site.submit(lines)
    queued.until(lambda: queued.waiting() > 0, "requests in the queue")
    queued.site.cancel(batch_id)
    queued.site.until_status(batch_id, "cancelled")
    queued.until(lambda: queued.waiting() == 0, "the queue to be empty")
    queued.processor()
    assert not queued.site.calls()
    queued.site.judge(batch_id, lines, status="cancelled")


def test_a_worker_that_stops_leaves_the_rest_to_the_next(queued: Queued) -> None:
    lines = requests(ITEMS)
    first = queued.site.begin(more={"TIDEGATE_WORKER_GRACE_MS": "200"})
    batch_id = queued.site.submit(lines)
    queued.until(lambda: queued.waiting() > 0, "requests in the queue")
    first.terminate()
    assert first.wait() == 0, first.logs()
    assert queued.waiting() == 0
    queued.site.relieve()
    queued.processor()
    queued.judge(batch_id, lines, repeats_max=0)


def test_redis_that_forgets_everything_costs_a_try_and_no_item(queue_site: Site, private_redis: RedisServer) -> None:
    queued = Queued(queue_site, private_redis.url)
    lines = requests(8)
    queue_site.begin(more={"TIDEGATE_RETRY_ATTEMPTS_MAX": "5"})
    batch_id = queue_site.submit(lines)
    queued.until(lambda: queued.waiting() > 0, "requests in the queue")
    private_redis.command("FLUSHALL")
    queued.processor()
    # What lay there was not sent, but no process can know that: each may have been paid for once.
    queued.judge(batch_id, lines, repeats_max=len(lines))


@pytest.mark.soak
def test_redis_that_is_away_for_a_while_is_waited_for(queue_site: Site, private_redis: RedisServer) -> None:
    queued = Queued(queue_site, private_redis.url)
    lines = requests(ITEMS)
    worker = queue_site.begin()
    batch_id = queue_site.submit(lines)
    queued.until(lambda: queued.waiting() > 0, "requests in the queue")
    private_redis.pause()
    wait_until(lambda: "queue_unreachable" in worker.logs(), END_S, "the worker to notice")
    private_redis.resume()
    queued.processor()
    queued.judge(batch_id, lines, repeats_max=0)


def test_a_paused_worker_takes_nothing_back_from_its_successor(queued: Queued) -> None:
    lines = requests(ITEMS)
    paused = queued.site.begin()
    batch_id = queued.site.submit(lines)
    queued.until(lambda: queued.waiting() > 0, "requests in the queue")
    paused.stop()
    queued.site.worker(name="next")
    queued.until(lambda: queued.site.is_gone(paused), "the paused one to be declared gone")
    paused.cont()
    queued.processor()
    queued.judge(batch_id, lines, repeats_max=0)


@pytest.mark.soak
def test_a_processor_that_dies_with_what_it_took_costs_a_try(queue_site: Site, redis_url: str) -> None:
    queued = Queued(queue_site, redis_url, timeout_s=8.0)
    queue_site.env |= {"TIDEGATE_RETRY_ATTEMPTS_MAX": "9"}
    lines = requests(4)
    queue_site.begin()
    batch_id = queue_site.submit(lines)
    queued.until(lambda: queued.waiting() > 0, "requests in the queue")
    queued.redis.zpopmin(queued.requests, 100)
    queued.processor()
    # No process can know that the first try was never sent.
    queue_site.judge(batch_id, lines, repeats_max=len(lines))
