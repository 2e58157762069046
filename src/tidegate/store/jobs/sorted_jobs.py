"""Pages of jobs in an order that may change while they are read.

A page begins after the present place of the last job of the page before.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tidegate.core.job_lists import JobSort
from tidegate.core.nouns import Job
from tidegate.store.database.driver import Row, Tx
from tidegate.store.database.rows import job_from

_LIST_START = (1 << 62, "")
_SORT_KEYS: Mapping[JobSort, Callable[[Job], int]] = {
    JobSort.DEADLINE: lambda job: job.expires_at,
    JobSort.SIZE: lambda job: job.item_count,
    JobSort.FAILED: lambda job: 1_000_000 * job.failed_count // job.item_count if job.item_count else 0,
    JobSort.COST: lambda job: job.cost_nano,
}
# These sort keys change with each record, so open jobs have no index of them: open and ended jobs
# need two statements.
_SORTED_APART = (JobSort.FAILED, JobSort.COST)
# Jobs are stored in the order of their creation, and reading all of them that way is several times
# faster than in the order of an index. So a search with fewer matches than this is sorted
# afterwards. One with more fills a page from the first few hundred jobs of the index.
FEW_MAX = 1_000
# The columns of the sort keys in a row of `jobs_matching_few`.
_FEW_KEYS = {JobSort.SIZE: 1, JobSort.FAILED: 2, JobSort.COST: 3}
_PLACES = ("count_max", "created_at", "id", "from_ms")


async def sorted_page(tx: Tx, sort: JobSort, page: dict[str, Any], after: str | None) -> list[tuple[Job, str]] | None:
    """Return a page of a sorted list; None if there was no job `after`.

    The page begins after the job's present place, or after its last one if it was deleted.
    """
    is_rising, key = sort is JobSort.DEADLINE, _SORT_KEYS[sort]
    start = (-1, "") if is_rising else _LIST_START
    if after is not None:
        known = await tx.dicts("job_place", id=after)
        if not known:
            return None
        start = (known[0][sort], after)
    if not is_rising and any(value is not None for name, value in page.items() if name not in _PLACES):
        few = await tx.all("jobs_matching_few", few_max=FEW_MAX, **page)
        if len(few) < FEW_MAX:
            return await _page_of_few(tx, sort, few, start, page["count_max"])
    place = {"sort_key": start[0], "sort_id": start[1]}
    parts = ("_open", "_ended") if sort in _SORTED_APART else ("",)
    rows = [row for part in parts for row in await tx.dicts(f"jobs_by_{sort}{part}", **page, **place)]
    found = [(job_from(row), str(row["org"])) for row in rows]
    found.sort(key=lambda one: (key(one[0]), one[0].id), reverse=not is_rising)
    return found[: page["count_max"]]


async def _page_of_few(
    tx: Tx, sort: JobSort, few: Sequence[Row], start: tuple[int, str], count_max: int
) -> list[tuple[Job, str]]:
    """Return a page of these jobs in descending order, after a place.

    Jobs without a key are left out.
    """
    places = [(row[_FEW_KEYS[sort]], str(row[0])) for row in few if row[_FEW_KEYS[sort]] is not None]
    ids = [place[1] for place in sorted(places, reverse=True) if place < start][:count_max]
    if not ids:
        return []
    found = {row["id"]: (job_from(row), str(row["org"])) for row in await tx.dicts("jobs_named", ids="".join(ids))}
    return [found[job_id] for job_id in ids]
