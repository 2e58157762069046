"""lease: take the slices that the scheduler chose, and read their items.

The lease is committed before anything is sent.
"""

from collections import Counter
from collections.abc import Sequence

import msgspec
import structlog

from tidegate import failpoints, metrics
from tidegate.core import schedule
from tidegate.core.errors import BlobError, BlobMissing
from tidegate.core.input.prefix_tree import shared_beginnings
from tidegate.core.nouns import Holding, Item, LeasedSlice, LineError
from tidegate.core.ports import Blobs, Clock, Entropy
from tidegate.store.store import Store

log = structlog.get_logger()

READ_AGAIN_MS = 5_000

_LEASED, _LOST = metrics.work_lease_attempts.of("leased"), metrics.work_lease_attempts.of("lost")
_LEASES = {why: metrics.work_leases.of(why) for why in schedule.Why}


class _WorkLine(msgspec.Struct):
    """The parts of a caller's line that are needed to send it."""

    custom_id: msgspec.Raw
    body: msgspec.Raw = msgspec.Raw(b"{}")


_decoder = msgspec.json.Decoder(_WorkLine)
_any_decoder = msgspec.json.Decoder(msgspec.Raw)


class SuspectBounds(msgspec.Struct, frozen=True):
    """The number of suspect slices that the worker may hold.

    With `keeps_rest` it leaves a few slices that never lost an owner, for checks.
    """

    suspects_max: int
    keeps_rest: bool = False


NONE_SUSPECTED = SuspectBounds(0)


class LeaseStage:
    """The stage that leases slices.

    `pending` holds the tokens of leases whose answer is still awaited: a heartbeat must not hand
    these back.
    """

    def __init__(self, store: Store, blobs: Blobs, clock: Clock, entropy: Entropy) -> None:
        self._store = store
        self._blobs = blobs
        self._clock = clock
        self._entropy = entropy
        self.pending: set[str] = set()

    async def lease_slices(
        self, worker_id: str, picks: Sequence[schedule.Pick], bounds: SuspectBounds
    ) -> list[tuple[LeasedSlice, float]]:
        """Lease the slices of these picks.

        Return each with the moment by which its calls must have begun.

        Each pick gets its own token. The deadline is counted from before the store is asked, so it
        is never too late.
        """
        marked = [(pick, self._entropy.token_bytes(16).hex()) for pick in picks]
        tokens = {token for _, token in marked}
        self.pending |= tokens
        try:
            asked_ms = self._clock.monotonic_ms()
            slices = await self._store.lease_picks(worker_id, marked, bounds.suspects_max, keeps_rest=bounds.keeps_rest)
            metrics.work_lease_seconds.observe((self._clock.monotonic_ms() - asked_ms) / 1000)
            (_LEASED if slices else _LOST).inc()
            taken = Counter(leased.token for leased in slices)
            for pick, token in marked:
                _LEASES[pick.why].inc(taken[token])
                metrics.work_lease_misses.inc(max(0, pick.slice_count - taken[token]))
            if failpoints.ARMED:
                await failpoints.hit("lease_committed")
        finally:
            # The caller notes the slices without an await in between, so no heartbeat misses them.
            self.pending -= tokens
        return [(leased, asked_ms + leased.expires_in_ms) for leased in slices]

    async def read(self, leased: LeasedSlice) -> list[Item] | None:
        """Return the items of a slice that have no outcome yet.

        None: they cannot be read, and the slice was handed back.
        """
        try:
            return await read_items(self._blobs, leased)
        except BlobMissing as error:
            log.error("work_file_gone", job=leased.job_id, error=str(error))
            gone = LineError("work_file_gone", "The batch's stored requests are gone.")
            await self._store.fail_job(leased.job_id, gone)
            await self._store.release_slice(leased.job_id, leased.first, leased.token, 0)
        except BlobError as error:
            log.warning("work_file_read_failed", job=leased.job_id, error=str(error))
            await self._store.release_slice(leased.job_id, leased.first, leased.token, READ_AGAIN_MS)
        return None

    async def release(self, holding: Holding) -> None:
        """Hand back a slice that the store counts as ours."""
        await self._store.release_slice(holding.job_id, holding.first, holding.token, 0)

    async def release_tail(self, leased: LeasedSlice, from_number: int) -> bool:
        """Hand back the items of a slice from this number on; False if the slice is not ours."""
        return await self._store.release_tail(leased.job_id, leased.first, leased.token, from_number)


async def read_items(blobs: Blobs, leased: LeasedSlice) -> list[Item]:
    """Return the items of a slice that have no outcome yet, with one ranged read.

    Bytes that ingest did not write are read once more: they may have been damaged in transit, and
    damaged bytes end the job.
    """
    where = (leased.work_blob_id, leased.work_at, leased.work_bytes)
    try:
        return _items_in(await blobs.read(*where), leased)
    except _Damaged:
        return _items_in(await blobs.read(*where), leased)


class _Damaged(BlobMissing):
    """Raised for bytes that ingest did not write. They count as gone."""


def _items_in(data: bytes, leased: LeasedSlice) -> list[Item]:
    lines = data.split(b"\n")
    offset = leased.first - leased.read_first
    if len(lines) < offset + leased.count:
        raise _Damaged(f"the work file of {leased.job_id} has fewer lines than slice {leased.first} says")
    items = []
    for number, line in enumerate(lines[offset : offset + leased.count], start=leased.first):
        if number in leased.done:
            continue
        try:
            if not line.isascii():
                line.decode()
            if leased.model:
                work = _decoder.decode(line)
                item = Item(number, bytes(work.custom_id), bytes(work.body))
            else:
                _any_decoder.decode(line)
                item = Item(number, b"null", line)
        except (msgspec.DecodeError, UnicodeDecodeError):
            raise _Damaged(f"the work file of {leased.job_id} holds no request at item {number}") from None
        attempts = leased.attempts.get(number)
        if attempts is not None:
            item.attempt_count, item.hand_backs = attempts.count, attempts.hand_backs
            item.wait_ms = max(0, attempts.wait_ms)
            item.alone_losses = attempts.alone_losses
            item.tries = attempts.tries
        items.append(item)
    if len(items) > 1:
        for item, shared in zip(items, shared_beginnings([item.body for item in items]), strict=True):
            item.prefix_bytes = shared
    return items
