"""The shadow: where another mode would have chosen otherwise, with its reason; and nothing where it would not."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.core.schedule import looks
from tests.core.schedule.test_modes import slices
from tests.core.schedule.world import ScheduleWorld, job
from tidegate.core.schedule import Difference, Mode, Policy, Reason, Snapshot, choose, compare


def test_fifo_beside_fair_share_names_the_jobs_that_would_have_waited() -> None:
    world = ScheduleWorld([job("old", "a", 9), job("new", "b", 9, created_at=5)], Policy(mode=Mode.FAIR_SHARE), slots=4)
    look = world.look(world.workers[0])
    ours = choose(look, world.policy)
    assert compare(look, world.policy, ours, Mode.FIFO) == [
        Difference("m", "a", "old", 2, 4, "fewer_slices"),
        Difference("m", "b", "new", 2, 0, Reason.BEHIND_OTHER_JOBS),
    ]


@pytest.mark.parametrize("mode", list(Mode))
def test_a_mode_does_not_differ_from_itself(mode: Mode) -> None:
    world = ScheduleWorld([job("a", "a", 9), job("b", "b", 9)], Policy(mode=mode), slots=3)
    look = world.look(world.workers[0])
    assert compare(look, world.policy, choose(look, world.policy), mode) == []


@given(looks.snapshots(), looks.policies, st.sampled_from(Mode))
@looks.tried
def test_every_difference_is_one_and_has_a_reason(snapshot: Snapshot, policy: Policy, other: Mode) -> None:
    ours = choose(snapshot, policy)
    for difference in compare(snapshot, policy, ours, other):
        assert difference.ours != difference.theirs
        assert difference.ours == slices(ours).get((difference.job_id, difference.model), 0)
        assert difference.reason
