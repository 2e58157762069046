"""Items that share calls, as a user gets them: a real server with its worker, the simulated engine, and the judge with that one's log."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.engine import Engine
from tests.support.processes import Processes
from tests.support.tidegate import Site, behaving, chat_line

GROUP = 8
MakeSite = Callable[..., Site]


@pytest.fixture
def make_site(processes: Processes, tmp_path: Path) -> MakeSite:
    """One process that serves `m` in groups as `place` says, and `alone` without; both at the same engine."""

    def make(place: dict[str, Any], latency_ms: int = 20) -> Site:
        engine = Engine(processes, tmp_path / "engine", latency_ms=latency_ms)
        models = {
            "m": {"deployments": [{"url": engine.url, "max_in_flight": 2, "tide": "off", **place}]},
            "alone": {"deployments": [{"url": engine.url, "max_in_flight": 4, "tide": "off"}]},
        }
        site = Site("embedded", processes, tmp_path, engine)
        site.configure(models=models)
        return site

    return make


def embedding_line(custom_id: str, text: str, model: str = "m") -> str:
    body = {"model": model, "input": text}
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": "/v1/embeddings", "body": body})


def items_of(call: dict[str, Any]) -> int:
    """How many items a call in the engine's log was for, by its key."""
    key = call["idempotency_key"]
    if not key.startswith("batch_grp_"):
        return 1
    runs = [run.split("-") for run in key.split("_")[3].split(".")]
    return sum(int(run[-1]) - int(run[0]) + 1 for run in runs)


def texts(count: int) -> list[str]:
    return [f"document {number} " + "and the sea " * (number % 5) for number in range(count)]


def test_embeddings_in_groups_are_those_of_single_calls_and_their_usage_adds_up(make_site: MakeSite) -> None:
    site = make_site({"upstream_max_batch_inputs": GROUP})
    site.begin()
    lines = [
        embedding_line(f"{model} {number}", text, model)
        for model in ("m", "alone")
        for number, text in enumerate(texts(120))
    ]
    batch_id = site.submit(lines, endpoint="/v1/embeddings")
    results = site.judge(batch_id, lines)
    bodies = {line["custom_id"]: line["response"]["body"] for line in results.output}
    for number in range(120):
        assert bodies[f"m {number}"]["data"] == bodies[f"alone {number}"]["data"]
    calls = [call for call in site.calls_of(batch_id) if call["model"] == "m"]
    sizes = [items_of(call) for call in calls]
    assert sum(sizes) == 120
    assert 1 < max(sizes) <= GROUP
    assert len(sizes) < 120
    used = sum(body["usage"]["prompt_tokens"] for body in bodies.values())
    assert used == results.batch["usage"]["input_tokens"]
    assert used == sum(call["tokens"] for call in site.calls_of(batch_id))


def test_an_input_that_the_engine_refuses_fails_alone(make_site: MakeSite) -> None:
    site = make_site({"upstream_max_batch_inputs": GROUP})
    site.begin()
    lines = [embedding_line(f"c{at}", behaving("400") if at == 7 else text) for at, text in enumerate(texts(30))]
    batch_id = site.submit(lines, endpoint="/v1/embeddings")
    results = site.judge(batch_id, lines)
    assert [line["custom_id"] for line in results.errors] == ["c7"]
    assert results.errors[0]["response"]["status_code"] == 400


def test_a_killed_process_loses_nothing_of_a_group(make_site: MakeSite) -> None:
    site = make_site({"upstream_max_batch_inputs": GROUP}, latency_ms=100)
    first = site.begin()
    lines = [embedding_line(f"c{at}", text) for at, text in enumerate(texts(150))]
    batch_id = site.submit(lines, endpoint="/v1/embeddings")
    site.until_done(batch_id, GROUP)
    first.kill()
    site.relieve()
    results = site.judge(batch_id, lines, repeats_max=2 * GROUP)
    assert results.errors == []
    assert any(items_of(call) > 1 for call in site.calls_of(batch_id))


def test_chat_items_in_provider_batches_are_those_of_single_calls(make_site: MakeSite) -> None:
    batching = {"mode": "sync_microbatch", "adapter": "results", "upstream_max_batch_size": GROUP}
    site = make_site({"chat_batching": batching})
    site.begin()
    lines = [chat_line(f"{model} {at}", f"say {at}", model) for model in ("m", "alone") for at in range(60)]
    batch_id = site.submit(lines)
    results = site.judge(batch_id, lines)
    bodies = {line["custom_id"]: line["response"]["body"] for line in results.output}
    for at in range(60):
        one, other = bodies[f"m {at}"], bodies[f"alone {at}"]
        assert (one["choices"], one["usage"]) == (other["choices"], other["usage"])
    sizes = [items_of(call) for call in site.calls_of(batch_id) if call["model"] == "m"]
    assert sum(sizes) == 60
    assert 1 < max(sizes) <= GROUP
