"""What an autoscaler learns with two pools and in odd states: pauses, late and early batches, servers that are gone, users only."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import Any

import pytest
from msgspec.structs import replace

from tests.support.processes import wait_until
from tests.upstream.raw_server import CHAT, Peer, Request
from tests.web import stages
from tests.web.calls import create, upload
from tests.web.server import NOWHERE, WebServer
from tests.web.upstream import Upstream
from tidegate.settings.capacity import ModelDeployment, ModelSettings, ResourceEntry
from tidegate.upstream.routing.slots import Slots

M = stages.MODEL


class Operator:
    def __init__(self, web: WebServer) -> None:
        self.web = web
        self.tenant = web.client(web.make_key("ours"))
        self._admin = web.client(web.make_key("ops", scopes=["admin:write"]))

    def needed(self, path: str = "") -> Any:
        answer = self._admin.get(f"/admin/v1/autoscale{path}")
        assert answer.status_code == 200, answer.text
        return answer.json()

    def counts(self, model: str = M) -> tuple[int, int]:
        """Return how many replicas of a model and how many workers are needed."""
        found = self.needed()
        return found["models"][model]["replicas_needed"], found["workers"]["replicas_needed"]

    def running(self, **more: Any) -> str:
        """Return a batch that was ingested and waits to run."""
        return stages.running(self.web, self.tenant, 3, **more)


@pytest.fixture
def two_pools(start_web: Any) -> Operator:
    pools = (
        ModelDeployment(NOWHERE, name="users", serves="interactive", max_in_flight=4),
        ModelDeployment(NOWHERE, name="batches/1", serves="batch", max_in_flight=100),
        ModelDeployment(NOWHERE, name="batches/2", serves="batch", max_in_flight=100),
    )
    return Operator(start_web(models={M: ModelSettings(pools)}, resources={"nightly": ResourceEntry(model=M)}))


def test_each_pool_has_a_count_and_a_reason(two_pools: Operator) -> None:
    idle = two_pools.needed()["models"][M]
    assert (idle["replicas_needed"], set(idle["pools"])) == (0, {"batch", "interactive"})
    two_pools.running()
    model = two_pools.needed(f"/models/{M}")
    assert {name: pool["replicas_needed"] for name, pool in model["pools"].items()} == {"batch": 2, "interactive": 0}
    assert model["replicas_needed"] == 2
    assert model["pools"]["batch"]["why"] == "Work waits, and no rate was measured yet."
    assert model["pools"]["batch"]["why"] in model["why"]
    # Two replicas of 100 calls keep four workers of 64 busy.
    assert two_pools.needed("/workers")["replicas_needed"] == 4
    assert two_pools.needed("/models/nightly") == model, "a resource is served by the replicas of its model"


def test_what_one_replica_does_is_measured_over_those_that_run_batches(two_pools: Operator) -> None:
    two_pools.running()
    web = two_pools.web
    columns, minute = "model, minute, worker_id, units, tokens, items", web.clock.now_ms() // 60_000 - 1
    web.rewrite(f"insert into rates ({columns}) values ('{M}', {minute}, 'w', 240, 9, 9)")  # noqa: S608 - our own text
    why = two_pools.needed()["models"][M]["pools"]["batch"]
    assert why["replicas_needed"] == 1
    assert "one replica did " in why["why"]
    assert 0 < why["scale_by"] < 0.5, "far less than the two that there are"


def test_a_share_of_no_slots_here_does_not_count_as_no_work(start_web: Any) -> None:
    """An API process beside workers holds few slots of a deployment, or none."""
    place = ModelDeployment(NOWHERE, name="one", max_in_flight=130)
    operator = Operator(start_web(models={M: ModelSettings((place,))}))
    operator.running()
    [state] = operator.web.router._states.values()
    state.slots = Slots("one", 130, 0)
    assert operator.counts() == (1, 3)


def test_odd_states_never_ask_for_none_while_something_waits(two_pools: Operator) -> None:
    ingesting = create(two_pools.tenant, upload(two_pools.tenant))["id"]
    assert two_pools.counts() == (0, 1), "its input is checked first: nothing is known of its models"
    two_pools.tenant.post(f"/v1/batches/{ingesting}/cancel")
    assert two_pools.counts() == (0, 1), "a worker has to end it"
    assert two_pools.web.run(two_pools.web.store.end_unstarted(ingesting))
    assert two_pools.counts() == (0, 0)

    later = two_pools.running(not_before=int(time.time()) + 7200)
    assert two_pools.counts()[0] == 2, "it waits for its time"
    assert two_pools.tenant.post(f"/v1/batches/{later}/pause").status_code == 200
    assert two_pools.counts() == (0, 0), "it runs only after someone resumes it"
    assert two_pools.tenant.post(f"/v1/batches/{later}/resume").status_code == 200
    two_pools.web.rewrite("update job_models set due_at = 1")
    late = two_pools.needed()["models"][M]["pools"]["batch"]
    assert late["replicas_needed"] >= 2


def test_replicas_that_are_gone_or_drained_are_asked_for_again(start_web: Any) -> None:
    places = [ModelDeployment(NOWHERE, name=name) for name in ("one", "two")]
    operator = Operator(start_web(models={M: ModelSettings(tuple(places))}))
    batch_id = operator.running()
    for state in operator.web.router._states.values():
        while not state.breaker.is_open:
            state.breaker.failed(operator.web.clock.monotonic_ms())
    found = operator.needed(f"/models/{M}")
    assert found["replicas_needed"] == 2
    assert found["why"].endswith("2 of 2 deployments are unhealthy.")
    for state in operator.web.router._states.values():
        state.update(replace(state.deployment, is_drained=True), state.client, state.control)
    assert operator.needed(f"/models/{M}") == {
        "scale_by": 1.0,
        "replicas_needed": 1,
        "why": "Work waits, and no deployment takes it.",
    }
    operator.tenant.post(f"/v1/batches/{batch_id}/cancel")
    assert operator.counts() == (0, 1)


def test_users_alone_keep_their_pool_and_no_worker(start_web: Any) -> None:
    released = threading.Event()

    async def script(request: Request, peer: Peer) -> None:
        await asyncio.to_thread(released.wait, 60)
        await peer.answer(200, CHAT)

    upstream = Upstream(script)
    try:
        place = ModelDeployment(upstream.url, name="one", max_in_flight=2)
        operator = Operator(start_web(models={M: ModelSettings((place,))}))
        body = {"model": M, "messages": [{"role": "user", "content": "hello"}]}
        calling = threading.Thread(target=lambda: operator.tenant.post("/v1/chat/completions", json=body), daemon=True)
        calling.start()
        wait_until(lambda: operator.counts() == (1, 0), 30, "the call to be counted")
        assert operator.needed(f"/models/{M}")["why"] == "1 interactive call needs 1."
        released.set()
        calling.join(30)
        wait_until(lambda: operator.counts() == (0, 0), 30, "the call to end")
    finally:
        released.set()
        upstream.close()
