"""What a worker is told when it is made."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tidegate.core.body_rules.caller_fields import FieldRules
from tidegate.core.budgets.budget import Budget
from tidegate.core.hooks import PolicyRule
from tidegate.core.input.turns import IngestLimits
from tidegate.core.nouns import LeasedSlice
from tidegate.core.retry import RetryPolicy
from tidegate.core.schedule import Policy
from tidegate.core.schedule.mode_override import ModeOverride
from tidegate.core.usage.prices import Price
from tidegate.stages.record import FlushLimits


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
    retry: RetryPolicy
    retry_of: Mapping[str, RetryPolicy] = field(default_factory=dict, kw_only=True)
    scratch: Path
    result_expires_after_ms: int | None
    job_keep_ms: int
    garbage_safety_ms: int
    policy_of: Callable[[ModeOverride], Policy] = lambda override: Policy()
    weight_of: Callable[[str], float] = lambda tenant: 1.0
    in_flight_caps: Mapping[str, int] = field(default_factory=dict)
    budgets_of: Callable[[LeasedSlice], tuple[Budget, ...]] = lambda leased: ()
    model_of: Mapping[str, str] = field(default_factory=dict)
    reached_by: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    fields_of: Mapping[str, FieldRules] = field(default_factory=dict)
    price_of: Callable[[str], Price | None] = lambda deployment: None
    parallel_of: Callable[[LeasedSlice, int], tuple[tuple[str, int], ...]] = lambda leased, key_max: ()
    rules: tuple[PolicyRule, ...] = ()
    ingest: IngestLimits = field(default_factory=IngestLimits)
