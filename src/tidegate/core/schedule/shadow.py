"""Run a second mode on the same snapshot, and show where it would have chosen otherwise, and why.

It takes nothing.
"""

import msgspec
from msgspec.structs import replace

from tidegate.core.schedule.modes import choose
from tidegate.core.schedule.policy import Mode, Policy
from tidegate.core.schedule.reasons import reason_of
from tidegate.core.schedule.snapshot import Choice, Snapshot


class Difference(msgspec.Struct, frozen=True):
    """A job on a model of which the two modes take different numbers of slices.

    `reason` comes from the mode that takes fewer.
    """

    model: str
    share_owner: str
    job_id: str
    ours: int
    theirs: int
    reason: str


def compare(snapshot: Snapshot, policy: Policy, ours: Choice, other: Mode) -> list[Difference]:
    """Return where another mode differs from the choice that was made, in the order of the
    snapshot.
    """
    theirs = choose(snapshot, replace(policy, mode=other, shadow_mode=None))
    our_counts, their_counts = _counts(ours), _counts(theirs)
    differences = []
    for job in snapshot.jobs:
        key = (job.job_id, job.model)
        mine, other_count = our_counts.get(key, 0), their_counts.get(key, 0)
        if mine == other_count:
            continue
        loser = ours if mine < other_count else theirs
        reason = reason_of(loser, job.model, job.share_owner, job.job_id) or "fewer_slices"
        differences.append(Difference(job.model, job.share_owner, job.job_id, mine, other_count, reason))
    return differences


def _counts(choice: Choice) -> dict[tuple[str, str], int]:
    counts: dict[tuple[str, str], int] = {}
    for pick in choice.picks:
        key = (pick.job_id, pick.model)
        counts[key] = counts.get(key, 0) + pick.slice_count
    return counts
