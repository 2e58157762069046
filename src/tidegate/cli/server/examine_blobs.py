"""Checks of `tidegate doctor` about the store and the blobs together: bytes that are missing, and
bytes without a row."""

from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

import msgspec

from tidegate.cli.server.examine import DoctorFinding, Grade
from tidegate.core.files import StoredBlob
from tidegate.core.wording import in_words

if TYPE_CHECKING:
    from tidegate.storage import Parts

SCAN_MAX = 50_000
_PAGE_MAX = 1_000
_SHOWN_MAX = 5


class Mismatches(msgspec.Struct, frozen=True):
    """The blobs that are needed but missing or too short, and the blobs that no row names.
    `looked_at` counts the needed ones."""

    missing: tuple[str, ...]
    strays: tuple[str, ...]
    looked_at: int
    is_all: bool


async def compare(parts: "Parts") -> Mismatches:
    """Compare the store's rows with the bytes that exist, up to a bound. Check each difference
    again, because both may change meanwhile."""
    present = await _present(parts)
    rows = {blob.id: blob for blob in await _rows(parts)}
    missing = [
        blob.id for blob in rows.values() if blob.is_needed and not await _holds(parts, blob.id, blob.size_bytes)
    ]
    if missing:
        again = {blob.id: blob for blob in await _rows(parts)}
        missing = [one for one in missing if one in again and again[one].is_needed]
    end = max(rows, default="") if len(rows) >= SCAN_MAX else "~"
    unnamed = [one for one in present if one <= end and one not in rows]
    strays = [
        one for one in unnamed if not await parts.store.knows_blob(one) and await parts.blobs.size(one) is not None
    ]
    is_all = len(rows) < SCAN_MAX and len(present) < SCAN_MAX
    needed = sum(blob.is_needed for blob in rows.values())
    return Mismatches(tuple(missing), tuple(strays), needed, is_all)


async def _present(parts: "Parts") -> list[str]:
    found: list[str] = []
    while len(found) < SCAN_MAX and (page := await parts.blobs.list_ids(found[-1] if found else "", _PAGE_MAX)):
        found += page
    return found


async def _rows(parts: "Parts") -> list[StoredBlob]:
    found: list[StoredBlob] = []
    while len(found) < SCAN_MAX and (page := await parts.store.list_blobs(found[-1].id if found else "", _PAGE_MAX)):
        found += page
    return found


async def _holds(parts: "Parts", blob_id: str, size_bytes: int) -> bool:
    size = await parts.blobs.size(blob_id)
    return size is not None and size >= size_bytes


async def findings(parts: "Parts") -> AsyncIterator[DoctorFinding]:
    """Yield findings about files that have lost bytes, and about blobs without a row."""
    found = await compare(parts)
    for blob_id in found.missing[:_SHOWN_MAX]:
        files = ", ".join(await parts.store.files_of_blob(blob_id, _SHOWN_MAX)) or "work of a running batch"
        problem = f"the bytes of {blob_id} are missing or cut short; they belong to: {files}"
        yield DoctorFinding(
            "blobs", Grade.WRONG, problem, "restore this blob from a backup; `tidegate verify` judges its batch"
        )
    if len(found.missing) > _SHOWN_MAX:
        more = f"the bytes of {in_words(len(found.missing) - _SHOWN_MAX, 'more blob')} are missing"
        yield DoctorFinding("blobs", Grade.WRONG, more, "restore the blobs from the same backup as the store")
    if found.strays:
        problem = (
            f"{in_words(len(found.strays), 'blob has', 'blobs have')} no row in the store, such as {found.strays[0]}"
        )
        to_do = (
            "nothing, unless the store was restored from an older backup: they are collected after retention.orphan_s"
        )
        yield DoctorFinding("blobs", Grade.WARNING, problem, to_do)
    if not found.missing and not found.strays:
        which = "all" if found.is_all else "the first"
        looked = in_words(found.looked_at, "blob that the store needs has its", "blobs that the store needs have their")
        yield DoctorFinding("blobs", Grade.OK, f"{which} {looked} bytes")
