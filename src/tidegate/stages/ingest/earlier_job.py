"""The earlier job whose answers a new job reuses: its input and its answers as local files.

They lie beside the new job's work file.
"""

from collections.abc import Callable
from pathlib import Path

from tidegate.core.input.lines import EarlierJob
from tidegate.core.job_shape import InputPart, ParameterLevel
from tidegate.core.nouns import Job, LineError
from tidegate.core.ports import Blobs
from tidegate.store.jobs.reuse import answers_file_of
from tidegate.store.store import Store

_EXTENTS_PAGE = 64


class EarlierJobs:
    """The way to earlier jobs.

    `operator_levels` returns the operator's parameters for a job's lines.
    """

    def __init__(
        self, store: Store, blobs: Blobs, operator_levels: Callable[[Job], tuple[ParameterLevel, ...]]
    ) -> None:
        self._store = store
        self._blobs = blobs
        self._operator_levels = operator_levels

    async def fetch(self, tenant_id: str, job_id: str, work_path: Path) -> EarlierJob | None:
        """Copy an earlier job's input and answers to local files; None if they are gone."""
        earlier = await self._store.get_job(tenant_id, job_id)
        if earlier is None:
            return None
        paths: list[Path] = []
        file_ids = (earlier.input_file_id, *earlier.shape.more_inputs, answers_file_of(earlier) or "")
        for number, file_id in enumerate(file_ids):
            file = await self._store.get_file(tenant_id, file_id)
            if file is None:
                return None
            paths.append(work_path.with_suffix(f".earlier{number}"))
            if await copy_file(self._store, self._blobs, file_id, paths[-1]) < file.size_bytes:
                # The earlier job was deleted meanwhile: a part of its answers must not count as all
                # of them.
                return None
        parts = tuple(InputPart(file_id, str(path)) for file_id, path in zip(file_ids, paths[:-1], strict=False))
        levels = (*self._operator_levels(earlier), *earlier.shape.levels())
        joined_path = str(work_path.with_suffix(".earlier"))
        return EarlierJob(earlier.endpoint, parts, levels, joined_path, str(paths[-1]))


def earlier_gone(job_id: str) -> LineError:
    return LineError(
        "reuse_source_gone",
        f"The input or the answers of {job_id} are gone, so nothing was run. Create the batch again without `reuse_from`.",
        "reuse_from",
    )


def remove_earlier(work_path: Path) -> None:
    """Remove the files that were fetched for this work file."""
    for path in work_path.parent.glob(f"{work_path.stem}.earlier*"):
        path.unlink(missing_ok=True)


async def copy_file(store: Store, blobs: Blobs, file_id: str, path: Path) -> int:
    """Copy a file to a local path and return its number of bytes."""
    at = 0
    with path.open("wb") as target:
        while extents := await store.list_extents(file_id, at, _EXTENTS_PAGE):
            for extent in extents:
                async for piece in blobs.stream(extent.blob_id, extent.blob_at, extent.size_bytes):
                    target.write(piece)
                at = extent.at + extent.size_bytes
    return at
