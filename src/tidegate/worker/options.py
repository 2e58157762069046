"""The figures by which a worker runs: how much at once, how often, how long."""

from dataclasses import dataclass, field
from pathlib import Path

from tidegate.core.input.turns import IngestLimits
from tidegate.core.nouns import KeepTimes
from tidegate.stages.record import FlushLimits
from tidegate.worker.heartbeat import CloseGrace
from tidegate.worker.leasing import HoldLimits


@dataclass(frozen=True, slots=True)
class WorkerOptions:
    in_flight_max: int
    slice_count_max: int
    slice_items: int
    heartbeat_ms: int
    poll_ms: int
    sweep_ms: int
    grace_ms: int
    flush: FlushLimits
    scratch: Path
    keep: KeepTimes
    cancel_grace_ms: int = 3_600_000
    ingest: IngestLimits = field(default_factory=IngestLimits)

    @property
    def close_grace(self) -> CloseGrace:
        """How long calls of a job that closes may go on."""
        return CloseGrace(self.grace_ms, min(self.grace_ms, self.cancel_grace_ms))

    @property
    def hold_limits(self) -> HoldLimits:
        """How much a worker holds at once."""
        return HoldLimits(self.in_flight_max, self.slice_count_max)
