"""How items without a result stand."""

from __future__ import annotations

from tidegate.web.completion_batch.items import OpenItems


def test_items_run_that_a_worker_holds_and_that_do_not_wait_to_be_tried_again() -> None:
    items = OpenItems(leased=[(2, 3), (7, 1)], waiting=frozenset({3}))
    assert [number for number in range(10) if items.is_running(number)] == [2, 4, 7]
    assert not OpenItems().is_running(0)
