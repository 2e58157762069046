"""Compute how many replicas of a model, and how many workers, the open deadlines need.

Pure functions of what waits and what was measured.
"""

import math
from collections.abc import Mapping, Sequence

import msgspec

from tidegate.core.deployments import Serves
from tidegate.core.window import spoken
from tidegate.core.wording import in_words

# Work that is due sooner than this counts as due then, because a replica started now serves nothing
# sooner.
SOONEST_MS = 60_000
REPLICAS_MAX = 10_000


class DueWork(msgspec.Struct, frozen=True):
    """Work units of one model that are due within a time."""

    due_in_ms: int
    units: int


class PoolLoad(msgspec.Struct, frozen=True):
    """The deployments of a model that take the same kind of calls, each counted as one replica, and
    how many of them are `unhealthy`.

    `interactive` counts users' calls in flight there, `slots` the calls that one replica takes at
    once.
    """

    replicas: int
    unhealthy: int
    interactive: int
    slots: int


NO_POOL = PoolLoad(0, 0, 0, 1)


class ReplicasNeeded(msgspec.Struct, frozen=True):
    """The number of replicas needed and why; `scale` is the need as a multiple of the replicas
    there are.
    """

    count: int
    why: str
    scale: float = 0.0


def background_pool(pools: Mapping[Serves, PoolLoad]) -> Serves:
    """Return the pool that background work makes grow: BATCH where it exists or only INTERACTIVE
    does, else BOTH.
    """
    return Serves.BATCH if Serves.BATCH in pools or set(pools) == {Serves.INTERACTIVE} else Serves.BOTH


def model_replicas(
    due: Sequence[DueWork], rate: float, pools: Mapping[Serves, PoolLoad]
) -> dict[Serves, ReplicasNeeded]:
    """Return how many replicas of a model are needed in each pool; never 0 while anything waits or
    a user calls there.

    `rate` is work units a second of all pools together; 0 while nothing was measured.
    """
    background = background_pool(pools)
    has_work = any(one.units > 0 for one in due)
    doing = sum(pool.replicas for serves, pool in pools.items() if serves is not Serves.INTERACTIVE)
    each = rate / doing if doing else 0.0
    kinds = {*pools, background} if has_work or not pools else set(pools)
    return {
        serves: _pool_replicas(due if has_work and serves is background else (), each, pools.get(serves, NO_POOL))
        for serves in sorted(kinds)
    }


def _pool_replicas(due: Sequence[DueWork], each: float, pool: PoolLoad) -> ReplicasNeeded:
    """Return how many replicas this work and the pool's users need.

    `each` is a replica's work units a second; 0: unknown.
    """
    for_users = math.ceil(pool.interactive / max(pool.slots, 1))
    scale = pool.interactive / max(pool.slots * pool.replicas, 1)
    users = in_words(pool.interactive, "interactive call needs", "interactive calls need")
    notes = f" {users} {for_users}." if for_users else ""
    if pool.unhealthy:
        verb = "is" if pool.unhealthy == 1 else "are"
        notes += f" {pool.unhealthy} of {in_words(pool.replicas, 'deployment')} {verb} unhealthy."
    if not due:
        why = "Nothing waits." if not for_users else ""
        return ReplicasNeeded(min(for_users, REPLICAS_MAX), f"{why}{notes}".strip(), _bounded(scale))
    if not pool.replicas:
        count, why, of_work = 1, "Work waits, and no deployment takes it.", 1.0
    elif not each:
        count, why, of_work = pool.replicas, "Work waits, and no rate was measured yet.", 1.0
    else:
        units_per_s, deadline = _steepest(due)
        replicas = min(units_per_s / each, REPLICAS_MAX)
        count, of_work = max(math.ceil(replicas), 1), replicas / pool.replicas
        by_when = f"within {spoken(deadline.due_in_ms)}" if deadline.due_in_ms > 0 else "already"
        why = f"Work due {by_when} needs {units_per_s:,.1f} units a second; one replica did {each:,.1f}."
    return ReplicasNeeded(min(count + for_users, REPLICAS_MAX), f"{why}{notes}", _bounded(of_work + scale, 0.01))


def _bounded(scale: float, least: float = 0.0) -> float:
    """Return a scale with two digits, rounded up."""
    return min(max(math.ceil(100 * scale) / 100, least), float(REPLICAS_MAX))


def whole_scale(needed: Mapping[Serves, ReplicasNeeded], pools: Mapping[Serves, PoolLoad]) -> float:
    """Return the need of all pools together as a multiple of the replicas there are."""
    counts = {serves: max(pools.get(serves, NO_POOL).replicas, 1) for serves in needed}
    return _bounded(sum(counts[serves] * one.scale for serves, one in needed.items()) / sum(counts.values()))


def worker_replicas(models: Sequence[tuple[int, int]], slots_per_worker: int, *, has_steps: bool) -> ReplicasNeeded:
    """Return how many workers keep these models full.

    A model is a number of replicas and the calls that one replica takes at once. `has_steps`:
    something beside items waits for a worker.
    """
    calls = sum(count * max(slots, 1) for count, slots in models)
    if not calls and has_steps:
        return ReplicasNeeded(1, "Inputs, ended batches, operations or deliveries wait for a worker.")
    if not calls:
        return ReplicasNeeded(0, "Nothing waits.")
    count = min(math.ceil(calls / slots_per_worker), REPLICAS_MAX)
    return ReplicasNeeded(
        count, f"The replicas take {calls:,} calls at once, and one worker makes {slots_per_worker:,}."
    )


def _steepest(due: Sequence[DueWork]) -> tuple[float, DueWork]:
    """Return the highest rate that any deadline asks for, and that deadline: all that is due by
    then must be done by then.
    """
    done, found, steepest = 0, 0.0, due[0]
    for one in sorted(due, key=lambda work: work.due_in_ms):
        done += one.units
        units_per_s = 1000 * done / max(one.due_in_ms, SOONEST_MS)
        if units_per_s > found:
            found, steepest = units_per_s, one
    return found, steepest
