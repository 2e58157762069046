"""What the scheduler sees and what it says: a bounded look at the store, and picks with their reasons.

Costs are work units (tokens). A flow's `served` is what record wrote down as done for it, in weighted tokens; what is in flight is the
sum over leased slices. Nothing here was counted by a process for itself, so a look is exact after any crash.
"""

from collections.abc import Mapping, Sequence
from enum import StrEnum

import msgspec

from tidegate.core.nouns import ModelPace


class Why(StrEnum):
    """Which rule took a slice; stored with the lease, so that shares of rules can be bounded by what is in flight."""

    FIFO = "fifo"
    FAIR = "fair"
    URGENT = "urgent"
    LARGE = "large"
    FAST_LANE = "fast_lane"
    INTERACTIVE = "interactive"


class JobView(msgspec.Struct, frozen=True, gc=False):
    """One job on one model, with at least one slice ready. Times are the database's milliseconds.

    `left_units` counts every slice that is not done, those in flight too; `slice_units` and `slice_items` are a mean slice's, and 0 items
    mean the look's `slice_items`. `begin_by` is None once the job has begun. `rate` is the job's measured work units per second, None
    while it has none. Of one flow, jobs of a higher `priority` go first. A look makes many of these, so they are of the kind that is made
    fastest.
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
    """The queue of one share owner (a tenant, or a part of one) for one model. `served` is weighted: tokens divided by the weight."""

    model: str
    share_owner: str
    weight: float
    served: float
    in_flight_units: int


class Turn(msgspec.Struct, frozen=True):
    """What a worker last took of a model: when and by which rule, when of each queue, and of which flows it was a large job's due.
    Only turns hang on it: it may be forgotten."""

    at: int
    why: Why
    queue_at: Mapping[str, int]
    large_owners: frozenset[str] = frozenset()


NO_PACE = ModelPace()


class ModelRoom(msgspec.Struct, frozen=True):
    """What a worker knows of a model before it looks: how many more items it could take, or why none, the model's pace, and what it took
    last."""

    items: int
    closed: str | None = None
    pace: ModelPace = NO_PACE
    turn: Turn | None = None


class ModelView(msgspec.Struct, frozen=True):
    """One model as this worker can use it: `room_items` more items, or why not.

    `rate` is the work units a second that all workers together served lately. `ratio` is what a unit really cost, in tokens charged.
    `turn` is what the last choice on this worker gave back for this model. `weights` is the sum over all awake flows and `flow_count` their
    number, 0 where only those shown are known. `hides_flows`: there may be more flows that have something ready than the look shows, all
    of them served more than those it shows.
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
    """The ready slices that lost the most owners: how many owners that is (`level`), and how many slices lost so many (`count`).
    `out_level` is how many owners the worst slice lost that another worker holds. `is_searching`: slices that lost owners are out, or were
    freed a moment ago."""

    out_level: int = 0
    level: int = 0
    count: int = 0
    is_searching: bool = False


NO_SUSPECTS = Suspects()


class Snapshot(msgspec.Struct, frozen=True):
    """All that a choice may know. `workers` choose at the same time on looks like this one, so each sets right its part of a gap. `awake`
    are all models that have something to do, those too that the look was not asked for."""

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
    """Take up to so many ready slices of this job and model; which ones, the lease decides, so equal looks do not collide."""

    job_id: str
    model: str
    slice_count: int
    why: Why


class Skip(msgspec.Struct, frozen=True, gc=False):
    """What was not taken, and why: `job_id` is empty where a whole flow or model was passed over."""

    model: str
    share_owner: str
    job_id: str
    reason: str


class Choice(msgspec.Struct, frozen=True):
    """What to take, in order. `turns` go into the next look's models; `faults` say what a plugged-in order did wrong, to be logged.
    `suspects` are those of the look."""

    picks: list[Pick]
    skips: list[Skip]
    turns: Mapping[str, Turn] = msgspec.field(default_factory=dict)
    faults: list[str] = msgspec.field(default_factory=list)
    suspects: Suspects = NO_SUSPECTS
