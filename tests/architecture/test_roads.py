"""How many files a reader follows: one plain item and one interactive call, traced in a real `tidegate serve`."""

import pytest

from bench.machinery import repository
from tests.architecture.trace_roads import Road, roads
from tests.docs.pages import roads_drawn

# A run counts a few files more or less, by what its timers do. Lower these when a road gets shorter.
ITEM_FILES_MAX, CALL_FILES_MAX = 32, 20


@pytest.fixture(scope="module")
def traced() -> tuple[Road, Road]:
    return roads(repository())


def test_an_items_road_leads_from_the_lease_to_the_commit(traced: tuple[Road, Road]) -> None:
    item, _ = traced
    assert {"stages/lease.py", "stages/perform.py", "stages/record.py", "store/road/outcomes.py"} <= item.files
    assert "upstream/http/transport.py" in item.files
    assert len(item.files) <= ITEM_FILES_MAX


def test_a_calls_road_leads_from_the_door_to_the_model_server(traced: tuple[Road, Road]) -> None:
    _, call = traced
    assert {"web/gateway/gateway.py", "upstream/http/transport.py"} <= call.files
    assert not {one for one in call.files if one.startswith("stages/")}
    assert len(call.files) <= CALL_FILES_MAX


def test_the_roads_on_the_page_are_those_that_are_gone(traced: tuple[Road, Road]) -> None:
    drawn, (item, call) = roads_drawn(), traced
    assert [one for one in drawn["item"] if one not in item.files] == []
    assert [one for one in drawn["call"] if one not in call.files] == []
