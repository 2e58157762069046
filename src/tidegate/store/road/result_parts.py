"""Result files of bounded size: a job's results are shown as several files with the same extents.

The whole file stays for readers that know lines by their place in it. It is in no list, and is
deleted with the last of its parts.
"""

from collections import Counter
from hashlib import blake2b

import msgspec

from tidegate.core import ids
from tidegate.core.job_shape import ResultParts
from tidegate.core.nouns import Job
from tidegate.store.database.driver import Tx

_EVERYTHING = 1 << 40


async def cut_results(tx: Tx, job: Job, ended: Job, keep_ms: int | None) -> None:
    """Show the results of an ended job as files of bounded size.

    A longer line gets a file of its own.

    `job` is its row before the end.
    """
    most = job.shape.output_file_bytes_max
    if not most:
        return
    cut = ResultParts(
        await _cut_file(tx, job, "output", job.output_file_id if ended.output_bytes > most else None, keep_ms),
        await _cut_file(tx, job, "error", job.error_file_id if ended.error_bytes > most else None, keep_ms),
    )
    if cut != ResultParts():
        await tx.all("job_set_parts", id=job.id, parts=msgspec.json.encode(cut).decode())


async def _cut_file(tx: Tx, job: Job, name: str, whole_id: str | None, keep_ms: int | None) -> tuple[str, ...]:
    """Make the parts of one result file; none if it is small enough."""
    if whole_id is None:
        return ()
    lines = await tx.all("outcome_sizes", job_id=job.id, is_answered=int(name == "output"))
    spans = part_spans([row[0] for row in lines], job.shape.output_file_bytes_max)
    # The ids are derived from the whole's random id, so that a replay makes the same ones.
    part_ids = [
        ids.make("file", blake2b(f"{whole_id}/{number}".encode(), digest_size=ids.RANDOM_BYTES).digest())
        for number in range(len(spans))
    ]
    extents = await tx.all("extent_list", file_id=whole_id, from_at=0, count_max=_EVERYTHING)
    files, pieces, at, index = [], [], 0, 0
    for number, (part_id, (size_bytes, line_count)) in enumerate(zip(part_ids, spans, strict=True)):
        filename = f"{job.id}_{name}_{number + 1}.jsonl"
        purpose = f"{job.kind}_output"
        files.append((part_id, job.tenant_id, job.id, purpose, filename, "ready", size_bytes, line_count, "", keep_ms))
        end = at + size_bytes
        while index < len(extents) and extents[index][0] < end:
            start, extent_bytes, blob_id, blob_at = extents[index]
            low, high = max(start, at), min(start + extent_bytes, end)
            pieces.append((part_id, low - at, high - low, blob_id, blob_at + low - start))
            if start + extent_bytes > end:
                break
            index += 1
        at = end
    for blob_id, uses in sorted(Counter(piece[3] for piece in pieces).items()):
        await tx.all("blob_use", id=blob_id, uses=uses)
    await tx.many("file_put", files)
    await tx.many("extent_put", pieces)
    await tx.all("file_hide", id=whole_id)
    return tuple(part_ids)


def part_spans(sizes: list[int], most: int) -> list[tuple[int, int]]:
    """Return the bytes and lines of each part of a file with lines of these sizes."""
    spans: list[tuple[int, int]] = []
    size_bytes = count = 0
    for size in sizes:
        if count and size_bytes + size > most:
            spans.append((size_bytes, count))
            size_bytes = count = 0
        size_bytes += size
        count += 1
    return [*spans, (size_bytes, count)] if count else spans
