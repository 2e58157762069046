"""What a runner passes on of the items it ran, and when what is recorded is written at once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.ports import HandClock
from tests.worker.test_leased_work import items, leased_work_of, slice_of
from tidegate.core.nouns import AnswerTry, Attempts, Finished, Item, ItemVerdict, Usage
from tidegate.core.states import Outcome
from tidegate.stages.perform import Again
from tidegate.worker.leased_work import LeasedWork
from tidegate.worker.leasing import Leasing
from tidegate.worker.runners import Runner

pytestmark = pytest.mark.anyio


class Notes:
    """A recorder that notes what it is given, until so many items have ended."""

    def __init__(self, item_count: int = 0) -> None:
        self.noted: list[Any] = []
        self.ended = asyncio.Event()
        self._left = item_count

    def record(self, verdict: ItemVerdict) -> None:
        self.noted.append(verdict.number)
        self._left -= 1
        if not self._left:
            self.ended.set()

    def tried(self, job_id: str, token: str, attempts: Attempts) -> None:
        self.noted.append((job_id, token, attempts))

    def commit_first(self) -> None:
        self.noted.append("commit first")

    def hurry(self) -> None:
        self.noted.append("hurry")


def answered(item: Item) -> ItemVerdict:
    return ItemVerdict("job", item.number, b"x", Finished(item.number, Outcome.ANSWERED, 1, 0, "t", deployment="d"))


async def run(leased_work: LeasedWork, perform: Callable[[Item], ItemVerdict | Again]) -> list[Any]:
    """Run every item that waits, one after another. Return what was recorded."""

    async def performed(state: Any, item: Item) -> ItemVerdict | Again:
        return perform(item)

    notes = Notes(leased_work.unsent("m"))
    rules, performer = SimpleNamespace(bind=lambda state: None), SimpleNamespace(perform=performed)
    settler, lease_wake = SimpleNamespace(settle_slice=lambda state: None), SimpleNamespace(notify=lambda: None)
    ports: Any = (leased_work, rules, performer, notes, settler, None, lease_wake)
    task = asyncio.create_task(Runner(*ports).run())
    await notes.ended.wait()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    return notes.noted


async def test_a_flush_waits_for_no_more_lines_once_nothing_is_in_flight_or_waits() -> None:
    leased_work = leased_work_of(HandClock())
    leased_work.add(slice_of(2), items(2))
    assert await run(leased_work, answered) == [0, 1, "hurry"]


async def test_an_answer_for_a_slice_that_was_lost_meanwhile_is_committed_before_anything_new_is_taken() -> None:
    """Its item may be leased again, also by this process: it would be sent once more."""
    leased_work = leased_work_of(HandClock())
    leased_work.add(slice_of(1), items(1))

    def lost(item: Item) -> ItemVerdict:
        leased_work.lose_lease()
        return answered(item)

    assert await run(leased_work, lost) == [0, "commit first", "hurry"]


async def test_an_answer_that_did_not_fit_is_written_down_before_the_item_is_sent_again() -> None:
    """It was paid for, though it used up no attempt: the process that runs the item next must know of it."""
    leased_work = leased_work_of(HandClock())
    leased_work.add(slice_of(1), items(1))
    tries = (AnswerTry("m", "d", Usage(1, 0, 1, 0), (1, 0, 1), "no number"),)
    ends = [Again(0, 0, "schema_invalid", tries=tries, rejected_text="x")]
    noted = await run(leased_work, lambda item: ends.pop() if ends else answered(item))
    assert noted[0] == ("job", "token", Attempts(0, 0, 0, "schema_invalid", tries=tries))
    assert noted[-2:] == [0, "hurry"]


async def test_what_an_item_was_lost_alone_stays_on_record_when_its_next_call_fails() -> None:
    """Else no number of workers that it kills would be enough to give it up."""
    leased_work = leased_work_of(HandClock())
    leased_work.add(slice_of(1), [Item(0, b'"x"', b"{}", alone_losses=2)])
    ends = [Again(0, 1, "upstream_error")]
    noted = await run(leased_work, lambda item: ends.pop() if ends else answered(item))
    assert noted[0] == ("job", "token", Attempts(0, 1, 0, "upstream_error", alone_losses=2))


async def test_a_call_that_was_taken_back_is_written_down_however_soon_its_item_is_sent_again() -> None:
    """Else it would be taken back for ever, by one process after another."""
    leased_work = leased_work_of(HandClock())
    leased_work.add(slice_of(1), items(1))
    ends = [Again(0, 0, "handed_back", hand_backs=1)]
    noted = await run(leased_work, lambda item: ends.pop() if ends else answered(item))
    assert noted[0] == ("job", "token", Attempts(0, 0, 0, "handed_back", 1))


@pytest.mark.parametrize("in_flight", [0, 1])
async def test_what_is_recorded_is_written_at_once_when_there_is_nothing_to_lease_and_nothing_in_flight(
    in_flight: int,
) -> None:
    notes = Notes()

    async def nothing() -> bool:
        return False

    async def wait(_: float) -> None:
        raise asyncio.CancelledError

    lost_workers, lease_wake = SimpleNamespace(deliver_spool=nothing), SimpleNamespace(wait=wait)
    leaser, leased_work = SimpleNamespace(fill=nothing), SimpleNamespace(in_flight=in_flight)
    ports: Any = (leaser, leased_work, notes, lost_workers, lease_wake, 1)
    with pytest.raises(asyncio.CancelledError):
        await Leasing(*ports).run()
    assert notes.noted == ([] if in_flight else ["hurry"])
