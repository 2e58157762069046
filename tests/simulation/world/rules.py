"""What must hold at every step, watched by the database itself: temporary triggers see each row change, and a look after each commit
compares the counters of the jobs it touched with their rows.

A broken rule does not fail the statement, where the engine might swallow it: it ends the whole run.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import apsw

from tests.simulation.world.process import EPOCH_MS, Process
from tests.simulation.world.store_time import StoreTime
from tests.simulation.world.witness import Witnessed
from tidegate.core import states


def _moves(table: dict[Any, frozenset[Any]]) -> str:
    return ", ".join(f"('{old}', '{new}')" for old, news in table.items() for new in news)


_ENDED = ", ".join(f"'{state}'" for state in sorted(states.JOB_ENDED))
_FROZEN = (
    "created_at", "expires_at", "closing", "in_progress_at", "finalizing_at", "completed_at", "failed_at", "expired_at", "cancelling_at",
    "cancelled_at", "output_file_id", "error_file_id", "output_bytes", "error_bytes", "item_count", "answered_count", "failed_count",
    "expired_count", "cancelled_count", "input_tokens", "output_tokens", "errors",
)  # fmt: skip
_COUNTS = ("answered_count", "failed_count", "expired_count", "cancelled_count", "unused_count", "input_tokens")

# (name, event, condition, words): the words say which promise is broken.
_TRIGGERS: list[tuple[str, str, str, str]] = [
    (f"{table}_move", f"update of state on {table}",
     f"old.state <> new.state and (old.state, new.state) not in (values {_moves(moves)})",
     f"P10: {table} moved from ' || old.state || ' to ' || new.state || '")
    for table, moves in (
        ("jobs", states.JOB_MOVES), ("slices", states.SLICE_MOVES), ("files", states.FILE_MOVES),
        ("blobs", states.BLOB_MOVES), ("workers", states.WORKER_MOVES),
    )
] + [
    ("job_frozen", "update on jobs",
     f"old.state in ({_ENDED}) and (" + " or ".join(f"old.{name} is not new.{name}" for name in _FROZEN) + ")",
     "P10: a job that had ended changed"),
    ("job_deleted_open", "delete on jobs", f"old.state not in ({_ENDED})", "P1: a job that had not ended was deleted"),
    ("delivery_dropped", "delete on webhook_deliveries", "old.state <> 'delivered'", "P24: an event that was not delivered was dropped"),
    ("job_counts", "update on jobs", " or ".join(f"new.{name} < old.{name}" for name in _COUNTS), "P10: a count decreased"),
    ("job_close_early", "update of state on jobs",
     "old.state in ('in_progress', 'cancelling') and new.state = 'finalizing' and new.closing <> 'completed'"
     " and now_ms() < new.closing_at + grace_ms()"
     " and exists (select 1 from slices s where s.job_id = new.id and s.state = 'leased')",
     "ship: a job closed while calls were out and their grace had not passed"),
    ("job_start_fenced", "update of state on jobs",
     "old.state = 'validating' and new.state = 'in_progress' and not is_acting(old.step_worker_id)",
     "P11: a job was started by a process that does not hold its step"),
    ("job_publish_fenced", "update of state on jobs",
     "old.state = 'finalizing' and new.state <> 'finalizing' and not is_acting(old.step_worker_id)",
     "P11: a job was published by a process that does not hold its step"),
    ("outcome_late", "insert on outcomes",
     "exists (select 1 from jobs j where j.id = new.job_id and (j.state = 'finalizing'"
     " or (new.outcome = 'answered' and j.state in ('completed', 'failed', 'expired', 'cancelled')"
     " and new.number < j.item_count - j.deduplicated_count - j.reused_count)))",
     "ship: an outcome was recorded after its job closed"),
    ("outcome_changed", "update on outcomes",
     "old.outcome <> new.outcome or old.number <> new.number or old.size_bytes <> new.size_bytes",
     "P3: an outcome changed"),
    ("slice_fenced", "update of state on slices",
     "old.state = 'leased' and new.state <> 'leased' and not is_acting(old.worker_id)"
     " and exists (select 1 from workers w where w.id = old.worker_id and w.state = 'alive')",
     "P11: a slice was taken from a living worker by another one"),
    ("slice_two_owners", "update on slices",
     "old.state = 'leased' and new.state = 'leased' and (old.lease_token <> new.lease_token or old.worker_id <> new.worker_id)",
     "P11: a leased slice was leased again"),
    ("slice_gone_worker", "update of state on slices",
     "new.state = 'leased' and not exists (select 1 from workers w where w.id = new.worker_id and w.state = 'alive')",
     "P6: a slice was leased to a worker that is gone"),
    ("slice_done_early", "update of state on slices",
     "new.state = 'done' and new.count <> (select count(*) from outcomes o where o.job_id = new.job_id"
     " and o.number >= new.first and o.number < new.first + new.count)",
     "P2: a slice was called done before all of its items had an outcome"),
    ("blob_needed", "update on blobs", "new.state = 'condemned' and new.uses > 0", "garbage: a blob in use was condemned"),
    ("blob_uses", "update on blobs", "new.uses < 0", "garbage: more was released than used"),
    ("flow_credit", "update of state on flows",
     "old.state = 'asleep' and new.state = 'awake' and new.served < (select min(f.served) from flows f"
     " where f.model = new.model and f.state = 'awake' and f.share_owner <> new.share_owner)",
     "P18: a flow woke with service saved up"),
    ("flow_falls", "update on flows", "new.served < old.served or new.served_tokens < old.served_tokens",
     "P18: service was taken back"),
    ("attempts_grow", "update on attempts",
     "new.count < old.count or new.not_before < old.not_before", "P17: a deferral or a count of attempts shrank"),
]  # fmt: skip


class Rules:
    def __init__(
        self, connection: apsw.Connection, broken: Callable[[str], None], grace_ms: int, time: StoreTime
    ) -> None:
        self._connection = connection
        self._broken = broken
        self._time = time
        self._process: Process | None = None
        self._touched: set[str] = set()
        # When workers left and when jobs began to close and closed, in seconds of the run: the store's own time may jump.
        self.gone_at_s: dict[str, float] = {}
        self.closing_at_s: dict[str, float] = {}
        self.closed_at_s: dict[str, float] = {}
        self.deleted: set[str] = set()
        self.losses: Counter[tuple[str, int]] = Counter()
        self.owner_of: dict[str, Process] = {}
        self._callers: dict[tuple[str, int], str] = {}
        self._out: dict[str, list[Witnessed]] = {}
        self.on_ended: Callable[[str], None] = lambda job_id: None
        self.on_commit: Callable[[str], None] = lambda verb: None
        define: Any = connection.create_scalar_function
        define("violated", lambda text: self._broken(str(text)), 1)
        define("grace_ms", lambda: grace_ms, 0)
        define("is_acting", self._is_acting, 1)
        define("touch", lambda job_id: self._touched.add(str(job_id)), 1)
        define("enlisted", self._enlisted, 1)
        define("worker_left", self._worker_left, 1)
        define("closes", lambda job_id: self.closing_at_s.setdefault(str(job_id), time.now_s()), 1)
        define("closed", lambda job_id: self.closed_at_s.setdefault(str(job_id), time.now_s()), 1)
        define("lost_owner", self._lost_owner, 3)
        define("deleted", lambda job_id: self.deleted.add(str(job_id)), 1)
        self._watch()

    def _watch(self) -> None:
        for name, event, condition, words in _TRIGGERS:
            self._connection.execute(
                f"create temp trigger {name} after {event} when {condition} begin select violated('{words}'); end"
            )
        for table, event, column in (
            ("outcomes", "insert", "new.job_id"), ("slices", "update", "new.job_id"), ("slices", "insert", "new.job_id"),
            ("jobs", "update", "new.id"),
        ):  # fmt: skip
            name = f"touch_{table}_{event}"
            self._connection.execute(
                f"create temp trigger {name} after {event} on {table} begin select touch({column}); end"
            )
        self._connection.execute(
            "create temp trigger enlist after insert on workers begin select enlisted(new.id); end"
        )
        self._connection.execute(
            "create temp trigger goes after update of state on workers when new.state = 'gone'"
            " begin select worker_left(new.id); end"
        )
        self._connection.execute(
            "create temp trigger closes after update on jobs when old.closing_at is null and new.closing_at is not null"
            " begin select closes(new.id); end"
        )
        self._connection.execute(
            "create temp trigger closed after update of state on jobs when new.state = 'finalizing'"
            " begin select closed(new.id); end"
        )
        self._connection.execute("create temp trigger deletes after delete on jobs begin select deleted(old.id); end")
        self._connection.execute(
            "create temp trigger loses after update of state on slices when old.state = 'leased' and new.state = 'ready'"
            " and not exists (select 1 from workers w where w.id = old.worker_id and w.state = 'alive')"
            " begin select lost_owner(new.job_id, new.first, new.count); end"
        )

    @contextmanager
    def acting(self, process: Process) -> Iterator[None]:
        """Whose transaction runs now."""
        self._process = process
        try:
            yield
        except BaseException:
            # What it touched was rolled back.
            self._touched.clear()
            raise
        finally:
            self._process = None

    def _is_acting(self, worker_id: Any) -> int:
        return int(self._process is not None and worker_id in self._process.incarnations)

    def _enlisted(self, worker_id: Any) -> None:
        if self._process is not None:
            self._process.incarnations.add(worker_id)
            self.owner_of[worker_id] = self._process

    def _worker_left(self, worker_id: Any) -> None:
        self.gone_at_s[worker_id] = self._time.now_s()
        if worker_id in self.owner_of:
            owner = self.owner_of[worker_id]
            owner.lost_at_s.append(owner.loop.time())

    def _lost_owner(self, job_id: Any, first: Any, count: Any) -> None:
        for number in range(first, first + count):
            self.losses[job_id, number] += 1

    def after_commit(self, verb: str) -> None:
        touched, self._touched = sorted(self._touched - self.deleted), set()
        for job_id in touched:
            self._check_job(job_id)
        self.on_commit(verb)

    def _one(self, sql: str, *parameters: object) -> Any:
        return self._connection.execute(sql, parameters).fetchall()[0]

    def _check_job(self, job_id: str) -> None:
        state, run_count, answered, failed, expired, cancelled, output_bytes, error_bytes, output, errors = self._one(
            "select state, item_count - deduplicated_count - reused_count, answered_count, failed_count, expired_count,"
            " cancelled_count, output_bytes, error_bytes, output_file_id, error_file_id from jobs where id = ?",
            job_id,
        )
        rows = dict(
            self._connection.execute(
                "select outcome, count(*) from outcomes where job_id = ? group by outcome", (job_id,)
            )
        )
        counted = {"answered": answered, "failed": failed, "expired": expired, "cancelled": cancelled}
        if {outcome: count for outcome, count in counted.items() if count} != rows:
            self._broken(f"P3: the counters of {job_id} say {counted}, its rows say {rows}")
        for file_id, size_bytes in ((output, output_bytes), (errors, error_bytes)):
            (held,) = self._one("select coalesce(sum(size_bytes), 0) from extents where file_id = ?", file_id)
            if held != size_bytes:
                self._broken(f"P3: {file_id} of {job_id} has {held} bytes in extents and {size_bytes} on the job")
        (done_count,) = self._one("select coalesce(sum(done_count), 0) from job_models where job_id = ?", job_id)
        (copied,) = self._one(
            "select count(*) from outcomes where job_id = ? and number >= ? and outcome in ('answered', 'failed')",
            job_id,
            run_count,
        )
        # What a job that was stopped never ran is counted as failed when it ends.
        if done_count != answered + failed - copied and state not in ("validating", "failed"):
            self._broken(f"P3: {job_id} has {answered + failed - copied} items done, and {done_count} by its models")
        if state in states.JOB_ENDED:
            self.on_ended(job_id)
        elif state != "validating":
            self._check_slices(job_id, run_count - answered - failed)

    def _check_slices(self, job_id: str, left: int) -> None:
        (waiting,) = self._one(
            "select coalesce(sum(s.count - (select count(*) from outcomes o where o.job_id = s.job_id and o.number >= s.first"
            " and o.number < s.first + s.count)), 0) from slices s where s.job_id = ? and s.state <> 'done'",
            job_id,
        )
        if waiting != left:
            self._broken(
                f"P2: {job_id} has {left} items without an outcome, and {waiting} of them stand in open slices"
            )

    def check_call(self, call: Witnessed) -> None:
        """No call without a committed lease that covers it, none after the deadline, none long after a cancel."""
        # The store's time may have jumped since it was last looked at.
        self._time.check()
        if call.job_id in self.deleted:
            # It had ended, which its sender learns at its next heartbeat.
            self._check_closing(call)
            self._check_alone(call)
            return
        job_state, expired = self._one(
            # Its sender learned of the deadline as a duration: a jump of the store's time may be news to it.
            "select state, now_ms() - ? >= expires_at from jobs where id = ?",
            self._time.jumped_ms,
            call.job_id,
        )
        if expired:
            self._broken(f"P9: call {call.serial} was sent after its job's window")
        if call.job_id in self.closing_at_s:
            self._check_closing(call)
        # Another worker's late answer may end a job under a lease that is in order: its owner learns it at its next heartbeat.
        if job_state in ("in_progress", "cancelling"):
            self._check_lease(call)
            self._check_deferral(call)
        self._check_alone(call)

    def _check_lease(self, call: Witnessed) -> None:
        found = self._connection.execute(
            "select s.worker_id, s.state, w.state, now_ms() >= w.alive_until"
            " from slices s left join workers w on w.id = s.worker_id"
            " where s.job_id = ? and s.first <= ? and s.first + s.count > ?",
            (call.job_id, call.number, call.number),
        ).fetchall()
        if len(found) != 1:
            self._broken(f"P6: call {call.serial} is covered by {len(found)} slices")
            return
        worker_id, state, alive, overdue = found[0]
        if state != "leased" or worker_id != call.incarnation or alive != "alive" or overdue:
            self._broken(f"P6: call {call.serial} has no lease: its slice is {state}, owned by {worker_id} ({alive})")

    def _check_alone(self, call: Witnessed) -> None:
        """While the store says that a worker runs one item alone, nothing else is in flight from its process."""
        out = [one for one in self._out.get(call.process.name, []) if not one.ended]
        self._out[call.process.name] = [*out, call]
        alone = "select alone_job_id, alone_number from workers where id = ? and alone_job_id is not null"
        for item in self._connection.execute(alone, (call.incarnation,)).fetchall():
            if item != (call.job_id, call.number):
                self._broken(f"poison: call {call.serial} was sent while item {item[1]} of {item[0]} runs alone")
            if out:
                self._broken(f"poison: call {call.serial} runs alone beside {[one.serial for one in out]}")

    def leases_left_ms(self) -> dict[str, int]:
        """How long the leases of living workers still last."""
        alive = "select id, alive_until - now_ms() from workers where state = 'alive'"
        rows: list[Any] = self._connection.execute(alive).fetchall()
        return {str(worker_id): int(left_ms) for worker_id, left_ms in rows}

    def check_leases_go_on(self, before: dict[str, int]) -> None:
        """No time has passed since `before`; the store's own may have jumped."""
        for worker_id, left_ms in self.leases_left_ms().items():
            if left_ms < before[worker_id] - 2:
                self._broken(
                    f"P29: the lease of {worker_id} lasts {left_ms} ms by a step of the clock, and not {before[worker_id]}"
                )

    def _check_deferral(self, call: Witnessed) -> None:
        """A worker that takes an item over waits as the store says; its first owner counted from its own verdict, a little earlier."""
        item = (call.job_id, call.number)
        before, self._callers[item] = self._callers.get(item), call.incarnation
        if before in (None, call.incarnation):
            return
        # A clock that was set back shows an earlier moment until the store looks at it: by then the time that really passed counts.
        deferred = "select 1 from attempts where job_id = ? and number = ? and not_before > max(now_ms(), ?) + 2"
        passed_ms = EPOCH_MS + int(1000 * call.sent_s)
        if self._connection.execute(deferred, (*item, passed_ms)).fetchall():
            self._broken(f"P17: call {call.serial} was sent although its item is deferred")

    def _check_closing(self, call: Witnessed) -> None:
        """One heartbeat may cross a lease on its way; a worker that got the closing twice must know."""
        closing_s = self.closing_at_s[call.job_id]
        beat_count = sum(1 for done_s, _ in call.process.beats if done_s > closing_s)
        if beat_count > 1:
            self._broken(
                f"P8: call {call.serial} was sent although {beat_count} heartbeats had reported that its job closes"
            )
