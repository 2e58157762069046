"""How items without a result stand, and when the others got theirs."""

from __future__ import annotations

from tidegate.store.jobs.job_events import OutcomePlace, RecordedTo
from tidegate.web.completion_batch.items import OpenItems, when


def test_items_run_that_a_worker_holds_and_that_do_not_wait_to_be_tried_again() -> None:
    items = OpenItems(leased=[(2, 3), (7, 1)], waiting=frozenset({3}))
    assert [number for number in range(10) if items.is_running(number)] == [2, 4, 7]
    assert not OpenItems().is_running(0)


def test_a_result_was_recorded_when_its_own_file_grew_behind_it() -> None:
    moments = [RecordedTo(10, 0, 1_000), RecordedTo(10, 10, 2_000), RecordedTo(20, 10, 3_000)]
    found = {
        (what, at): when(moments, OutcomePlace(0, what, at, 10)) for what in ("answered", "failed") for at in (0, 10)
    }
    assert found == {("answered", 0): 1_000, ("answered", 10): 3_000, ("failed", 0): 2_000, ("failed", 10): 0}
