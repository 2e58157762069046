"""Choose whose input is ingested next: fair between tenants by bytes, and small inputs first within
one tenant.

This is start-time fair queueing. Every tenant has a place on a clock that counts bytes. An input
starts at its tenant's place, or at the clock where the tenant had nothing waiting for a while, and
the tenant's place moves ahead by the input's bytes. The input with the earliest start goes next.
Small inputs and large ones have a lane each, with its own clock, because small ones need no
process.

The functions are pure: the store brings what waits and keeps the places.
"""

import heapq
from collections.abc import Sequence
from enum import StrEnum

import msgspec

LINE_BYTES = 512
BYTES_MAX = 1 << 62


class IngestLane(StrEnum):
    """A small input is read inside the worker's process, a large one in a process of its own."""

    SMALL = "small"
    LARGE = "large"


class IngestLimits(msgspec.Struct, frozen=True):
    """The most bytes that a small ingest may cost, and how many large inputs are read at once."""

    small_bytes_max: int = 1 << 20
    passes_max: int = 3

    def sizes(self, lane: IngestLane) -> tuple[int, int]:
        """Return the least and the most that an ingest of this lane costs, in bytes."""
        return (0, self.small_bytes_max) if lane is IngestLane.SMALL else (self.small_bytes_max + 1, BYTES_MAX)

    @property
    def tenant_passes_max(self) -> int:
        """Return how many large inputs of one tenant are read at once."""
        return max(1, self.passes_max - 1)


class WaitingInput(msgspec.Struct, frozen=True):
    """An input that no worker ingests now.

    `rank` orders the inputs of one tenant: small and old ones have a low rank.
    """

    job_id: str
    ingest_bytes: int
    rank: int


class WaitingTenant(msgspec.Struct, frozen=True):
    """A tenant's place on the lane's clock and its next inputs, lowest rank first."""

    tenant_id: str
    place: int
    inputs: Sequence[WaitingInput]


class IngestTurn(msgspec.Struct, frozen=True):
    """The input that goes next, and its start and end on the lane's clock."""

    tenant_id: str
    job_id: str
    start: int
    end: int


def ingest_bytes(size_bytes: int, line_count: int) -> int:
    """Return what an ingest costs in bytes: the input's own, and some for each line, which costs
    time however short it is.
    """
    return max(1, size_bytes + LINE_BYTES * line_count)


def choose_inputs(
    tenants: Sequence[WaitingTenant], clock: int, count_max: int, bytes_max: int = BYTES_MAX
) -> list[IngestTurn]:
    """Return the next inputs of a lane, in order: one, and more of them while all together cost at
    most so many bytes.
    """
    queue = [
        (max(tenant.place, clock), tenant.inputs[0].rank, number, 0)
        for number, tenant in enumerate(tenants)
        if tenant.inputs
    ]
    heapq.heapify(queue)
    turns: list[IngestTurn] = []
    total_bytes = 0
    while queue and len(turns) < count_max:
        start, _, number, place = heapq.heappop(queue)
        tenant = tenants[number]
        chosen = tenant.inputs[place]
        total_bytes += chosen.ingest_bytes
        if turns and total_bytes > bytes_max:
            break
        end = start + chosen.ingest_bytes
        turns.append(IngestTurn(tenant.tenant_id, chosen.job_id, start, end))
        if place + 1 < len(tenant.inputs):
            heapq.heappush(queue, (end, tenant.inputs[place + 1].rank, number, place + 1))
    return turns
