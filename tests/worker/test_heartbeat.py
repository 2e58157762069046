"""What a heartbeat brings back is obeyed when it is due, and not a heartbeat later."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import replace

from tests.support.ports import HandClock
from tests.worker.test_leased_work import items, leased_work_of, slice_of
from tests.worker.world import Script, WorkerWorld, chat_lines, until, working
from tidegate.core.errors import StoreUnavailable
from tidegate.core.nouns import Answer, Call, Holding, LeasedSlice
from tidegate.core.states import JobState
from tidegate.worker import heartbeat
from tidegate.worker.heartbeat import CloseGrace, Heartbeat
from tidegate.worker.leased_work import LeasedWork

pytestmark = pytest.mark.anyio

MINUTES_MS = 600_000


async def test_calls_of_a_cancelled_job_are_cut_off_when_their_grace_ends_however_far_the_next_heartbeat_is(
    live: WorkerWorld,
) -> None:
    script, cut_off = Script(live, "m"), list[int]()

    async def hangs(call: Call) -> Answer:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cut_off.append(call.number)
            raise
        raise AssertionError("it waits for ever")

    script.answers = hangs
    job = await live.started(chat_lines(2))
    async with working(live, script, heartbeat_ms=MINUTES_MS, cancel_grace_ms=300) as run:
        await until(lambda: len(script.calls) == 2, "both calls")
        await live.store.cancel_job(job.tenant_id, job.id)
        run.worker._items.recorder.job_stopped.set()
        await until(lambda: sorted(cut_off) == [0, 1], "their grace to end")


async def test_the_next_heartbeat_comes_when_the_first_of_several_graces_ends() -> None:
    beats, beat_due = list[int](), asyncio.Event()

    async def beat() -> list[Holding]:
        beats.append(len(beats))
        if len(beats) == 2:
            me.has_left = True
            beat_due.set()
        soon, late = (Holding(name, 0, "t", JobState.CANCELLING, JobState.CANCELLED, 0, False, 0) for name in "ab")
        return [replace(soon, closing_for_ms=MINUTES_MS - 10), late]

    me = SimpleNamespace(has_left=False, safe_until_ms=0.0, asked_ms=0.0, beat=beat)
    await run(me, leased_work_of(HandClock()), beat_due)
    assert beats == [0, 1]


async def run(
    me: Any,
    leased_work: LeasedWork,
    beat_due: asyncio.Event,
    leases: Leases | None = None,
    settling: frozenset[str] = frozenset(),
) -> None:
    """Beat until this process has left. The ends of slices with the tokens `settling` are not committed yet."""
    settler = SimpleNamespace(settle_all=lambda: None, is_settling=lambda holding: holding.token in settling)
    grace = CloseGrace(MINUTES_MS, MINUTES_MS)
    ports: Any = (me, leases or Leases(), leased_work, settler, beat_due, MINUTES_MS, grace)
    async with asyncio.timeout(10):
        await Heartbeat(*ports).run()


class Leases:
    """The leases that are being taken, and the tokens of the slices that were handed back."""

    def __init__(self) -> None:
        self.pending: set[str] = set()
        self.released: list[str] = []

    async def release(self, holding: Holding) -> None:
        self.released.append(holding.token)


class Beats:
    """A process that leaves after so many heartbeats. Of these, some get no answer and the others this one."""

    def __init__(self, *holdings: Holding, count: int = 1, unanswered: int = 0) -> None:
        self.has_left = False
        self.safe_until_ms = 60_000.0
        self.asked_ms = 1_000.0
        self.due = asyncio.Event()
        self._holdings = list(holdings)
        self._left = count
        self._unanswered = unanswered

    async def beat(self) -> list[Holding]:
        self._unanswered -= 1
        if self._unanswered >= 0:
            raise StoreUnavailable("away")
        self._left -= 1
        # The last answer is read after the process has left, and not at all.
        self.has_left = self._left < 0
        self.due.set()
        return self._holdings


async def test_a_heartbeat_that_got_no_answer_is_repeated_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each one that is missed brings the end of the lease nearer."""
    monkeypatch.setattr(heartbeat, "_RETRY_MS", 1)
    me, leased_work = Beats(unanswered=2), leased_work_of(HandClock())
    await run(me, leased_work, me.due)
    assert leased_work.lease_until_ms == me.safe_until_ms


async def test_a_deadline_that_moved_is_followed_from_the_moment_on_at_which_the_store_was_asked() -> None:
    state, leased_work = slice_of(1), leased_work_of(HandClock())
    leased_work.add(state, items(1))
    me = Beats(Holding("job", 0, "token", JobState.IN_PROGRESS, None, 0, False, 500))
    await run(me, leased_work, me.due)
    assert state.deadline_ms == 1_500


async def test_slices_that_are_being_leased_while_a_heartbeat_is_out_are_not_handed_back() -> None:
    """The store counts them already, and the answer to the lease is on its way: they would run here and elsewhere."""
    me = Beats(*(Holding("job", 0, token, JobState.IN_PROGRESS, None, 0, False, 0) for token in ("new", "unknown")))
    leases = Leases()
    beat = me.beat

    async def beat_beside_a_lease() -> list[Holding]:
        leases.pending.add("new")
        return await beat()

    me.beat = beat_beside_a_lease  # type: ignore[method-assign]
    await run(me, leased_work_of(HandClock()), me.due, leases)
    assert leases.released == ["unknown"]


async def test_a_slice_whose_last_answers_wait_for_their_commit_is_not_handed_back() -> None:
    """Its work here is done. Handed back, it would be leased again, and its items sent a second time."""
    me = Beats(*(Holding("job", 0, token, JobState.IN_PROGRESS, None, 0, False, 0) for token in ("ended", "unknown")))
    leases = Leases()
    await run(me, leased_work_of(HandClock()), me.due, leases, settling=frozenset({"ended"}))
    assert leases.released == ["unknown"]


async def test_slices_of_a_lease_whose_answer_was_lost_are_handed_back_and_run(
    live: WorkerWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their owner does not know of them, and as long as it lives no other worker gets them."""
    script, lease_picks, lost = Script(live, "m"), live.store.lease_picks, list[LeasedSlice]()
    job = await live.started(chat_lines(4))

    async def lease_and_vanish(*arguments: Any, **more: Any) -> list[LeasedSlice]:
        lost.extend(await lease_picks(*arguments, **more))
        monkeypatch.setattr(live.store, "lease_picks", lease_picks)
        raise StoreUnavailable("away")

    monkeypatch.setattr(live.store, "lease_picks", lease_and_vanish)
    async with working(live, script):
        await live.completed(job)
    assert [one.count for one in lost] == [4]
