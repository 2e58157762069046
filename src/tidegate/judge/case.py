"""The case of one job, gathered once: the store's rows at one moment, and the lines of its files.

This module judges nothing. If bytes cannot be read that should be there, the case keeps that as
trouble, for a rule to report.
"""

import hashlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from tidegate.core.errors import BlobError, BlobMissing
from tidegate.core.ports import Blobs
from tidegate.judge.copies import EarlierAnswers, RequestKey, read_request_key
from tidegate.judge.jsonl import JsonlLine, NotJson, lines_of, pieces_of, read_json
from tidegate.judge.lines import JudgedInputLine, ResultLine, read_input_line, read_parameters, read_result_line
from tidegate.judge.records import RecordRow, Records
from tidegate.judge.report import CannotJudge, Finding
from tidegate.judge.retried import retried_lines
from tidegate.judge.witness import Witness, read_witness

ENDED = ("completed", "failed", "expired", "cancelled")
END_STAMPS = ("completed_at", "failed_at", "expired_at", "cancelled_at")
NOT_INGESTED = "the job was not ingested"
GIVEN_UP = "an operator gave up publishing it"
_ABANDONED = "abandoned"
_JOB_PART = slice(len("batch_"), len("batch_") + 16)
_PAGE_COUNT = 20_000
_LEDGER = """
select cast(coalesce(sum(input_tokens), 0) as bigint) as input_tokens, cast(coalesce(sum(cached_tokens), 0) as bigint) as cached_tokens,
    cast(coalesce(sum(output_tokens), 0) as bigint) as output_tokens,
    cast(coalesce(sum(reasoning_tokens), 0) as bigint) as reasoning_tokens,
    cast(coalesce(sum(input_nano + cached_nano + output_nano), 0) as bigint) as cost_nano,
    count(case when tenant_id <> (select j.tenant_id from jobs j where j.id = usage.job_id) then 1 end) as strangers
from usage where job_id = $1
"""


@dataclass(frozen=True, slots=True)
class Allowance:
    """The limits from an operator's settings, and the expectations of the judge's caller.

    - `attempts_max` is the larger of the settings' two.
    - `grace_ms` is the time for calls in flight when a job closes.
    - `cancel_ms` is the time within which sending must stop.
    - `travel_ms` is the longest time that a call may take to arrive.
    - `overridden` are the parameters that the settings replace, `defaulted` those they fill in.
    """

    attempts_max: int = 3
    grace_ms: int = 60_000
    cancel_ms: int = 2_000
    travel_ms: int = 1_000
    expect_no_repeats: bool = False
    overridden: frozenset[str] = frozenset()
    defaulted: frozenset[str] = frozenset()


@dataclass(slots=True)
class Content:
    """One file: its row, its extents and its contents.

    `absent` is the reason why it may have no bytes.
    """

    name: str
    file_id: str | None
    row: RecordRow | None
    extents: list[RecordRow]
    absent: str = ""
    trouble: str = ""
    size_bytes: int = 0
    sha256: str = ""
    line_count: int = 0
    parts: list["Content"] = field(default_factory=list)
    parts_sha256: str = ""


@dataclass(slots=True)
class Case:
    job: RecordRow
    job_later: RecordRow | None
    now_ms: int
    allowance: Allowance
    files: list[RecordRow]
    blobs: dict[str, RecordRow]
    outcomes: list[RecordRow]
    slices: list[RecordRow]
    attempts: list[RecordRow]
    workers: list[RecordRow]
    ledger: RecordRow
    faults: list[str]
    input: Content
    output: Content
    error: Content
    witness: Witness | None
    more_inputs: list[Content] = field(default_factory=list)
    retry: Content | None = None
    merged: Content | None = None
    merged_lines: list[ResultLine] = field(default_factory=list)
    input_lines: list[JudgedInputLine] = field(default_factory=list)
    result_lines: list[ResultLine] = field(default_factory=list)
    work_ids: list[str | None] | None = None
    asked: dict[str, Any] = field(default_factory=dict)
    input_parameters: dict[str | None, dict[str, Any] | None] = field(default_factory=dict)
    request_keys: dict[str | None, RequestKey] = field(default_factory=dict)
    earlier: EarlierAnswers | None = None
    work_parameters: list[dict[str, Any] | None] = field(default_factory=list)
    work_absent: str = NOT_INGESTED
    work_trouble: str = ""

    @property
    def parameters(self) -> frozenset[str]:
        """Return the names of the parameters that the job's caller put into all requests."""
        return frozenset((*self.asked.get("defaults", {}), *self.asked.get("overrides", {})))

    @property
    def set_by_others(self) -> frozenset[str]:
        """Return the parameters that no line decides, here or in the job of reused answers."""
        earlier = self.earlier.parameters if self.earlier is not None else frozenset()
        return self.parameters | self.allowance.overridden | earlier

    @property
    def copied_count(self) -> int:
        """Return how many items get a copy of another line instead of a run; they are the last."""
        return cast(int, self.job["deduplicated_count"] + self.job["reused_count"])

    @property
    def ended(self) -> bool:
        return self.job["state"] in ENDED

    @property
    def ingested(self) -> bool:
        return self.job["in_progress_at"] is not None

    @property
    def abandoned(self) -> bool:
        """Return whether an operator gave up publishing this job.

        Then items that never ran have neither a line nor an outcome.
        """
        if self.job["state"] != "failed" or self.job["finalizing_at"] is None:
            return False
        try:
            errors = read_json(self.job["errors"].encode())
        except NotJson:
            return False
        return isinstance(errors, list) and any(
            isinstance(error, dict) and error.get("code") == _ABANDONED for error in errors
        )

    @property
    def part(self) -> str:
        """Return the letters of the job's id that are also in its items' ids."""
        return cast(str, self.job["id"][_JOB_PART])

    @property
    def inputs(self) -> list[Content]:
        return [self.input, *self.more_inputs]

    @property
    def contents(self) -> list[Content]:
        own = (*self.inputs, self.output, self.error, self.retry, self.merged)
        return [content for content in own if content is not None]

    def has_results(self, found: Finding) -> bool:
        """Return whether the result lines can be judged; skip the rule if not."""
        absent = NOT_INGESTED if not self.ingested else self.output.absent or self.error.absent
        if absent:
            found.skip(absent)
        return not absent

    def lines(self, name: str) -> list[ResultLine]:
        return [line for line in self.result_lines if line.name == name]

    def by_number(self) -> dict[int, ResultLine]:
        """Return the first line of each item."""
        first: dict[int, ResultLine] = {}
        for line in self.result_lines:
            if line.job_part == self.part:
                first.setdefault(line.number, line)
        return first


async def gather(records: Records, blobs: Blobs, job_id: str, witness: Path | None, allowance: Allowance) -> Case:
    """Read the store's rows, then the files, then the job's row once more."""
    await records.refresh()
    case = await _look(records, job_id, allowance)
    await records.refresh()
    await _read_earlier(case, records, blobs)
    await _read_input(case, blobs)
    for content in (case.output, case.error):
        await _read_results(content, case.result_lines, blobs, has_copies=case.copied_count > 0)
        await _read_parts(content, blobs)
    if case.retry is not None and case.merged is not None:
        chosen: list[ResultLine] = []
        await _read_results(case.retry, chosen, blobs)
        case.input_lines = retried_lines(case.job, case.input_lines, chosen)
        await _read_results(case.merged, case.merged_lines, blobs)
    await _read_work(case, blobs)
    if witness is not None:
        case.witness = read_witness(witness, case.part)
    later = await records.rows("select * from jobs where id = $1", (job_id,))
    case.job_later = later[0] if later else None
    await records.refresh()
    return case


async def _look(records: Records, job_id: str, allowance: Allowance) -> Case:
    jobs = await records.rows("select * from jobs where id = $1", (job_id,))
    if not jobs:
        raise CannotJudge(f"there is no batch {job_id} in this store. Check the id, --data and store.url.")
    job = jobs[0]
    files = await records.rows("select * from files where id = $1 or job_id = $2", (job["input_file_id"], job_id))
    asked = read_json(job["shape"].encode()) if job["shape"] else {}
    names = ("input", "output", "error", *(("retry", "merged") if job["retry_of"] is not None else ()))
    content = {name: await _content(records, job, name, files) for name in names}
    more = []
    for file_id in asked.get("more_inputs", ()):
        rows = await records.rows("select * from files where id = $1", (file_id,))
        more.append(await _content(records, job | {"input_file_id": file_id}, "input", rows))
        # If one file cannot be read, the whole input cannot be judged.
        content["input"].absent = content["input"].absent or more[-1].absent
    for name, part_ids in (read_json(job["parts"].encode()) if job["parts"] else {}).items():
        for file_id in part_ids:
            content[name].parts.append(await _content(records, job | {f"{name}_file_id": file_id}, name, files))
    blobs: dict[str, RecordRow] = {}
    extents = [extent for one in (*content.values(), *more) for extent in one.extents]
    wanted = {extent["blob_id"] for extent in extents} | {job["work_blob_id"]}
    for blob_id in sorted(wanted - {None}):
        for row in await records.rows("select * from blobs where id = $1", (blob_id,)):
            blobs[blob_id] = row
    by_job = "where job_id = $1 order by"
    return Case(
        job,
        None,
        await records.now_ms(),
        allowance,
        files,
        blobs,
        await _outcomes(records, job_id),
        await records.rows(f"select * from slices {by_job} first", (job_id,)),  # noqa: S608 - the text is this module's own
        await records.rows(f"select * from attempts {by_job} number", (job_id,)),  # noqa: S608
        await records.rows("select id, state, started_at, beat_at, alive_until from workers"),
        (await records.rows(_LEDGER, (job_id,)))[0],
        await records.faults(),
        content["input"],
        content["output"],
        content["error"],
        witness=None,
        more_inputs=more,
        asked=asked,
        retry=content.get("retry"),
        merged=content.get("merged"),
    )


async def _outcomes(records: Records, job_id: str) -> list[RecordRow]:
    sql = "select number, outcome, at, size_bytes, crc32 from outcomes where job_id = $1 and number > $2 order by number limit $3"
    found: list[RecordRow] = []
    last = -(1 << 62)
    while page := await records.rows(sql, (job_id, last, _PAGE_COUNT)):
        found += page
        last = page[-1]["number"]
    return found


async def _content(records: Records, job: RecordRow, name: str, files: list[RecordRow]) -> Content:
    file_id = job[f"{name}_file_id"]
    row = next((file for file in files if file["id"] == file_id), None)
    extents: list[RecordRow] = []
    if file_id is not None:
        sql = "select at, size_bytes, blob_id, blob_at from extents where file_id = $1 order by at"
        extents = await records.rows(sql, (file_id,))
    content = Content(name, file_id, row, extents)
    if file_id is None:
        ended_after_ingest = job["state"] in ENDED and job["in_progress_at"] is not None
        content.absent = "" if ended_after_ingest else NOT_INGESTED
    elif row is None and name == "input":
        content.absent = "the input file was deleted long ago"
    elif row is None:
        content.trouble = f"{file_id} has no record"
    elif row["state"] == "deleted":
        content.absent = f"the {name} file was deleted"
    return content


async def _read_earlier(case: Case, records: Records, blobs: Blobs) -> None:
    """Read the earlier answers that the job reuses, and their requests, while they are kept."""
    rows = await records.rows("select * from jobs where id = $1", (case.asked.get("reuse_from", ""),))
    if not rows or not case.job["reused_count"]:
        return
    job = rows[0]
    asked = read_json(job["shape"].encode()) if job["shape"] else {}
    case.earlier = EarlierAnswers(frozenset((*asked.get("defaults", {}), *asked.get("overrides", {}))))
    for file_id in (job["input_file_id"], *asked.get("more_inputs", ())):
        files = await records.rows("select * from files where id = $1", (file_id,))
        content = await _content(records, job | {"input_file_id": file_id}, "input", files)
        if content.absent or content.trouble:
            continue
        async for line in _read(content, blobs):
            read = read_input_line(line, 0)
            if read is not None:
                key = read_request_key(line.data, case.set_by_others)
                case.earlier.request_keys.setdefault(read.custom_id, key)
    name = "output" if job["retry_of"] is None else "merged"
    files = await records.rows("select * from files where id = $1", (job[f"{name}_file_id"],))
    lines: list[ResultLine] = []
    await _read_results(await _content(records, job, name, files), lines, blobs, has_copies=True)
    case.earlier.lines.update((line.id, line) for line in lines)


async def _read_input(case: Case, blobs: Blobs) -> None:
    before = 0
    for content in case.inputs:
        if not case.input.absent and not content.trouble:
            await _read_lines(case, content, blobs, before)
        before += content.line_count


async def _read_lines(case: Case, content: Content, blobs: Blobs, before: int) -> None:
    """Read one file of the input; the files before it have `before` lines."""
    async for line in _read(content, blobs):
        content.line_count += 1
        read = read_input_line(line, content.line_count, before)
        if read is not None:
            case.input_lines.append(read)
            if case.parameters:
                case.input_parameters[read.custom_id] = read_parameters(line.data, case.parameters)
            if case.copied_count:
                case.request_keys.setdefault(read.custom_id, read_request_key(line.data, case.set_by_others))


async def _read_results(content: Content, lines: list[ResultLine], blobs: Blobs, *, has_copies: bool = False) -> None:
    if content.absent or content.trouble:
        return
    async for line in _read(content, blobs):
        content.line_count += 1
        lines.append(read_result_line(line, content.name, content.line_count, has_copies=has_copies))


async def _read_parts(content: Content, blobs: Blobs) -> None:
    """Read the parts that a result file was cut into, one after the other."""
    digest = hashlib.sha256()
    for part in content.parts:
        if not part.absent and not part.trouble:
            async for line in _read(part, blobs):
                part.line_count += 1
                digest.update(line.data + b"\n" * line.whole)
    content.parts_sha256 = digest.hexdigest()


async def _read(content: Content, blobs: Blobs) -> AsyncIterator[JsonlLine]:
    """Yield the lines of a file, and note its size and hash.

    Missing bytes are kept as trouble. If the blobs cannot be reached, raise CannotJudge.
    """
    digest = hashlib.sha256()

    async def counted() -> AsyncIterator[tuple[int, bytes]]:
        async for at, chunk in pieces_of(blobs, content.extents):
            digest.update(chunk)
            content.size_bytes += len(chunk)
            yield at, chunk

    try:
        async for line in lines_of(counted()):
            yield line
    except BlobMissing as error:
        content.trouble = str(error)
    except BlobError as error:
        raise CannotJudge(f"the bytes of the {content.name} file cannot be read now: {error}") from error
    content.sha256 = digest.hexdigest()


async def _read_work(case: Case, blobs: Blobs) -> None:
    """Read the custom_id of each item from the work file, for as long as it is kept."""
    job = case.job
    blob = case.blobs.get(job["work_blob_id"] or "")
    if not case.ingested:
        return
    if blob is None or blob["state"] == "condemned":
        case.work_absent = "the work file was collected"
        return
    whole: Any = {"at": 0, "blob_id": blob["id"], "blob_at": 0, "size_bytes": job["work_bytes"]}
    work = Content("work", None, None, [whole])
    ids: list[str | None] = []
    async for line in _read(work, blobs):
        try:
            read = read_json(line.data)
        except NotJson:
            read = None
        ids.append(read.get("custom_id") if isinstance(read, dict) else None)
        if case.parameters:
            case.work_parameters.append(read_parameters(line.data, case.parameters))
    if work.trouble and case.ended:
        case.work_absent = "the work file was collected"
        return
    case.work_ids, case.work_trouble = ids, work.trouble
