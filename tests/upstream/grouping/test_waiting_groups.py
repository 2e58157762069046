"""How many items the free slots of a route take when items share calls, also after its deployments changed."""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from tests.upstream.world import deployment
from tidegate.core.grouping.embeddings import GroupSize
from tidegate.upstream.grouping.group_kinds import KINDS
from tidegate.upstream.grouping.waiting_groups import WaitingGroups, WaitingItem
from tidegate.upstream.routing.deployment_state import DeploymentPolicy, DeploymentState
from tidegate.upstream.routing.routes import NameRoute

EMBEDDINGS = KINDS["/v1/embeddings"]
NO_LINE: Any = None


def state_of(inputs_max: int) -> DeploymentState:
    place = deployment("http://one/v1", upstream_max_batch_inputs=inputs_max)
    return DeploymentState(place, NO_LINE, NO_LINE, DeploymentPolicy(), is_alone=True)


def change(state: DeploymentState, inputs_max: int) -> None:
    state.update(replace(state.deployment, upstream_max_batch_inputs=inputs_max), NO_LINE, NO_LINE)


def test_each_free_slot_takes_a_whole_group_and_what_waits_has_its_own() -> None:
    groups, route = WaitingGroups(), NameRoute([state_of(8)])
    assert (groups.room(route, 2), groups.room(route, 0)) == (16, 0)
    for _ in range(3):
        groups.join(route, NO_LINE, WaitingItem(NO_LINE, NO_LINE, NO_LINE))
    assert (groups.room(route, 2), groups.room(route, 1), groups.room(route, 0)) == (8 + 5, 5, 0)


def test_a_smaller_size_that_was_learned_holds_until_the_deployments_change() -> None:
    groups, state = WaitingGroups(), state_of(8)
    route = NameRoute([state])
    assert groups.room(route, 2) == 16
    groups.learn(state, EMBEDDINGS.endpoint, GroupSize(8, 2))
    assert groups.room(route, 2) == 4
    groups.refresh()
    assert groups.known_size(state, EMBEDDINGS.endpoint) is None
    assert groups.room(route, 2) == 16


def test_a_new_limit_of_a_deployment_counts_from_the_refresh_on() -> None:
    groups, state = WaitingGroups(), state_of(8)
    route = NameRoute([state])
    assert (groups.room(route, 1), groups.is_single(route, EMBEDDINGS)) == (8, False)
    for inputs_max in (4, 1, 6):
        change(state, inputs_max)
        groups.refresh()
        assert groups.room(route, 1) == inputs_max
        assert groups.is_single(route, EMBEDDINGS) is (inputs_max == 1)
