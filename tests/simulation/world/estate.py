"""What is served in one run, and to whom: models, deployments, resources, tenants, their limits and weights, and how the scheduler is set.

Half of the seeds have no budgets, so that these do not hide everything else. Periods are tiny (see `settings`): a minute is seconds.
No limit is so small that the run's work would not be through in time.
"""

import random
from enum import StrEnum

import msgspec
from msgspec.structs import replace

from tidegate.core.budgets.budget import Limit, Period
from tidegate.core.deployments import Deployment, EngineKind, Estimate, Resource
from tidegate.core.grouping.chat import ChatAdapter, ChatBatching, ChatMode
from tidegate.core.schedule import Mode, Policy
from tidegate.core.usage.prices import Price
from tidegate.settings.tenants import TenantPolicy

_NAMES = ("alpha", "beta", "gamma", "delta")
UNKNOWN_MODEL = "orphan"
# The shape of the answers of each endpoint.
ANSWER_MEMBER = {"/v1/chat/completions": "choices", "/v1/embeddings": "data", "/v1/messages": "stop_reason"}
CHAT, EMBEDDINGS, MESSAGES = "/v1/chat/completions", "/v1/embeddings", "/v1/messages"
# No request of a customer reserves or takes more than this.
CALL_TOKENS_MAX = 400
_REDIS_KINDS = ("redis_flush", "redis_fail_over", "redis_away", "redis_lost", "redis_slow")


class Estate(msgspec.Struct, frozen=True):
    """`names` are what requests may ask for: models and resources. `override_mode` is a mode that an operator switches to under way.

    `usage_factor` is by how much real prompts exceed their estimate. `stronger` is the model for answers that do not fit."""

    models: tuple[str, ...]
    deployments: tuple[Deployment, ...]
    resources: tuple[Resource, ...]
    tenants: tuple[TenantPolicy, ...]
    job_limits: tuple[tuple[Limit, ...], ...]
    model_in_flight_max: dict[str, int]
    in_flight_max_global: int
    policy: Policy
    override_mode: Mode | None
    scope_preference: tuple[str, ...]
    uses_redis: bool
    usage_factor: int
    endpoints: tuple[str, ...] = (CHAT,)
    stronger: str = ""

    @property
    def names(self) -> tuple[str, ...]:
        return self.models + tuple(resource.name for resource in self.resources)

    def serving(self, name: str) -> list[Deployment]:
        """The deployments that calls for a name go to."""
        model = next((resource.model for resource in self.resources if resource.name == name), name)
        return [deployment for deployment in self.deployments if model in deployment.models]


class Shape(StrEnum):
    """What a run is for: anything at all, many who want the same model at once, or one of these with a deadline that only urgency meets."""

    ANY = "any"
    CONTENDED = "contended"
    RACE = "race"


# No request costs more than this at PRICE, however its prompt is counted.
CALL_NANO_MAX = 10_000
# Ten nano-units for an input token, twenty for one of output; half of that for batches.
PRICE = Price(10_000_000, None, 20_000_000, 500_000)
_MONEY_SHARE = 0.12


def draw_estate(seed: int, kinds: dict[str, float], shape: Shape) -> Estate:
    dice = random.Random(f"estate/{seed}")
    match shape:
        case Shape.ANY:
            estate = _priced(random.Random(f"money/{seed}"), _any(dice, kinds))
            return _spoken(random.Random(f"spoken/{seed}"), _shared(random.Random(f"shared/{seed}"), estate, kinds))
        case Shape.CONTENDED:
            return _contended(dice, kinds)
        case Shape.RACE:
            return _race()


def _priced(dice: random.Random, estate: Estate) -> Estate:
    """In some runs calls cost money, and tenants or users have only so much of it a minute. Drawn apart from everything else."""
    if dice.random() >= _MONEY_SHARE:
        return estate
    money = (Limit(Period.MINUTE, nano=dice.choice((1, 2, 4)) * CALL_NANO_MAX),)
    whose = dice.choice(("limits", "user_limits"))
    return replace(
        estate,
        deployments=tuple(replace(one, price=PRICE) for one in estate.deployments),
        tenants=tuple(replace(one, **{whose: getattr(one, whose) + money}) for one in estate.tenants),
    )


def _shared(dice: random.Random, estate: Estate, kinds: dict[str, float]) -> Estate:
    """Where users come, some deployments are engines of our own, on which batch work stands back, or leave it only a part."""
    if "users" not in kinds:
        return estate
    engine = dice.choice((EngineKind.VLLM, EngineKind.GENERIC))
    fraction = dice.choice((1.0, 1.0, 0.5))
    return replace(
        estate,
        deployments=tuple(replace(one, engine=engine, batch_fraction=fraction) for one in estate.deployments),
    )


_GROUPED_SHARE, _MESSAGES_SHARE, _CHAT_GROUPS_SHARE = 0.1, 0.1, 0.06
CHAT_GROUPS = ChatBatching(ChatMode.SYNC_MICROBATCH, upstream_max_batch_size=4, adapter=ChatAdapter.RESULTS)


def _spoken(dice: random.Random, estate: Estate) -> Estate:
    """In some runs several items of embeddings or of chat share a call, or jobs are of messages. Drawn apart from everything else."""
    drawn = dice.random()
    if drawn < _GROUPED_SHARE:
        inputs_max = dice.choice((2, 4, 16))
        return replace(
            estate,
            endpoints=dice.choice(((EMBEDDINGS,), (CHAT, EMBEDDINGS))),
            deployments=tuple(replace(one, upstream_max_batch_inputs=inputs_max) for one in estate.deployments),
        )
    if drawn < _GROUPED_SHARE + _MESSAGES_SHARE:
        engines = [one.engine if dice.random() < 0.5 else EngineKind.ANTHROPIC for one in estate.deployments]
        return replace(
            estate,
            endpoints=(CHAT, MESSAGES),
            deployments=tuple(
                replace(one, engine=engine) for one, engine in zip(estate.deployments, engines, strict=True)
            ),
        )
    if drawn < _GROUPED_SHARE + _MESSAGES_SHARE + _CHAT_GROUPS_SHARE:
        return replace(estate, deployments=tuple(replace(one, chat_batching=CHAT_GROUPS) for one in estate.deployments))
    return estate


def _contended(dice: random.Random, kinds: dict[str, float]) -> Estate:
    """Nothing but fair share decides between flows: no lane that goes before it, no cap or budget of one tenant."""
    drawn = _any(dice, kinds)
    mode = dice.choice((Mode.FAIR_SHARE, Mode.SMART))
    tenants = [
        TenantPolicy(dice.choice((1.0, 1.0, 2.0, 0.5)), 0, 0, (), (), ()) for _ in range(dice.choice((2, 2, 3, 6)))
    ]
    return replace(
        drawn,
        models=drawn.models[:2],
        deployments=tuple(one for one in drawn.deployments if set(one.models) & set(drawn.models[:2])),
        tenants=tuple(tenants),
        job_limits=((),),
        policy=replace(drawn.policy, mode=mode, in_flight_units_max=0, fast_lane=False),
        override_mode=dice.choice((None, None, Mode.FAIR_SHARE, Mode.SMART)),
    )


RACE_SLOTS = 6
RACE_TENANTS = 8


def _race() -> Estate:
    return Estate(
        models=_NAMES[:1],
        deployments=(Deployment("alpha-0", "http://alpha-0/v1", _NAMES[:1], max_in_flight=RACE_SLOTS),),
        resources=(),
        tenants=tuple(TenantPolicy(1.0, 0, 0, (), (), ()) for _ in range(RACE_TENANTS)),
        job_limits=((),),
        model_in_flight_max={},
        in_flight_max_global=0,
        policy=Policy(rate_units_per_s_default=100.0),
        override_mode=None,
        scope_preference=("organization",),
        uses_redis=False,
        usage_factor=1,
    )


def _any(dice: random.Random, kinds: dict[str, float]) -> Estate:
    limited = dice.random() < 0.45 or any(kind in kinds for kind in _REDIS_KINDS)
    models = _NAMES[: dice.choice((1, 1, 2, 2, 3, 4))]
    deployments = tuple(_deployments(dice, models, limited=limited))
    resources = (
        (Resource(f"{models[0]}-gold", models[0], _limits(dice, 1.0)),) if limited and dice.random() < 0.4 else ()
    )
    tenant_count = dice.choice((1, 1, 2, 3, 6))
    fallback = dice.choice((None, None, *Mode))
    return Estate(
        models=models,
        deployments=deployments,
        resources=resources,
        tenants=tuple(_tenant(dice, limited=limited) for _ in range(tenant_count)),
        job_limits=tuple(_limits(dice, 0.2 if limited else 0.0) for _ in range(4)),
        model_in_flight_max={models[0]: dice.choice((1, 3))} if dice.random() < 0.12 else {},
        in_flight_max_global=dice.choice((2, 5)) if dice.random() < 0.12 else 0,
        policy=_policy(dice),
        override_mode=fallback,
        scope_preference=("user",) if dice.random() < 0.15 else ("organization",),
        uses_redis=limited and (dice.random() < 0.4 or any(kind in kinds for kind in _REDIS_KINDS)),
        usage_factor=dice.choice((1, 1, 1, 3)),
    )


def _deployments(dice: random.Random, models: tuple[str, ...], *, limited: bool) -> list[Deployment]:
    found = []
    for model in models:
        for number in range(dice.choice((1, 1, 1, 1, 2, 3))):
            served = models if dice.random() < 0.1 else (model,)
            found.append(
                Deployment(
                    name=f"{model}-{number}",
                    url=f"http://{model}-{number}/v1",
                    models=served,
                    max_in_flight=dice.choice((1, 2, 4, 6)),
                    weight=dice.choice((1.0, 1.0, 3.0)),
                    limits=_limits(dice, 0.6 if limited else 0.0),
                    estimate=Estimate.BOUND if dice.random() < 0.3 else Estimate.LIKELY,
                    tokens_in_flight_max=2 * CALL_TOKENS_MAX if dice.random() < 0.1 else 0,
                )
            )
    return found


def _limits(dice: random.Random, chance: float) -> tuple[Limit, ...]:
    if dice.random() >= chance:
        return ()
    kind = dice.choice(("requests", "requests", "tokens", "both", "hour"))
    minute = Limit(
        Period.MINUTE,
        dice.choice((3, 6, 12)) if kind in ("requests", "both") else None,
        dice.choice((2, 4)) * CALL_TOKENS_MAX if kind in ("tokens", "both") else None,
    )
    hour = Limit(Period.HOUR, dice.choice((15, 30)))
    return (hour,) if kind == "hour" else (minute, hour) if dice.random() < 0.2 else (minute,)


def _tenant(dice: random.Random, *, limited: bool) -> TenantPolicy:
    part = 0.2 if limited else 0.0
    return TenantPolicy(
        weight=dice.choice((1.0, 1.0, 1.0, 2.0, 0.5)),
        in_flight_units_max=0,
        queued_units_max=0,
        limits=_limits(dice, part),
        user_limits=_limits(dice, part / 2),
        key_limits=_limits(dice, part / 2),
    )


def _policy(dice: random.Random) -> Policy:
    return Policy(
        mode=dice.choice((*Mode, Mode.FAIR_SHARE, Mode.SMART, Mode.SMART)),
        shadow_mode=dice.choice((None, None, *Mode)),
        in_flight_units_max=dice.choice((0, 0, 0, 200)),
        urgent_share=dice.choice((0.0, 0.3, 0.5)),
        age_units_per_s=dice.choice((0.0, 8.0)),
        age_units_max=100,
        large_units=200,
        large_interval_ms=dice.choice((0, 2_000)),
        fast_lane=dice.random() < 0.2,
        fast_lane_share=0.25,
        fast_lane_units=100,
        rate_units_per_s_default=50.0,
    )
