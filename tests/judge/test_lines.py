"""Lines of result files that say what no product of ours says: each is a fault of its line, and no failure of the judge."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tidegate.core.ids import item_id
from tidegate.judge.jsonl import JsonlLine
from tidegate.judge.lines import COPIED, read_input_line, read_result_line, split_item_id

BATCH = "batch_0f3kQ2mZ8s1xW7vB4nD9Lc"
NO_ITEMS: tuple[Any, ...] = (None, 7, [], {}, "", "batch_req_short", BATCH)


def faults(extras: Any) -> list[str]:
    line = {
        "id": item_id(BATCH, 1),
        "custom_id": "a",
        "response": {"status_code": 200, "request_id": "req_" + 22 * "a", "body": {}},
        "error": None,
        "tidegate": extras,
    }
    return read_result_line(JsonlLine(0, json.dumps(line).encode(), whole=True), "output", 1, has_copies=True).faults


@pytest.mark.parametrize("number", [0, 61, 62, 3_843, 3_844, 49_999_999])
def test_an_items_id_has_its_number(number: int) -> None:
    assert split_item_id(item_id(BATCH, number)) == (BATCH.removeprefix("batch_")[:16], number)


@pytest.mark.parametrize("copied", COPIED)
def test_a_copy_names_the_item_that_it_is_of(copied: str) -> None:
    assert faults({copied: item_id(BATCH, 0)}) == []
    for wrong in NO_ITEMS:
        assert f"tidegate.{copied} must be the id of an item, without costs or tries" in faults({copied: wrong}), wrong


@pytest.mark.parametrize("extras", [None, 7, "x", [], {}])
def test_what_stands_beside_an_answer_is_an_object_with_something_in_it(extras: Any) -> None:
    assert "tidegate is no object, or an empty one" in faults(extras)


@pytest.mark.parametrize("tries", [None, 7, "x", [], {}, [7]])
def test_tries_are_a_list_of_objects(tries: Any) -> None:
    assert any("tries" in fault for fault in faults({"tries": tries}))


def test_a_byte_order_mark_may_stand_before_the_first_line_alone() -> None:
    line = JsonlLine(0, b"\xef\xbb\xbf" + json.dumps({"custom_id": "a", "body": {}}).encode(), whole=True)
    first, second = read_input_line(line, 1), read_input_line(line, 2)
    assert first is not None
    assert (first.custom_id, second is None or second.custom_id) == ("a", None)
