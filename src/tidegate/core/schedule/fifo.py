"""Who goes next: a pure function from a bounded snapshot to picks.

A pick says which job and model and how many slices, not which slices: workers with equal snapshots do not collide. Today's only order is
first come, first served; a model that cannot take anything never blocks one that can.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tidegate.core.nouns import Candidate


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What a worker knows when it has room: jobs with something ready, and how many items it may take per model."""

    candidates: Sequence[Candidate]
    room: Mapping[str, int]
    slice_items: int
    slices_max: int


@dataclass(frozen=True, slots=True)
class Pick:
    job_id: str
    model: str
    slice_count: int


@dataclass(frozen=True, slots=True)
class Skip:
    job_id: str
    model: str
    reason: str


@dataclass(frozen=True, slots=True)
class Choice:
    picks: list[Pick]
    skips: list[Skip]


def choose(snapshot: Snapshot) -> Choice:
    """First come, first served over the open models, within the room of each model and of the worker."""
    picks: list[Pick] = []
    skips: list[Skip] = []
    room = dict(snapshot.room)
    slices_left = snapshot.slices_max
    for candidate in snapshot.candidates:
        if slices_left <= 0:
            skips.append(Skip(candidate.job_id, candidate.model, "worker_full"))
            continue
        open_items = room.get(candidate.model, 0)
        if open_items <= 0:
            skips.append(Skip(candidate.job_id, candidate.model, "no_available_slots"))
            continue
        count = min(slices_left, -(-open_items // snapshot.slice_items))
        picks.append(Pick(candidate.job_id, candidate.model, count))
        room[candidate.model] = open_items - count * snapshot.slice_items
        slices_left -= count
    return Choice(picks, skips)
