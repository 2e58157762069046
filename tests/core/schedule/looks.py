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

# Each strategy is made once: making and checking one costs Hypothesis more than drawing from it.
whys = st.sampled_from(list(Why))
units = st.integers(0, 5_000)
scopes = st.sampled_from(SCOPES)
moments = st.integers(0, NOW)
turns = st.builds(
    Turn, moments, whys, st.dictionaries(st.sampled_from(QUEUES), moments), st.sets(scopes).map(frozenset)
)

# What a model view has after its name, but for its units in flight, which are no fewer than those by reason.
model_room = st.tuples(
    st.integers(0, 40),
    st.none() | st.none() | st.sampled_from([Reason.RESTING, Reason.TIDE_CLOSED, "a_reason_of_tomorrow"]),
)
model_units = st.tuples(st.dictionaries(whys, units, max_size=3), units)
model_rest = st.tuples(
    st.none() | st.floats(0, 10_000), st.floats(0.1, 5), st.none() | turns, st.sampled_from([0.0, 50.0])
)

# What a job view has after its id, in three runs of fields; units in flight hang on those left, a lease on when the job was made.
job_names = st.tuples(st.sampled_from((*MODELS, *MODELS, "unknown")), scopes, st.sampled_from(("default", *QUEUES)))
job_times = st.tuples(
    moments, st.integers(NOW - 1_000, NOW + 10_000_000), st.none() | st.integers(NOW - 1_000, NOW + 100_000)
)
job_units = st.tuples(st.integers(1, 2_000_000), units, st.integers(0, 50_000))
job_rest = st.tuples(st.none() | st.floats(0, 1_000), st.integers(0, 16), st.sampled_from([0, 0, 0, 5, -5]))
is_leased = st.booleans()

job_counts = st.integers(0, 14)
one_in_six = st.integers(0, 5)
flow_rest = st.tuples(st.sampled_from([0.0, 0.5, 1.0, 4.0]), st.floats(0, 100_000), units)
snapshot_rest = st.tuples(st.dictionaries(scopes, units), st.integers(1, 8), st.integers(0, 24), st.integers(1, 5))


def _model(draw: st.DrawFn, name: str) -> ModelView:
    room, closed = draw(model_room)
    by_why, more = draw(model_units)
    rate, ratio, turn, weights = draw(model_rest)
    return ModelView(name, room, closed, sum(by_why.values()) + more, by_why, rate, ratio, turn, weights)


def _job(draw: st.DrawFn, number: int) -> JobView:
    created_at, expires_at, begin_by = draw(job_times)
    left, done, slice_units = draw(job_units)
    return JobView(
        f"job_{number}",
        *draw(job_names),
        created_at,
        expires_at,
        begin_by,
        left + done,
        left,
        draw(st.integers(0, left)),
        slice_units,
        draw(st.integers(created_at, NOW)) if draw(is_leased) else None,
        *draw(job_rest),
    )


@st.composite
def snapshots(draw: st.DrawFn) -> Snapshot:
    shown = [_job(draw, number) for number in range(draw(job_counts))]
    pairs = sorted({(job.model, job.share_owner) for job in shown})
    # Some flows are not shown: jobs are also listed for their deadline alone.
    flows = [FlowView(model, share_owner, *draw(flow_rest)) for model, share_owner in pairs if draw(one_in_six)]
    return Snapshot(NOW, {name: _model(draw, name) for name in MODELS}, flows, shown, *draw(snapshot_rest))


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
