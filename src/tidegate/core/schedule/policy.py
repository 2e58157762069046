"""Every knob of the scheduler in one value.

It does not know where a setting comes from, nor how a plug-in is loaded.

Units are tokens. The defaults are DeltaLLM's; one of its work units is 256 of ours.
"""

from collections.abc import Callable, Mapping
from enum import StrEnum
from typing import Any

import msgspec

from tidegate.core.schedule.queues import QueueOrder, StrictOrder
from tidegate.core.schedule.share_owner import tenant_of
from tidegate.core.schedule.snapshot import JobView

UNITS_PER_DELTALLM_UNIT = 256

# A sort key, least first. Keys need only be comparable, so a comparator fits too
# (functools.cmp_to_key).
RankKey = Callable[[JobView], Any]


class Mode(StrEnum):
    FIFO = "fifo_v1"
    SLICE = "slice_v1"
    MODEL_CAPACITY = "model_capacity_v1"
    FAIR_SHARE = "fair_share_v1"
    SMART = "smart_v1"


class Policy(msgspec.Struct, frozen=True):
    """The knobs of the scheduler.

    `in_flight_units_max` and `large_interval_ms` of 0 are off. A tenant's own cap, by its id,
    replaces the common one. A `rank` of None is the mode's own. Shares are parts of a model's work
    in flight; at 1 a rule may take everything, and jobs outside it wait.
    """

    mode: Mode = Mode.SMART
    shadow_mode: Mode | None = None
    flows_per_decision_max: int = 50
    jobs_per_flow_max: int = 50
    in_flight_units_max: int = 0
    in_flight_units_by_tenant: Mapping[str, int] = msgspec.field(default_factory=dict)
    urgent_share: float = 0.5
    age_units_per_s: float = UNITS_PER_DELTALLM_UNIT / 30
    age_units_max: int = 1_000 * UNITS_PER_DELTALLM_UNIT
    large_units: int = 1_000 * UNITS_PER_DELTALLM_UNIT
    large_interval_ms: int = 30_000
    fast_lane: bool = False
    fast_lane_share: float = 0.1
    fast_lane_units: int = 100 * UNITS_PER_DELTALLM_UNIT
    # The assumed rate of a model while nothing was measured; it only decides who is urgent, and is
    # never shown.
    rate_units_per_s_default: float = 1_000.0
    rank: RankKey | None = None
    queue_order: QueueOrder = msgspec.field(default_factory=StrictOrder)

    def in_flight_units_max_of(self, share_owner: str) -> int:
        """Return the cap of one share owner; 0 means none."""
        if not self.in_flight_units_by_tenant:
            return self.in_flight_units_max
        return self.in_flight_units_by_tenant.get(tenant_of(share_owner), self.in_flight_units_max)


class ModeOverride(msgspec.Struct, frozen=True):
    """The modes that an operator set at run time, by their names; `shadow_mode` may also be `none`.

    The store keeps it, so that every process follows. An empty name leaves the mode of the
    settings.
    """

    mode: str = ""
    shadow_mode: str = ""
