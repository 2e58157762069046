"""Plans that bring one sort of trouble to light: each family settles some of what a seed draws, and leaves the rest to the seed.

A planted bug belongs to a family in which a handful of seeds shows it. The healthy engine keeps every promise in all of them.
"""

from dataclasses import dataclass, field
from typing import Any

from msgspec.structs import replace

from tests.simulation.world.estate import (
    CALL_NANO_MAX,
    CALL_TOKENS_MAX,
    CHAT,
    CHAT_GROUPS,
    EMBEDDINGS,
    MESSAGES,
    PRICE,
    Shape,
)
from tidegate.core.budgets.budget import Limit, Period
from tidegate.core.deployments import Deployment, EngineKind, Estimate, Resource
from tidegate.core.schedule import Mode, Policy
from tidegate.settings.tenants import TenantPolicy


@dataclass(frozen=True, slots=True)
class Family:
    """`strengths` are all kinds of fault of this family. `plan` and `estate` are fields that do not depend on the seed."""

    strengths: dict[str, float] = field(default_factory=dict)
    shape: Shape = Shape.ANY
    plan: dict[str, Any] = field(default_factory=dict)
    estate: dict[str, Any] = field(default_factory=dict)


def _tenants(count: int, **limits: tuple[Limit, ...]) -> tuple[TenantPolicy, ...]:
    named: dict[str, Any] = {"limits": (), "user_limits": (), "key_limits": ()} | limits
    return tuple(TenantPolicy(weight=1.0, in_flight_units_max=0, queued_units_max=0, **named) for _ in range(count))


def _deployments(count: int, **more: Any) -> tuple[Deployment, ...]:
    return tuple(
        Deployment(f"alpha-{number}", f"http://alpha-{number}/v1", ("alpha",), **({"max_in_flight": 6} | more))
        for number in range(count)
    )


# One model, tenants without limits: nothing but the faults of the family is in the way.
_OPEN: dict[str, Any] = {
    "models": ("alpha",),
    "deployments": _deployments(1),
    "resources": (),
    "tenants": _tenants(2),
    "job_limits": ((),),
    "model_in_flight_max": {},
    "in_flight_max_global": 0,
    "policy": Policy(rate_units_per_s_default=50.0),
    "override_mode": None,
    "uses_redis": False,
}
# Leases end soon and all processes look often, so that work changes hands within seconds.
_QUICK: dict[str, Any] = {
    "process_count": 3,
    "lease_ms": 2_000,
    "heartbeat_ms": 400,
    "poll_ms": 500,
    "sweep_ms": 800,
    "arrival_s": 0.5,
    "trouble_s": 15.0,
    "in_flight_max": 8,
    "slice_count_max": 6,
    "objects": False,
}


def _late(verbs: tuple[str, ...], leases: float, strengths: dict[str, float], **plan: Any) -> Family:
    """Some requests to the store arrive late, up to so many leases."""
    slow = {"store_verbs": frozenset(verbs), "store_slow_leases": leases}
    return Family(strengths, plan={**_QUICK, "in_flight_max": 3, "flush_ms": 5, **slow, **plan}, estate=_OPEN)


_SCARCE = Limit(Period.MINUTE, 6, 2 * CALL_TOKENS_MAX)

FAMILIES: dict[str, Family] = {
    # Nothing goes wrong.
    "quiet": Family(plan={**_QUICK, "job_count": 3, "item_count_max": 10}),
    # The steps of a job arrive at the store long after they were sent, when another process has taken over.
    "late_steps": _late(
        ("publish_job", "start_jobs"), 4.0, {"store_slow": 0.7, "kill": 0.06}, job_count=12, item_count_max=2, arrival_s=6.0
    ),
    # So do results and slices that are given back.
    "late_returns": _late(
        ("record_outcomes", "release_slice"), 4.0, {"store_slow": 0.8, "kill": 0.1, "pause": 0.15, "throttle": 0.15},
        job_count=4, item_count_max=10, slice_items=2,
    ),
    # Results arrive after their job was closed.
    "late_records": _late(
        ("publish_job", "record_outcomes"), 2.0, {"store_slow": 0.5, "cancel": 1.0},
        job_count=4, item_count_max=20, item_count_min=20, grace_ms=500, call_s_max=3.0,
    ),
    # Results arrive late, from workers that live.
    "slow_records": _late(("record_outcomes",), 1.0, {"store_slow": 0.5}, job_count=3, item_count_max=20, slice_items=1),
    # Heartbeats arrive late, and so do the items of a slice.
    "late_beats": _late(
        ("beat",), 3.0, {"store_slow": 0.12, "disk_slow": 0.3},
        job_count=6, item_count_max=20, item_count_min=10, slice_items=2, call_s_max=1.0, trouble_s=25.0,
    ),
    # The store carries out what it is asked and its answer is lost.
    "lost_answers": Family(
        {"store_unknown": 0.2, "store_fail": 0.1},
        plan={**_QUICK, "job_count": 6, "item_count_max": 10, "flush_lines": 1, "lively_s": 60.0},
        estate=_OPEN,
    ),
    # Workers die with results that lie on disk and are not in the store.
    "deaths": _late(
        ("record_outcomes",), 1.0, {"store_fail": 0.6, "kill": 0.06, "disk_read": 0.4},
        job_count=4, item_count_max=20, item_count_min=10, slice_items=2, trouble_s=20.0,
    ),
    # Model servers ask for rests, and workers die while items wait beside calls that take long.
    "rests": Family(
        {"throttle": 0.12, "slow": 0.6, "kill": 0.05},
        plan={**_QUICK, "job_count": 4, "item_count_max": 20, "item_count_min": 12, "slice_items": 4, "flush_ms": 5, "trouble_s": 20.0},
        estate={**_OPEN, "deployments": _deployments(1, max_in_flight=20)},
    ),
    # Model servers refuse most calls for a moment.
    "throttled": Family(
        {"throttle": 0.6},
        plan={**_QUICK, "retry_after_s_max": 0.5, "job_count": 3, "item_count_max": 20, "call_s_max": 0.3, "trouble_s": 30.0},
        estate=_OPEN,
    ),
    # The store's clock is set back while items wait.
    "clock_back": Family(
        {"error": 0.5, "database_clock": 0.2},
        plan={**_QUICK, "job_count": 4, "item_count_max": 20, "item_count_min": 20, "flush_ms": 5, "call_s_max": 0.3},
        estate=_OPEN,
    ),
    # The clock of the store's machine is set back and ahead, while there is much to do and little of it allowed.
    "clock_set": Family(
        {"machine_clock": 0.1},
        plan={**_QUICK, "job_count": 4, "item_count_max": 12, "item_count_min": 12, "call_s_max": 0.3},
        estate={**_OPEN, "tenants": _tenants(2, limits=(Limit(Period.MINUTE, 4),), user_limits=(Limit(Period.MINUTE, 3),))},
    ),
    # Jobs end before their items do.
    "closings": Family(
        {"expire": 0.8, "cancel": 0.3, "slow": 0.3},
        plan={
            **_QUICK, "lease_ms": 6_000, "heartbeat_ms": 1_200, "grace_ms": 2_000, "job_count": 6, "item_count_max": 20,
            "item_count_min": 20, "in_flight_max": 2,
        },
        estate=_OPEN,
    ),
    # Keys are revoked while their jobs run.
    "revoked": Family(
        {"revoke": 1.0, "slow": 0.1},
        plan={**_QUICK, "job_count": 4, "item_count_max": 20, "item_count_min": 20, "in_flight_max": 2, "call_s_max": 3.0},
        estate=_OPEN,
    ),
    # One item of many kills every worker that calls it.
    "poison": Family(
        {"poison": 1.0},
        plan={
            **_QUICK, "process_count": 1, "job_count": 1, "item_count_max": 30, "item_count_min": 30, "slice_items": 2,
            "call_s_max": 3.0, "poison_s_max": 0.2,
        },
        estate=_OPEN,
    ),
    # It has no company.
    "lonely_poison": Family(
        {"poison": 1.0},
        plan={**_QUICK, "process_count": 1, "job_count": 1, "item_count_max": 1},
        estate=_OPEN,
    ),
    # Much to do, and little of it allowed: by the deployment, the resource, the tenant and the job.
    "scarce": Family(
        {"slow": 0.05},
        plan={**_QUICK, "job_count": 6, "item_count_max": 20, "trouble_s": 12.0, "call_s_max": 0.3},
        estate={
            **_OPEN,
            "deployments": _deployments(1, limits=(Limit(Period.MINUTE, 8, 2 * CALL_TOKENS_MAX),), estimate=Estimate.BOUND),
            "resources": (Resource("alpha-gold", "alpha", (Limit(Period.MINUTE, 3),)),),
            "tenants": _tenants(2, limits=(Limit(Period.MINUTE, 6),), user_limits=(Limit(Period.MINUTE, 4),)),
            "job_limits": ((Limit(Period.MINUTE, 3),),),
        },
    ),
    # The same through Redis, with connections that take their time.
    "dealt": Family(
        {"connect_slow": 0.4, "redis_lost": 0.05},
        plan={**_QUICK, "job_count": 6, "item_count_max": 20, "trouble_s": 12.0, "call_s_max": 0.3},
        estate={**_OPEN, "deployments": _deployments(1, limits=(_SCARCE,)), "uses_redis": True},
    ),
    # Tokens are scarce, and calls take less of them than they reserve.
    "tokens": Family(
        plan={**_QUICK, "job_count": 6, "item_count_max": 20, "item_count_min": 20, "call_s_max": 0.3},
        estate={
            **_OPEN,
            "deployments": _deployments(1, limits=(Limit(Period.MINUTE, None, 2 * CALL_TOKENS_MAX),), estimate=Estimate.BOUND),
            "usage_factor": 1,
        },
    ),
    # Tokens are dealt through Redis in blocks, to calls of all sizes.
    "dealt_tokens": Family(
        plan={**_QUICK, "job_count": 6, "item_count_max": 20, "item_count_min": 10, "call_s_max": 0.3, "slice_items": 4},
        estate={
            **_OPEN, "deployments": _deployments(1, limits=(Limit(Period.MINUTE, None, 3 * CALL_TOKENS_MAX),), max_in_flight=24),
            "uses_redis": True,
        },
    ),
    # Calls cost money, and a tenant has little of it.
    "money": Family(
        {"slow": 0.05, "reset": 0.05, "kill": 0.03},
        plan={**_QUICK, "job_count": 4, "item_count_max": 20, "item_count_min": 20, "call_s_max": 0.3, "trouble_s": 12.0},
        estate={
            **_OPEN, "deployments": _deployments(1, price=PRICE), "usage_factor": 3,
            "tenants": _tenants(2, limits=(Limit(Period.MINUTE, nano=CALL_NANO_MAX // 2),)),
        },
    ),
    # Users call beside the jobs, and there is little room.
    "users": Family(
        {"users": 4.0, "slow": 0.05},
        plan={**_QUICK, "job_count": 3, "item_count_max": 12, "item_count_min": 12, "call_s_max": 1.0, "trouble_s": 6.0},
        estate={**_OPEN, "deployments": _deployments(1, max_in_flight=4)},
    ),
    # They share an engine with the jobs, which stand back for them.
    "tide": Family(
        {"users": 3.0},
        plan={
            **_QUICK, "process_count": 2, "job_count": 3, "item_count_max": 20, "item_count_min": 20, "call_s_max": 1.0,
            "trouble_s": 12.0,
        },
        estate={**_OPEN, "deployments": _deployments(1, engine=EngineKind.VLLM, max_in_flight=24)},
    ),
    # Several items share a call, each connection takes its time, answers are no good, and windows end meanwhile.
    "groups": Family(
        {"broken": 0.1, "refuse": 0.05, "expire": 1.0, "connect_slow": 1.0},
        plan={
            **_QUICK, "job_count": 8, "item_count_max": 30, "item_count_min": 30, "call_s_max": 0.3, "slice_items": 4,
        },
        estate={**_OPEN, "deployments": _deployments(1, max_in_flight=4, upstream_max_batch_inputs=4), "endpoints": (EMBEDDINGS,)},
    ),
    # Several chat items share a call, by an adapter that names each result's item.
    "chat_groups": Family(
        {"broken": 0.1, "refuse": 0.05, "error": 0.05},
        plan={
            **_QUICK, "job_count": 4, "item_count_max": 20, "item_count_min": 20, "call_s_max": 1.0, "slice_items": 4,
        },
        estate={**_OPEN, "deployments": _deployments(1, max_in_flight=1, chat_batching=CHAT_GROUPS)},
    ),
    # Jobs of Anthropic's API, over engines of both shapes.
    "messages": Family(
        {"slow": 0.05},
        plan={**_QUICK, "job_count": 3, "item_count_max": 10},
        estate={
            **_OPEN, "endpoints": (CHAT, MESSAGES),
            "deployments": (*_deployments(1), *(replace(one, name="alpha-1", engine=EngineKind.ANTHROPIC) for one in _deployments(1))),
        },
    ),
    # Receivers of webhooks fail, and so do those who send.
    "webhooks": Family(
        {"receiver": 0.5, "kill": 0.04, "store_unknown": 0.1, "cancel": 0.6},
        plan={**_QUICK, "job_count": 6, "item_count_max": 6, "in_flight_max": 1, "call_s_max": 3.0},
        estate={**_OPEN, "tenants": _tenants(3)},
    ),
    # Callers ask for more than the lines of a file, and processes die while their inputs are read and run.
    "shaped": Family(
        {"kill": 0.05, "store_unknown": 0.05, "cancel": 0.2, "odd_input": 0.2, "error": 0.4},
        plan={**_QUICK, "job_count": 6, "item_count_max": 10, "shaped": True},
        estate={**_OPEN, "endpoints": (CHAT,)},
    ),
    # Callers ask before they make a job, while others run.
    "checked": Family(
        {"job_checked": 1.0, "job_same": 0.3, "odd_input": 0.3, "kill": 0.03, "store_unknown": 0.05},
        plan={**_QUICK, "job_count": 6, "item_count_max": 10, "shaped": True},
        estate={**_OPEN, "endpoints": (CHAT,)},
    ),
    # Callers have tables instead of requests, in several parts, some rows of which fail.
    "tables": Family(
        {"job_table": 1.0, "cancel": 0.2, "expire": 0.2, "error": 0.3, "refuse": 0.2, "kill": 0.05, "store_unknown": 0.05},
        plan={**_QUICK, "job_count": 4, "item_count_max": 12, "item_count_min": 4},
        estate=_OPEN,
    ),
    # Jobs are cancelled while calls hang, and a cancel aborts at once what a deadline would let go on.
    "cancelled_at_once": Family(
        {"cancel": 1.0, "hang": 0.3, "slow": 0.5},
        plan={**_QUICK, "job_count": 4, "item_count_max": 10, "item_count_min": 10, "grace_ms": 20_000, "cancel_grace_ms": 0},
        estate=_OPEN,
    ),
    # Callers pause, resume and put off their jobs while leases are late and workers die.
    "paused": Family(
        {"job_pause": 1.0, "job_later": 0.5, "expire": 0.2, "store_slow": 0.3, "kill": 0.02},
        plan={
            **_QUICK, "job_count": 4, "item_count_max": 16, "item_count_min": 10, "in_flight_max": 2, "slice_count_max": 2,
            "slice_items": 4, "call_s_max": 1.0, "store_verbs": frozenset({"lease_picks"}), "store_slow_leases": 0.4, "lively_s": 90.0,
        },
        estate=_OPEN,
    ),
    # Jobs that may cost or fail only so much, and workers that die while results are recorded.
    "thresholds": Family(
        {"job_threshold": 1.0, "refuse": 0.25, "kill": 0.04, "store_unknown": 0.1},
        plan={**_QUICK, "job_count": 6, "item_count_max": 16, "item_count_min": 8, "in_flight_max": 2, "call_s_max": 1.0},
        estate={**_OPEN, "deployments": _deployments(1, price=PRICE)},
    ),
    # A sample runs first.
    "canaries": Family(
        {"job_canary": 1.0, "refuse": 0.2, "kill": 0.04, "store_unknown": 0.1},
        plan={**_QUICK, "job_count": 6, "item_count_max": 16, "item_count_min": 8, "call_s_max": 0.6, "lively_s": 90.0},
        estate=_OPEN,
    ),
    # Windows become longer and shorter while calls take long.
    "windows": Family(
        {"job_window": 1.0, "expire": 0.7, "kill": 0.01},
        plan={
            **_QUICK, "process_count": 2, "job_count": 2, "item_count_max": 12, "item_count_min": 8, "in_flight_max": 1,
            "slice_count_max": 2, "slice_items": 4, "call_s_max": 8.0, "lively_s": 150.0,
        },
        estate=_OPEN,
    ),
    # Jobs of one caller that go before others.
    "priorities": Family(
        {"job_priority": 1.0},
        plan={
            **_QUICK, "process_count": 1, "job_count": 3, "item_count_max": 40, "item_count_min": 40, "in_flight_max": 2,
            "slice_count_max": 2, "slice_items": 2, "call_s_max": 1.0,
        },
        estate={**_OPEN, "tenants": _tenants(1)},
    ),
    # What has no answer runs again.
    "retried": Family(
        {"job_retry": 1.0, "refuse": 0.2, "cancel": 0.4, "expire": 0.3, "kill": 0.04, "store_unknown": 0.1},
        plan={**_QUICK, "job_count": 4, "item_count_max": 12, "item_count_min": 8, "in_flight_max": 2, "call_s_max": 1.0},
        estate={**_OPEN, "endpoints": (CHAT,)},
    ),
    # Jobs are deleted: before they have ended, when they have, and while others run what they left or take what they answered.
    "deleted": Family(
        {
            "job_delete": 1.0, "job_retry": 0.6, "job_edit": 0.4, "refuse": 0.2, "error": 0.1, "cancel": 0.3, "kill": 0.04,
            "receiver": 0.5,
        },
        plan={**_QUICK, "job_count": 4, "item_count_max": 12, "item_count_min": 4, "in_flight_max": 2, "call_s_max": 1.0},
        estate={**_OPEN, "endpoints": (CHAT,)},
    ),
    # The same request stands in an input more than once, and processes die while its lines are published.
    "same": Family(
        {"job_same": 1.0, "refuse": 0.15, "cancel": 0.2, "expire": 0.2, "kill": 0.04, "store_unknown": 0.1},
        plan={**_QUICK, "job_count": 4, "item_count_max": 12, "item_count_min": 8, "call_s_max": 1.0},
        estate={**_OPEN, "endpoints": (CHAT,)},
    ),
    # An input is edited and sent again.
    "edited": Family(
        {"job_edit": 1.0, "refuse": 0.15, "cancel": 0.2, "kill": 0.04, "store_unknown": 0.1},
        plan={**_QUICK, "job_count": 4, "item_count_max": 12, "item_count_min": 8, "call_s_max": 0.6},
        estate={**_OPEN, "endpoints": (CHAT,)},
    ),
    # Answers must fit a schema, and many do not.
    "fitting": Family(
        {"job_schema": 1.0, "error": 0.05, "throttle": 0.05},
        plan={**_QUICK, "retry_after_s_max": 0.5, "job_count": 3, "item_count_max": 12, "item_count_min": 8, "call_s_max": 0.6},
        estate={**_OPEN, "endpoints": (CHAT,)},
    ),
    # What does not fit goes to a stronger model, while workers die between two tries.
    "escalated": Family(
        {"job_schema": 1.0, "error": 0.05, "kill": 0.04, "store_unknown": 0.1},
        plan={**_QUICK, "job_count": 4, "item_count_max": 16, "item_count_min": 12, "call_s_max": 0.6},
        estate={
            **_OPEN, "endpoints": (CHAT,), "stronger": "omega",
            "deployments": (*_deployments(1), Deployment("omega-0", "http://omega-0/v1", ("omega",), max_in_flight=6)),
        },
    ),
    # What becomes of each item is noted, while leases change hands.
    "doors": Family(
        {"job_door": 1.0, "refuse": 0.15, "cancel": 0.3, "throttle": 0.1, "kill": 0.05, "store_unknown": 0.1},
        plan={**_QUICK, "job_count": 4, "item_count_max": 12, "item_count_min": 8, "slice_items": 2, "call_s_max": 1.0},
        estate={**_OPEN, "endpoints": (CHAT,)},
    ),
    # The items of one job go to several endpoints, while leases change hands and slices are split.
    "mixed": Family(
        {"job_mixed": 1.0, "kill": 0.15, "throttle": 0.2, "error": 0.05, "store_unknown": 0.05},
        plan={**_QUICK, "job_count": 3, "item_count_max": 16, "item_count_min": 10, "slice_items": 3, "call_s_max": 1.0},
        estate={**_OPEN, "endpoints": (CHAT,), "deployments": _deployments(2, max_in_flight=4, upstream_max_batch_inputs=4)},
    ),
    # Jobs of one item are accepted by processes that die.
    "background": Family(
        {"background": 1.0, "kill": 0.08, "border_kill": 0.02, "store_unknown": 0.2, "store_fail": 0.05},
        plan={**_QUICK, "job_count": 1, "item_count_max": 4, "call_s_max": 0.6},
        estate={**_OPEN, "endpoints": (CHAT,)},
    ),
    # Jobs of one item wait behind others, until they go like calls of users.
    "waiting": Family(
        {"background": 1.0},
        plan={**_QUICK, "process_count": 1, "job_count": 2, "item_count_max": 12, "item_count_min": 12, "call_s_max": 3.0},
        estate={**_OPEN, "endpoints": (CHAT,), "deployments": _deployments(1, max_in_flight=12, batch_fraction=0.1)},
    ),
    # The power is cut while results are written.
    "power": Family(
        {"power": 0.1, "disk_slow": 0.1},
        plan={**_QUICK, "job_count": 4, "item_count_max": 20, "item_count_min": 20, "call_s_max": 0.3, "flush_ms": 5, "flush_lines": 2},
        estate=_OPEN,
    ),
    # Tenants come when others have been served for a while.
    "late_comers": Family(
        plan={**_QUICK, "job_count": 9, "item_count_max": 20, "item_count_min": 10, "arrival_s": 10.0, "in_flight_max": 2},
        estate={**_OPEN, "tenants": _tenants(3)},
    ),
    # Several tenants want one model at the same time.
    "shares": Family(
        shape=Shape.CONTENDED,
        plan={**_QUICK, "item_count_max": 20, "job_count": 6, "slice_items": 2, "call_s_max": 0.3, "in_flight_max": 3},
        estate={**_OPEN, "tenants": _tenants(3), "policy": Policy(mode=Mode.FAIR_SHARE, rate_units_per_s_default=50.0)},
    ),
    # A deadline that only urgency meets.
    "race": Family(shape=Shape.RACE),
}  # fmt: skip
