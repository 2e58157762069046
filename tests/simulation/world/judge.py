"""What must hold when all is over: the promises about files, counts, calls and bytes, read from the database, the disk and the witness."""

from collections import Counter
from collections.abc import Callable, Collection
from itertools import combinations
from typing import Any

import apsw
import msgspec

from tests.simulation.world.customers import Order
from tests.simulation.world.disk import Disk
from tests.simulation.world.estate import ANSWER_MEMBER, EMBEDDINGS, UNKNOWN_MODEL
from tests.simulation.world.line_judge import LineJudge
from tests.simulation.world.plan import DEATHS, DELAYS, Plan
from tests.simulation.world.rules import Rules
from tests.simulation.world.search import Search
from tests.simulation.world.tide_watch import TideWatch
from tests.simulation.world.witness import INVALID, MARK, Witnessed, mark_of
from tidegate.core.errors import BlobMissing
from tidegate.core.ids import split_item_id
from tidegate.core.job_controls import RetryChoice
from tidegate.core.nouns import Usage
from tidegate.core.retry import ALONE_LOSSES_MAX

_BILLED_FAILURES = ("error", "reset", "hang", "broken", "cut")
_UNBILLED = ("throttle", "away")
# How many workers a poison item may kill before it fails: its group is halved with each, then it is run alone.
DEADLY_MAX = 12
# An answer may come while its item is being leased again, which takes as long as the store takes; so may what waits for a slot.
_LEASING_S = 2.0

Line = dict[str, Any]

# What stays of a job that is deleted: what was paid for it, for a while that its files are deleted, and events that never arrived.
_KEPT = ("usage",)
_KEPT_STATES = {"files": "deleted", "webhook_deliveries": "failed"}


class Gone(msgspec.Struct, frozen=True):
    """What is known of a job that was deleted: what its flow was charged for, and what other jobs may have taken from it."""

    share_owner: str
    cost: int
    failed_count: int
    answers: bytes
    chain_answers: bytes


class Judge:
    def __init__(
        self,
        plan: Plan,
        connection: apsw.Connection,
        disk: Disk,
        rules: Rules,
        calls: list[Witnessed],
        poison: set[str],
        search: Search,
        tides: TideWatch,
        revoked: Collection[str],
        broken: Callable[[str], None],
    ) -> None:
        self._plan = plan
        self._connection = connection
        self._disk = disk
        self._rules = rules
        self._calls = calls
        self._poison = poison
        self._search = search
        self._tides = tides
        self._revoked = revoked
        self._broken = broken
        self._asked: dict[str, str] = {}
        self.gone: dict[str, Gone] = {}
        self._lines = LineJudge(connection, plan, self.answers_of, broken)

    def _rows(self, sql: str, *parameters: object) -> list[Line]:
        cursor = self._connection.execute(sql, parameters)
        rows: list[Line] = []
        for row in cursor:
            rows.append(dict(zip([column[0] for column in cursor.get_description()], row, strict=True)))
        return rows

    def file_bytes(self, file_id: str | None) -> bytes:
        """A file through its extents; each must follow the one before."""
        data = b""
        for extent in self._rows("select * from extents where file_id = ? order by at", file_id):
            if extent["at"] != len(data):
                self._broken(f"P3: {file_id} has a gap or an overlap at {extent['at']}")
            try:
                data += self._disk.read(extent["blob_id"], extent["blob_at"], extent["size_bytes"])
            except BlobMissing as missing:
                self._broken(f"P1: a part of {file_id} is gone: {missing}")
        return data

    def retried_ids(self, job_id: str, choice: RetryChoice) -> list[str]:
        """The custom_ids of an ended job's lines that a retry of this choice runs."""
        [row] = self._rows("select error_file_id from jobs where id = ?", job_id)
        found = []
        for line in _lines(self.file_bytes(row["error_file_id"])):
            code = line["error"]["code"] if line["error"] else ""
            outcome = {"batch_expired": "expired", "batch_cancelled": "cancelled"}.get(code, "failed")
            if outcome in choice.outcomes and (not choice.codes or code in choice.codes):
                found.append(line["custom_id"])
        return found

    def answers_of(self, job_id: str) -> bytes:
        """The answers of one job, also of one that is gone."""
        if job_id in self.gone:
            return self.gone[job_id].answers
        [row] = self._rows("select output_file_id from jobs where id = ?", job_id)
        return self.file_bytes(row["output_file_id"])

    def result_files(self, job_id: str) -> tuple[bytes, bytes]:
        """The answers of a job and its failed lines."""
        [row] = self._rows("select output_file_id, error_file_id from jobs where id = ?", job_id)
        return self.file_bytes(row["output_file_id"]), self.file_bytes(row["error_file_id"])

    def chain_answers_of(self, job_id: str) -> bytes:
        """The answers of one job and of those that it is a retry of."""
        if job_id in self.gone:
            return self.gone[job_id].chain_answers
        [row] = self._rows("select coalesce(merged_file_id, output_file_id) as file_id from jobs where id = ?", job_id)
        return self.file_bytes(row["file_id"])

    def judge_deletion(self, order: Order) -> None:
        """Look at a job that has ended and is deleted now, and keep what others must be compared with."""
        self._asked.update(order.asked)
        self._judge_job(order, [call for call in self._calls if call.job_id == order.job_id], is_deleted=True)
        [job] = self._rows("select * from jobs where id = ?", order.job_id)
        self.gone[order.job_id] = Gone(
            job["share_owner"],
            job["input_tokens"] + 2 * job["output_tokens"],
            job["failed_count"],
            self.answers_of(order.job_id),
            self.chain_answers_of(order.job_id),
        )

    def judge(self, orders: list[Order]) -> None:
        self._asked = {tag: name for order in orders for tag, name in order.asked.items()}
        calls: dict[str, list[Witnessed]] = {order.job_id: [] for order in orders}
        for call in self._calls:
            calls.setdefault(call.job_id, []).append(call)
        for order in orders:
            if order.job_id not in self.gone:
                self._judge_job(order, calls[order.job_id])
        self._judge_flows(orders)
        self._judge_gone()
        self._judge_blobs()

    # ---- deletions

    def _judge_gone(self) -> None:
        """Nothing is left of a job that was deleted but what was paid for it and what could not be delivered."""
        tables = self._rows(
            "select m.name from sqlite_master m join pragma_table_info(m.name) c on c.name = 'job_id' where m.type = 'table'"
        )
        for name in (row["name"] for row in tables):
            if name in _KEPT:
                continue
            for row in self._rows(f"select * from {name} where job_id is not null"):  # noqa: S608 - a name of the schema
                if row["job_id"] in self.gone and (name not in _KEPT_STATES or row["state"] != _KEPT_STATES[name]):
                    self._broken(f"delete: {name} still has rows of {row['job_id']}, which is gone")
        for row in self._rows(
            "select f.job_id from extents e join files f on f.id = e.file_id where f.state = 'deleted'"
        ):
            self._broken(f"delete: a deleted file of {row['job_id']} still has bytes")
        for row in self._rows("select id, retried_by from jobs where retried_by is not null"):
            if self.gone.keys() & set(msgspec.json.decode(row["retried_by"])):
                self._broken(f"delete: {row['id']} names a retry that is gone: {row['retried_by']}")

    # ---- flows and deadlines

    def _judge_flows(self, orders: list[Order]) -> None:
        """Each item was charged once, to the flow of its share_owner: what was answered by what it took, what failed by its estimate."""
        units_max = max((units for order in orders for units in order.units.values()), default=0)
        cost: Counter[str] = Counter()
        failed: Counter[str] = Counter()
        for row in self._rows("select share_owner, input_tokens + 2 * output_tokens as cost, failed_count from jobs"):
            cost[row["share_owner"]] += row["cost"]
            failed[row["share_owner"]] += row["failed_count"]
        for one in self.gone.values():
            cost[one.share_owner] += one.cost
            failed[one.share_owner] += one.failed_count
        rows = self._rows("select share_owner, sum(served_tokens) as tokens from flows group by share_owner")
        for owner, tokens in ((row["share_owner"], row["tokens"]) for row in rows):
            if not 0 <= tokens - cost[owner] <= failed[owner] * max(units_max, 1_000):
                self._broken(
                    f"charge: {owner} was charged {tokens}; its answers cost {cost[owner]}, {failed[owner]} items failed"
                )

    def _judge_deadline(self, order: Order, job: Line) -> None:
        """Without faults every job ends as it should, also one whose deadline only urgency can meet."""
        if not self._plan.kinds and not order.refused and job["state"] != "completed":
            self._broken(f"deadline: {order.name} with a window of {order.window_ms} ms is {job['state']}")

    # ---- one job

    def _judge_job(self, order: Order, calls: list[Witnessed], *, is_deleted: bool = False) -> None:
        job = self._rows("select * from jobs where id = ?", order.job_id)[0]
        name = order.name
        self._judge_deadline(order, job)
        self._search.judge(calls)
        if job["in_progress_at"] is None:
            if job["output_file_id"] or job["error_file_id"] or calls:
                self._broken(f"P2: {name} ended before ingest and has result files or calls")
            is_without_source = order.reuse_of is not None and order.reuse_of.job_id in self.gone
            if is_without_source and "reuse_source_gone" in str(job["errors"]):
                return
            if job["state"] == "failed" and not order.refused:
                self._broken(f"P2: {name} was refused although its input is good: {job['errors']}")
            return
        output, errors = self.file_bytes(job["output_file_id"]), self.file_bytes(job["error_file_id"])
        good, bad = _lines(output), _lines(errors)
        self._judge_parts(order, job, {"output": output, "error": errors})
        self._judge_lines(order, job, good, bad)
        self._judge_places(job, output, errors)
        unused = self._judge_answers(order, job, good, bad, calls)
        if not is_deleted:
            # Of one that is deleted, late answers may not be counted yet.
            self._judge_unused(order, job, unused)
        self._lines.judge_copies(order, good + bad, calls)
        if order.actions.door is not None:
            self._lines.judge_events(order, job, len(good) + len(bad), calls)
        self._judge_errors(order, job, bad, calls)
        if order.cancel_s is not None and job["state"] == "cancelled":
            self._judge_aborts(order, order.cancel_s, calls)
        by_item: dict[int, list[Witnessed]] = {}
        for call in calls:
            by_item.setdefault(call.number, []).append(call)
        for same in by_item.values():
            self._judge_repeats(job, same)

    def _judge_parts(self, order: Order, job: Line, wholes: dict[str, bytes]) -> None:
        """Results above the size that was asked for are several files, which make the whole."""
        most = order.shape.output_file_bytes_max
        cut = msgspec.json.decode(job["parts"]) if job["parts"] else {}
        for name, whole in wholes.items():
            parts = [self.file_bytes(file_id) for file_id in cut.get(name, [])]
            if parts and (
                b"".join(parts) != whole or any(len(part) > most and part.count(b"\n") > 1 for part in parts)
            ):
                self._broken(f"parts: the {name} of {order.name} is not what its parts are")
            if most and len(whole) > most and not parts:
                self._broken(f"parts: the {name} of {order.name} has {len(whole)} bytes in one file")

    def _judge_aborts(self, order: Order, cancel_s: float, calls: list[Witnessed]) -> None:
        """Where nothing keeps a worker from learning of a cancel, calls in flight end with the grace for it."""
        plan = self._plan
        if plan.cancel_grace_ms >= plan.grace_ms or set(plan.kinds) - {"cancel", "hang", "slow"}:
            return
        latest_s = cancel_s + (plan.cancel_grace_ms + 2 * plan.heartbeat_ms + 500) / 1000
        for call in calls:
            if call.ended_s > latest_s:
                self._broken(
                    f"cancel: call {call.serial} of {order.name} went on until {call.ended_s:.1f} s, past {latest_s:.1f} s"
                )

    def _judge_lines(self, order: Order, job: Line, good: list[Line], bad: list[Line]) -> None:
        found = Counter(line["custom_id"] for line in good + bad)
        if found != Counter(order.custom_ids):
            missing = Counter(order.custom_ids) - found
            self._broken(
                f"P2/P3: {order.name} misses {dict(missing)} and has {dict(found - Counter(order.custom_ids))} too many"
            )
        failures = job["failed_count"] + job["expired_count"] + job["cancelled_count"]
        if (len(good), len(bad)) != (job["answered_count"], failures):
            self._broken(
                f"P3: {order.name} has {len(good)}+{len(bad)} lines and counts {job['answered_count']}+{failures}"
            )
        if bool(good) != (job["output_file_id"] is not None) or bool(bad) != (job["error_file_id"] is not None):
            self._broken(f"P3: {order.name} shows a file without lines, or hides one with lines")
        parts = [one for ids in (msgspec.json.decode(job["parts"]) if job["parts"] else {}).values() for one in ids]
        for file in self._rows("select * from files where job_id = ?", order.job_id):
            if file["id"] in (*parts, job["retry_file_id"], job["input_file_id"]):
                continue
            lines = good if file["id"] == job["output_file_id"] else bad
            if file["id"] == job["merged_file_id"]:
                lines = _lines(self.file_bytes(file["id"]))
            shown = file["id"] in (job["output_file_id"], job["error_file_id"], job["merged_file_id"])
            if file["state"] != ("ready" if shown else "deleted") or (shown and file["line_count"] != len(lines)):
                self._broken(
                    f"P3: the file {file['id']} of {order.name} is {file['state']} with {file['line_count']} lines"
                )
        if order.ordered:
            place = {custom_id: at for at, custom_id in enumerate(order.custom_ids)}
            for lines in (good, bad):
                places = [place[line["custom_id"]] for line in lines]
                if places != sorted(places):
                    self._broken(f"ordered: {order.name} is out of order: {places}")

    def _judge_places(self, job: Line, output: bytes, errors: bytes) -> None:
        """Each outcome's place in its file is the place of its own line."""
        for row in self._rows("select * from outcomes where job_id = ?", job["id"]):
            data = output if row["outcome"] == "answered" else errors
            line = data[row["at"] : row["at"] + row["size_bytes"]]
            split = (
                split_item_id(msgspec.json.decode(line)["id"])
                if line.endswith(b"\n") and line.count(b"\n") == 1
                else None
            )
            if split is None or split[1] != row["number"]:
                self._broken(f"P3: the place of item {row['number']} of {job['id']} holds {line[:60]!r}")

    def _judge_answers(
        self, order: Order, job: Line, good: list[Line], bad: list[Line], calls: list[Witnessed]
    ) -> list[Witnessed]:
        """Each answer is one that a model server gave. Returns the calls whose answer came and was not used."""
        used: set[tuple[int, str]] = set()
        by_mark = {(call.serial, call.tag): call for call in calls}
        for line in self._lines.without_reused(order, good, calls):
            marks = MARK.findall(msgspec.json.encode(line["response"]["body"]))
            call = by_mark.get((int(marks[0][0]), marks[0][1].decode())) if len(marks) == 1 else None
            source = order.source_of(line["custom_id"])
            if call is None or call.mood != "ok" or call.tag != source or call.received_s is None:
                self._broken(f"P3: {order.name} has an answer that no server gave: {line}")
                return []
            endpoint = order.endpoint_of(call.tag)
            if ANSWER_MEMBER[endpoint] not in line["response"]["body"]:
                self._broken(f"endpoint: {order.name} has an answer that is none of {endpoint}: {line}")
                return []
            if endpoint != EMBEDDINGS and _usage_in(line["response"]["body"]) != call.usage:
                self._broken(f"usage: {order.name} has an answer that says another usage than its call: {line}")
            if endpoint != EMBEDDINGS and order.usages[call.tag] != call.usage:
                self._broken(f"parameters: {order.name} was sent with other parameters than its caller wants: {line}")
            used.add((call.serial, call.tag))
        usages = [by_mark[mark].usage for mark in used]
        usages += self._lines.rejected_usages(order, good, bad, calls)
        counted = (sum(usage.input_tokens for usage in usages), sum(usage.output_tokens for usage in usages))
        # What a call for several items took is divided between them, and one of them may have been answered before.
        is_shared = any(order.endpoint_of(tag) == EMBEDDINGS for _, tag in used)
        is_divided = is_shared and not all(_is_whole(by_mark[mark], used, calls) for mark in used)
        if (job["input_tokens"], job["output_tokens"]) != counted and not is_divided:
            self._broken(f"usage: {order.name} counts {job['input_tokens']} input tokens, its answers say otherwise")
        unused = [
            call
            for call in calls
            if call.mood == "ok" and call.received_s is not None and (call.serial, call.tag) not in used
        ]
        if not DELAYS & set(self._plan.kinds):
            self._judge_kept(order, job, unused)
        return unused

    def _judge_unused(self, order: Order, job: Line, unused: list[Witnessed]) -> None:
        # One that left in trouble may have left in a hurry, with answers that it could not store in time.
        sure = sum(1 for call in unused if not call.process.dead and not call.process.is_ended_in_trouble)
        # Lines of a void log are written again to another one; a worker that adopts both sees the same answer twice.
        again = bool({"disk_append", "disk_full"} & set(self._plan.kinds))
        if job["unused_count"] < sure or (job["unused_count"] > len(unused) and not again):
            self._broken(
                f"P4: {order.name} counts {job['unused_count']} unused answers; between {sure} and {len(unused)} came"
            )

    def _judge_kept(self, order: Order, job: Line, unused: list[Witnessed]) -> None:
        """Nothing delayed it: an answer that came well before the job closed must be in the output."""
        closed_s = self._rules.closed_at_s[job["id"]]
        for call in unused:
            assert call.received_s is not None
            if call.received_s < closed_s - _margin_s(self._plan) and not call.process.dead:
                self._broken(
                    f"P4: {order.name} lost answer {call.serial}, which came {closed_s - call.received_s:.1f} s before it closed"
                )

    def _judge_errors(self, order: Order, job: Line, bad: list[Line], calls: list[Witnessed]) -> None:
        for line in bad:
            split = split_item_id(line["id"])
            number = split[1] if split else -1
            same = [call for call in calls if call.number == number]
            if (
                line["custom_id"] is not None
                and (source := order.source_of(line["custom_id"])) in order.copies.values()
            ):
                same = [call for call in calls if call.tag == source]
            moods = Counter(call.mood for call in same)
            code = line["error"]["code"] if line["error"] else "upstream_refused"
            billed = sum(moods[mood] for mood in _BILLED_FAILURES)
            retry = order.shape.retry
            tries = (3, 2) if retry is None or retry.attempts_max is None else (retry.attempts_max, retry.attempts_max)
            expected = {
                "batch_expired": job["state"] == "expired",
                "batch_cancelled": job["state"] == "cancelled",
                "batch_failed": job["state"] == "failed" and job["stopped_by"] is not None,
                "upstream_ambiguous": billed >= tries[0],
                "upstream_refused": moods["refuse"] > 0 or billed >= tries[1],
                "invalid_upstream_response": billed >= tries[1],
                "worker_lost": self._search.count_alone_losses(same) >= ALONE_LOSSES_MAX,
                "model_not_found": UNKNOWN_MODEL.encode() in b"".join(order.bodies),
                "key_revoked": order.caller.key_id in self._revoked,
                "invalid_json_line": order.invalid_lines == "error_file",
                "schema_invalid": moods[INVALID] > (order.actions.answers.tries_max if order.actions.answers else 1e9),
            }
            if not expected.get(code, False):
                self._broken(f"P5: item {number} of {order.name} failed with {code} after {dict(moods)}")
            sure = code == "worker_lost" and not DEATHS & set(self._plan.kinds)
            if sure and not (same and same[0].tag in self._poison):
                self._broken(f"poison: item {number} of {order.name} failed for another one's poison")

    # ---- repeated calls

    def _judge_repeats(self, job: Line, calls: list[Witnessed]) -> None:
        # A call for several items has a key of its own, which names them all.
        # So has each try of one whose answer must fit.
        if len({call.key for call in calls if call.item_count == 1 and not call.wants_json}) > 1:
            self._broken(f"P5: item {calls[0].number} of {job['id']} was sent under several idempotency keys")
        deadly = [call for call in calls if call.mood == "poison" and not call.aborted]
        if len(deadly) > DEADLY_MAX and job["state"] == "completed":
            proving = sum(not self._search.was_beside_culprits_alone(call) for call in deadly)
            if proving > DEADLY_MAX:
                self._broken(f"poison: item {calls[0].number} of {job['id']} killed {proving} workers")
        taken_back = [call for call in calls[:-1] if self._tides.was_taken_back(call)]
        for earlier, later in combinations(calls, 2):
            if earlier.mood == "throttle" and earlier.received_s is not None and self._has_no_other_way(earlier):
                self._judge_wait(earlier, later)
            if earlier.mood in _UNBILLED or (
                earlier.mood in (*_BILLED_FAILURES, INVALID) and earlier.received_s is not None
            ):
                continue
            if earlier.mood == "refuse" and earlier.item_count > 1:
                # One of them is at fault: each is asked for by itself.
                continue
            if earlier.aborted and earlier.process.is_ended_in_trouble:
                continue
            if earlier in taken_back:
                continue
            if not any(earlier.sent_s <= lost_s <= later.sent_s for lost_s in earlier.process.lost_at_s):
                self._broken(
                    f"P5: call {later.serial} repeats call {earlier.serial} ({earlier.mood}), whose worker was not lost"
                )
            if earlier.mood == "ok":
                self._judge_durable(earlier, later)
                self._judge_own(earlier, later)

    def _has_no_other_way(self, call: Witnessed) -> bool:
        """Whether an item can only go to the deployment that it went to: another one may take it at once."""
        return len(self._plan.estate.serving(self._asked[call.tag])) == 1

    def _judge_durable(self, earlier: Witnessed, later: Witnessed) -> None:
        """What lay durable in a log before its owner was declared gone is adopted, never asked for again."""
        if self._plan.objects and not self._plan.spool_reachable:
            return
        durable_s = self._disk.durable_at_s.get(mark_of(earlier.serial, earlier.tag))
        gone_s = self._rules.gone_at_s.get(earlier.incarnation)
        if durable_s is None or gone_s is None:
            return
        if durable_s < gone_s - 0.001 and later.sent_s > gone_s:
            self._broken(
                f"P5: call {later.serial} repeats call {earlier.serial}, whose answer was durable at {durable_s:.3f}"
            )

    def _judge_own(self, earlier: Witnessed, later: Witnessed) -> None:
        """A process that lost its lease and lives commits the answers that it has before it leases their items again."""
        if earlier.process is not later.process or earlier.received_s is None:
            return
        if later.sent_s > earlier.received_s + _LEASING_S:
            self._broken(f"P5: call {later.serial} repeats call {earlier.serial}, whose answer its own process has")

    def _judge_wait(self, earlier: Witnessed, later: Witnessed) -> None:
        assert earlier.received_s is not None
        if later.sent_s >= earlier.received_s + earlier.wait_s - 0.002:
            return
        delayed = DELAYS & set(self._plan.kinds) - {"kill", "stop"}
        excused_s = earlier.received_s + (1e9 if delayed else _margin_s(self._plan))
        if not any(earlier.sent_s <= lost_s <= excused_s for lost_s in earlier.process.lost_at_s):
            self._broken(f"P17: call {later.serial} came before the Retry-After that call {earlier.serial} was given")

    # ---- bytes

    def _judge_blobs(self) -> None:
        rows = {row["id"]: row for row in self._rows("select * from blobs")}
        needed = Counter(row["blob_id"] for row in self._rows("select blob_id from extents"))
        for blob_id, row in rows.items():
            if row["state"] != "kept" or row["uses"] != needed[blob_id] or not row["uses"]:
                self._broken(
                    f"garbage: {blob_id} ({row['kind']}) is {row['state']} with {row['uses']} uses, {needed[blob_id]} needed"
                )
        if missing := set(needed) - set(rows):
            self._broken(f"P1: files are made of blobs that are gone: {sorted(missing)}")
        if set(rows) != set(self._disk.blobs):
            self._broken(f"garbage: rows and bytes differ: {set(rows) ^ set(self._disk.blobs)}")


def _margin_s(plan: Plan) -> float:
    """How long a verdict may wait to be recorded when nothing is wrong."""
    return 3.0 if plan.objects else 1.0


def _is_whole(call: Witnessed, used: set[tuple[int, str]], calls: list[Witnessed]) -> bool:
    """Whether all items that shared a call have their answer from it."""
    return all((one.serial, one.tag) in used for one in calls if one.serial == call.serial)


def _usage_in(body: Line) -> Usage:
    usage = body["usage"]
    fresh, output = (
        usage.get("prompt_tokens", usage.get("input_tokens")),
        usage.get("completion_tokens", usage.get("output_tokens")),
    )
    return Usage(fresh, 0, output)


def _lines(data: bytes) -> list[Line]:
    return [msgspec.json.decode(line) for line in data.splitlines()]
