"""Each figure of a worker comes from the setting that names it, in the unit that the worker counts in."""

from __future__ import annotations

from pathlib import Path

from tidegate.core.input.turns import IngestLimits
from tidegate.core.nouns import KeepTimes
from tidegate.settings import load
from tidegate.stages.record import FlushLimits
from tidegate.worker.heartbeat import CloseGrace
from tidegate.worker.leasing import HoldLimits
from tidegate.worker.options import WorkerOptions, worker_options

VALUES = {
    "worker.in_flight_max": 11,
    "worker.slice_count_max": 12,
    "worker.heartbeat_ms": 130,
    "worker.poll_ms": 140,
    "worker.sweep_ms": 150,
    "worker.grace_ms": 16_000,
    "worker.cancel_grace_ms": 1_700,
    "worker.record_flush_ms": 18,
    "worker.record_lines_max": 19,
    "worker.record_bytes_max": 2_000,
    "ingest.slice_count_max": 21,
    "ingest.small_bytes_max": 2_200,
    "ingest.passes_max": 2,
    "retention.completed_s": 3_601,
    "retention.failed_s": 3_602,
    "retention.metadata_s": 3_603,
    "retention.audit_s": 86_404,
    "retention.orphan_s": 65,
    "retention.scan_max": 6,
}


def test_each_figure_is_what_its_setting_says(tmp_path: Path) -> None:
    options = worker_options(load(None, tmp_path, VALUES, {}).settings, tmp_path)
    assert options == WorkerOptions(
        in_flight_max=11,
        slice_count_max=12,
        slice_items=21,
        heartbeat_ms=130,
        poll_ms=140,
        sweep_ms=150,
        grace_ms=16_000,
        cancel_grace_ms=1_700,
        flush=FlushLimits(18, 19, 2_000, 64 << 20),
        scratch=tmp_path,
        keep=KeepTimes(3_601_000, 3_602_000, 3_603_000, 86_404_000, 65_000, 6),
        ingest=IngestLimits(2_200, 2),
    )
    assert options.hold_limits == HoldLimits(11, 12)
    assert options.close_grace == CloseGrace(closing_ms=16_000, cancel_ms=1_700)


def test_a_cancel_leaves_calls_no_more_time_than_any_other_end(tmp_path: Path) -> None:
    values = {"worker.grace_ms": 1_000, "worker.cancel_grace_ms": 2_000}
    options = worker_options(load(None, tmp_path, values, {}).settings, tmp_path)
    assert options.close_grace == CloseGrace(closing_ms=1_000, cancel_ms=1_000)


def test_by_default_results_are_kept_for_a_week_and_what_failed_for_two(tmp_path: Path) -> None:
    options = worker_options(load(None, tmp_path, {}, {}).settings, tmp_path)
    day_ms = 86_400_000
    assert options.keep == KeepTimes() == KeepTimes(7 * day_ms, 14 * day_ms, 30 * day_ms, 365 * day_ms, day_ms, 200)
    assert options.ingest == IngestLimits() == IngestLimits(1 << 20, 3)
