"""Background responses as their users have them: the official SDK, and a server that is killed while they run."""

from __future__ import annotations

import random
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2
import pytest

from tests.support.engine import Engine
from tests.support.processes import Proc, Processes, wait_until
from tests.support.sdks import openai
from tests.support.sse import events
from tests.support.tidegate import Site
from tests.support.tidegate import requests as chats

IN_FLIGHT = 16
PATH = "/v1/responses"


@pytest.fixture
def site(processes: Processes, tmp_path: Path) -> Site:
    engine = Engine(processes, tmp_path / "engine", latency_ms=20)
    more = {"TIDEGATE_WORKER_IN_FLIGHT_MAX": str(IN_FLIGHT), "TIDEGATE_UPSTREAM_MAX_IN_FLIGHT": str(IN_FLIGHT)}
    return Site("embedded", processes, tmp_path, engine, more)


def test_every_call_of_the_sdk(site: Site) -> None:
    site.serve()
    client = openai.OpenAI(base_url=f"{site.url}/v1", api_key="none", max_retries=0)
    made = client.responses.create(model="m", input="Hello", background=True, metadata={"a": "b"})
    assert (made.status, made.background, made.metadata) == ("queued", True, {"a": "b"})
    waited = client.responses.retrieve(made.id, extra_headers={"Prefer": "wait=30"})
    assert (waited.id, waited.status, waited.service_tier) == (made.id, "completed", "flex")
    assert waited.output_text
    assert waited.usage is not None
    assert client.responses.retrieve(made.id).output_text == waited.output_text
    client.responses.delete(made.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(made.id)
    # Autobatcher's way: the flex tier in the background, and a cancel.
    site.engine.set_faults({"hang": 1.0})
    held = client.responses.create(model="m", input="Hold", background=True, service_tier="flex")
    wait_until(lambda: client.responses.retrieve(held.id).status == "in_progress", what="the call to begin")
    assert client.responses.cancel(held.id).status == "cancelled"
    assert client.responses.cancel(held.id).status == "cancelled"
    assert client.responses.retrieve(held.id).status == "cancelled"
    with pytest.raises(openai.BadRequestError, match="stream"):
        client.responses.create(model="m", input="x", background=True, stream=True)


def test_a_response_that_waited_through_a_kill_goes_like_an_interactive_call(site: Site) -> None:
    proc = site.serve()
    client = openai.OpenAI(base_url=f"{site.url}/v1", api_key="none", max_retries=0)
    site.engine.set_faults({"hang": 1.0})
    after = {"interactive_after_seconds": 2}
    made = client.responses.create(model="m", input="Hello", background=True, extra_body=after)
    begun_s = time.monotonic()
    wait_until(lambda: client.responses.retrieve(made.id).status == "in_progress", what="its first call")
    proc.kill()
    proc.wait()
    site.engine.set_faults({})
    time.sleep(max(0.0, begun_s + 2 - time.monotonic()))
    site.serve()
    again = openai.OpenAI(base_url=f"{site.url}/v1", api_key="none", max_retries=0)
    waited = again.responses.retrieve(made.id, extra_headers={"Prefer": "wait=60"})
    assert (waited.status, waited.service_tier) == ("completed", "default")
    site.verify(made.id.replace("resp_", "batch_"))


class Callers:
    """Clients that make background responses and read them, whatever becomes of the server meanwhile."""

    def __init__(self, site: Site) -> None:
        self._site = site
        self.answers: dict[int, dict[str, Any]] = {}
        self.ids: dict[int, str] = {}

    def call(self, number: int) -> None:
        body = {"model": "m", "input": f"say {number}", "background": True}
        key = {"Idempotency-Key": f"call-{number}"}
        made = self._until_answered("POST", PATH, json=body, headers=key).json()
        self.ids[number] = made["id"]
        while made["status"] in ("queued", "in_progress"):
            made = self._until_answered("GET", f"{PATH}/{made['id']}", headers={"Prefer": "wait=5"}).json()
            assert made["id"] == self.ids[number]
        self.answers[number] = made

    def _until_answered(self, method: str, path: str, **more: Any) -> httpx2.Response:
        while True:
            try:
                answer = httpx2.request(method, self._site.url + path, timeout=30, **more)
            except httpx2.TransportError:
                answer = None
            if answer is not None and answer.status_code not in (429, 503):
                assert answer.status_code == 200, answer.text
                return answer
            time.sleep(random.uniform(0.05, 0.3))


def serve(site: Site) -> Proc:
    return site.serve(more={"TIDEGATE_WORKER_POLL_MS": "1000", "TIDEGATE_WORKER_RECORD_FLUSH_MS": "50"})


def run_with_kills(site: Site, count: int, kills: int) -> None:
    """Each call gets one answer, the same whenever it is read, and no item is called more often than kills explain."""
    proc = serve(site)
    callers = Callers(site)
    with ThreadPoolExecutor(48) as pool:
        calls = [pool.submit(callers.call, number) for number in range(count)]
        try:
            for kill in range(kills):
                goal = count * (kill + 1) // (kills + 1)
                wait_until(lambda goal=goal: len(callers.answers) >= goal, 300, f"{goal} answers")  # type: ignore[misc]
                proc.kill()
                proc.wait()
                proc = serve(site)
            for one in calls:
                one.result(300)
        finally:
            for one in calls:
                one.cancel()
    assert len(set(callers.ids.values())) == count
    assert {answer["status"] for answer in callers.answers.values()} == {"completed"}
    for number in random.sample(range(count), min(count, 100)):
        again = httpx2.get(f"{site.url}{PATH}/{callers.ids[number]}").json()
        assert again == callers.answers[number]
    for number in random.sample(range(count), 5):
        site.verify(callers.ids[number].replace("resp_", "batch_"))
    called = Counter(call["idempotency_key"] for call in site.engine.calls())
    repeats = sum(called.values()) - len(called)
    print(f"{count} calls, {kills} kills: {repeats} repeated", file=sys.stderr)
    assert len(called) == count
    assert repeats <= kills * 4 * IN_FLIGHT


def test_a_killed_server_loses_no_response_and_answers_each_once(site: Site) -> None:
    run_with_kills(site, 200, 2)


@pytest.mark.soak
@pytest.mark.timeout(1_800)
def test_twenty_kills_under_ten_thousand_responses(site: Site) -> None:
    run_with_kills(site, 10_000, 20)


def test_processes_apart_wake_each_other(processes: Processes, tmp_path: Path, cluster_env: dict[str, str]) -> None:
    """With polls of a minute, a response and a batch are run and their ends are seen at once: the database carries the wake-ups."""
    engine = Engine(processes, tmp_path / "engine", latency_ms=20)
    site = Site("cluster", processes, tmp_path, engine, {**cluster_env, "TIDEGATE_WORKER_POLL_MS": "60000"})
    site.begin()
    ask = {"model": "m", "input": "Hello", "background": True}

    def answered() -> bool:
        # Nothing is sent to the worker before it reports that it waits.
        answer = site.client().post(PATH, json=ask, headers={"Prefer": "wait=3"}).json()
        return bool(answer["status"] == "completed")

    wait_until(answered, 40, "a response within three seconds")
    batch_id = site.submit(chats(3))
    with site.client().stream("GET", f"/v1/batches/{batch_id}/events") as stream:
        kinds = [event.kind for event in events(stream.iter_lines())]
    assert kinds[-1] == "batch.completed"
    assert kinds.count("item.completed") == 3
    site.processes.close()
