"""lease: slices that were chosen become this worker's, and their items are read. Committed before anything of it is sent."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from tidegate import metrics
from tidegate.core import schedule
from tidegate.core.errors import BlobMissing
from tidegate.core.nouns import Item, LeasedSlice
from tidegate.core.ports import Blobs, Clock
from tidegate.failpoints import hit
from tidegate.store.store import Store


class _WorkLine(msgspec.Struct):
    """A caller's line, as far as sending it needs."""

    custom_id: msgspec.Raw
    body: msgspec.Raw = msgspec.Raw(b"{}")


_decoder = msgspec.json.Decoder(_WorkLine)


@dataclass(frozen=True, slots=True)
class SuspectBounds:
    """How many suspect slices the worker may hold, and whether slices that never lost an owner are left alone."""

    suspects_max: int
    keeps_rest: bool = False


async def take(
    store: Store, clock: Clock, worker_id: str, picks: Sequence[tuple[schedule.Pick, str]], bounds: SuspectBounds
) -> list[tuple[LeasedSlice, float]]:
    """Lease the slices of these picks, each under its token, and say until when each is ours.

    The deadline is counted from before the question, so it never lies late.
    """
    asked_ms = clock.monotonic_ms()
    slices = await store.lease_picks(worker_id, picks, bounds.suspects_max, keeps_rest=bounds.keeps_rest)
    metrics.work_lease_seconds.observe((clock.monotonic_ms() - asked_ms) / 1000)
    taken = Counter(leased.token for leased in slices)
    for pick, token in picks:
        metrics.work_leases.of(pick.why).inc(taken[token])
        metrics.work_lease_misses.inc(max(0, pick.slice_count - taken[token]))
    await hit("lease_committed")
    return [(leased, asked_ms + leased.expires_in_ms) for leased in slices]


async def read_items(blobs: Blobs, leased: LeasedSlice) -> list[Item]:
    """The items of a slice that have no outcome yet, with one ranged read."""
    data = await blobs.read(leased.work_blob_id, leased.work_at, leased.work_bytes)
    lines = data.split(b"\n")
    offset = leased.first - leased.read_first
    # Other bytes than ingest wrote will not become the right ones: they are as good as gone.
    if len(lines) < offset + leased.count:
        raise BlobMissing(f"the work file of {leased.job_id} has fewer lines than slice {leased.first} says")
    items = []
    for number, line in enumerate(lines[offset : offset + leased.count], start=leased.first):
        if number in leased.done:
            continue
        if leased.model:
            try:
                work = _decoder.decode(line)
            except msgspec.DecodeError:
                raise BlobMissing(f"the work file of {leased.job_id} holds no request at item {number}") from None
            item = Item(number, bytes(work.custom_id), bytes(work.body))
        else:
            item = Item(number, b"null", line)
        attempts = leased.attempts.get(number)
        if attempts is not None:
            item.attempt_count, item.hand_backs = attempts.count, attempts.hand_backs
            item.wait_ms = max(0, attempts.wait_ms)
            item.alone_losses = attempts.alone_losses
        items.append(item)
    return items
