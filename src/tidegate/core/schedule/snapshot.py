"""The scheduler's input and output: a bounded snapshot of the store, and picks with their reasons.

Costs are work units (tokens). A flow's `served` is the work that record noted as done for it, in
weighted tokens; work in flight is the sum over leased slices. No process counts any of this for
itself, so a snapshot is exact after any crash.
"""

from collections.abc import Mapping, Sequence
from enum import StrEnum

import msgspec

from tidegate.core.nouns import ModelPace


class Why(StrEnum):
    """The rules that take slices.

    A lease stores its rule, so that the share of a rule can be bounded by what is in flight.
    """

    FIFO = "fifo"
    FAIR = "fair"
    URGENT = "urgent"
    LARGE = "large"
    FAST_LANE = "fast_lane"
    INTERACTIVE = "interactive"


class JobView(msgspec.Struct, frozen=True, gc=False):
    """One job on one model, with at least one slice ready.

    Times are the database's milliseconds.

    `left_units` counts every slice that is not done, including those in flight. `slice_units` and
    `slice_items` are a mean slice's; 0 items mean the snapshot's `slice_items`. `begin_by` is None
    once the job has begun. `rate` is the job's measured work units per second, None while it has
    none. Within a flow, jobs of a higher `priority` go first. A snapshot has many of these, so the
    struct is of the kind that is made fastest.
    """

    job_id: str
    model: str
    share_owner: str
    queue: str
    created_at: int
    expires_at: int
    begin_by: int | None
    total_units: int
    left_units: int
    in_flight_units: int
    slice_units: int
    leased_at: int | None
    rate: float | None
    slice_items: int = 0
    priority: int = 0


class FlowView(msgspec.Struct, frozen=True, gc=False):
    """The queue of one share owner (a tenant, or a part of one) for one model.

    `served` is weighted: tokens divided by the weight.
    """

    model: str
    share_owner: str
    weight: float
    served: float
    in_flight_units: int


class Turn(msgspec.Struct, frozen=True):
    """The last turn of a worker at a model: its time and its rule, and the times by queue.

    `large_owners` are the flows whose last slice went to a large job that was due. A turn only
    decides the order, so it may be forgotten.
    """

    at: int
    why: Why
    queue_at: Mapping[str, int]
    large_owners: frozenset[str] = frozenset()


NO_PACE = ModelPace()


class ModelRoom(msgspec.Struct, frozen=True):
    """The facts of a worker about a model before it takes a snapshot.

    `items` is how many more it could take, `closed` why none, `turn` what it took last.
    """

    items: int
    closed: str | None = None
    pace: ModelPace = NO_PACE
    turn: Turn | None = None


class ModelView(msgspec.Struct, frozen=True):
    """One model as this worker can use it: it has room for `room_items` more items, or `closed`
    says why not.

    `rate` is the work units a second that all workers together served lately. `ratio` is what a
    unit really cost, in tokens charged. `turn` is what the last choice on this worker returned for
    this model. `weights` is the sum over all awake flows and `flow_count` their number; 0 where
    only the flows shown are known. `hides_flows`: the snapshot may leave out flows with something
    ready, all of them served more than those it shows.
    """

    model: str
    room_items: int
    closed: str | None
    in_flight_units: int
    in_flight_by_why: Mapping[Why, int]
    rate: float | None
    ratio: float = 1.0
    turn: Turn | None = None
    weights: float = 0.0
    flow_count: int = 0
    hides_flows: bool = False


class Suspects(msgspec.Struct, frozen=True, gc=False):
    """The ready slices that lost the most owners: each lost `level` owners, and there are `count`
    of them.

    `out_level` is the most owners lost by a slice that another worker holds. `is_searching`: slices
    that lost owners are leased, or have just been freed.
    """

    out_level: int = 0
    level: int = 0
    count: int = 0
    is_searching: bool = False


NO_SUSPECTS = Suspects()


class Snapshot(msgspec.Struct, frozen=True):
    """All that a choice may know.

    `workers` processes choose at the same time on snapshots like this one, so each closes its part
    of a gap. `awake` are all models that have something to do, even those that the snapshot was not
    asked for.
    """

    now: int
    models: Mapping[str, ModelView]
    flows: Sequence[FlowView]
    jobs: Sequence[JobView]
    owner_in_flight_units: Mapping[str, int]
    slice_items: int
    slices_max: int
    workers: int = 1
    awake: Sequence[str] = ()
    suspects: Suspects = NO_SUSPECTS


class Pick(msgspec.Struct, frozen=True, gc=False):
    """How many ready slices of a job and model to lease, at most.

    The lease decides which, so equal snapshots do not collide.
    """

    job_id: str
    model: str
    slice_count: int
    why: Why


class Skip(msgspec.Struct, frozen=True, gc=False):
    """A job that was not taken, and why; `job_id` is empty where a whole flow or model was
    skipped."""

    model: str
    share_owner: str
    job_id: str
    reason: str


class Choice(msgspec.Struct, frozen=True):
    """The result of a choice: picks, in order, and skips.

    `turns` go into the models of the next snapshot. `faults` say what a plugged-in order did wrong,
    to be logged. `suspects` are those of the snapshot.
    """

    picks: list[Pick]
    skips: list[Skip]
    turns: Mapping[str, Turn] = msgspec.field(default_factory=dict)
    faults: list[str] = msgspec.field(default_factory=list)
    suspects: Suspects = NO_SUSPECTS
