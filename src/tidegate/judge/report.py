"""The judge's report: one verdict for each rule, with bounded evidence, as text or JSON.

Evidence names lines, numbers, custom_ids and counts. It never quotes a prompt or an answer.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Generic, TypeVar

from tidegate.core.errors import TidegateError

EVIDENCE_COUNT_MAX = 10
EVIDENCE_CHARS_MAX = 300
SHOWN_CHARS_MAX = 80

C = TypeVar("C")


class CannotJudge(TidegateError):
    """The job, the store, the bytes or the witness cannot be read. The message says what to do."""


class Verdict(StrEnum):
    OK = "ok"
    VIOLATED = "violated"
    NOT_APPLICABLE = "n-a"


@dataclass(slots=True)
class Finding:
    """The findings of one rule."""

    evidence: list[str] = field(default_factory=list)
    violation_count: int = 0
    skipped: str = ""
    seen: str = ""

    def wrong(self, what: str) -> None:
        """Add one violation. All are counted, and the first few are shown."""
        self.violation_count += 1
        if len(self.evidence) < EVIDENCE_COUNT_MAX:
            self.evidence.append(what[:EVIDENCE_CHARS_MAX])

    def need(self, holds: bool, otherwise: str) -> None:
        if not holds:
            self.wrong(otherwise)

    def skip(self, why: str) -> None:
        """Skip the rule for this job."""
        self.skipped = why

    def looked(self, at: str) -> None:
        """Note what was looked at, for the reader of an `ok`."""
        self.seen = at


@dataclass(frozen=True, slots=True)
class JudgeRule(Generic[C]):
    """One promise that must hold, and the function that checks it."""

    id: str
    promise: str
    sentence: str
    look: Callable[[C, Finding], None]

    def judge(self, case: C) -> "JudgeCheck":
        found = Finding()
        self.look(case, found)
        verdict = Verdict.NOT_APPLICABLE if found.skipped else Verdict.OK
        if found.violation_count:
            verdict = Verdict.VIOLATED
        return JudgeCheck(
            self.id,
            self.promise,
            self.sentence,
            verdict,
            found.skipped or found.seen,
            found.violation_count,
            tuple(found.evidence),
        )


def rule(id: str, promise: str, sentence: str) -> Callable[[Callable[[C, Finding], None]], JudgeRule[C]]:
    """Turn a function that checks a promise into a rule."""
    return lambda look: JudgeRule(id, promise, sentence, look)


@dataclass(frozen=True, slots=True)
class JudgeCheck:
    id: str
    promise: str
    sentence: str
    verdict: Verdict
    detail: str
    violation_count: int
    evidence: tuple[str, ...]

    def lines(self) -> list[str]:
        mark = "VIOLATED" if self.verdict is Verdict.VIOLATED else self.verdict.value
        detail = f" ({self.detail})" if self.detail else ""
        lines = [f"{mark:<8}  {self.promise:<9}  {self.id}: {self.sentence}{detail}"]
        lines += [f"{'':21}- {one}" for one in self.evidence]
        more = self.violation_count - len(self.evidence)
        if more > 0:
            lines.append(f"{'':21}- and {more} more")
        return lines

    def to_json(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "promise": self.promise,
            "sentence": self.sentence,
            "verdict": self.verdict.value,
            "detail": self.detail,
            "violation_count": self.violation_count,
            "evidence": list(self.evidence),
        }


@dataclass(frozen=True, slots=True)
class Report:
    """The verdict on one job."""

    job_id: str
    state: str
    checks: tuple[JudgeCheck, ...]

    @property
    def ok(self) -> bool:
        return not self.violated

    @property
    def violated(self) -> tuple[str, ...]:
        """Return the ids of the rules that do not hold."""
        return tuple(check.id for check in self.checks if check.verdict is Verdict.VIOLATED)

    def count(self, verdict: Verdict) -> int:
        return sum(check.verdict is verdict for check in self.checks)

    def summary(self) -> str:
        counts = (
            f"{self.count(Verdict.OK)} ok, {self.count(Verdict.VIOLATED)} violated, "
            f"{self.count(Verdict.NOT_APPLICABLE)} not applicable"
        )
        verdict = "every promise holds" if self.ok else "PROMISES ARE BROKEN"
        return f"{self.job_id} ({self.state}): {verdict} ({counts})"

    def to_text(self, *, is_short: bool = False) -> str:
        """Return a line for each rule with its evidence under it, and a summary as the last line.

        With `is_short`, only violated rules are listed.
        """
        shown = [check for check in self.checks if not is_short or check.verdict is Verdict.VIOLATED]
        return "\n".join([line for check in shown for line in check.lines()] + [self.summary()])

    def to_json(self) -> dict[str, Any]:
        return {
            "batch_id": self.job_id,
            "status": self.state,
            "ok": self.ok,
            "counts": {verdict.value: self.count(verdict) for verdict in Verdict},
            "checks": [check.to_json() for check in self.checks],
        }


def shown(text: str | None) -> str:
    """Return a caller's text, escaped and cut for a terminal."""
    if text is None:
        return "null"
    cut = text[:SHOWN_CHARS_MAX]
    return ascii(cut) + ("…" if len(cut) < len(text) else "")
