"""Rules about files and the bytes behind them."""

from collections import Counter

from tidegate.judge.case import Case, Content
from tidegate.judge.report import Finding, rule, shown


@rule("input_unchanged", "P1", "The input has the length and the SHA-256 that were recorded when it was uploaded")
def input_unchanged(case: Case, found: Finding) -> None:
    if case.input.absent or case.input.row is None:
        found.skip(case.input.absent)
        return
    found.looked(f"{sum(content.size_bytes for content in case.inputs)} bytes")
    for content in case.inputs:
        _unchanged(content, found)


def _unchanged(content: Content, found: Finding) -> None:
    if content.trouble or content.row is None:
        found.wrong(content.trouble)
        return
    row = content.row
    found.need(
        content.size_bytes == row["size_bytes"], f"it has {content.size_bytes} bytes, recorded are {row['size_bytes']}"
    )
    found.need(content.sha256 == row["sha256"], f"its SHA-256 is {content.sha256}, recorded is {row['sha256']}")


@rule("pieces", "P3", "The extents of each file follow one another from 0 without gap or overlap, inside their blobs")
def chunks(case: Case, found: Finding) -> None:
    found.looked(f"{sum(len(content.extents) for content in case.contents)} extents")
    for content in case.contents:
        if content.absent:
            continue
        at = 0
        for extent in content.extents:
            start, size_bytes = extent["at"], extent["size_bytes"]
            if start != at:
                what = "a gap" if start > at else "an overlap"
                found.wrong(f"{content.name} has {what} at {at}: the next extent begins at {start}")
            if size_bytes <= 0:
                found.wrong(f"the extent at {start} of {content.name} has {size_bytes} bytes")
            blob = case.blobs.get(extent["blob_id"])
            if blob is not None and (extent["blob_at"] < 0 or extent["blob_at"] + size_bytes > blob["size_bytes"]):
                found.wrong(
                    f"the extent at {start} of {content.name} ends at {extent['blob_at'] + size_bytes} of {blob['id']}, "
                    f"which has {blob['size_bytes']} bytes on record"
                )
            at = start + size_bytes


@rule(
    "bytes_kept",
    "P1",
    "Every blob of a file has a record, is not condemned, is counted as used, and its bytes can be read",
)
def bytes_kept(case: Case, found: Finding) -> None:
    uses: dict[str, int] = {}
    for content in case.contents:
        if content.trouble:
            found.wrong(f"{content.name}: {content.trouble}")
        for extent in content.extents:
            uses[extent["blob_id"]] = uses.get(extent["blob_id"], 0) + 1
    if case.ingested and not case.ended:
        work = case.job["work_blob_id"]
        uses[str(work)] = 1
        if case.work_trouble:
            found.wrong(f"work file: {case.work_trouble}")
    found.looked(f"{len(uses)} blobs")
    for blob_id, count in uses.items():
        blob = case.blobs.get(blob_id)
        if blob is None:
            found.wrong(f"{blob_id} has no record")
        elif blob["state"] == "condemned":
            found.wrong(f"{blob_id} is condemned and will be removed")
        elif blob["uses"] < count:
            found.wrong(
                f"{blob_id} counts {blob['uses']} uses, but this job alone has {count}: it may be removed too early"
            )


@rule("file_sizes", "P3", "The sizes and line counts on record are those of the bytes")
def file_sizes(case: Case, found: Finding) -> None:
    if not case.has_results(found):
        return
    for content, column in ((case.output, "output_bytes"), (case.error, "error_bytes")):
        _size(case, content, column, found)
    found.looked(f"{case.output.size_bytes} + {case.error.size_bytes} bytes")


def _size(case: Case, content: Content, column: str, found: Finding) -> None:
    on_job = case.job[column]
    if on_job != content.size_bytes:
        found.wrong(f"{content.name} has {content.size_bytes} bytes, the job's {column} is {on_job}")
    if not case.ended or content.row is None:
        return
    for what, real in (("size_bytes", content.size_bytes), ("line_count", content.line_count)):
        if content.row[what] != real:
            found.wrong(f"{what} of {content.name} is {content.row[what]} on record and {real} in the bytes")
    if content.row["sha256"] and content.row["sha256"] != content.sha256:
        found.wrong(f"the SHA-256 of {content.name} is not the recorded one")


@rule("files_shown", "P3", "Result files are hidden while they can change and shown at the end, empty ones never")
def files_shown(case: Case, found: Finding) -> None:
    job = case.job
    own = [file for file in case.files if file["job_id"] == job["id"]]
    if job["kind"] != "batch":
        # The request of a background response is a file of the job too, and is shown from the
        # start.
        own = [file for file in own if file["id"] != job["input_file_id"]]
    found.looked(f"{len(own)} result files")
    own = [file for file in own if file["id"] != job["retry_file_id"]]
    if not case.ingested:
        found.need(
            job["output_file_id"] is None and job["error_file_id"] is None, "a job without ingest names a result file"
        )
        early = [file for file in own if job["retry_of"] is None or file["state"] == "ready"]
        found.need(not early, f"a job without ingest has {len(early)} result files")
        return
    named = {job["output_file_id"], job["error_file_id"], job["merged_file_id"]} - {None}
    parts = {part.file_id for content in (case.output, case.error) for part in content.parts}
    for file in own:
        if file["tenant_id"] != job["tenant_id"]:
            found.wrong(f"{file['id']} belongs to another tenant than its job")
        if not case.ended:
            found.need(file["state"] == "growing", f"{file['id']} is {file['state']} while the job is {job['state']}")
        elif file["id"] in named | parts:
            found.need(file["state"] in ("ready", "deleted"), f"{file['id']} is {file['state']} though the job ended")
        else:
            found.need(file["state"] == "deleted", f"{file['id']} is {file['state']}, but the job does not name it")
    if not case.ended:
        count = 2 if job["retry_of"] is None else 3
        found.need(
            len(named) == count and len(own) == count,
            "a running job needs one growing output and one growing error file, and a retry a merged one",
        )
        return
    failures = job["failed_count"] + job["expired_count"] + job["cancelled_count"]
    for content, count in ((case.output, job["answered_count"]), (case.error, failures)):
        if (content.file_id is not None) != (count > 0):
            found.wrong(f"{count} lines belong in the {content.name} file, and its id is {content.file_id}")


@rule("merged", "P3", "The merged output of a retry ends with its own answers, and answers every request at most once")
def merged(case: Case, found: Finding) -> None:
    content = case.merged
    if content is None or not case.ended or not case.ingested:
        found.skip("the job is no retry" if content is None else "the merged output is made when the job is published")
        return
    if content.absent or case.output.absent:
        found.skip(content.absent or case.output.absent)
        return
    lines, own = case.merged_lines, case.lines("output")
    found.looked(f"{len(lines)} lines")
    ending = [(line.id, line.crc32) for line in lines[len(lines) - len(own) :]]
    found.need(ending == [(line.id, line.crc32) for line in own], "it does not end with the answers of the job")
    for line in lines[: len(lines) - len(own)]:
        found.need(line.job_part != case.part, f"{line.where} is an answer of the job, before those of the first")
    for custom_id, count in Counter(line.custom_id for line in lines).items():
        found.need(count == 1, f"custom_id {shown(custom_id)} is there {count} times")
    found.need(not any(line.faults or not line.good for line in lines), "not all of its lines are answers")
    found.need(
        (content.file_id is not None) == bool(lines), f"it has {len(lines)} lines, and its id is {content.file_id}"
    )
    if content.row is not None:
        real = (content.size_bytes, content.line_count)
        recorded = (content.row["size_bytes"], content.row["line_count"])
        found.need(recorded == real, f"bytes and lines are {recorded} on record and {real} in the bytes")


@rule(
    "parts",
    "P3",
    "Result files that were cut are, one after the other, the whole, in whole lines and within the size that was asked for",
)
def parts(case: Case, found: Finding) -> None:
    if not any(content.parts for content in (case.output, case.error)):
        found.skip("no result file was cut")
        return
    most = case.asked.get("output_file_bytes_max", 0)
    for content in (case.output, case.error):
        if content.absent or not content.parts or any(part.absent for part in content.parts):
            continue
        found.looked(f"{len(content.parts)} parts")
        found.need(content.parts_sha256 == content.sha256, f"the parts of the {content.name} file are not the whole")
        for part in content.parts:
            found.need(not part.trouble, part.trouble)
            found.need(part.size_bytes <= most or part.line_count == 1, f"{part.file_id} has {part.size_bytes} bytes")
            for what in ("size_bytes", "line_count"):
                real = getattr(part, what)
                if part.row is not None and part.row[what] != real:
                    found.wrong(f"{what} of {part.file_id} is {part.row[what]} on record and {real} in the bytes")


RULES = (input_unchanged, chunks, bytes_kept, file_sizes, files_shown, merged, parts)
