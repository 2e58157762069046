"""What a seed means: how large the run is, how the engine is set, which kinds of fault are on and how strong.

Each seed first draws which kinds are on, so that some runs are quiet, some have one fault only and some have everything at once;
faults that hide one another are thereby also met alone. Settings are tiny, so that every limit is met within seconds.
"""

import random

import msgspec
from msgspec.structs import replace

from tests.simulation.world.estate import Estate, Shape, draw_estate
from tests.simulation.world.families import FAMILIES

# Each kind with the strengths it may have: chances per event or per second, or how many items or jobs it touches.
KINDS: dict[str, tuple[float, ...]] = {
    "kill": (0.02, 0.08),
    "border_kill": (0.002, 0.01),
    "pause": (0.03, 0.12),
    "stop": (0.01, 0.05),
    "clock": (0.1,),
    "store_fail": (0.01, 0.1),
    "store_unknown": (0.01, 0.1),
    "store_slow": (0.02, 0.1),
    "store_away": (0.02, 0.05),
    "disk_append": (0.02, 0.15),
    "disk_read": (0.02, 0.15),
    "disk_full": (0.02, 0.05),
    "disk_slow": (0.05, 0.2),
    "ingest": (0.3,),
    "error": (0.05, 0.3),
    "throttle": (0.05, 0.3),
    "reset": (0.05, 0.2),
    "hang": (0.02, 0.1),
    "slow": (0.05, 0.2),
    "broken": (0.05, 0.2),
    "away": (0.05, 0.3),
    "refuse": (0.05, 0.2),
    "poison": (1.0, 2.0),
    "cancel": (0.3, 0.8),
    "expire": (0.3, 0.8),
    "odd_input": (0.3,),
    "connect_slow": (0.1, 0.4),
    "database_clock": (0.03, 0.1),
    "redis_flush": (0.1, 0.3),
    "redis_fail_over": (0.05, 0.15),
    "redis_away": (0.03, 0.1),
    "redis_lost": (0.05, 0.3),
    "redis_slow": (0.05, 0.2),
    "revoke": (0.3, 1.0),
    "power": (0.02, 0.06),
    "machine_clock": (0.05, 0.15),
    "users": (0.4, 2.0),
    "receiver": (0.2, 0.7),
    "job_pause": (0.3, 1.0),
    "job_later": (0.3, 1.0),
    "job_threshold": (0.3, 1.0),
    "job_canary": (0.3, 1.0),
    "job_retry": (0.3, 1.0),
    "job_same": (0.3, 1.0),
    "job_edit": (0.3, 1.0),
    "job_schema": (0.3, 1.0),
    "job_door": (0.3, 1.0),
    "background": (0.3, 1.0),
    "job_window": (0.3, 1.0),
    "job_priority": (0.3, 1.0),
    "job_delete": (0.3, 1.0),
    "job_mixed": (0.3, 1.0),
    "job_checked": (0.3, 1.0),
    "job_table": (0.3, 1.0),
}
# Kinds that came later are drawn apart, so that the seeds still mean what they meant.
_APART = (
    "revoke", "power", "machine_clock", "users", "receiver",
    "job_pause", "job_later", "job_threshold", "job_canary", "job_retry", "job_same", "job_edit", "job_schema", "job_door", "background",
    "job_window", "job_priority", "job_delete", "job_mixed", "job_checked", "job_table",
)  # fmt: skip
_APART_SHARE = 0.12

# What may go wrong while it is watched how flows share a model: nothing that takes work away from those who hold it.
MILD = ("error", "throttle", "reset", "slow", "refuse", "connect_slow", "redis_flush", "redis_lost")

# What may lose an answer, and what may hold one up.
DEATHS = frozenset({"kill", "border_kill", "pause", "stop", "store_fail", "store_unknown", "store_slow", "store_away"})
DELAYS = DEATHS | {"disk_append", "disk_full", "disk_read", "disk_slow"}

# Troubles that are worst together. Half of the seeds have one of these beside what they draw by chance.
THEMES: tuple[dict[str, float], ...] = (
    {"kill": 0.12, "border_kill": 0.015, "slow": 0.1, "disk_read": 0.3, "store_fail": 0.15},
    {"pause": 0.15, "slow": 0.5, "cancel": 0.6, "expire": 0.6},
    {"pause": 0.2, "disk_append": 0.3, "disk_read": 0.2, "disk_slow": 0.2, "cancel": 0.9, "slow": 0.5},
    {"pause": 0.3, "store_slow": 0.3, "disk_slow": 0.2, "cancel": 0.9},
    {"kill": 0.12, "throttle": 0.35, "error": 0.35, "slow": 0.5},
    {"store_fail": 0.1, "store_unknown": 0.1, "store_slow": 0.1, "border_kill": 0.005},
    {"poison": 1.0, "expire": 0.2},
    {"expire": 1.0, "throttle": 0.2},
    {"redis_flush": 0.3, "redis_fail_over": 0.15, "redis_lost": 0.2, "redis_slow": 0.1, "kill": 0.05},
    {"redis_fail_over": 0.5, "connect_slow": 0.4},
    {"kill": 0.1, "pause": 0.15, "connect_slow": 0.4},
)


class Plan(msgspec.Struct, frozen=True):
    """`family` names what was settled beside the seed. `store_slow_leases` is how late a request to the store may come, in leases, and
    `store_verbs` which requests come late or fail; all where it is empty. `poison_s_max` is how soon a poison item kills; where it is 0,
    as late as any answer comes. `lively_s` is the longest wait in clear weather that is still healthy: a Retry-After, a hung call, three
    lost owners, and room. `shaped`: callers ask for more than lines of a file: parameters of
    all lines, several files, retries of their own."""

    seed: int
    estate: Estate
    shape: Shape = Shape.ANY
    strengths: dict[str, float] = msgspec.field(default_factory=dict)
    process_count: int = 2
    job_count: int = 2
    item_count_max: int = 12
    call_s_max: float = 0.6
    slice_items: int = 4
    slice_count_max: int = 4
    in_flight_max: int = 4
    lease_ms: int = 5_000
    heartbeat_ms: int = 1_000
    poll_ms: int = 500
    sweep_ms: int = 1_000
    grace_ms: int = 1_500
    flush_ms: int = 50
    flush_lines: int = 256
    garbage_safety_ms: int = 5_000
    objects: bool = False
    spool_reachable: bool = True
    arrival_s: float = 5.0
    trouble_s: float = 30.0
    item_count_min: int = 1
    store_slow_leases: float = 1.2
    store_verbs: frozenset[str] = frozenset()
    poison_s_max: float = 0.0
    lively_s: float = 240.0
    retry_after_s_max: float = 25.0
    shaped: bool = False
    cancel_grace_ms: int = 3_600_000
    family: str = ""

    def strength(self, kind: str) -> float:
        return self.strengths.get(kind, 0.0)

    @property
    def store_slow_s_max(self) -> float:
        return self.store_slow_leases * self.lease_ms / 1000

    @property
    def kinds(self) -> list[str]:
        return sorted(kind for kind, strength in self.strengths.items() if strength)


def draw(seed: int, without: frozenset[str] = frozenset(), family: str = "") -> Plan:
    """The plan of a seed, with some kinds of fault left out; of a family, if one is named."""
    if not family:
        return _draw(seed, without)
    settled = FAMILIES[family]
    plan = _draw(seed, without, settled.shape, settled.strengths)
    return replace(plan, family=family, estate=replace(plan.estate, **settled.estate), **settled.plan)


def _draw(
    seed: int, without: frozenset[str], shape: Shape | None = None, strengths: dict[str, float] | None = None
) -> Plan:
    dice = random.Random(f"plan/{seed}")
    drawn = dice.choices((Shape.ANY, Shape.CONTENDED, Shape.RACE), (0.85, 0.11, 0.04))[0]
    shape = shape or drawn
    if strengths is None:
        strengths = _strengths(dice, shape) | _apart(seed, shape)
    lease_ms = dice.choice((2_000, 4_000, 6_000))
    plan = Plan(
        seed=seed,
        estate=draw_estate(seed, strengths, shape),
        shape=shape,
        strengths={kind: strength for kind, strength in strengths.items() if kind not in without},
        process_count=dice.choice((1, 2, 2, 3, 3)),
        job_count=dice.choice((1, 2, 3, 3, 6)),
        item_count_max=dice.choice((4, 10, 20)),
        call_s_max=dice.choice((0.3, 1.0, 3.0)),
        slice_items=dice.choice((1, 2, 4)),
        slice_count_max=dice.choice((1, 3, 6)),
        in_flight_max=dice.choice((1, 3, 8)),
        lease_ms=lease_ms,
        heartbeat_ms=lease_ms // 5,
        poll_ms=dice.choice((500, 1_500)),
        sweep_ms=dice.choice((800, 2_000)),
        grace_ms=dice.choice((500, 2_000)),
        flush_ms=dice.choice((5, 50, 400)),
        flush_lines=dice.choice((1, 2, 256)),
        garbage_safety_ms=dice.choice((500, 5_000, 60_000)),
        objects=dice.random() < 0.25,
        spool_reachable=dice.random() < 0.5,
        arrival_s=dice.choice((0.5, 6.0)),
        trouble_s=dice.choice((8.0, 20.0)),
    )
    tenant_count = len(plan.estate.tenants)
    if shape is Shape.CONTENDED:
        return replace(plan, job_count=max(plan.job_count, tenant_count), arrival_s=0.5, item_count_max=20)
    if shape is Shape.RACE:
        return replace(
            plan, job_count=tenant_count, arrival_s=0.5, item_count_max=12, slice_items=1, slice_count_max=6,
            in_flight_max=8, call_s_max=3.0, poll_ms=400, flush_ms=50, objects=False,
        )  # fmt: skip
    return plan


def _strengths(dice: random.Random, shape: Shape) -> dict[str, float]:
    if shape is Shape.RACE:
        return {}
    theme = dice.choice(THEMES) if shape is Shape.ANY and dice.random() < 0.5 else {}
    share = dice.choice((0.0, 0.0, 0.15)) if theme else dice.choice((0.0, 0.1, 0.2, 0.3, 0.5, 0.8))
    kinds = KINDS if shape is Shape.ANY else {kind: KINDS[kind] for kind in MILD}
    strengths = {}
    for kind, choices in kinds.items():
        if kind in _APART:
            continue
        on, strength = dice.random() < share, dice.choice(choices)
        strength = theme.get(kind, strength if on else 0.0)
        if strength:
            strengths[kind] = strength
    return strengths


def _apart(seed: int, shape: Shape) -> dict[str, float]:
    dice = random.Random(f"apart/{seed}")
    drawn = {kind: dice.choice(KINDS[kind]) for kind in _APART if dice.random() < _APART_SHARE}
    return drawn if shape is Shape.ANY else {}
