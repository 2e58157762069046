"""The scheduler: pure functions from a bounded snapshot of the store to picks with reasons."""

from tidegate.core.schedule.forecast import FlowForecast, forecast_not_ready, forecasts
from tidegate.core.schedule.modes import choose
from tidegate.core.schedule.policy import Mode, Policy
from tidegate.core.schedule.queues import QueueOrder, QueueView, StrictOrder, WeightedOrder
from tidegate.core.schedule.reasons import Reason, reason_of
from tidegate.core.schedule.shadow import Difference, compare
from tidegate.core.schedule.snapshot import (
    NO_PACE,
    Choice,
    FlowView,
    JobView,
    ModelRoom,
    ModelView,
    Pick,
    Skip,
    Snapshot,
    Turn,
    Why,
)

__all__ = [
    "NO_PACE",
    "Choice",
    "Difference",
    "FlowForecast",
    "FlowView",
    "JobView",
    "Mode",
    "ModelRoom",
    "ModelView",
    "Pick",
    "Policy",
    "QueueOrder",
    "QueueView",
    "Reason",
    "Skip",
    "Snapshot",
    "StrictOrder",
    "Turn",
    "WeightedOrder",
    "Why",
    "choose",
    "compare",
    "forecast_not_ready",
    "forecasts",
    "reason_of",
]
