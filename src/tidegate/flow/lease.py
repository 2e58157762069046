"""lease: a worker with room asks for slices. The choice is pure; the lease is committed before anything of it is sent."""

from collections.abc import Callable, Mapping, Sequence

import msgspec

from tidegate.core import schedule
from tidegate.core.errors import BlobMissing
from tidegate.core.nouns import Candidate, Item, LeasedSlice
from tidegate.core.ports import Blobs, Clock
from tidegate.failpoints import hit
from tidegate.flow.hand import Held
from tidegate.store.store import Store

CANDIDATES_MAX = 200
_LOOKS_MAX = 20
_FIRST_COME = schedule.Policy(mode=schedule.Mode.FIFO)
# A candidate does not say how much of it is ready: enough that the room decides.
_UNITS = 1 << 40


class _WorkLine(msgspec.Struct):
    """A caller's line, as far as sending it needs."""

    custom_id: msgspec.Raw
    body: msgspec.Raw = msgspec.Raw(b"{}")


_decoder = msgspec.json.Decoder(_WorkLine)


async def choose(
    store: Store, worker_id: str, room: Callable[[str], int], slice_items: int, slices_max: int
) -> schedule.Choice:
    """Look at what is ready and decide what to take.

    A look shows only so many jobs. When nothing of it can be taken, the next one leaves out the models that were full: however many
    jobs wait for a closed model, they never hide one whose model is open."""
    closed: set[str] = set()
    for _ in range(_LOOKS_MAX):
        candidates = await store.candidates(CANDIDATES_MAX, worker_id, closed)
        models = {candidate.model: room(candidate.model) for candidate in candidates}
        choice = schedule.choose(_look(candidates, models, slice_items, slices_max), _FIRST_COME)
        if choice.picks or len(candidates) < CANDIDATES_MAX:
            break
        closed.update(models)
    return choice


def _look(
    candidates: Sequence[Candidate], room: Mapping[str, int], slice_items: int, slices_max: int
) -> schedule.Snapshot:
    jobs = [
        schedule.JobView(
            job.job_id,
            job.model,
            f"tenant:{job.tenant_id}",
            "default",
            job.created_at,
            job.expires_at,
            begin_by=None,
            total_units=_UNITS,
            left_units=_UNITS,
            in_flight_units=0,
            slice_units=1,
            leased_at=None,
            rate=None,
        )
        for job in candidates
    ]
    models = {model: schedule.ModelView(model, items, None, 0, {}, None, 0.0) for model, items in room.items()}
    return schedule.Snapshot(0, models, [], jobs, {}, slice_items, slices_max)


async def take(store: Store, clock: Clock, worker_id: str, pick: schedule.Pick, token: str) -> list[Held]:
    """Lease the slices of one pick. The deadline is counted from before the question, so it never lies late."""
    asked_ms = clock.monotonic_ms()
    slices = await store.lease_slices(worker_id, pick.job_id, pick.model, pick.slice_count, token)
    await hit("lease_committed")
    return [Held(piece, asked_ms + piece.expires_in_ms) for piece in slices]


async def read_items(blobs: Blobs, piece: LeasedSlice) -> list[Item]:
    """The items of a slice that have no outcome yet, with one ranged read."""
    data = await blobs.read(piece.work_blob_id, piece.work_at, piece.work_bytes)
    lines = data.split(b"\n")
    offset = piece.first - piece.read_first
    # Other bytes than ingest wrote will not become the right ones: they are as good as gone.
    if len(lines) < offset + piece.count:
        raise BlobMissing(f"the work file of {piece.job_id} has fewer lines than slice {piece.first} says")
    items = []
    for number, line in enumerate(lines[offset : offset + piece.count], start=piece.first):
        if number in piece.done:
            continue
        if piece.model:
            try:
                work = _decoder.decode(line)
            except msgspec.DecodeError:
                raise BlobMissing(f"the work file of {piece.job_id} holds no request at item {number}") from None
            item = Item(number, bytes(work.custom_id), bytes(work.body))
        else:
            item = Item(number, b"null", line)
        attempts = piece.attempts.get(number)
        if attempts is not None:
            item.attempt_count = attempts.count
            item.wait_ms = max(0, attempts.wait_ms)
        items.append(item)
    return items
