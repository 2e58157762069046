"""Settings of models, resources and tenants: entries of mappings rather than plain values.

`models.py` and `tenants.py` turn each into a noun of the core, and `rules.py` checks them together.
"""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from tidegate.core.deployments import Secret
from tidegate.settings.declare import DeclaredSetting, Group, Text, Weight, about

Count = Annotated[int, Meta(ge=1, le=1_000_000_000_000_000)]
CountOrOff = Annotated[int, Meta(ge=0, le=1_000_000_000_000_000)]
HeaderName = Annotated[str, Meta(max_length=64, pattern=r"^$|^[A-Za-z][A-Za-z0-9-]*$")]
PriceNumber = Annotated[float, Meta(ge=0.0, le=1_000_000.0)]
ParallelMax = Annotated[int, Meta(ge=0, le=1_000_000)]
TotalTimeout = Annotated[float, Meta(ge=0.1, le=604_800.0)]
LIMITS_MAX = 12


class LimitEntry(DeclaredSetting, frozen=True):
    """The most requests and tokens in one period.

    Tenants, teams, users and keys may also have a limit of cost, of batches and of bytes of input.
    """

    period: Literal["minute", "hour", "day", "week", "month", "lifetime"]
    requests: Count | None = None
    tokens: Count | None = None
    cost: PriceNumber | None = None
    batches: Count | None = None
    bytes: Count | None = None
    enabled: bool = True


LimitEntries = Annotated[tuple[LimitEntry, ...], Meta(max_length=LIMITS_MAX)]


class DeploymentTls(DeclaredSetting, frozen=True):
    """The check of a deployment's certificate, and the certificate that we show."""

    ca_file: Text | None = None
    cert_file: Text | None = None
    key_file: Text | None = None
    verify: bool = True


class DeploymentHints(DeclaredSetting, frozen=True):
    """Hints about a call for the engine or router that gets it; an empty name sends none."""

    priority_field: Annotated[str, Meta(max_length=64, pattern=r"^$|^[a-z][a-z0-9_]*$")] = ""
    priority: Annotated[int, Meta(ge=-1_000_000, le=1_000_000)] = 100
    objective_header: HeaderName = ""
    objective: Annotated[str, Meta(max_length=64, pattern=r"^[A-Za-z0-9_.-]+$")] = "batch"
    fairness_header: HeaderName = ""
    deadline_header: HeaderName = ""
    prefix_header: HeaderName = ""


class DeploymentPrice(DeclaredSetting, frozen=True):
    """The price of a million tokens; without a price for cached ones, they cost what others do.

    `covers` are surcharges of the provider that the price includes.
    """

    input: PriceNumber = 0.0
    cached: PriceNumber | None = None
    output: PriceNumber = 0.0
    batch_factor: Annotated[float, Meta(ge=0.0, le=1.0)] = 1.0
    covers: tuple[Literal["service_tier", "server_tools", "modalities"], ...] = ()


class DeploymentChatBatching(DeclaredSetting, frozen=True):
    """The way in which chat items of batches are sent to a deployment.

    `max_in_flight` counts over all processes; 0 lifts `max_total_input_tokens`.
    """

    mode: Literal["disabled", "concurrent", "sync_microbatch"] = "concurrent"
    max_in_flight: Annotated[int, Meta(ge=1, le=65_536)] | None = None
    upstream_max_batch_size: Annotated[int, Meta(ge=1, le=1_024)] = 1
    max_total_input_tokens: CountOrOff = 0
    require_homogeneous_params: bool = True
    adapter: Literal["none", "results"] = "none"


RedisKey = Annotated[str, Meta(min_length=1, max_length=512)]


class DeploymentQueue(DeclaredSetting, frozen=True):
    """A queue in Redis for a deployment's batch calls, which llm-d's async processor takes from it.

    `pool` (default: the model's name) names its two keys as llm-d does; `requests` and `results`
    name the keys themselves.
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
    """The limits and pauses of retries for a model's items; the defaults are those of `retry`."""

    attempts_max: Annotated[int, Meta(ge=1, le=100)] | None = None
    broken_attempts_max: Annotated[int, Meta(ge=1, le=100)] | None = None
    backoff_ms: Annotated[int, Meta(ge=1, le=3_600_000)] | None = None
    backoff_ms_max: Annotated[int, Meta(ge=1, le=3_600_000)] | None = None


class ModelSettings(DeclaredSetting, frozen=True):
    """The deployments and terms of a model; `in_flight_max` counts over all processes, 0 lifts it.

    `allowed_fields` are fields of the body that callers may set though they are refused otherwise.
    `media_hosts` are the hosts that the model's servers may fetch files from.
    """

    deployments: Annotated[tuple[ModelDeployment, ...], Meta(min_length=1, max_length=1_000)]
    in_flight_max: ModelInFlight = 0
    retry: ModelRetry = ModelRetry()
    allowed_fields: AllowedFields = ()
    media_hosts: MediaHosts = ()


class ModelTerms(DeclaredSetting, frozen=True):
    """The terms of a whole model whose deployments were added one by one."""

    in_flight_max: ModelInFlight = 0
    retry: ModelRetry = ModelRetry()
    allowed_fields: AllowedFields = ()
    media_hosts: MediaHosts = ()


class ResourceEntry(DeclaredSetting, frozen=True):
    """A named route to a model with its own budgets; `model` is by default the name itself.

    `fallbacks` are the models or resources that get a call next, in order. A call goes on to one
    only if it cannot have been done or billed before.
    """

    model: Annotated[str, Meta(min_length=1, max_length=255)] | None = None
    limits: LimitEntries = ()
    fallbacks: Annotated[tuple[Annotated[str, Meta(min_length=1, max_length=255)], ...], Meta(max_length=16)] = ()
    total_timeout_s: TotalTimeout | None = None


class TenantEntry(DeclaredSetting, frozen=True):
    """The weight or tier of one tenant, its budgets, and its calls at once; 0 lifts a cap."""

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
