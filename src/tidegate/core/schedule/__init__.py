"""Who goes next: pure functions from a bounded snapshot to picks."""

from tidegate.core.schedule.fifo import Choice, Pick, Skip, Snapshot, choose

__all__ = ["Choice", "Pick", "Skip", "Snapshot", "choose"]
