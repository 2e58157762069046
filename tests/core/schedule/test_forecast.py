"""The position of one job in a choice: its share, its slack, and why it waits."""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from tidegate.core.schedule import (
    Choice,
    FlowView,
    JobView,
    ModelView,
    Pick,
    Policy,
    Skip,
    Snapshot,
    Why,
    forecast_not_ready,
    forecasts,
)
from tidegate.core.schedule.outlooks import Backlog, ModelOutlook

NOW = 1_000_000
JOB = JobView("ours", "m", "tenant:a", "default", NOW, NOW + 60_000, None, 900, 600, 0, 100, None, None)
FLOWS = [
    FlowView("m", "tenant:a", 1.0, 0.0, 0),
    FlowView("m", "tenant:b", 3.0, 0.0, 0),
    FlowView("n", "tenant:a", 9.0, 0.0, 0),
]
MODEL = ModelView("m", 64, None, 0, {}, 40.0)


def look(model: ModelView | None = MODEL, job: JobView = JOB) -> Snapshot:
    other = replace(job, job_id="theirs", share_owner="tenant:b")
    return Snapshot(NOW, {} if model is None else {"m": model}, FLOWS, [other, job], {}, 4, 64)


def forecast(snapshot: Snapshot, choice: Choice = Choice([], [])) -> Any:  # noqa: B008 - a constant
    [found] = forecasts(snapshot, choice, Policy(), "ours")
    return found


def test_a_job_has_the_share_of_its_flow_and_the_slack_of_its_rate() -> None:
    found = forecast(look())
    assert (found.model, found.mode, found.share, found.flows) == ("m", "smart_v1", 0.25, 2)
    # 600 units at a quarter of 40 a second are just in time.
    assert (found.slack_ms, found.hopeless) == (0, False)
    assert forecast(look(replace(MODEL, rate=0.8))).slack_ms == -2_940_000, "a slow model's pace is its own"
    assert forecast(look(replace(MODEL, weights=8.0, flow_count=5))).share == 1 / 8
    assert forecast(look(replace(MODEL, weights=8.0, flow_count=5))).flows == 5


def test_a_job_that_is_late_is_hopeless_only_if_urgency_cannot_help() -> None:
    # Urgent work may have half of the model and our quarter of the other half: 25 a second, 1,500 units.
    for left, slack_ms, hopeless in ((601, -100, False), (1_500, -90_000, False), (1_501, -90_100, True)):
        found = forecast(look(job=replace(JOB, left_units=left)))
        assert (found.slack_ms, found.hopeless) == (slack_ms, hopeless)


def test_without_a_measured_rate_there_is_no_slack() -> None:
    for model in (None, replace(MODEL, rate=None)):
        found = forecast(look(model, replace(JOB, left_units=10**9)))
        assert (found.slack_ms, found.hopeless, found.share) == (None, False, 0.25)
    assert forecast(look(replace(MODEL, rate=None), replace(JOB, rate=20.0))).slack_ms == 30_000
    assert forecast(look(None)).flows == 2


def test_the_rule_that_takes_it_or_the_reason_why_none_does_is_its_own() -> None:
    choice = Choice(
        [Pick("theirs", "m", 1, Why.URGENT), Pick("ours", "n", 1, Why.FAIR)], [Skip("m", "tenant:a", "", "fair_share")]
    )
    assert (forecast(look(), choice).rule, forecast(look(), choice).reason) == (None, "fair_share")
    taken = Choice([Pick("ours", "m", 1, Why.LARGE)], [])
    assert (forecast(look(), taken).rule, forecast(look(), taken).reason) == (Why.LARGE, None)


def test_a_job_that_no_look_shows_has_the_share_that_is_known() -> None:
    outlook = ModelOutlook("m", Backlog(9), Backlog(9), 9, Backlog(), 2.0, 8.0, 3, ())
    found = forecast_not_ready(outlook, Policy())
    assert (found.share, found.flows, found.slack_ms, found.hopeless, found.rule) == (0.25, 3, None, False, None)
    assert forecast_not_ready(replace(outlook, flow_count=0), Policy()).flows == 1
