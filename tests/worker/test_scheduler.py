"""What a bounded look may decide: it never deals a flow more than the flows that it could not show would allow."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterable
from functools import partial
from typing import Any, cast

import pytest
from msgspec.structs import replace
from structlog.testing import capture_logs

from tests.support.ports import HandClock
from tests.support.store_verbs import lease_slices
from tests.worker.world import WorkerWorld, chat_lines, until
from tidegate import metrics
from tidegate.core.errors import StoreUnavailable
from tidegate.core.nouns import ModelPace
from tidegate.core.policies import Policies
from tidegate.core.schedule import Choice, FlowView, JobView, Mode, ModelView, Pick, Policy, Reason, Snapshot, Why
from tidegate.core.schedule.policy import ModeOverride
from tidegate.settings import switched
from tidegate.worker.scheduler import Scheduler, within_sight

pytestmark = pytest.mark.anyio


def look(flow_count: int, *, hides_flows: bool) -> Snapshot:
    scopes = [f"tenant:{number}" for number in range(flow_count)]
    jobs = [
        JobView(f"batch_{share_owner}", "m", share_owner, "default", 1, 10, None, 9, 9, 0, 1, None, None)
        for share_owner in scopes
    ]
    flows = [FlowView("m", share_owner, 1.0, 0.0, 0) for share_owner in scopes]
    model = ModelView("m", 64, None, 0, {}, None, hides_flows=hides_flows)
    return Snapshot(0, {"m": model}, flows, jobs, {}, 4, 64)


def test_a_look_that_shows_all_flows_deals_as_the_scheduler_says() -> None:
    picks = [Pick("batch_tenant:0", "m", 5, Why.FAIR), Pick("batch_tenant:1", "m", 4, Why.FAIR)]
    assert within_sight(look(2, hides_flows=False), picks) == picks


def test_where_others_may_be_next_each_flow_gets_a_slice_and_urgent_work_what_it_was_given() -> None:
    picks = [
        Pick("batch_tenant:0", "m", 5, Why.FAIR),
        Pick("batch_tenant:0", "m", 2, Why.URGENT),
        Pick("batch_tenant:1", "m", 1, Why.FAIR),
        Pick("batch_tenant:1", "m", 1, Why.FAIR),
    ]
    assert within_sight(look(3, hides_flows=True), picks) == [
        Pick("batch_tenant:0", "m", 1, Why.FAIR),
        Pick("batch_tenant:0", "m", 2, Why.URGENT),
        Pick("batch_tenant:1", "m", 1, Why.FAIR),
    ]


class Capped(Policies):
    """The operator's caps by tenant, and the mode that was switched to."""

    def __init__(self, caps: dict[str, int], **policy: Any) -> None:
        self.in_flight_caps = caps
        self._policy = Policy(**policy)

    def schedule_policy(self, override: ModeOverride) -> Policy:
        return switched(self._policy, override)


async def choose(scheduler: Scheduler, room: int = 9, trial: Any = None) -> Choice:
    return await scheduler.choose("unknown", lambda _: (room, None), 9, trial)


def reasons(choice: Choice) -> set[str]:
    return {skip.reason for skip in choice.skips}


async def test_a_tenants_own_cap_holds_from_the_first_look_on_and_whatever_else_changes(
    world: WorkerWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = await world.started(chat_lines(4), slice_items=1)
    assert await lease_slices(world.store, await world.worker(), job.id, "m", 1, "token")
    caps = {"acme": 1}
    scheduler = Scheduler(world.store, world.clock, Capped(caps), 1)
    assert reasons(await choose(scheduler)) == {Reason.TENANT_IN_FLIGHT_MAX}
    await world.store.override_mode("fifo_v1")
    await scheduler.follow()
    assert reasons(await choose(scheduler)) == {Reason.TENANT_IN_FLIGHT_MAX}
    caps.clear()
    world.clock.advance(30_000)
    await scheduler.follow()
    assert [pick.why for pick in (await choose(scheduler)).picks] == [Why.FIFO], "the operator took it back"
    caps["acme"] = 1
    world.clock.advance(30_000)
    tenant_ids = world.store.tenant_ids

    async def away(names: Iterable[str]) -> dict[str, str]:
        raise StoreUnavailable("away")

    monkeypatch.setattr(world.store, "tenant_ids", away)
    with pytest.raises(StoreUnavailable):
        await scheduler.follow()
    monkeypatch.setattr(world.store, "tenant_ids", tenant_ids)
    await scheduler.follow()
    assert reasons(await choose(scheduler)) == {Reason.TENANT_IN_FLIGHT_MAX}


async def test_a_cap_finds_its_tenant_when_that_comes_into_being(world: WorkerWorld) -> None:
    scheduler = Scheduler(world.store, world.clock, Capped({"acme": 1}), 1)
    await scheduler.follow()
    job = await world.started(chat_lines(4), slice_items=1)
    assert await lease_slices(world.store, await world.worker(), job.id, "m", 1, "token")
    asked = len(await _tenants_asked(scheduler, world))
    assert asked == 0, "not at every look"
    world.clock.advance(30_000)
    assert len(await _tenants_asked(scheduler, world)) == 1
    assert reasons(await choose(scheduler)) == {Reason.TENANT_IN_FLIGHT_MAX}


async def _tenants_asked(scheduler: Scheduler, world: WorkerWorld) -> list[Iterable[str]]:
    """Whom the store is asked for in one more look at the operator's words."""
    asked = []
    tenant_ids = world.store.tenant_ids

    async def noted(names: Iterable[str]) -> dict[str, str]:
        asked.append(names)
        return await tenant_ids(names)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(world.store, "tenant_ids", noted)
        await scheduler.follow()
    return asked


async def test_models_take_turns_over_several_looks(world: WorkerWorld) -> None:
    for model in ("m", "n"):
        await world.started(chat_lines(4, model), slice_items=1)
    scheduler, seen = Scheduler(world.store, world.clock, Policies(), 1), []
    for _ in range(4):
        world.clock.advance(1)
        choice = await scheduler.choose("unknown", lambda _: (9, None), 1)
        seen += [pick.model for pick in choice.picks]
    assert seen == ["m", "n", "m", "n"]


def metric(name: str, **labels: str) -> float:
    return metrics.REGISTRY.get_sample_value(f"tidegate_{name}", labels) or 0.0


async def test_what_was_decided_can_be_read_in_the_metrics(world: WorkerWorld) -> None:
    """Slices that were wanted, what was passed over and why, and where a second mode would have chosen otherwise."""
    first = await world.started(chat_lines(3), slice_items=1)
    later = await world.caller("later")
    await world.started(chat_lines(3), slice_items=1, caller=later)
    metrics.pin(models=["m"], deployments=[])
    names: dict[str, tuple[str, dict[str, str]]] = {
        "fair": ("scheduler_picks_total", {"why": "fair"}),
        "passed over": ("scheduler_skips_total", {"reason": Reason.FAIR_SHARE}),
        "flows": ("scheduler_flow_skips_total", {"reason": Reason.FAIR_SHARE}),
        "models": ("scheduler_model_skips_total", {"model": "m", "reason": Reason.NO_AVAILABLE_SLOTS}),
        "empty": ("work_lease_attempts_total", {"result": "empty"}),
        "shadow": ("scheduler_shadow_decisions_total", {}),
        "differs": ("scheduler_shadow_differences_total", {}),
        "decisions": ("scheduler_decision_seconds_count", {"mode": "fair_share_v1"}),
    }

    def counted() -> dict[str, float]:
        return {word: metric(name, **labels) for word, (name, labels) in names.items()}

    async def grown(room: int, shadow: Mode | None, slices_max: int = 2) -> dict[str, float]:
        policies = Capped({}, mode=Mode.FAIR_SHARE, shadow_mode=shadow)
        scheduler, before = Scheduler(world.store, world.clock, policies, 1), counted()
        await scheduler.choose("unknown", lambda _: (room, None), slices_max)
        return {word: now - before[word] for word, now in counted().items() if now != before[word]}

    assert await grown(2, None) == {"fair": 2, "decisions": 1}
    assert await grown(2, Mode.FAIR_SHARE) == {"fair": 2, "decisions": 1, "shadow": 1}
    assert await grown(2, Mode.FIFO) == {"fair": 2, "decisions": 1, "shadow": 1, "differs": 1}
    assert await grown(1, None, 1) == {"fair": 1, "passed over": 1, "flows": 1, "decisions": 1}
    assert await grown(0, None) == {"models": 1}
    await world.rows("update flows set served = 700.0 where share_owner = ?", f"tenant:{first.tenant_id}")
    await world.rows("update flows set served = 500.0 where share_owner = ?", f"tenant:{later.tenant_id}")
    await grown(2, None)
    assert metric("scheduler_fairness_gap_tokens", model="m") == 200.0


async def test_the_config_in_force_is_the_only_one_in_the_metrics(world: WorkerWorld) -> None:
    scheduler = Scheduler(world.store, world.clock, Capped({}, mode=Mode.FAIR_SHARE), 1)
    await world.store.override_mode("fifo_v1", "smart_v1")
    await scheduler.follow()
    [family] = metrics.scheduler_config_info.made.collect()
    assert [(one.labels["mode"], one.labels["shadow_mode"], one.value) for one in family.samples] == [
        ("fifo_v1", "smart_v1", 1.0)
    ]


class Looks:
    """A store that shows what a test says, and counts how often it is asked to wake what rested."""

    def __init__(self) -> None:
        self.awake, self.shown, self.override = ["m"], look(1, hides_flows=False), ModeOverride()
        self.woken = self.read = 0
        self.paced: list[list[str]] = []

    async def mode_override(self) -> ModeOverride:
        return self.override

    async def wake_rested(self, count_max: int) -> None:
        self.woken += 1

    async def awake_models(self, count_max: int) -> list[str]:
        self.read += 1
        return self.awake

    async def paces(self, models: list[str]) -> dict[str, ModelPace]:
        self.paced.append(sorted(models))
        return dict.fromkeys(models, ModelPace())

    async def snapshot(self, *_: Any, **__: Any) -> Snapshot:
        return replace(self.shown, awake=self.awake)


def scheduler_over(looks: Looks) -> tuple[Scheduler, HandClock]:
    clock = HandClock()
    return Scheduler(cast(Any, looks), clock, Capped({}), 4), clock


async def test_what_rested_is_woken_twice_a_second_and_models_are_read_again_only_when_none_has_room() -> None:
    looks = Looks()
    scheduler, clock = scheduler_over(looks)
    woken = []
    for wait_ms in (0, 499, 1, 499, 1):
        clock.advance(wait_ms)
        await choose(scheduler)
        woken.append(looks.woken)
    assert woken == [1, 1, 2, 2, 3]
    assert looks.read == 1
    await choose(scheduler, room=0)
    assert looks.read == 2
    looks.awake = ["n"]
    await choose(scheduler, room=0)
    assert [skip.model for skip in (await choose(scheduler, room=0)).skips] == ["n"]


async def test_how_fast_models_go_is_asked_again_after_five_seconds_and_for_two_of_a_few_at_a_time() -> None:
    looks = Looks()
    scheduler, clock = scheduler_over(looks)
    looks.awake = ["m"]
    asked = []
    for wait_ms in (0, 4_999, 1, 4_999, 1):
        clock.advance(wait_ms)
        looks.paced.clear()
        await choose(scheduler)
        asked.append(list(looks.paced))
    assert asked == [[["m"]], [], [["m"]], [], [["m"]]]
    clock.advance(1_000)
    looks.awake = ["a", "b", "c"]
    scheduler._models = ()
    await choose(scheduler)
    assert looks.paced[-1] == ["a", "b", "c"], "at once for those that are not known"
    clock.advance(5_000)
    for known_longest in (["a", "b"], ["c"]):
        await choose(scheduler)
        assert looks.paced[-1] == known_longest
    looks.paced.clear()
    await choose(scheduler)
    assert looks.paced == []
    for awake in (["d"], ["c"]):
        looks.awake = awake
        scheduler._models = ()
        await choose(scheduler)
        assert looks.paced[-1:] == [awake], "a model that had no work is not known"


async def test_gauges_show_the_least_slack_and_the_widest_gap_of_jobs_that_wait_twice_a_second() -> None:
    metrics.pin(models=["m"], deployments=[])
    looks = Looks()
    scheduler, clock = scheduler_over(looks)
    model = ModelView("m", 64, None, 0, {}, None)
    job = JobView("job", "m", "tenant:0", "default", 0, 60_000, None, 100, 100, 0, 9, None, 10.0)
    later, unknown = replace(job, expires_at=70_000), replace(job, model="gone", rate=0.001)
    unmeasured, other = replace(job, rate=None, expires_at=1), replace(job, share_owner="tenant:1")
    flows = [FlowView("m", f"tenant:{number}", 1.0, 100.0 * number, 0) for number in range(3)]
    flows += [FlowView("n", "tenant:0", 1.0, 9_000.0, 0)]
    before_s = metric("scheduler_decision_seconds_sum", mode="smart_v1")

    async def seen(*jobs: JobView) -> tuple[float, float]:
        looks.shown = Snapshot(0, {"m": model}, flows, list(jobs), {}, 4, 64)
        await choose(scheduler)
        return metric("deadline_slack_seconds"), metric("scheduler_fairness_gap_tokens", model="m")

    assert await seen(later, job, unknown, unmeasured, other) == (50.0, 100.0)
    assert await seen(later) == (50.0, 100.0), "not at every look"
    clock.advance(500)
    assert await seen(later) == (60.0, 0.0)
    clock.advance(500)
    assert await seen(unmeasured, other) == (50.0, 100.0)
    model = replace(model, rate=10.0)
    clock.advance(500)
    assert (await seen(replace(unmeasured, expires_at=30_000)))[0] == 20.0, "at the model's pace"
    assert metric("scheduler_decision_seconds_sum", mode="smart_v1") == before_s, "no time has passed"


async def test_gauges_forget_what_does_not_wait_any_more() -> None:
    """A batch that was behind its deadline and ended must not be shown for ever; a model without room is not read, and keeps its value."""
    metrics.pin(models=["m", "n"], deployments=[])
    looks = Looks()
    scheduler, clock = scheduler_over(looks)
    models = {name: ModelView(name, 64, None, 0, {}, None) for name in "mn"}
    late = JobView("job", "m", "tenant:0", "default", 0, 1_000, None, 100, 100, 0, 9, None, 10.0)
    flows = [FlowView("m", "tenant:0", 1.0, 0.0, 0), FlowView("m", "tenant:1", 1.0, 300.0, 0)]

    async def seen(*jobs: JobView) -> tuple[float, float | None]:
        clock.advance(500)
        looks.shown = Snapshot(0, models, flows, list(jobs), {}, 4, 64)
        await choose(scheduler)
        gap = metrics.REGISTRY.get_sample_value("tidegate_scheduler_fairness_gap_tokens", {"model": "m"})
        return metric("deadline_slack_seconds"), gap

    looks.awake = ["m", "n"]
    waiting = (late, replace(late, share_owner="tenant:1"))
    assert await seen(*waiting) == (-9.0, 300.0)
    models["m"] = replace(models["m"], room_items=0)
    assert await seen(replace(late, model="n", expires_at=60_000)) == (-9.0, 300.0), "m was not read"
    looks.awake = ["n"]
    assert await seen(replace(late, model="n", expires_at=60_000)) == (50.0, None)
    assert (await seen())[0] == math.inf
    assert (await seen(replace(late, model="n", expires_at=2_000)))[0] == -8.0
    looks.awake, before = [], metric("work_lease_attempts_total", result="empty")
    for _ in range(3):
        scheduler._models = ()
        assert (await seen())[0] == math.inf
    assert metric("work_lease_attempts_total", result="empty") == before + 3, "an idle worker looks and finds nothing"


async def test_a_switch_is_logged_once_and_looks_without_anything_to_take_are_counted() -> None:
    looks = Looks()
    scheduler, _ = scheduler_over(looks)
    looks.override = ModeOverride("fifo_v1")
    with capture_logs() as logged:
        for _ in range(2):
            await scheduler.follow()
    assert [line["event"] for line in logged] == ["scheduler_switched"]
    looks.shown = replace(looks.shown, jobs=[])
    before = metric("work_lease_attempts_total", result="empty")
    await choose(scheduler)
    assert metric("work_lease_attempts_total", result="empty") == before + 1


async def test_the_operators_switch_is_followed_again_and_again() -> None:
    looks = Looks()
    scheduler = Scheduler(cast(Any, looks), HandClock(), Capped({}), 4, follow_ms=1)
    running = asyncio.create_task(scheduler.run())

    async def in_mode(mode: str) -> bool:
        return scheduler._policy.mode == mode

    for mode in ("fifo_v1", "slice_v1"):
        looks.override = ModeOverride(mode)
        await until(partial(in_mode, mode), "the switch")
    running.cancel()
