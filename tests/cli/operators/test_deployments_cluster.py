"""Deployments that an operator adds and removes are followed by every process of an installation over PostgreSQL."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.cli.conftest import Desk, Serving
from tests.support.engine import Engine
from tests.support.processes import Proc, Processes, wait_until
from tests.support.tidegate import ENDED, chat_line
from tests.upstream.raw_server import Peer, Request
from tests.web.upstream import Upstream, answers

EVERYWHERE_S = 60.0


class Cluster(Serving):
    """An API process and two workers over one database; each worker shows its metrics."""

    def __init__(self, desk: Desk, store_url: str) -> None:
        self.desk = desk
        self.variables = {"TIDEGATE_STORE_URL": store_url, "THE_KEY": "sk-over-there"}
        (desk.here / "c.yaml").write_text(
            f"models: {{fixed: {{deployments: [{{url: '{desk.engine.url}', name: steady}}]}}}}\n"
            "added: {env_names: [THE_KEY, NOT_THERE], folders: [/no]}\n"
        )
        self.proc: Proc = self.start("api", "--port", "0")
        self.url = self.proc.wait_for_line(r"^tidegate listening on (http://\S+)$").group(1)
        self.workers = [self.start("worker") for _ in range(2)]
        for worker in self.workers:
            worker.wait_for_line(r"tidegate worker_\w+ running")

    def start(self, *words: str, **more: str) -> Proc:
        return self.desk.start(*words, "--config", "c.yaml", **self.variables, **more)

    def did(self, *words: str) -> str:
        return self.desk.done(
            *words, "--config", "c.yaml", TIDEGATE_STORE_URL=self.variables["TIDEGATE_STORE_URL"]
        ).stdout()

    def listed(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.operate("deployments", method="GET")[1]["data"]
        return found

    def models(self) -> set[str]:
        return {one["id"] for one in self.call("GET", "/v1/models")[1]["data"]}

    def ended(self, batch: str) -> dict[str, Any]:
        def now() -> dict[str, Any] | None:
            batch_now: dict[str, Any] = self.call("GET", f"/v1/batches/{batch}")[1]
            return batch_now if batch_now["status"] in ENDED else None

        return wait_until(now, EVERYWHERE_S, f"{batch} to end")


def followed(proc: Proc, count: int) -> None:
    """This process has followed so many changes."""

    def there() -> bool:
        return (proc.stdout() + proc.stderr()).count("routing_changed") >= count

    wait_until(there, EVERYWHERE_S, f"{proc} to follow {count} changes")


def test_every_process_follows(desk: Desk, processes: Processes, migrated_postgres_url: str) -> None:
    cluster = Cluster(desk, migrated_postgres_url)
    other = Engine(processes, desk.here / "other")
    # The command has no key in its environment and need not: the processes that call have it.
    cluster.did("deployments", "add", "gpu", "--model", "m", "--url", other.url, "--api-key", "env:THE_KEY")
    wait_until(lambda: cluster.models() == {"fixed", "m"}, EVERYWHERE_S, "the API to follow")
    for worker in cluster.workers:
        followed(worker, 1)
    batch = cluster.submit([chat_line(f"c{number}", "hi") for number in range(40)])
    assert cluster.ended(batch)["request_counts"]["completed"] == 40
    assert len([call for call in other.calls() if call["path"] == "/v1/chat/completions"]) == 40

    # One worker dies in the middle and another begins: it knows what was added from the store.
    cluster.workers[0].kill()
    fresh = cluster.start("worker")
    fresh.wait_for_line(r"tidegate worker_\w+ running")
    cluster.did("deployments", "change", "gpu", "--set", f"url={desk.engine.url}")
    for worker in (cluster.workers[1], fresh):
        followed(worker, 2)
    batch = cluster.submit([chat_line(f"c{number}", "hi again") for number in range(8)])
    assert cluster.ended(batch)["request_counts"]["completed"] == 8
    assert len([call for call in other.calls() if call["path"] == "/v1/chat/completions"]) == 40

    cluster.did("deployments", "remove", "gpu")
    wait_until(lambda: cluster.models() == {"fixed"}, EVERYWHERE_S, "the API to follow")
    followed(fresh, 3)
    followed(cluster.workers[1], 3)
    batch = cluster.submit([chat_line("c0", "hi")])
    assert cluster.ended(batch)["request_counts"]["failed"] == 1


@pytest.mark.soak
def test_a_drained_deployment_gets_no_new_calls_from_any_process(desk: Desk, migrated_postgres_url: str) -> None:
    """What two workers have in flight there ends there; the rest waits or goes elsewhere. A process that starts later knows it too."""
    landing = asyncio.Event()

    async def script(request: Request, peer: Peer) -> None:
        if request.line.startswith("POST"):
            await landing.wait()
        await peer.answer()

    cluster = Cluster(desk, migrated_postgres_url)
    with Upstream(script) as one, Upstream(answers()) as two:
        cluster.did("deployments", "add", "gpu/1", "--model", "m", "--url", one.url, "--set", "max_in_flight=6")
        for process in (cluster.proc, *cluster.workers):
            followed(process, 1)
        first = cluster.submit([chat_line(f"c{number}", "hi") for number in range(60)])
        wait_until(lambda: len(one.posts) == 6, EVERYWHERE_S, "both workers to fill it")
        assert cluster.operate("deployments/gpu/1/drain")[1]["revision"] == 2
        for process in (cluster.proc, *cluster.workers):
            followed(process, 2)
        upstream_idle = len(one.posts)
        one._loop.call_soon_threadsafe(landing.set)

        def done() -> int:
            return int(cluster.call("GET", f"/v1/batches/{first}")[1]["request_counts"]["completed"])

        wait_until(lambda: done() == 6, EVERYWHERE_S, "what was in flight to end")
        cluster.workers[0].kill()
        fresh = cluster.start("worker")
        fresh.wait_for_line(r"tidegate worker_\w+ running")
        (shown,) = [row for row in cluster.listed() if row["name"] == "gpu/1"]
        assert (shown["is_drained"], shown["state"], shown["in_flight"]) == (True, "drained", 0)
        cluster.did("deployments", "add", "gpu/2", "--model", "m", "--url", two.url)
        assert cluster.ended(first)["request_counts"]["completed"] == 60
        assert (len(one.posts), upstream_idle, len(two.posts)) == (6, 6, 54), "nothing was sent there, nor sent twice"

        assert cluster.operate("deployments/gpu/2/drain")[0] == 200
        assert cluster.operate("deployments/gpu/1/resume")[0] == 200
        for process in (cluster.workers[1], fresh):
            process.wait_for_line("routing_changed.*number=5", EVERYWHERE_S)
        second = cluster.submit([chat_line(f"c{number}", "hi") for number in range(8)])
        assert cluster.ended(second)["request_counts"]["completed"] == 8
        assert (len(one.posts), len(two.posts)) == (14, 54)


def test_a_process_that_cannot_use_a_deployment_says_so_and_goes_on(desk: Desk, migrated_postgres_url: str) -> None:
    cluster = Cluster(desk, migrated_postgres_url)
    cluster.did("deployments", "add", "gpu", "--model", "m", "--url", desk.engine.url, "--api-key", "env:NOT_THERE")
    cluster.did(
        "deployments", "add", "tls", "--model", "m", "--url", "https://h/v1", "--set", "tls={ca_file: /no/such/file}"
    )

    def listed() -> dict[str, str]:
        return {one["name"]: one["why"] for one in cluster.listed()}

    wait_until(lambda: bool(listed()["tls"]), EVERYWHERE_S, "the API to look")
    assert "NOT_THERE, which is not set" in listed()["gpu"]
    assert "check that each exists" in listed()["tls"]
    assert listed()["steady"] == ""
    assert cluster.models() == {"fixed"}
    batch = cluster.submit([chat_line(f"c{number}", "hi").replace('"m"', '"fixed"') for number in range(4)])
    assert cluster.ended(batch)["request_counts"]["completed"] == 4


def test_what_holds_for_a_model_holds_over_every_process(desk: Desk, migrated_postgres_url: str) -> None:
    """Its calls in flight are counted over both workers, and each tries its items as often as was set."""
    landing = asyncio.Event()
    flying, highest = 0, 0

    async def script(request: Request, peer: Peer) -> None:
        nonlocal flying, highest
        if request.line.startswith("POST"):
            flying += 1
            highest = max(highest, flying)
            await landing.wait()
            flying -= 1
        await peer.answer(500 if b"fail" in request.body else 200)

    cluster = Cluster(desk, migrated_postgres_url)
    with Upstream(script) as upstream:
        cluster.did("deployments", "add", "gpu", "--model", "m", "--url", upstream.url, "--set", "max_in_flight=32")
        cluster.did("models", "add", "m", "--set", "in_flight_max=3", "--set", "retry={attempts_max: 1}")
        for process in (cluster.proc, *cluster.workers):
            process.wait_for_line("routing_changed.*number=2", EVERYWHERE_S)
        batch = cluster.submit([chat_line(f"c{number}", "hi") for number in range(40)])
        wait_until(lambda: flying == 3, EVERYWHERE_S, "three calls there")
        upstream._loop.call_soon_threadsafe(landing.set)
        assert cluster.ended(batch)["request_counts"]["completed"] == 40
        assert highest == 3
        batch = cluster.submit([chat_line(f"c{number}", "fail") for number in range(4)])
        assert cluster.ended(batch)["request_counts"]["failed"] == 4
        assert len(upstream.posts) == 44, "none was tried again"
