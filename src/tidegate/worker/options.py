"""The options of a worker: how much at once, how often, how long."""

from pathlib import Path

import msgspec

from tidegate.core.input.turns import IngestLimits
from tidegate.core.nouns import KeepTimes
from tidegate.settings import Settings
from tidegate.stages.record import FlushLimits
from tidegate.worker.heartbeat import CloseGrace
from tidegate.worker.leasing import HoldLimits

_UNFLUSHED_BYTES_MAX = 64 << 20


class WorkerOptions(msgspec.Struct, frozen=True):
    in_flight_max: int
    slice_count_max: int
    slice_items: int
    heartbeat_ms: int
    poll_ms: int
    sweep_ms: int
    grace_ms: int
    cancel_grace_ms: int
    flush: FlushLimits
    scratch: Path
    keep: KeepTimes
    ingest: IngestLimits = msgspec.field(default_factory=IngestLimits)

    @property
    def close_grace(self) -> CloseGrace:
        """Return the grace of calls whose job closes."""
        return CloseGrace(self.grace_ms, min(self.grace_ms, self.cancel_grace_ms))

    @property
    def hold_limits(self) -> HoldLimits:
        """Return the limits of calls and slices that a worker holds at once."""
        return HoldLimits(self.in_flight_max, self.slice_count_max)


def worker_options(settings: Settings, scratch: Path) -> WorkerOptions:
    """Return the options that these settings give."""
    worker = settings.worker
    return WorkerOptions(
        in_flight_max=worker.in_flight_max,
        slice_count_max=worker.slice_count_max,
        slice_items=settings.ingest.slice_count_max,
        heartbeat_ms=worker.heartbeat_ms,
        poll_ms=worker.poll_ms,
        sweep_ms=worker.sweep_ms,
        grace_ms=worker.grace_ms,
        cancel_grace_ms=worker.cancel_grace_ms,
        flush=FlushLimits(
            worker.record_flush_ms,
            worker.record_lines_max,
            worker.record_bytes_max,
            unflushed_bytes_max=_UNFLUSHED_BYTES_MAX,
        ),
        scratch=scratch,
        keep=KeepTimes(
            completed_ms=settings.retention.completed_s * 1000,
            failed_ms=settings.retention.failed_s * 1000,
            metadata_ms=settings.retention.metadata_s * 1000,
            audit_ms=settings.retention.audit_s * 1000,
            orphan_ms=settings.retention.orphan_s * 1000,
            scan_max=settings.retention.scan_max,
        ),
        ingest=IngestLimits(settings.ingest.small_bytes_max, settings.ingest.passes_max),
    )
