"""What an operator says about models, resources and tenants: entries of mappings rather than plain values.

Each becomes a noun of the core in `models.py` and `tenants.py`; what they may not say together stands in `rules.py`.
"""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from tidegate.core.deployments import Secret
from tidegate.settings.declare import DeclaredSetting, Group, Text, Weight, about

Count = Annotated[int, Meta(ge=1, le=1_000_000_000_000_000)]
CountOrOff = Annotated[int, Meta(ge=0, le=1_000_000_000_000_000)]
HeaderName = Annotated[str, Meta(max_length=64, pattern=r"^$|^[A-Za-z][A-Za-z0-9-]*$")]
Price = Annotated[float, Meta(ge=0.0, le=1_000_000.0)]
ParallelMax = Annotated[int, Meta(ge=0, le=1_000_000)]
TotalTimeout = Annotated[float, Meta(ge=0.1, le=604_800.0)]
LIMITS_MAX = 12


class LimitEntry(DeclaredSetting, frozen=True):
    """At most so many requests and tokens in one period; for those who pay also so much money, and so many batches and bytes of input."""

    period: Literal["minute", "hour", "day", "week", "month", "lifetime"]
    requests: Count | None = None
    tokens: Count | None = None
    cost: Price | None = None
    batches: Count | None = None
    bytes: Count | None = None
    enabled: bool = True


LimitEntries = Annotated[tuple[LimitEntry, ...], Meta(max_length=LIMITS_MAX)]


class DeploymentTls(DeclaredSetting, frozen=True):
    """How a deployment's certificate is checked, and which one we show."""

    ca_file: Text | None = None
    cert_file: Text | None = None
    key_file: Text | None = None
    verify: bool = True


class DeploymentHints(DeclaredSetting, frozen=True):
    """Hints about a call for an engine or a router behind us; an empty name sends none."""

    priority_field: Annotated[str, Meta(max_length=64, pattern=r"^$|^[a-z][a-z0-9_]*$")] = ""
    priority: Annotated[int, Meta(ge=-1_000_000, le=1_000_000)] = 100
    objective_header: HeaderName = ""
    objective: Annotated[str, Meta(max_length=64, pattern=r"^[A-Za-z0-9_.-]+$")] = "batch"
    fairness_header: HeaderName = ""
    deadline_header: HeaderName = ""
    prefix_header: HeaderName = ""


class DeploymentPrice(DeclaredSetting, frozen=True):
    """What a million tokens cost there; cached ones cost what others do where no price of their own is given.

    `covers` are surcharges of the provider that the price has in it.
    """

    input: Price = 0.0
    cached: Price | None = None
    output: Price = 0.0
    batch_factor: Annotated[float, Meta(ge=0.0, le=1.0)] = 1.0
    covers: tuple[Literal["service_tier", "server_tools", "modalities"], ...] = ()


class DeploymentChatBatching(DeclaredSetting, frozen=True):
    """How a deployment takes the chat items of batches; `max_in_flight` counts over all processes, 0 lifts `max_total_input_tokens`."""

    mode: Literal["disabled", "concurrent", "sync_microbatch"] = "concurrent"
    max_in_flight: Annotated[int, Meta(ge=1, le=65_536)] | None = None
    upstream_max_batch_size: Annotated[int, Meta(ge=1, le=1_024)] = 1
    max_total_input_tokens: CountOrOff = 0
    require_homogeneous_params: bool = True
    adapter: Literal["none", "results"] = "none"


RedisKey = Annotated[str, Meta(min_length=1, max_length=512)]


class DeploymentQueue(DeclaredSetting, frozen=True):
    """A queue in Redis that a deployment's batch calls are laid down in, for llm-d's async processor to take.

    `pool` names its two keys as llm-d does, and is the model's name where it is left out; `requests` and `results` name them otherwise.
    """

    url: Secret
    pool: RedisKey | None = None
    requests: RedisKey | None = None
    results: RedisKey | None = None
    timeout_s: Annotated[float, Meta(ge=1.0, le=2_592_000.0)] = 86_400.0


class ModelDeployment(DeclaredSetting, frozen=True):
    """One upstream endpoint that serves a model."""

    url: Annotated[str, Meta(min_length=1, max_length=2048)]
    name: Annotated[str, Meta(min_length=1, max_length=255)] | None = None
    engine: Literal["vllm", "sglang", "openai", "anthropic", "generic"] = "generic"
    api_key: Secret | None = None
    max_in_flight: Annotated[int, Meta(ge=1, le=65_536)] | None = None
    weight: Weight = 1.0
    order: Annotated[int, Meta(ge=1, le=100)] = 1
    read_timeout_s: Annotated[float, Meta(ge=0.1, le=86_400.0)] | None = None
    total_timeout_s: TotalTimeout = 3_600.0
    endpoint_timeouts_s: Annotated[
        dict[Annotated[str, Meta(max_length=132, pattern=r"^/v1/[a-z0-9_/-]+$")], TotalTimeout], Meta(max_length=64)
    ] = msgspec.field(default_factory=dict)
    tls: DeploymentTls = DeploymentTls()
    limits: LimitEntries = ()
    estimate: Literal["likely", "bound"] = "likely"
    tokens_in_flight_max: CountOrOff = 0
    batch_fraction: Annotated[float, Meta(ge=0.001, le=1.0)] = 1.0
    tide: Literal["auto", "off"] = "auto"
    metrics_url: Text = ""
    metrics_names: Annotated[
        dict[Annotated[str, Meta(min_length=1, max_length=64)], Annotated[str, Meta(min_length=1, max_length=255)]],
        Meta(max_length=32),
    ] = msgspec.field(default_factory=dict)
    hints: DeploymentHints = DeploymentHints()
    serves: Literal["interactive", "batch", "both"] = "both"
    price: DeploymentPrice = DeploymentPrice()
    output_tokens_max: CountOrOff = 0
    upstream_max_batch_inputs: Annotated[int, Meta(ge=1, le=2_048)] = 1
    upstream_min_batch_inputs: Annotated[int, Meta(ge=2, le=2_048)] = 2
    chat_batching: DeploymentChatBatching = DeploymentChatBatching()
    upstream_model: Annotated[str, Meta(min_length=1, max_length=255)] | None = None
    queue: DeploymentQueue | None = None


ModelInFlight = Annotated[int, Meta(ge=0, le=1_000_000)]
AllowedFields = Annotated[tuple[Annotated[str, Meta(min_length=1, max_length=64)], ...], Meta(max_length=128)]
MediaHosts = Annotated[tuple[Annotated[str, Meta(min_length=1, max_length=255)], ...], Meta(max_length=1_000)]


class ModelRetry(DeclaredSetting, frozen=True):
    """How often and how soon an item of a model is tried again; what is left out is as `retry` says for all."""

    attempts_max: Annotated[int, Meta(ge=1, le=100)] | None = None
    broken_attempts_max: Annotated[int, Meta(ge=1, le=100)] | None = None
    backoff_ms: Annotated[int, Meta(ge=1, le=3_600_000)] | None = None
    backoff_ms_max: Annotated[int, Meta(ge=1, le=3_600_000)] | None = None


class ModelSettings(DeclaredSetting, frozen=True):
    """A public model name and where it is served; `in_flight_max` counts over all processes, 0 lifts it.

    `allowed_fields` are fields of the body that callers may set though they are refused otherwise, and `media_hosts` the hosts that the
    model's servers may fetch files from.
    """

    deployments: Annotated[tuple[ModelDeployment, ...], Meta(min_length=1, max_length=1_000)]
    in_flight_max: ModelInFlight = 0
    retry: ModelRetry = ModelRetry()
    allowed_fields: AllowedFields = ()
    media_hosts: MediaHosts = ()


class ModelTerms(DeclaredSetting, frozen=True):
    """What holds for a model as a whole, where its deployments were added one by one."""

    in_flight_max: ModelInFlight = 0
    retry: ModelRetry = ModelRetry()
    allowed_fields: AllowedFields = ()
    media_hosts: MediaHosts = ()


class ResourceEntry(DeclaredSetting, frozen=True):
    """A named route to a model with budgets of its own; `model` may be left out where the name is a model's.

    `fallbacks` are models or resources that take a call, in order, when the ones before can neither have done nor billed it.
    """

    model: Annotated[str, Meta(min_length=1, max_length=255)] | None = None
    limits: LimitEntries = ()
    fallbacks: Annotated[tuple[Annotated[str, Meta(min_length=1, max_length=255)], ...], Meta(max_length=16)] = ()
    total_timeout_s: TotalTimeout | None = None


class TenantEntry(DeclaredSetting, frozen=True):
    """What one tenant may have: its weight alone or that of its tier, its budgets, and how many calls at once; 0 lifts a cap."""

    weight: Weight | None = None
    tier: Annotated[str, Meta(min_length=1, max_length=64)] | None = None
    limits: LimitEntries = ()
    in_flight_units_max: CountOrOff | None = None
    queued_units_max: CountOrOff = 0
    limits_per_team: LimitEntries = ()
    limits_per_user: LimitEntries = ()
    limits_per_key: LimitEntries = ()
    parallel_max: ParallelMax = 0
    parallel_max_per_user: ParallelMax = 0
    parallel_max_per_key: ParallelMax = 0


class BudgetSettings(Group, frozen=True):
    tenant: Annotated[
        LimitEntries,
        about("Limits of every tenant, such as [{period: minute, requests: 600}]; `tenants` may replace them."),
    ] = ()
    team: Annotated[
        LimitEntries, about("Limits of every team of a tenant; the tenant's `limits_per_team` replace them.")
    ] = ()
    user: Annotated[
        LimitEntries, about("Limits of every user of a tenant; the tenant's `limits_per_user` replace them.")
    ] = ()
    key: Annotated[LimitEntries, about("Limits of every API key; the tenant's `limits_per_key` replace them.")] = ()
