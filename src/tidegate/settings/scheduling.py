"""Settings of the scheduler, and of Redis, through which processes may share limits."""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from tidegate.core.deployments import Secret
from tidegate.core.schedule.policy import UNITS_PER_DELTALLM_UNIT
from tidegate.settings.declare import ADVANCED, Group, ImportPath, ShortName, Weight, about, number, whole

ModeName = Literal["fifo_v1", "slice_v1", "model_capacity_v1", "fair_share_v1", "smart_v1"]
ShadowMode = Literal["none", "fifo_v1", "slice_v1", "model_capacity_v1", "fair_share_v1", "smart_v1"]
Scope = Literal["organization", "team", "key", "user"]


class SchedulerSettings(Group, frozen=True):
    mode: Annotated[
        ModeName, about("Which layers choose the next slice; `tidegate scheduler set` changes it at run time.")
    ] = "smart_v1"
    shadow_mode: Annotated[
        ShadowMode, about("A second mode that decides on the same snapshots and only reports where it differs.")
    ] = "none"
    flows_per_decision_max: Annotated[int, whole(1, 10_000, "Most flows that one decision looks at."), ADVANCED] = 50
    jobs_per_flow_max: Annotated[
        int, whole(1, 1_000, "Most batches of one flow that one decision looks at."), ADVANCED
    ] = 50
    scope_preference: Annotated[
        tuple[Scope, ...],
        Meta(
            min_length=1,
            max_length=4,
            description="Whose share a batch counts as: the first of these that it has.",
        ),
    ] = ("organization", "team", "key", "user")
    in_flight_units_max: Annotated[
        int,
        whole(0, 1 << 50, "Most work units (tokens) that one share owner may have leased at once; 0 lifts the limit."),
    ] = 0
    urgent_share: Annotated[
        float, number(0, 1, "Largest part of a model's work in flight that urgent batches may take.")
    ] = 0.5
    age_units_per_s: Annotated[
        float,
        number(0, 1_000_000, "Work units (tokens) that a batch's rank improves by for each second it waits."),
        ADVANCED,
    ] = UNITS_PER_DELTALLM_UNIT / 30
    age_units_max: Annotated[
        int, whole(0, 1 << 50, "Most work units (tokens) that waiting can improve a batch's rank by."), ADVANCED
    ] = 256_000
    large_units: Annotated[int, whole(1, 1 << 50, "Work units (tokens) from which on a batch counts as large.")] = (
        256_000
    )
    large_interval_ms: Annotated[
        int, whole(0, 86_400_000, "A large batch gets a slice at least this often; 0 gives no guarantee.")
    ] = 30_000
    fast_lane: Annotated[bool, about("Whether small batches have a part of each model for themselves.")] = False
    fast_lane_share: Annotated[
        float, number(0, 1, "The part of a model's work in flight that the fast lane may take.")
    ] = 0.1
    fast_lane_units: Annotated[
        int, whole(1, 1 << 50, "Work units (tokens) up to which a batch is small enough for the fast lane.")
    ] = 25_600
    rank: Annotated[
        ImportPath,
        about("Your own rank within a queue, as `package.module:name`: a number or a comparator; empty uses ours."),
    ] = ""
    queues: Annotated[
        tuple[ShortName, ...],
        Meta(min_length=1, max_length=64, description="Queues that batches may name; `default` is always one."),
    ] = ("default",)
    queue_order: Annotated[
        Annotated[str, Meta(max_length=255, pattern=r"^(strict|weighted|[A-Za-z_][\w.]*:[A-Za-z_]\w*)$")],
        about("Order between queues: `strict` as listed, `weighted`, or your own as `package.module:name`."),
    ] = "strict"
    queue_weights: Annotated[
        dict[ShortName, Weight],
        Meta(max_length=64, description="Weights of queues by name under `queue_order: weighted`; others weigh 1."),
    ] = msgspec.field(default_factory=dict)
    admission: Annotated[
        Literal["off", "warn", "refuse"],
        about("What creating a batch does whose deadline cannot be met by what was measured."),
    ] = "warn"


class Redis(Group, frozen=True):
    url: Annotated[
        Secret | None,
        about("Where shared limits are dealt out fast: redis://HOST:6379/0 or rediss://…; empty uses the store alone."),
    ] = None
    name: Annotated[
        ShortName, about("What every key in Redis begins with; the same for all processes of an installation.")
    ] = "tidegate"
    timeout_ms: Annotated[
        int, whole(10, 60_000, "How long Redis may take to answer before the store is asked instead.")
    ] = 100
    model_rest_ms_min: Annotated[
        int,
        whole(100, 300_000, "Shortest pause of all batch work for a model of which no server is healthy."),
        ADVANCED,
    ] = 5_000
    model_rest_ms_max: Annotated[
        int,
        whole(0, 3_600_000, "Longest such pause; 0: processes do not share pauses, and each finds out by itself."),
        ADVANCED,
    ] = 300_000

    @property
    def location(self) -> str:
        """Return the URL with its password, to connect to it."""
        return self.url.reveal() if self.url is not None else ""
