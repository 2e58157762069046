"""Looks at the store that Hypothesis makes up: any mixture of models, flows, jobs, caps and rooms."""

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from tidegate.core.schedule import (
    FlowView,
    JobView,
    Mode,
    ModelView,
    Policy,
    Reason,
    Snapshot,
    StrictOrder,
    Turn,
    WeightedOrder,
    Why,
)

# How often a property is tried, however slow or busy the machine is.
tried = settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.too_slow])

NOW = 1_000_000
MODELS = ("m0", "m1", "m2")
SCOPES = ("tenant:a", "tenant:b", "tenant:c", "team:a/x")
QUEUES = ("default", "bulk", "vip")

whys = st.sampled_from(list(Why))
units = st.integers(0, 5_000)


@st.composite
def turns(draw: st.DrawFn) -> Turn:
    queue_at = draw(st.dictionaries(st.sampled_from(QUEUES), st.integers(0, NOW)))
    return Turn(draw(st.integers(0, NOW)), draw(whys), queue_at, frozenset(draw(st.sets(st.sampled_from(SCOPES)))))


@st.composite
def models(draw: st.DrawFn, name: str) -> ModelView:
    by_why = draw(st.dictionaries(whys, units, max_size=3))
    return ModelView(
        name,
        draw(st.integers(0, 40)),
        draw(st.none() | st.none() | st.sampled_from([Reason.RESTING, Reason.TIDE_CLOSED, "a_reason_of_tomorrow"])),
        sum(by_why.values()) + draw(units),
        by_why,
        draw(st.none() | st.floats(0, 10_000)),
        draw(st.floats(0.1, 5)),
        draw(st.none() | turns()),
        draw(st.sampled_from([0.0, 50.0])),
    )


@st.composite
def jobs(draw: st.DrawFn, number: int) -> JobView:
    left = draw(st.integers(1, 2_000_000))
    created_at = draw(st.integers(0, NOW))
    return JobView(
        f"job_{number}",
        draw(st.sampled_from((*MODELS, *MODELS, "unheard_of"))),
        draw(st.sampled_from(SCOPES)),
        draw(st.sampled_from(("default", *QUEUES))),
        created_at,
        draw(st.integers(NOW - 1_000, NOW + 10_000_000)),
        draw(st.none() | st.integers(NOW - 1_000, NOW + 100_000)),
        left + draw(units),
        left,
        draw(st.integers(0, left)),
        draw(st.integers(0, 50_000)),
        draw(st.none() | st.integers(created_at, NOW)),
        draw(st.none() | st.floats(0, 1_000)),
        draw(st.integers(0, 16)),
        draw(st.sampled_from([0, 0, 0, 5, -5])),
    )


@st.composite
def snapshots(draw: st.DrawFn) -> Snapshot:
    shown = [draw(jobs(number)) for number in range(draw(st.integers(0, 14)))]
    pairs = sorted({(job.model, job.share_owner) for job in shown})
    # Some flows are not shown: jobs are also listed for their deadline alone.
    flows = [
        FlowView(
            model, share_owner, draw(st.sampled_from([0.0, 0.5, 1.0, 4.0])), draw(st.floats(0, 100_000)), draw(units)
        )
        for model, share_owner in pairs
        if draw(st.integers(0, 5))
    ]
    return Snapshot(
        NOW,
        {name: draw(models(name)) for name in MODELS},
        flows,
        shown,
        draw(st.dictionaries(st.sampled_from(SCOPES), units)),
        draw(st.integers(1, 8)),
        draw(st.integers(0, 24)),
        draw(st.integers(1, 5)),
    )


policies = st.builds(
    Policy,
    mode=st.sampled_from(Mode),
    in_flight_units_max=st.sampled_from([0, 0, 1, 10_000, 60_000]),
    urgent_share=st.sampled_from([0.0, 0.25, 0.5, 1.0]),
    age_units_per_s=st.sampled_from([0.0, 8.5]),
    age_units_max=st.sampled_from([0, 256_000]),
    large_units=st.sampled_from([1_000, 256_000]),
    large_interval_ms=st.sampled_from([0, 30_000]),
    fast_lane=st.booleans(),
    fast_lane_share=st.sampled_from([0.0, 0.1, 0.5]),
    fast_lane_units=st.sampled_from([1_000, 25_600]),
    rank=st.none() | st.just(lambda job: -job.total_units) | st.just(lambda job: 1 / 0),
    queue_order=st.sampled_from(
        [StrictOrder(), StrictOrder(("vip", "default")), WeightedOrder({"vip": 3.0}), lambda views: ["made_up"]]
    ),
)
