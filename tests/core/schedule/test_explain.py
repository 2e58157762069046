"""What `tidegate explain` says of a job, from how it stands and what the scheduler would do with it."""

from typing import Any

import pytest
from msgspec.structs import fields, replace

from tests.core.schedule.world import ScheduleWorld, job
from tidegate.core import nouns
from tidegate.core.job_controls import Canary, JobControls
from tidegate.core.ports import DeploymentTrouble, ReportedWorker, WorkerReport
from tidegate.core.schedule import FlowForecast, Policy, Reason, Why, choose, forecast_not_ready, forecasts
from tidegate.core.schedule import explain as reasons
from tidegate.core.schedule.outlooks import Backlog, ModelOutlook
from tidegate.core.states import JobState
from tidegate.core.window import DAY_MS


def forecast_of(world: ScheduleWorld, job_id: str) -> FlowForecast:
    look = world.look(world.workers[0])
    [forecast] = forecasts(look, choose(look, world.policy), world.policy, job_id)
    return forecast


def text_of(forecast: FlowForecast) -> str:
    return "\n".join(reasons._foreseen(forecast))


def test_a_job_whose_turn_it_is() -> None:
    world = ScheduleWorld([job("a", "a", 5, expires_at=DAY_MS), job("b", "b", 5)], Policy(), slots=2)
    forecast = forecast_of(world, "a")
    assert (forecast.rule, forecast.reason, forecast.share, forecast.flows) == (Why.FAIR, None, 0.5, 2)
    assert "takes its next slice now, because it is its turn (smart_v1)" in text_of(forecast)
    assert "2 tenants have work for it; its tenant can count on 50% of what is served" in text_of(forecast)
    assert "to spare before its deadline" in text_of(forecast)


@pytest.mark.parametrize("reason", list(Reason))
def test_every_reason_has_a_sentence(reason: Reason) -> None:
    forecast = replace(forecast_of(ScheduleWorld([job("a", "a", 5)], Policy()), "a"), rule=None, reason=reason)
    assert reasons._REASONS[reason] in text_of(forecast)
    assert f"({reason})" in text_of(forecast)


@pytest.mark.parametrize("rule", list(Why))
def test_every_rule_has_a_sentence(rule: Why) -> None:
    forecast = replace(forecast_of(ScheduleWorld([job("a", "a", 5)], Policy()), "a"), rule=rule)
    assert reasons._RULES[rule] in text_of(forecast)


def test_why_it_waits_comes_from_the_choice() -> None:
    world = ScheduleWorld([job("a", "a", 5), job("b", "b", 5), job("c", "b", 50)], Policy(), slots=1)
    assert forecast_of(world, "b").reason == Reason.FAIR_SHARE
    world.served["m", "a"] = 500.0
    assert forecast_of(world, "c").reason == Reason.BEHIND_IN_FLOW
    world.closed["m"] = Reason.TIDE_CLOSED
    assert "interactive calls need all of it now" in text_of(forecast_of(world, "a"))
    del world.closed["m"]
    world.policy = replace(world.policy, in_flight_units_max=150)
    world.act(world.workers[0])
    world.workers[0].slots["m"] = 2
    assert forecast_of(world, "c").reason == Reason.TENANT_IN_FLIGHT_MAX


def test_a_deadline_that_presses_and_one_that_is_lost() -> None:
    jobs = [job("a", "a", 30, expires_at=25_000), job("b", "b", 999), job("c", "c", 999, expires_at=9_000)]
    world = ScheduleWorld(jobs, Policy(), slots=2)
    assert forecast_of(world, "a").rule == Why.URGENT
    assert "goes first within the urgent share" in text_of(forecast_of(world, "a"))
    assert "cannot be met any more" in text_of(forecast_of(world, "c"))


def test_a_job_whose_only_slice_rests_has_its_line_too() -> None:
    outlook = ModelOutlook(
        "m", Backlog(100), Backlog(50), 0, Backlog(), weight=1.0, weights=4.0, flow_count=3, minutes=()
    )
    forecast = forecast_not_ready(outlook, Policy())
    assert (forecast.rule, forecast.reason, forecast.share) == (None, None, 0.25)
    assert "m: nothing more of it can be taken now: all that is left is out or put off." in text_of(forecast)
    assert "3 tenants have work for it" in text_of(forecast)
    inputs = reasons.ExplainInputs(0, 1, 0, 1, 4_000, 0, 0, (("upstream_throttled", 2),), (forecast,))
    assert reasons._as_put_off(forecast, inputs).reason == Reason.RESTING


def test_what_was_not_measured_is_shown_as_unknown() -> None:
    world = ScheduleWorld([job("a", "a", 5)], Policy(), slots=2)
    unknown = replace(forecast_of(world, "a"), slack_ms=None)
    assert "not measured yet" in text_of(unknown)
    known = replace(unknown, eta_p50_ms=60_000, eta_p95_ms=90_000, notes=("the tide leaves it 4 calls.",))
    assert "done in about 1m, in 1m30s with 95 % confidence" in text_of(known)
    assert "m: the tide leaves it 4 calls." in text_of(known)


OPEN = DeploymentTrouble("gpu-1", False, 90_000, "connection refused")
REJECTED = DeploymentTrouble("cloud", True, 3_600_000, "status 401")


def job_running() -> nouns.Job:
    known: dict[str, Any] = {field.name: None for field in fields(nouns.Job) if field.required}
    known |= {"id": "batch_1", "state": JobState.IN_PROGRESS, "errors": (), "item_count": 9, "expires_at": DAY_MS}
    known |= dict.fromkeys(("answered_count", "failed_count", "expired_count", "cancelled_count"), 0)
    return nouns.Job(**{name: value for name, value in known.items() if name != "controls"})


def inputs(**more: Any) -> reasons.ExplainInputs:
    return replace(reasons.ExplainInputs(0, 1, 3, 0, 0, 0, 0, ()), **more)


def test_one_of_a_kind_is_written_in_the_singular() -> None:
    one = inputs(work_units=1, jobs_ahead=1, slices_ready=1, waiting_reasons=(("budget_spent", 1),))
    text = " ".join(reasons.explain(replace(job_running(), item_count=1), one))
    assert "0 of 1 item done" in text
    assert "It is about 1 token of work" in text
    assert "1 slice is ready, behind 1 older batch that has slices ready too." in text
    assert "1 item was tried and waits" in text
    broke = inputs(waiting_reasons=(("upstream_ambiguous", 2),))
    assert (
        "2 items were tried and wait to be tried again: their server failed, or the connection broke, after they"
        in (" ".join(reasons.explain(job_running(), broke)))
    )


def test_bytes_that_cannot_be_written_are_explained_with_the_next_try() -> None:
    closing = replace(job_running(), state=JobState.FINALIZING, closing=JobState.COMPLETED)
    assert reasons.waits_for(closing, inputs()) == ""
    assert reasons.explain(closing, inputs())[-1] == (
        "Everything that will run has run; its result files are being published."
    )
    stuck = inputs(step_failures=3, step_rests_ms=8_000)
    assert reasons.waits_for(closing, stuck) == (
        "Publishing its result files failed 3 times; it is tried again in 8s. "
        "`tidegate doctor` says whether bytes can be written, and the log why not."
    )
    assert reasons.explain(closing, stuck)[-1].endswith("its result files wait to be published.")
    once = inputs(step_failures=1)
    assert reasons.waits_for(replace(closing, state=JobState.VALIDATING), once, for_owner=True) == (
        "Reading its input failed 1 time; it is tried again now."
    )


def test_what_is_in_the_way_comes_before_everything_else() -> None:
    running = job_running()
    assert reasons.causes(running, inputs()) == []
    assert reasons.waits_for(running, inputs()) == ""
    down = inputs(unhealthy=(reasons.UnhealthyModel("m", (OPEN, REJECTED), True),))
    assert reasons.causes(running, down) == [
        "m: the circuit of deployment gpu-1 has been open for 1m30s (connection refused).",
        "m: deployment cloud has rejected our key for 1h (status 401): check its api_key.",
    ]
    assert reasons.waits_for(running, down).startswith("m: the circuit of deployment gpu-1")
    spent = reasons.SpentBudget("m", "organization acme", "5 of cost a month; 0 left", 60_000, True)
    assert reasons.waits_for(running, inputs(spent=(spent,))) == (
        "m: the budget of organization acme is used up (5 of cost a month; 0 left); it allows more in 1m."
    )
    paused = replace(running, paused_at=1)
    assert "It is paused, for 1m30s now" in reasons.waits_for(paused, replace(down, now=90_001))
    canary = replace(running, canary=Canary(5, 0, "wait", "waiting"), answered_count=4, failed_count=1)
    assert "Its canary is done (4 of its 5 requests were answered, 1 failed)" in reasons.waits_for(canary, down)
    later = replace(running, controls=JobControls(not_before=7_200_000))
    assert (
        "It may not begin for another 2h (not_before); to begin at once: `tidegate batches set batch_1 --not-before 0`"
        in (reasons.waits_for(later, down))
    )
    stopped = replace(
        forecast_of(ScheduleWorld([job("a", "a", 5)], Policy()), "a"),
        rule=None,
        reason=Reason.UNHEALTHY,
        eta_p50_ms=3_000,
    )
    assert "m: it is unknown when it ends, because nothing of it is served now." in text_of(stopped)
    ended = replace(running, state=JobState.COMPLETED)
    part = replace(ended, answered_count=7, failed_count=2)
    assert reasons.explain(part, down)[0] == "It completed: 7 of 9 requests were answered, 2 failed."
    assert (reasons.causes(ended, down), reasons.waits_for(ended, down)) == ([], "")


def test_what_put_slices_off_is_guessed_only_where_it_is_unknown() -> None:
    resting = inputs(slices_resting=1, rest_ends_in_ms=3_000, slices_ready=0)
    assert "1 slice is put off for another 3s, because an upstream" in "\n".join(
        reasons.explain(job_running(), resting)
    )
    known = replace(resting, waiting_reasons=(("upstream_throttled", 2),))
    assert "1 slice is put off for another 3s." in reasons.explain(job_running(), known)
    one = replace(resting, waiting_reasons=(("upstream_ambiguous", 1),))
    assert "1 item was tried and waits to be tried again" in "\n".join(reasons.explain(job_running(), one))


def test_workers_that_are_broken_or_gone() -> None:
    broken = ReportedWorker("node-a", True, 0, WorkerReport("it cannot keep answers: access denied"))
    found = reasons.causes(job_running(), inputs(workers=(broken,)))
    assert found == ["The worker on node-a takes no new work: it cannot keep answers: access denied."]
    ended = ReportedWorker("node-b", False, 12_000, WorkerReport("ends after an internal error: KeyError in leasing"))
    found = reasons.causes(job_running(), inputs(workers=(ended,), workers_alive=0))
    assert "No worker is alive" in found[0]
    assert "node-b and was alive 12s ago" in found[0]
    started_later = ReportedWorker("node-c", False, 40_000, WorkerReport())
    found_last = reasons.causes(job_running(), inputs(workers=(started_later, ended), workers_alive=0))
    assert "node-b and was alive 12s ago" in found_last[0], "not the one that started last"
    assert found[1] == "The worker on node-b ended 12s ago: ends after an internal error: KeyError in leasing."
    assert reasons.causes(job_running(), inputs(workers=(ended,))) == [], "another one runs"
    many = tuple(replace(broken, host=f"n{number}") for number in range(9))
    assert reasons.causes(job_running(), inputs(workers=many))[-1] == "And 6 more workers are in trouble."


def test_the_owner_of_a_job_gets_no_names_of_the_operators_things() -> None:
    running = job_running()
    hidden = inputs(
        workers_alive=0,
        workers=(ReportedWorker("node-a", True, 0, WorkerReport("s3://secret-bucket: access denied")),),
        unhealthy=(reasons.UnhealthyModel("m", (OPEN, REJECTED), True),),
        spent=(reasons.SpentBudget("m", "deployment gpu-1", "100 requests a minute", 1_000, False),),
        forecasts=(
            replace(
                forecast_of(ScheduleWorld([job("a", "a", 5)], Policy()), "a"), notes=("the tide of gpu-1 is low.",)
            ),
        ),
    )
    for_operator = "\n".join(reasons.explain(running, hidden))
    for_owner = "\n".join(reasons.explain(running, hidden, for_owner=True))
    for word in ("gpu-1", "node-a", "secret-bucket", "cloud", "tidegate worker"):
        assert word in for_operator
        assert word not in for_owner
    assert "m: no model server of it takes calls, for 1m30s now." in for_owner
    assert "m: a budget of the server is used up; it allows more in 1s." in for_owner
    some = replace(hidden, unhealthy=(reasons.UnhealthyModel("m", (OPEN,), False),))
    assert "no model server" not in "\n".join(reasons.explain(running, some, for_owner=True))
