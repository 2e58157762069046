"""How many replicas of a model, and how many workers, every open deadline needs. A pure function of what waits and what was measured."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from tidegate.core.window import spoken

# Work that is due sooner than this is treated as due then: a replica that is started now serves nothing sooner.
SOONEST_MS = 60_000
REPLICAS_MAX = 10_000


@dataclass(frozen=True, slots=True)
class DueWork:
    """Work units of one model that are due within so long."""

    due_in_ms: int
    units: int


@dataclass(frozen=True, slots=True)
class ReplicaLoad:
    """What waits for a model and what serves it now. `rate` is work units a second of all replicas; None while nothing was measured.

    `interactive` counts users' calls in flight, `slots` the calls that one replica takes at once."""

    due: Sequence[DueWork]
    rate: float | None
    replicas: int
    interactive: int
    slots: int


@dataclass(frozen=True, slots=True)
class ReplicasNeeded:
    count: int
    why: str


def model_replicas(load: ReplicaLoad) -> ReplicasNeeded:
    """Return how many replicas of a model are needed; never 0 while anything waits or a user calls."""
    for_users = math.ceil(load.interactive / max(load.slots, 1))
    users = f" {load.interactive:,} interactive calls need {for_users}." if for_users else ""
    if not any(one.units > 0 for one in load.due):
        return ReplicasNeeded(for_users, users.strip() or "Nothing waits.")
    each = load.rate / load.replicas if load.rate and load.replicas else 0.0
    if not each:
        count = max(load.replicas, 1) + for_users
        return ReplicasNeeded(count, f"Work waits, and no rate was measured yet.{users}")
    units_per_s, deadline = _steepest(load.due)
    for_batches = max(math.ceil(min(units_per_s / each, REPLICAS_MAX)), 1)
    why = (
        f"Work due within {spoken(deadline.due_in_ms)} needs {units_per_s:,.1f} units a second; "
        f"one replica did {each:,.1f}.{users}"
    )
    return ReplicasNeeded(min(for_batches + for_users, REPLICAS_MAX), why)


def worker_replicas(models: Sequence[tuple[int, int]], slots_per_worker: int, *, has_inputs: bool) -> ReplicasNeeded:
    """Return how many workers keep these models full: each a count of replicas and the calls that one takes at once."""
    calls = sum(count * slots for count, slots in models)
    if not calls:
        return ReplicasNeeded(1, "Inputs wait to be checked.") if has_inputs else ReplicasNeeded(0, "Nothing waits.")
    count = min(math.ceil(calls / slots_per_worker), REPLICAS_MAX)
    return ReplicasNeeded(
        count, f"The replicas take {calls:,} calls at once, and one worker makes {slots_per_worker:,}."
    )


def _steepest(due: Sequence[DueWork]) -> tuple[float, DueWork]:
    """Return the highest rate that any deadline asks for, and that deadline: all that is due by then must be done by then."""
    done, found, steepest = 0, 0.0, due[0]
    for one in sorted(due, key=lambda work: work.due_in_ms):
        done += one.units
        units_per_s = 1000 * done / max(one.due_in_ms, SOONEST_MS)
        if units_per_s > found:
            found, steepest = units_per_s, one
    return found, steepest
