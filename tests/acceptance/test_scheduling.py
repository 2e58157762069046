"""Who comes next, seen from outside: tenants with keys of their own, real workers, and the order in which calls reached the engine."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import httpx2
import pytest

from tests.acceptance.conftest import MakeCrew
from tests.support.crew import Crew, deployment, items_of, per_minute
from tests.support.processes import Proc, free_port, wait_until
from tests.support.tidegate import END_S, IN_FLIGHT, Site, behaving, requests
from tidegate.core.ids import job_part

WORKERS = 2
SLICE_ITEMS = 4
# What a worker may hold of anyone when a new tenant comes: calls in flight, and half as many again with a slice that overshoots.
HELD_MAX = WORKERS * (IN_FLIGHT + IN_FLIGHT + SLICE_ITEMS - 1)
# The bound of fair share: (workers + 1) slices, and the largest item.
BOUND = (WORKERS + 1) * SLICE_ITEMS + 1
POLL_S = 0.2


def _slow(ms: int) -> Callable[[int], str]:
    return lambda number: f"{number} {behaving(f'latency={ms}')}"


def _crew(make_crew: MakeCrew, config: Mapping[str, Any] | None = None, workers: int = WORKERS) -> Crew:
    crew = make_crew(lambda url: {"models": {"m": deployment(url)}, **(config or {})}, latency_ms=20)
    crew.start(workers)
    return crew


def _before(calls: Sequence[Mapping[str, Any]], batch_id: str) -> int:
    """How many calls came before the first one of a batch."""
    mine = f"batch_req_{job_part(batch_id)}"
    return next(number for number, item in enumerate(items_of(calls)) if item.startswith(mine))


def _of(calls: Sequence[Mapping[str, Any]], batch_id: str) -> int:
    mine = f"batch_req_{job_part(batch_id)}"
    return sum(item.startswith(mine) for item in items_of(calls))


def _in_progress(site: Site, batch_id: str) -> None:
    site.until_status(batch_id, "in_progress", "finalizing", "completed")


def test_a_small_tenant_starts_within_one_round_and_ends_long_before(make_crew: MakeCrew) -> None:
    """One tenant has fifty times the work of the other and came first."""
    crew = _crew(make_crew)
    large, small = crew.site.keyed("large"), crew.site.keyed("small")
    heavy = large.submit(requests(200, _slow(3_000)))
    crew.until_called(WORKERS * IN_FLIGHT)
    light = small.submit(requests(SLICE_ITEMS))
    _in_progress(small, light)
    seen = len(crew.calls())
    assert small.ended(light).batch["request_counts"]["completed"] == SLICE_ITEMS
    calls = crew.calls()
    assert _before(calls, light) - seen <= HELD_MAX + BOUND
    counts = large.batch(heavy)["request_counts"]
    assert counts["completed"] < 100, "the small one ends while most of the large one still waits"
    assert small.client().get(f"/v1/batches/{heavy}").status_code == 404


@pytest.mark.soak
def test_weights_are_what_tenants_get_of_a_model(make_crew: MakeCrew) -> None:
    config = {"tiers": {"gold": 4, "plain": 1}, "tenants": {"rich": {"tier": "gold"}, "poor": {"tier": "plain"}}}
    crew = _crew(make_crew, config)
    rich, poor = crew.site.keyed("rich"), crew.site.keyed("poor")
    first = rich.submit(requests(600, _slow(400)))
    second = poor.submit(requests(400, _slow(400)))
    _in_progress(poor, second)
    seen = len(crew.calls())
    assert _of(crew.calls(), first) < 400, "both must have work enough for the rest of the story"
    crew.until_called(seen + 160)
    calls = crew.calls()[seen : seen + 160]
    # 128 and 32, give or take what is held and the bound.
    assert 2 * _of(calls, second) < _of(calls, first)
    assert _of(calls, second) >= 8


@pytest.mark.soak
def test_the_mode_is_switched_while_everything_runs(make_crew: MakeCrew) -> None:
    crew = _crew(make_crew)
    large, small = crew.site.keyed("large"), crew.site.keyed("small")
    answer = json.loads(crew.command("scheduler", "set", "fifo_v1", "--shadow", "fair_share_v1", "--json").stdout())
    assert (answer["mode"], answer["shadow_mode"], answer["mode_switched"]) == ("fifo_v1", "fair_share_v1", True)
    for worker in crew.workers:
        worker.wait_for_line(r"scheduler_switched\s+mode=fifo_v1 shadow_mode=fair_share_v1")
    heavy = large.submit(requests(200, _slow(2_000)))
    crew.until_called(WORKERS * IN_FLIGHT)
    light = small.submit(requests(SLICE_ITEMS))
    # The shadow would have chosen otherwise and says so; the tenant that came first is still served first.
    wait_until(
        lambda: any(_has_logged(worker, "scheduler_shadow_differs") for worker in crew.workers), END_S, "the shadow"
    )
    assert _of(crew.calls(), light) == 0
    assert _of(crew.calls(), heavy) < 200
    crew.command("scheduler", "set", "configured", "--shadow", "none")
    for worker in crew.workers:
        worker.wait_for_line(r"scheduler_switched\s+mode=smart_v1 shadow_mode=none")
    assert small.ended(light).batch["request_counts"]["completed"] == SLICE_ITEMS
    assert large.batch(heavy)["request_counts"]["completed"] < 150, "with shares the small one ends long before"


def _has_logged(worker: Proc, words: str) -> bool:
    return words in worker.stdout() + worker.stderr()


def _metrics(port: int) -> dict[str, float]:
    text = httpx2.get(f"http://127.0.0.1:{port}/metrics", timeout=30, trust_env=False).text
    rows = [line.rpartition(" ") for line in text.splitlines() if line and not line.startswith("#")]
    return {name: float(value) for name, _, value in rows}


def test_a_workers_metrics_tell_of_fairness_and_limits(make_crew: MakeCrew) -> None:
    crew = make_crew(
        lambda url: {
            "models": {"m": deployment(url), "tight": deployment(url, limits=per_minute(5))},
            "scheduler": {"shadow_mode": "fifo_v1"},
        },
        latency_ms=20,
    )
    port = free_port()
    crew.site.api()
    crew.add_worker({"TIDEGATE_METRICS_PORT": str(port)})
    acme, globex = crew.site.keyed("acme"), crew.site.keyed("globex")
    acme.submit(requests(100, _slow(500)))
    globex.submit(requests(100, _slow(500)))
    tight = acme.submit(requests(12, model="tight"))
    crew.until_called(5, "tight")

    def all_shown() -> bool:
        shown = _metrics(port)
        return (
            shown.get('tidegate_limits_granted_requests_total{bound="deployment"}', 0) >= 5
            and shown.get('tidegate_limits_spent_total{bound="deployment"}', 0) >= 1
            and 'tidegate_scheduler_fairness_gap_tokens{model="m"}' in shown
            and shown["tidegate_scheduler_shadow_decisions_total"] > 0
            and shown.get('tidegate_scheduler_skips_total{reason="budget_spent"}', 0) >= 1
        )

    wait_until(all_shown, END_S, "the metrics to tell", poll_s=POLL_S)
    assert acme.batch(tight)["request_counts"]["failed"] == 0
    text = httpx2.get(f"http://127.0.0.1:{port}/metrics", timeout=30, trust_env=False).text
    samples = [line for line in text.splitlines() if not line.startswith("#")]
    assert not [line for line in samples if "acme" in line or "globex" in line], "no label names a tenant"


def test_explain_says_in_words_why_a_batch_waits(make_crew: MakeCrew) -> None:
    crew = make_crew(
        lambda url: {
            "models": {
                "tight": deployment(url, limits=per_minute(5)),
                "own": deployment(url),
                "paused": deployment(url),
                "failing": deployment(url),
                "busy": deployment(url),
            },
            "retry": {"budget_share": 0, "budget_min": 0},
        },
        latency_ms=20,
    )
    crew.start(1)
    tight = crew.site.submit(requests(40, model="tight"))
    crew.until_called(5, "tight")
    tight_budget = r"the budget of deployment tight/1 is used up \(5 requests a minute\); it allows more in \w+\."
    assert re.search(tight_budget, crew.explain(tight))
    assert "tight: it waits, because a budget of it is used up" in crew.command("explain", tight).stdout()

    own = crew.site.submit(requests(40, model="own"), limits=[{"period": "lifetime", "requests": 5}])
    crew.until_called(5, "own")
    own_budget = "the budget of this batch is used up (5 requests in all); it allows more when it is raised."
    assert own_budget in crew.explain(own)

    paused = crew.site.submit(requests(40, lambda number: behaving("429:ra=600"), "paused"))
    _until_explained(crew, paused, "their upstream asked for a pause (upstream_throttled)")
    _until_explained(crew, paused, "paused: it waits, because its upstreams asked for a pause (resting)")

    # Too few to open the circuit of the deployment: only the retry budget keeps them waiting.
    failing = crew.site.submit(requests(3, lambda number: behaving("500"), "failing"))
    _until_explained(
        crew, failing, "the retry budget of their deployment is used up (retry.budget_share, retry.budget_min)"
    )
    # Also while every slice rests, which no look of a worker shows.
    _until_explained(crew, failing, "failing: it waits, because its retries wait for the retry budget")

    # Nothing of these ends, so that it stays the turn of one of them.
    large, small = crew.site.keyed("large"), crew.site.keyed("small")
    first = large.submit(requests(40, lambda number: behaving("hang"), "busy"))
    second = small.submit(requests(40, lambda number: behaving("hang"), "busy"))
    _in_progress(large, first)
    _in_progress(small, second)

    def one_goes_first() -> bool:
        explanations = [crew.explain(first, "large"), crew.explain(second, "small")]
        waits = ["other tenants were served less so far and go first (fair_share)" in one for one in explanations]
        goes = ["busy: a worker with room takes its next slice now" in one for one in explanations]
        return sorted(waits) == [False, True] and goes == waits[::-1]

    wait_until(one_goes_first, END_S, "one of two tenants to go first", poll_s=POLL_S)


def _until_explained(crew: Crew, batch_id: str, words: str, org: str | None = None) -> None:
    what = f"{batch_id} to be explained by {words!r}"
    wait_until(lambda: words in crew.explain(batch_id, org), END_S, what, poll_s=POLL_S)
