"""The item that kills its workers is found in few losses, and workers that are killed from outside fail nothing."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import replace

from tests.support.ports import HandClock
from tests.support.store_verbs import lease_slices
from tests.worker.test_leased_work import leased_work_of, slice_of
from tests.worker.world import BODY, Script, WorkerWorld, chat_lines, until, working
from tidegate.core.errors import StoreUnavailable, Unavailable
from tidegate.core.nouns import Answer, Attempts, Call, Item, Job, Usage
from tidegate.core.retry import ALONE_LOSSES_MAX
from tidegate.core.schedule.snapshot import Suspects
from tidegate.stages.lease import SuspectBounds
from tidegate.store.road.leases import ALL_SUSPECTS, KEPT_FOR_CHECKS
from tidegate.worker import trial as trials
from tidegate.worker.leased_work import LeasedSliceState
from tidegate.worker.trial import ALONE_AFTER, Trial

pytestmark = pytest.mark.anyio

_MARK = "select alone_job_id, alone_checked from workers where state = 'alive' and alone_job_id is not null"


def state(lost_count: int = 2, count: int = 4) -> Any:
    leased = SimpleNamespace(lost_count=lost_count, count=count, attempts={})
    return SimpleNamespace(slice=leased, sent_to=1)


def trial() -> Trial:
    nothing: Any = SimpleNamespace(send_one_at_a_time=lambda: None)
    return Trial(nothing, nothing, nothing, nothing, nothing)


def hashable(*slices: Any) -> Any:
    """As the worker's own slices are: told apart by what they are, not by what they hold."""
    return [type("Held", (), {"slice": one.slice, "sent_to": one.sent_to})() for one in slices]


async def test_half_of_the_worst_then_the_rest_of_them_then_all() -> None:
    ours = trial()
    assert ours.suspects_max(Suspects(0, 5, 9)) == 5
    group = hashable(state(5), state(5))
    ours.begin_group(group)
    assert ours.hides_suspects
    assert ours.suspects_max(Suspects(0, 5, 4)) == 0, "one group at a time"
    assert not ours.end_slice(group[0])
    assert ours.end_slice(group[1])
    assert ours.suspects_max(Suspects(0, 5, 10)) == 10 - KEPT_FOR_CHECKS
    rest = hashable(state(5))
    ours.begin_group(rest)
    assert ours.end_slice(rest[0])
    assert ours.suspects_max(Suspects(0, 4, 30)) == ALL_SUSPECTS
    assert ours.suspects_max(Suspects(0, 6, 8)) == 4, "worse ones than those that were survived begin again"


async def test_a_trial_is_on_from_the_first_suspects_seen_until_none_are_seen_and_none_are_held() -> None:
    ours = trial()
    assert not ours.is_on
    ours.suspects_max(Suspects())
    assert not ours.is_on
    ours.suspects_max(Suspects(0, 5, 2))
    group = hashable(state(5))
    ours.begin_group(group)
    assert ours.is_on
    assert ours.suspects_max(Suspects()) == 0, "its own suspects hide all others"
    assert ours.is_on
    ours.end_slice(group[0])
    assert ours.is_on, "the others of its level may be ready still"
    ours.suspects_max(Suspects())
    assert not ours.is_on


async def test_a_level_that_is_survived_in_one_group_clears_the_lesser_ones() -> None:
    ours = trial()
    assert ours.suspects_max(Suspects(0, 5, 1)) == 1
    [only] = hashable(state(5))
    ours.begin_group([only])
    assert ours.end_slice(only)
    assert ours.suspects_max(Suspects(0, 4, 30)) == ALL_SUSPECTS


async def test_suspects_of_a_model_that_had_no_room_are_halved_when_they_come() -> None:
    """As bad as what was survived, but none of them was in the groups that were."""
    ours = trial()
    assert ours.suspects_max(Suspects(0, 7, 1)) == 1
    [only] = hashable(state(7))
    ours.begin_group([only])
    assert ours.end_slice(only)
    assert ours.suspects_max(Suspects(0, 2, 5)) == ALL_SUSPECTS
    assert ours.suspects_max(Suspects(0, 7, 4)) == 2


async def test_a_group_without_any_of_the_worst_says_nothing_about_them() -> None:
    """A lease is of one model: its own suspects may be lesser ones than those that were counted."""
    ours = trial()
    assert ours.suspects_max(Suspects(0, 4, 3)) == 2
    group = hashable(state(2), state(2))
    ours.begin_group(group)
    assert [ours.end_slice(one) for one in group] == [False, False]
    assert ours.suspects_max(Suspects(0, 4, 3)) == 2


async def test_a_group_that_was_given_back_unsent_has_survived_nothing() -> None:
    ours = trial()
    ours.suspects_max(Suspects(0, 3, 8))
    [unsent] = hashable(state(3))
    unsent.sent_to = 0
    ours.begin_group([unsent])
    assert not ours.end_slice(unsent)
    assert ours.suspects_max(Suspects(0, 3, 8)) == 4


async def test_a_group_that_was_survived_says_nothing_about_the_next_one_if_that_goes_back_unsent() -> None:
    ours = trial()
    ours.suspects_max(Suspects(0, 3, 8))
    sent, unsent = hashable(state(3), state(3))
    unsent.sent_to = 0
    ours.begin_group([sent])
    assert ours.end_slice(sent)
    ours.begin_group([unsent])
    assert not ours.end_slice(unsent)


async def test_an_item_that_is_given_up_says_nothing_about_the_other_suspects() -> None:
    """It fails unsent. Its end passed for a group that was survived, and all others ran at once."""
    ours = trial()
    assert ours.suspects_max(Suspects(0, 7, 1)) == 1
    given_up = state(7, count=1)
    given_up.slice.attempts = {20: Attempts(20, 3, 0, "worker_lost", alone_losses=ALONE_LOSSES_MAX)}
    [only] = hashable(given_up)
    ours.begin_group([only])
    assert ours.end_slice(only), "what is left is looked for at once"
    assert ours.suspects_max(Suspects(0, 4, 30)) == 15


async def test_lesser_suspects_wait_while_another_worker_tries_worse_ones() -> None:
    assert trial().suspects_max(Suspects(4, 3, 8)) == 0
    assert trial().suspects_max(Suspects(3, 3, 8)) == 4
    assert trial().suspects_max(Suspects(3, 3, 2)) == 0, "the last are left for checks"


async def suspected(world: WorkerWorld, job: Job, lost_count: int) -> None:
    """Let the slices of this job have lost so many owners."""
    await world.rows("update slices set lost_count = ? where job_id = ?", lost_count, job.id)


async def test_a_single_suspect_is_the_only_one_in_flight_and_the_store_knows_before(
    live: WorkerWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trials, "FIRST_ROUNDS", 0)
    script = Script(live, "m")
    company = await live.started(chat_lines(6))
    job = await live.started(chat_lines(1))
    await suspected(live, job, ALONE_AFTER)
    seen: list[tuple[int, list[Any]]] = []

    async def slow(call: Call) -> Answer:
        await asyncio.sleep(0.01)
        if call.job_id == job.id:
            seen.append((script.in_flight, await live.rows(_MARK)))
        return Answer(200, BODY, Usage(), "here")

    script.answers = slow
    async with working(live, script):
        for one in (job, company):
            await live.completed(one)
        assert seen == [(1, [(job.id, 0)])]
        assert await live.rows(_MARK) == []


@pytest.mark.parametrize("is_lost_alone", [False, True])
async def test_a_suspect_does_not_stop_a_worker_that_has_just_begun(
    live: WorkerWorld, monkeypatch: pytest.MonkeyPatch, *, is_lost_alone: bool
) -> None:
    """Or a machine that keeps dying would stand still for several calls after each start."""
    rounds, calls = 8, Counter[str]()
    monkeypatch.setattr(trials, "FIRST_ROUNDS", rounds)
    monkeypatch.setattr(trials, "_LOOK_AGAIN_S", 0.05)
    script = Script(live, "m")
    company = await live.started(chat_lines(600), slice_items=4)
    job = await (lost_alone(live) if is_lost_alone else live.started(chat_lines(1)))
    await suspected(live, job, ALONE_AFTER)
    before: list[int] = []
    most = 0

    async def slow(call: Call) -> Answer:
        nonlocal most
        most = max(most, script.in_flight)
        if call.job_id == job.id:
            before.append(calls[company.id])
        await asyncio.sleep(0.02)
        calls[call.job_id] += 1
        return Answer(200, BODY, Usage(), "here")

    script.answers = slow
    async with working(live, script):
        for one in (job, company):
            await live.completed(one)
    [worked] = before
    assert rounds * most <= worked < 600, "it has worked for a while, and there was more to do"


async def test_a_worker_with_long_calls_runs_an_item_alone_after_a_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    """However few of its calls have ended until then."""
    lonely = Lonely(monkeypatch)
    now_s = asyncio.get_running_loop().time()
    lonely.trial._begun_s = now_s - trials.REST_S_MAX + 0.5
    lonely.leased_work.expect(slice_of(1))
    suspect = lonely.held("suspect", ALONE_AFTER)
    lonely.begin(suspect)
    assert 0 < suspect.rests_ms <= 500
    assert not lonely.leased_work._sends_one_at_a_time
    lonely.trial._begun_s = now_s - trials.REST_S_MAX
    lonely.begin(lonely.held("suspect", ALONE_AFTER))
    assert lonely.leased_work._sends_one_at_a_time


async def lost_alone(live: WorkerWorld) -> Job:
    """A job whose only item was lost alone once."""
    job = await live.started(chat_lines(1))
    lost = await live.worker()
    assert await lease_slices(live.store, lost, job.id, "m", 1, "t")
    assert await live.store.run_alone(lost, (job.id, 0))
    assert await live.store.declare_gone(lost, leaving=True)
    assert await live.store.reclaim_slices(lost) == 1
    await suspected(live, job, ALONE_AFTER)
    return job


async def test_an_item_that_no_model_server_answered_is_no_check(
    live: WorkerWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was not sent, for a spent budget or a server that is away, so its worker survived nothing."""
    monkeypatch.setattr(trials, "FIRST_ROUNDS", 0)
    script = Script(live, "m")
    company = await live.started(chat_lines(6))
    job = await lost_alone(live)
    marks: list[Any] = []

    async def away_at_first(call: Call) -> Answer:
        marks.append((call.job_id, *await live.rows(_MARK)))
        if len(marks) == 1:
            raise Unavailable("connection refused")
        return Answer(200, BODY, Usage(), "here")

    script.answers = away_at_first
    async with working(live, script):
        for one in (job, company):
            await live.completed(one)
    assert marks[:2] == [(company.id, (company.id, 0)), (job.id, (job.id, 0))]


async def test_another_item_is_run_alone_before_a_suspect_that_was_lost_alone(
    live: WorkerWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trials, "FIRST_ROUNDS", 0)
    script = Script(live, "m")
    company = await live.started(chat_lines(6))
    job = await lost_alone(live)
    marks: list[Any] = []

    async def slow(call: Call) -> Answer:
        marks.append((call.job_id, *await live.rows(_MARK)))
        return Answer(200, BODY, Usage(), "here")

    script.answers = slow
    async with working(live, script):
        for one in (job, company):
            await live.completed(one)
    assert marks[:2] == [(company.id, (company.id, 0)), (job.id, (job.id, 1))]


async def test_an_item_that_was_lost_alone_three_times_fails_unsent(live: WorkerWorld) -> None:
    script = Script(live, "m")
    job = await live.started(chat_lines(2))
    for _ in range(3):
        lost = await live.worker()
        assert await lease_slices(live.store, lost, job.id, "m", 9, lost)
        assert await live.store.run_alone(lost, (job.id, 1), is_checked=True)
        assert await live.store.declare_gone(lost, leaving=True)
        await live.store.reclaim_slices(lost)
    async with working(live, script):
        await live.completed(job)
    assert [call.number for call in script.calls] == [0]
    assert (await live.look(job)).failed_count == 1


class Lonely:
    """A trial over the hands of a worker: what is sent comes back at once, and a test says what a look for more finds."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for name, value in (("_CHECK_WAIT_S", 0.2), ("_INNOCENT_WAIT_S", 0.1), ("_POLL_S", 0.001), ("_RETRY_S", 0.001)):
            monkeypatch.setattr(trials, name, value)
        self.leased_work = leased_work_of(HandClock(), free=9)
        self.me = SimpleNamespace(id="worker")
        # What was sent, and what the store got before and after: the item of which job is alone, and whether another was checked.
        self.events: list[Any] = []
        self.store_faults = 0
        # Whether the store counts the worker as gone.
        self.is_gone = False
        # What each look for more may take: whether no suspects, how many of them, and whether kept ones.
        self.looks: list[tuple[bool, int]] = []
        self.more: list[LeasedSliceState] = []
        self.settling_count = 0
        fakes: Any = (self, self.leased_work, self, self.me, self)
        self.trial = Trial(*fakes)

    async def run_alone(self, worker_id: str, item: tuple[str, int] | None, *, is_checked: bool = False) -> bool:
        if self.store_faults:
            self.store_faults -= 1
            raise StoreUnavailable("away")
        self.events.append((item and item[0], is_checked))
        return not self.is_gone

    def hurry(self) -> None:
        self.settling_count = 2

    def is_settling(self, job_id: str, first: int, token: str) -> bool:
        self.settling_count -= 1
        if self.settling_count == 0:
            self.events.append("committed")
        return self.settling_count > 0

    def notify(self) -> None:
        self.looks.append((self.trial.hides_suspects, self.trial.suspects_max(Suspects(0, 9, 5))))
        for state in self.more:
            self.leased_work.add(state, [Item(0, b'"x"', b"{}")])
        self.more = []

    def held(self, job_id: str, lost_count: int, alone_losses: int = 0) -> LeasedSliceState:
        attempts = {0: Attempts(0, 0, 0, "worker_lost", alone_losses=alone_losses)}
        plain = slice_of(1)
        leased = replace(plain.slice, job_id=job_id, lost_count=lost_count, attempts=attempts)
        return LeasedSliceState(leased, plain.deadline_ms)

    def begin(self, *states: LeasedSliceState) -> None:
        for state in states:
            self.leased_work.expect(state)
        self.trial.begin_group(list(states))
        for state in states:
            self.leased_work.add(state, [Item(0, b'"x"', b"{}")])

    async def run(self, what: Callable[[], bool]) -> None:
        """Send what goes, until the trial is over and this holds."""

        async def send() -> None:
            while True:
                state, item = await self.leased_work.next()
                self.events.append(f"sent {state.slice.job_id}")
                await asyncio.sleep(0.002)
                self.leased_work.mark_done(state)
                state.end_item(item.number, was_answered=True)

        tasks = [asyncio.create_task(one) for one in (self.trial.run(), send(), send())]

        await until(what, "the end of the trial")
        for task in tasks:
            task.cancel()

    def sent(self) -> list[str]:
        return [one for one in self.events if isinstance(one, str) and one.startswith("sent")]


async def test_with_nothing_else_at_hand_another_item_is_leased_and_run_alone_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lonely = Lonely(monkeypatch)
    lonely.more = [lonely.held("innocent", 0), lonely.held("worse", 1)]
    lonely.store_faults = 2
    lonely.begin(lonely.held("suspect", ALONE_AFTER, alone_losses=1))
    await lonely.run(lambda: len(lonely.sent()) == 3)
    assert lonely.looks == [(True, 1)], "one group at a time, and an innocent one first"
    assert lonely.events == [
        ("innocent", False),
        "sent innocent",
        "committed",
        ("suspect", True),
        "sent suspect",
        "committed",
        (None, False),
        "sent worse",
    ]
    assert not lonely.trial.wants_check


async def test_a_suspect_that_nothing_can_be_held_against_runs_unchecked(monkeypatch: pytest.MonkeyPatch) -> None:
    lonely = Lonely(monkeypatch)
    lonely.begin(lonely.held("suspect", ALONE_AFTER, alone_losses=1))
    await lonely.run(lambda: (None, False) in lonely.events)
    assert lonely.events == [("suspect", False), "sent suspect", "committed", (None, False)]
    assert sorted(set(lonely.looks)) == [(False, 2), (True, 1)], "in the end another suspect would do"
    assert not lonely.trial.wants_check


async def test_an_item_that_was_never_lost_alone_needs_no_check_and_what_is_dropped_is_not_sent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(trials, "FIRST_ROUNDS", 0)
    lonely = Lonely(monkeypatch)
    lonely.begin(lonely.held("suspect", ALONE_AFTER))
    await lonely.run(lambda: (None, False) in lonely.events)
    assert lonely.events == [("suspect", False), "sent suspect", "committed", (None, False)]
    dropped = Lonely(monkeypatch)
    suspect = dropped.held("suspect", ALONE_AFTER, alone_losses=1)
    dropped.begin(suspect)
    dropped.leased_work.close_job("suspect")
    later = dropped.held("later", 0)
    dropped.leased_work.add(later, [Item(0, b'"x"', b"{}")])
    await dropped.run(lambda: bool(dropped.events))
    assert dropped.events == ["sent later"], "and the others go on"


async def test_a_worker_that_counts_as_gone_runs_no_item_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever became of it, the store would not know which item it was."""
    monkeypatch.setattr(trials, "FIRST_ROUNDS", 0)
    lonely = Lonely(monkeypatch)
    lonely.is_gone = True
    lonely.begin(lonely.held("suspect", ALONE_AFTER))
    await lonely.run(lambda: (None, False) in lonely.events)
    assert lonely.events[:2] == [("suspect", False), (None, False)]


@pytest.mark.parametrize(
    ("lost_count", "alone_losses", "is_alone"),
    [(ALONE_AFTER - 1, 0, False), (ALONE_AFTER, ALONE_LOSSES_MAX - 1, True), (ALONE_AFTER, ALONE_LOSSES_MAX, False)],
)
async def test_a_single_item_goes_alone_from_so_many_losses_on_until_it_is_given_up(
    monkeypatch: pytest.MonkeyPatch, lost_count: int, alone_losses: int, is_alone: bool
) -> None:
    monkeypatch.setattr(trials, "FIRST_ROUNDS", 0)
    lonely = Lonely(monkeypatch)
    lonely.begin(lonely.held("suspect", lost_count, alone_losses))
    assert (lonely.leased_work.take_item() is None) == is_alone


@pytest.mark.parametrize(("share", "is_long"), [(trials.REST_SHARE, False), (10_000_000, True)])
async def test_between_two_items_that_run_alone_a_worker_works_for_several_times_as_long_as_the_first_stopped_it(
    monkeypatch: pytest.MonkeyPatch, share: int, is_long: bool
) -> None:
    monkeypatch.setattr(trials, "FIRST_ROUNDS", 0)
    monkeypatch.setattr(trials, "REST_SHARE", share)
    lonely = Lonely(monkeypatch)
    first, second, company = lonely.held("first", ALONE_AFTER), lonely.held("second", ALONE_AFTER), slice_of(1)
    begun_s = asyncio.get_running_loop().time()
    lonely.begin(first)
    await lonely.run(lambda: not lonely.leased_work._sends_one_at_a_time)
    stopped_ms = (asyncio.get_running_loop().time() - begun_s) * 1000
    assert lonely.leased_work.forget_if_done(first)
    lonely.trial.end_slice(first)
    lonely.trial.begin_again()
    lonely.leased_work.expect(company)
    lonely.begin(second)
    assert second.rests_ms <= min(share * stopped_ms, trials.REST_S_MAX * 1000)
    if is_long:
        assert second.rests_ms > 0, "it goes back for as long"
        assert not lonely.leased_work._sends_one_at_a_time


async def test_the_rest_waits_while_a_culprit_is_searched_for_but_not_while_a_check_is() -> None:
    ours = trial()
    assert ours.bounds(Suspects(0, 4, 8, is_searching=True)) == SuspectBounds(4, keeps_rest=True)
    assert not ours.bounds(Suspects(0, 4, 8)).keeps_rest
    ours.wants_check = True
    assert not ours.bounds(Suspects(0, 4, 8, is_searching=True)).keeps_rest


async def test_a_look_without_suspects_begins_again_unless_a_group_is_out() -> None:
    ours = trial()
    assert ours.suspects_max(Suspects(0, 5, 1)) == 1
    [survived] = hashable(state(5))
    ours.begin_group([survived])
    assert ours.end_slice(survived)
    assert ours.suspects_max(Suspects(0, 3, 8)) == ALL_SUSPECTS
    ours.begin_group(hashable(state(3)))
    ours.begin_again()
    assert ours.suspects_max(Suspects()) == 0, "a new incarnation holds none"
    ours._stage = trials._Stage.ALL
    group = hashable(state(3), state(3))
    ours.begin_group([*group, *hashable(state(1))])
    assert not ours.hides_suspects, "all are taken at once"
    assert ours.suspects_max(Suspects()) == 2, "those that it holds, and none that came since"
    assert [ours.end_slice(one) for one in group] == [False, True]
    assert ours.suspects_max(Suspects()) == 0
    assert ours.suspects_max(Suspects(0, 3, 8)) == 4, "what was survived is forgotten with the last suspect"
