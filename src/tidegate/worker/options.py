"""The figures by which a worker runs: how much at once, how often, how long."""

from dataclasses import dataclass, field
from pathlib import Path

from tidegate.core.input.turns import IngestLimits
from tidegate.core.nouns import KeepTimes
from tidegate.stages.record import FlushLimits
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
    ingest: IngestLimits = field(default_factory=IngestLimits)

    @property
    def hold_limits(self) -> HoldLimits:
        """How much a worker holds at once."""
        return HoldLimits(self.in_flight_max, self.slice_count_max)
