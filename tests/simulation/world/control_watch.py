"""What must hold of jobs that are paused, begin later, stop at a threshold, have a canary, another window or a priority, or are retried.

Leases are watched by triggers in the database; thresholds and canaries by what callers asked for, not by what the store wrote down of it.
"""

from collections.abc import Callable, Iterable
from itertools import permutations
from typing import Any

import apsw

from tests.simulation.world.customers import Order
from tests.simulation.world.estate import PRICE
from tests.simulation.world.judge import Judge
from tests.simulation.world.plan import Plan
from tests.simulation.world.witness import Witnessed
from tidegate.core.answers.results import INTERACTIVE_MEMBER

KINDS = ("job_pause", "job_later", "job_threshold", "job_canary", "job_retry", "job_window", "job_priority")

_LEASED = (
    "new.state = 'leased' and old.state <> 'leased' and exists (select 1 from jobs j where j.id = new.job_id and {})"
)
_LEASES = (
    ("paused_lease", "j.paused_at is not null", "pause: a slice of a paused job was leased"),
    ("early_lease", "j.not_before > now_ms()", "not_before: a slice was leased before its job may begin"),
    (
        "sample_lease",
        "j.canary_state in ('running', 'waiting') and new.first >= j.canary_items",
        "canary: a slice that is not of the sample was leased before the sample was over",
    ),
)
_ON_JOBS = (
    ("pauses", "old.paused_at is not new.paused_at", "noted_pause(new.id, new.paused_at)"),
    (
        "stops",
        "old.stopped_by is null and new.stopped_by is not null",
        "noted_stop(new.id, new.stopped_by, new.answered_count, new.failed_count, new.cost_nano)",
    ),
    (
        "samples",
        "old.canary_state = 'running' and new.canary_state in ('passed', 'waiting')",
        "noted_sample(new.id, new.answered_count, new.failed_count)",
    ),
)
_GOING_ON = """
select id, answered_count, failed_count, item_count - deduplicated_count - reused_count, cost_nano, canary_state from jobs
where state in ('in_progress', 'finalizing') and (closing is null or closing = 'completed')
"""
_MILLION = 1_000_000
# So long after a job came or got its priority all workers have looked at it.
_RANKED_S = 3.0


class ControlWatch:
    def __init__(
        self,
        plan: Plan,
        connection: apsw.Connection,
        orders: dict[str, Order],
        now_s: Callable[[], float],
        broken: Callable[[str], None],
    ) -> None:
        self._connection = connection
        self._orders = orders
        self._now_s = now_s
        self._broken = broken
        self._paused_at_s: dict[str, float] = {}
        self.words: dict[str, str] = {}
        self._plan = plan
        self._is_priced = plan.estate.deployments[0].price is not None
        self._watches = bool(set(KINDS) & set(plan.kinds))
        # Thresholds that are given later bind from then on.
        self.bound: set[str] = set()
        if self._watches:
            self._watch()

    def _watch(self) -> None:
        define: Any = self._connection.create_scalar_function
        define("noted_pause", self._note_pause, 2)
        define("noted_stop", self._note_stop, 5)
        define("noted_sample", self._note_sample, 3)
        for name, condition, words in _LEASES:
            self._connection.execute(
                f"create temp trigger {name} after update of state on slices when {_LEASED.format(condition)}"
                f" begin select violated('{words}'); end"
            )
        for name, condition, call in _ON_JOBS:
            self._connection.execute(
                f"create temp trigger {name} after update on jobs when {condition} begin select {call}; end"
            )

    def _note_pause(self, job_id: Any, paused_at: Any) -> None:
        self._paused_at_s.pop(job_id, None)
        if paused_at is not None:
            self._paused_at_s[job_id] = self._now_s()

    def _note_stop(self, job_id: Any, stopped_by: Any, answered: Any, failed: Any, cost_nano: Any) -> None:
        order = self._orders[job_id]
        reasons = _passed(order, answered, failed, cost_nano)
        canary = order.actions.canary
        if canary is not None and (
            self.words.get(job_id) == "stop"
            or canary.then == "stop"
            or _share_is_over(canary.error_ppm, answered, failed)
        ):
            reasons.add("canary")
        if stopped_by not in reasons:
            self._broken(
                f"stop: {order.name} was stopped by {stopped_by} with {answered} answered, {failed} failed, cost {cost_nano}"
            )

    def _note_sample(self, job_id: Any, answered: Any, failed: Any) -> None:
        order, canary = self._orders[job_id], self._orders[job_id].actions.canary
        if canary is None or self.words.get(job_id) == "continue":
            return
        if answered + failed < min(canary.items, len(order.tags)):
            self._broken(f"canary: that of {order.name} passed after {answered + failed} items")
        if _share_is_over(canary.error_ppm, answered, failed):
            self._broken(f"canary: that of {order.name} passed with {failed} of {answered + failed} items failed")

    def after_commit(self) -> None:
        """No job goes on past a threshold, and no canary that is done is left without a verdict."""
        if not self._watches:
            return
        rows: list[Any] = self._connection.execute(_GOING_ON).fetchall()
        for job_id, answered, failed, run_count, cost_nano, canary_state in rows:
            order = self._orders[job_id]
            if job_id in self.bound and (passed := _passed(order, answered, failed, cost_nano, run_count)):
                self._broken(
                    f"thresholds: {order.name} goes on past {passed}: {answered} answered, {failed} failed, {cost_nano}"
                )
            canary = order.actions.canary
            if canary_state == "running" and canary and answered + failed >= min(canary.items, run_count):
                self._broken(f"canary: that of {order.name} is done, and nothing follows")

    def check_call(self, call: Witnessed) -> None:
        paused_s = self._paused_at_s.get(call.job_id)
        if paused_s is not None:
            beat_count = sum(1 for done_s, _ in call.process.beats if done_s > paused_s)
            if beat_count > 1:
                self._broken(
                    f"pause: call {call.serial} was sent though {beat_count} heartbeats had reported the pause"
                )
        canary = self._orders[call.job_id].actions.canary
        if canary is not None and call.number >= canary.items:
            running = "select 1 from jobs where id = ? and canary_state in ('running', 'waiting') and closing is null"
            if self._connection.execute(running, (call.job_id,)).fetchall():
                self._broken(f"canary: call {call.serial} is not of the sample, which is not over")

    def judge(self, judge: Judge, calls: list[Witnessed]) -> None:
        """Each job that was asked for was made once, and those that are there are as they must be."""
        orders = {id(order): order for order in self._orders.values()}.values()
        if self._plan.kinds == ["job_priority"]:
            self._judge_priorities(orders, calls)
        for order in orders:
            if order.job_id not in judge.gone:
                self.judge_job(order, judge)
        made, asked_for = len(self._connection.execute("select id from jobs").fetchall()), len(orders) - len(judge.gone)
        if made != asked_for:
            self._broken(f"P1: there are {made} jobs, and {asked_for} were asked for")

    def judge_job(self, order: Order, judge: Judge) -> None:
        """What a job cost is what its answers cost; a retry's merged file holds the answers of its chain."""
        self._judge_window(order)
        row: list[Any] = self._connection.execute(
            "select merged_file_id, output_file_id, retry_of, input_tokens, output_tokens, cost_nano from jobs where id = ?",
            (order.job_id,),
        ).fetchall()
        merged_id, output_id, retry_of, input_tokens, output_tokens, cost_nano = row[0]
        price = (PRICE.input_nano * input_tokens + PRICE.output_nano * output_tokens) // _MILLION
        has_turned = order.interactive_after_ms is not None and INTERACTIVE_MEMBER in judge.file_bytes(output_id)
        if not has_turned:
            # Batch work pays half.
            price //= 2
        if cost_nano != (price if self._is_priced else 0):
            self._broken(f"cost: {order.name} cost {cost_nano}, and its answers {price}")
        if order.retry_of is None:
            return
        if retry_of != order.retry_of.job_id:
            self._broken(f"retry: {order.name} says that it is one of {retry_of}")
        whole = judge.chain_answers_of(order.retry_of.job_id) + judge.file_bytes(output_id)
        if merged_id is not None and judge.file_bytes(merged_id) != whole:
            self._broken(f"retry: the merged output of {order.name} is not what its chain answered")
        if merged_id is None and output_id is not None:
            self._broken(f"retry: {order.name} has answers and no merged output")

    def _judge_window(self, order: Order) -> None:
        """A job ends by its last window, and does not expire before."""
        if order.actions.window_s is None:
            return
        found: list[Any] = self._connection.execute(
            "select created_at, expires_at, expired_at, state from jobs where id = ?", (order.job_id,)
        ).fetchall()
        created_at, expires_at, expired_at, state = found[0]
        if expires_at != created_at + order.window_ms:
            self._broken(f"window: {order.name} has one of {expires_at - created_at} ms, and not {order.window_ms}")
        if state == "expired" and expired_at < expires_at:
            self._broken(f"window: {order.name} expired {expires_at - expired_at} ms too soon")

    def _judge_priorities(self, orders: Iterable[Order], calls: list[Witnessed]) -> None:
        """Of one caller's jobs for one model, those of a higher priority go first, but for what a worker holds already. A job that waits
        for a limit of its own holds up no other."""
        plan = self._plan
        held_max = plan.process_count * plan.slice_items * (plan.slice_count_max + 1)
        rows: list[Any] = self._connection.execute("select id, share_owner from jobs").fetchall()
        owners: dict[str, str] = dict(rows)
        sent: dict[str, list[float]] = {}
        for call in calls:
            sent.setdefault(call.job_id, []).append(call.sent_s)
        for low, high in permutations(orders, 2):
            is_ranked = owners[low.job_id] == owners[high.job_id] and low.actions.priority < high.actions.priority
            if not is_ranked or high.limits:
                continue
            ready_s = max(order.begin_s + order.actions.ranked_s for order in (low, high)) + _RANKED_S
            early = [at_s for at_s in sent.get(low.job_id, ()) if ready_s < at_s < max(sent.get(high.job_id, [0.0]))]
            if len(early) > held_max:
                self._broken(f"priority: {len(early)} calls of {low.name} went before the last one of {high.name}")


def _share_is_over(ppm: int, answered: int, failed: int) -> bool:
    return failed > ppm / _MILLION * (answered + failed) + 1e-9


def _passed(order: Order, answered: int, failed: int, cost_nano: int, run_count: int | None = None) -> set[str]:
    """Which thresholds of its caller a job has passed."""
    given, passed = order.actions.thresholds, set()
    if given.max_cost_nano is not None and cost_nano > given.max_cost_nano:
        passed.add("max_cost")
    errors = given.max_errors
    if errors is None:
        return passed
    if errors.count is not None and failed > errors.count:
        passed.add("max_errors")
    enough = answered + failed >= min(errors.after, len(order.tags) if run_count is None else run_count)
    if errors.share_ppm is not None and enough and _share_is_over(errors.share_ppm, answered, failed):
        passed.add("max_errors")
    return passed
