"""The judge behind `tidegate verify`: it checks one job's promises with its own SQL and readers.

The judge shares little code with the parts that it judges, so that one bug cannot hide in both. It
has its own SQL, its own JSONL reader and its own reading of ids and usage. It takes nothing from
`stages` or `store`, and bytes come through the Blobs port alone. The judge only reads.
"""

from collections.abc import AsyncIterator
from pathlib import Path

from tidegate.core.ports import Blobs
from tidegate.judge import rules_calls, rules_copies, rules_files, rules_items, rules_job, rules_lines
from tidegate.judge.case import Allowance, Case, gather
from tidegate.judge.records import Records, postgres_records, sqlite_records
from tidegate.judge.report import CannotJudge, JudgeCheck, JudgeRule, Report, Verdict

RULES: tuple[JudgeRule[Case], ...] = (
    *rules_job.RULES,
    *rules_files.RULES,
    *rules_lines.RULES,
    *rules_items.RULES,
    *rules_copies.RULES,
    *rules_calls.RULES,
)
_SWEEP_PAGE_COUNT = 100

__all__ = [
    "RULES",
    "Allowance",
    "CannotJudge",
    "JudgeCheck",
    "Records",
    "Report",
    "Verdict",
    "judge",
    "postgres_records",
    "sqlite_records",
    "sweep",
]


async def judge(
    records: Records,
    blobs: Blobs,
    job_id: str,
    witness: Path | None = None,
    allowance: Allowance | None = None,
) -> Report:
    """Judge one job by all rules; raise CannotJudge if its records or bytes cannot be read.

    A running job is judged by what must hold already.
    """
    case = await gather(records, blobs, job_id, witness, allowance or Allowance())
    return Report(job_id, case.job["state"], tuple(rule.judge(case) for rule in RULES))


async def sweep(
    records: Records, blobs: Blobs, witness: Path | None = None, allowance: Allowance | None = None
) -> AsyncIterator[Report]:
    """Judge all jobs in the store, in the order of their ids."""
    sql = "select id from jobs where id > $1 order by id limit $2"
    last = ""
    while page := await records.rows(sql, (last, _SWEEP_PAGE_COUNT)):
        await records.refresh()
        for row in page:
            yield await judge(records, blobs, row["id"], witness, allowance)
        last = page[-1]["id"]
