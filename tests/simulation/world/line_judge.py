"""What must hold of lines that are copies of others, of answers that were asked for again, and of what is noted of each item."""

from collections.abc import Callable
from typing import Any

import apsw
import msgspec

from tests.simulation.world.customers import Order
from tests.simulation.world.plan import DELAYS, Plan
from tests.simulation.world.witness import INVALID, Witnessed
from tidegate.core.answer_terms import AnswerTerms
from tidegate.core.nouns import Usage

Line = dict[str, Any]

_EVENTS = """
select number, count, kind, first, output_at, output_bytes, error_at, error_bytes from job_events where job_id = ? order by number
"""


class LineJudge:
    def __init__(
        self,
        connection: apsw.Connection,
        plan: Plan,
        answers_of: Callable[[str], bytes],
        broken: Callable[[str], None],
    ) -> None:
        self._connection = connection
        self._plan = plan
        self._answers_of = answers_of
        self._broken = broken

    # ---- copies

    def judge_copies(self, order: Order, lines: list[Line], calls: list[Witnessed]) -> None:
        """A request that is in the input twice runs once, and all its lines say the same."""
        numbers: dict[str, set[int]] = {}
        for call in calls:
            numbers.setdefault(call.tag, set()).add(call.number)
        for tag, found in numbers.items():
            if len(found) > 1:
                self._broken(f"dedupe: the request {tag} of {order.name} ran as items {sorted(found)}")
        by_id = {line["custom_id"]: line for line in lines}
        for tag, leader in order.copies.items():
            mine, source = by_id.get(f"id-{tag}"), by_id.get(f"id-{leader}")
            if mine is None or source is None:
                self._broken(f"P2/P3: {order.name} has no line for {tag} or {leader}, which are one request")
            elif (mine["response"], mine["error"]) != (source["response"], source["error"]):
                self._broken(f"dedupe: {order.name} gave {tag} another line than {leader}, whose request it is: {mine}")

    def without_reused(self, order: Order, good: list[Line], calls: list[Witnessed]) -> list[Line]:
        """Check the lines that an earlier job has answered, and return the others."""
        if order.reuse_of is None:
            return good
        lines = self._answers_of(order.reuse_of.job_id).splitlines()
        answered = {line["custom_id"]: line for line in map(msgspec.json.decode, lines)}
        expected = {f"id-{tag}" for tag in order.unchanged} & set(answered)
        for call in calls:
            if f"id-{call.tag}" in expected:
                self._broken(
                    f"reuse: call {call.serial} of {order.name} asks for what {order.reuse_of.name} has answered"
                )
        if missing := expected - {line["custom_id"] for line in good}:
            self._broken(f"reuse: {order.name} has no answers for {sorted(missing)}, which an earlier job answered")
        for line in good:
            theirs = answered.get(line["custom_id"])
            if line["custom_id"] in expected and theirs is not None and line["response"] != theirs["response"]:
                self._broken(f"reuse: {order.name} has another answer than the earlier job: {line}")
        return [line for line in good if line["custom_id"] not in expected]

    # ---- answers that must fit

    def rejected_usages(self, order: Order, good: list[Line], bad: list[Line], calls: list[Witnessed]) -> list[Usage]:
        """What answers took that did not fit: each is in the line of its item, as it was met, and there are not too many."""
        terms, found = order.actions.answers, []
        if terms is None:
            return []
        for line in good + bad:
            if line["custom_id"] is None or line["custom_id"].removeprefix("id-") in order.copies:
                continue
            tries = line.get("tidegate", {}).get("tries", [])
            tag = order.source_of(line["custom_id"])
            rejected = [one for one in tries if one["problem"] is not None]
            met = [call for call in calls if call.tag == tag and call.mood == INVALID and call.received_s is not None]
            tries_max = terms.tries_max + 1 + (terms.escalate_to is not None)
            if len(rejected) > tries_max or len(rejected) > len(met):
                self._broken(
                    f"schema: {order.name} lists {len(rejected)} answers that do not fit, {len(met)} came: {line}"
                )
            never_ran = line["error"] is not None and line["error"]["code"].startswith("batch_")
            # A worker that an item kills loses the answers that it has not recorded.
            if len(rejected) < len(met) and not never_ran and not (DELAYS | {"poison"}) & set(self._plan.kinds):
                self._broken(
                    f"schema: {order.name} lists {len(rejected)} answers that do not fit, and {len(met)} came: {line}"
                )
            if terms.escalate_to is not None:
                self._judge_escalation(order, terms, line, tries)
            for one in rejected:
                usage = Usage(one["input_tokens"], one["cached_tokens"], one["output_tokens"])
                if usage != order.usages[tag]:
                    self._broken(
                        f"schema: {order.name} says that an answer took {usage}, and it took {order.usages[tag]}"
                    )
                found.append(usage)
        return found

    def _judge_escalation(self, order: Order, terms: AnswerTerms, line: Line, tries: list[Line]) -> None:
        """The stronger model is asked when all other tries were in vain, once; and nothing is filed before it was."""
        stronger = [number for number, one in enumerate(tries) if one["model"] == terms.escalate_to]
        if stronger not in ([], [terms.tries_max + 1]):
            self._broken(f"schema: {order.name} asked the stronger model at {stronger}: {line}")
        is_filed = line["error"] is not None and line["error"]["code"] == "schema_invalid"
        if is_filed and not stronger:
            self._broken(f"schema: {order.name} filed an answer that the stronger model was not asked for: {line}")

    # ---- what is noted of each item

    def judge_events(self, order: Order, job: Line, line_count: int, calls: list[Witnessed]) -> None:
        """Events have no gaps; each item that was called began once, and each line was added once."""
        rows: list[Any] = self._connection.execute(_EVENTS, (job["id"],)).fetchall()
        place, output, errors, lines = 2, 0, 0, 0
        begun: list[int] = []
        for number, count, kind, first, output_at, output_bytes, error_at, error_bytes in rows:
            if number != place:
                self._broken(f"events: {order.name} has event {number} where {place} is due")
            place += count
            if kind == "running":
                begun += range(first, first + count)
                continue
            if (output_at, error_at) != (output, errors):
                self._broken(
                    f"events: event {number} of {order.name} begins at {output_at} and {error_at}, not {output} and {errors}"
                )
            output, errors, lines = output + output_bytes, errors + error_bytes, lines + count
        if (output, errors, lines) != (job["output_bytes"], job["error_bytes"], line_count):
            self._broken(f"events: those of {order.name} add {lines} lines to its files, which have {line_count}")
        if len(begun) != len(set(begun)) or {call.number for call in calls} - set(begun):
            self._broken(
                f"events: items {sorted(begun)} of {order.name} began, and {sorted({c.number for c in calls})} did"
            )
