"""What a bounded look may decide: it never deals a flow more than the flows that it could not show would allow."""

from __future__ import annotations

from tidegate.core.schedule import FlowView, JobView, ModelView, Pick, Snapshot, Why
from tidegate.worker.scheduler import within_sight


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
    ]
    assert within_sight(look(3, hides_flows=True), picks) == [
        Pick("batch_tenant:0", "m", 1, Why.FAIR),
        Pick("batch_tenant:0", "m", 2, Why.URGENT),
        Pick("batch_tenant:1", "m", 1, Why.FAIR),
    ]
