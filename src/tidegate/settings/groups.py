"""The declarations of all settings: name (unit last), default, bounds and one sentence about each.

The loader, the reference page and `tidegate config` are made from them. The scheduler's settings
stand in `scheduling.py`, entries of models and tenants in `capacity.py`. This module reads no file
and no environment, and does not know who uses a setting.
"""

from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from tidegate.core.callback_targets import TargetRules
from tidegate.core.deployments import HttpLimits, Secret
from tidegate.core.nouns import Quotas
from tidegate.core.retry import RetryPolicy
from tidegate.settings.capacity import (
    AllowedFields,
    BudgetSettings,
    MediaHosts,
    ModelSettings,
    ResourceEntry,
    TenantEntry,
)
from tidegate.settings.declare import ADVANCED, DAY_S, Group, Host, Name, ShortName, Text, Weight
from tidegate.settings.declare import about as _about
from tidegate.settings.declare import number as _num
from tidegate.settings.declare import whole as _int
from tidegate.settings.guards import GuardrailEntry, HookEntry
from tidegate.settings.parameters import ParametersSettings
from tidegate.settings.scheduling import Redis, SchedulerSettings

__all__ = ["Group", "Settings"]


class ServerSettings(Group, frozen=True):
    host: Annotated[Host, _about("Address to listen on; where other machines reach it, every call needs a key.")] = (
        "127.0.0.1"
    )
    port: Annotated[int, _int(0, 65_535, "Port to listen on; 0 lets the system choose.")] = 8080
    connections_max: Annotated[
        int,
        _int(
            32,
            65_536,
            "Connections that clients may have open to one process; fewer where its limit of open files leaves no room for the rest.",
        ),
    ] = 1_000
    bodies_bytes_max: Annotated[
        int,
        _int(
            1 << 20,
            1 << 40,
            "Bytes of request bodies that one process holds in memory at once, of which one tenant may have half; uploads do not count.",
        ),
    ] = 128 << 20
    trusted_proxies: Annotated[
        tuple[Annotated[str, Meta(min_length=2, max_length=64)], ...],
        Meta(
            max_length=256,
            description="Addresses or ranges (10.0.0.0/8) of proxies whose X-Forwarded-For names the caller.",
        ),
    ] = ()


class AdminSettings(Group, frozen=True):
    host: Annotated[
        Host, _about("Address of the admin API and the console, where `server.host` is no loopback address.")
    ] = "127.0.0.1"
    port: Annotated[
        int,
        _int(
            0,
            65_535,
            "Port of the admin API and the console where `server.host` is no loopback address; 0 leaves them to commands on this "
            "machine. On a loopback address they share `server.port`.",
        ),
    ] = 0


class StoreSettings(Group, frozen=True):
    url: Annotated[
        Secret | None,
        _about("Where the queue lives: sqlite:///PATH (default: in the data directory) or postgresql://…."),
    ] = None
    pool_size: Annotated[
        int, _int(2, 200, "PostgreSQL connections per process, beside the one kept for heartbeats.")
    ] = 8
    statement_timeout_ms: Annotated[
        int, _int(100, 600_000, "How long one SQL statement may take before it is given up.")
    ] = 5_000
    pooler: Annotated[
        Literal["none", "transaction"],
        _about(
            "What stands before PostgreSQL: `transaction` avoids everything that outlives a transaction (PgBouncer)."
        ),
    ] = "none"

    @property
    def location(self) -> str:
        """Return the URL with its password, to connect to it."""
        return self.url.reveal() if self.url is not None else ""

    @property
    def is_postgresql(self) -> bool:
        return self.location.startswith(("postgresql://", "postgres://"))


class BlobsSettings(Group, frozen=True):
    url: Annotated[
        Text,
        _about(
            "Where bytes lie: file:///PATH (default: in the data directory), s3://BUCKET/PREFIX or az://CONTAINER/PREFIX."
        ),
    ] = ""
    endpoint: Annotated[
        Text, _about("URL of an S3-compatible or Azure-compatible server; empty means the cloud's.")
    ] = ""
    region: Annotated[Name, _about("S3 region.")] = "us-east-1"
    access_key_id: Annotated[
        Secret | None,
        _about("S3 access key id, or the Azure storage account; empty uses the machine's own identity."),
    ] = None
    secret_access_key: Annotated[
        Secret | None, _about("S3 secret access key, or the key of the Azure storage account.")
    ] = None
    allow_http: Annotated[bool, _about("Whether an endpoint may be plain http.")] = False

    @property
    def backend(self) -> str:
        scheme = self.url.partition("://")[0]
        return scheme if scheme in ("s3", "az") else "local"

    @property
    def is_object_store(self) -> bool:
        """Return whether the bytes lie in an object store, not on this machine's disk."""
        return self.backend != "local"


class Http(Group, frozen=True):
    connect_timeout_s: Annotated[float, _num(0.1, 300, "How long connecting to an upstream may take.")] = 10.0
    read_timeout_s: Annotated[
        float, _num(0.1, DAY_S, "How long an upstream may stay silent; a deployment may say otherwise.")
    ] = 300.0
    write_timeout_s: Annotated[float, _num(0.1, 3_600, "How long sending a request's body may take.")] = 30.0
    pool_timeout_s: Annotated[
        float, _num(0.1, 300, "How long a call waits for a free connection before `upstream_pool_timeout`."), ADVANCED
    ] = 10.0
    connections_max: Annotated[
        int, _int(1, 65_536, "Ceiling of upstream connections per process, over all deployments.")
    ] = 500
    kept_alive_max: Annotated[int, _int(0, 65_536, "How many idle upstream connections are kept open."), ADVANCED] = 100
    kept_alive_s: Annotated[float, _num(0.1, 3_600, "How long an idle upstream connection is kept."), ADVANCED] = 60.0
    response_bytes_max: Annotated[
        int, _int(1_024, 1 << 30, "Largest answer taken from an upstream, counted after decompression.")
    ] = 16 << 20
    header_bytes_max: Annotated[int, _int(1_024, 1 << 20, "Most bytes of an answer's headers."), ADVANCED] = 16 << 10
    header_count_max: Annotated[int, _int(8, 10_000, "Most headers of an answer."), ADVANCED] = 128
    body_rate_min_bytes_per_s: Annotated[
        float,
        _num(0, 1 << 30, "Slowest answer that is waited for, once `body_rate_grace_s` is over; 0 waits for any."),
        ADVANCED,
    ] = 16.0
    body_rate_grace_s: Annotated[float, _num(0, DAY_S, "How long an answer's body may be slow."), ADVANCED] = 30.0
    interactive_connections: Annotated[
        int,
        _int(
            0,
            65_536,
            "Upstream connections that batch work leaves to interactive calls, in processes that take any; "
            "at most half of `connections_max`.",
        ),
    ] = 50
    client_timeout_s: Annotated[
        float,
        _num(
            1,
            DAY_S,
            "How long a client may take nothing of an answer, or less than 1 kB a second, before it is given up.",
        ),
    ] = 60.0

    def limits(self, *, takes_interactive: bool = False) -> HttpLimits:
        """Return these values as the HTTP client takes them.

        A process that takes no interactive calls keeps no connections for them.
        """
        kept = min(self.interactive_connections, self.connections_max // 2) if takes_interactive else 0
        return HttpLimits(**{**msgspec.structs.asdict(self), "interactive_connections": kept})


class UpstreamSettings(Group, frozen=True):
    url: Annotated[
        Text, _about("One upstream for every model, in place of `models`, such as http://localhost:8000/v1.")
    ] = ""
    api_key: Annotated[Secret | None, _about("Key for that upstream: env:NAME, file:PATH, or the key itself.")] = None
    engine: Annotated[
        Literal["vllm", "sglang", "openai", "anthropic", "generic"], _about("What kind of server that upstream is.")
    ] = "generic"
    max_in_flight: Annotated[
        int,
        _int(
            0,
            65_536,
            "Calls in flight that upstream takes, over all processes; 0: it is learned, up to `worker.in_flight_max`.",
        ),
    ] = 0
    read_timeout_s: Annotated[
        float, _num(0, DAY_S, "How long that upstream may stay silent; 0: as long as `http.read_timeout_s`.")
    ] = 0.0
    total_timeout_s: Annotated[float, _num(0.1, 7 * DAY_S, "How long a whole call to that upstream may take.")] = (
        3_600.0
    )
    ca_file: Annotated[Text, _about("Certificates that the upstream's is checked against; empty: the system's.")] = ""
    cert_file: Annotated[Text, _about("Certificate that the upstream is shown.")] = ""
    key_file: Annotated[Text, _about("Key of that certificate, where it has a file of its own.")] = ""
    verify: Annotated[
        bool, _about("Whether the upstream's certificate is checked; only for tests should it not be.")
    ] = True
    allowed_fields: Annotated[
        AllowedFields,
        _about(
            "Fields of the body that callers of that upstream may set though they are refused otherwise, such as [priority]."
        ),
    ] = ()
    media_hosts: Annotated[
        MediaHosts, _about("Hosts that upstream may fetch files of a request from, such as [images.example.com].")
    ] = ()


class GatewaySettings(Group, frozen=True):
    body_bytes_max: Annotated[int, _int(1_024, 1 << 28, "Largest body of an interactive call.")] = 32 << 20
    flex_wait_s: Annotated[
        float,
        _num(0.1, 3_600, "How long a call with `service_tier: flex` waits for a gap before it is refused with 429."),
    ] = 60.0
    models_cache_s: Annotated[
        float, _num(0, 3_600, "How long the models that deployments name are believed, for /v1/models."), ADVANCED
    ] = 10.0


class WorkerSettings(Group, frozen=True):
    in_flight_max: Annotated[int, _int(1, 65_536, "Calls in flight per worker process, over all models.")] = 64
    in_flight_max_global: Annotated[
        int, _int(0, 10_000_000, "Calls in flight over all worker processes and models; 0 lifts the limit.")
    ] = 0
    slice_count_max: Annotated[int, _int(1, 10_000, "Slices one worker process holds at once."), ADVANCED] = 64
    lease_ms: Annotated[int, _int(1_000, 3_600_000, "How long a lease lasts without a heartbeat.")] = 30_000
    heartbeat_ms: Annotated[
        int, _int(100, 60_000, "Pause between two heartbeats; at most a third of `lease_ms`."), ADVANCED
    ] = 2_000
    poll_ms: Annotated[int, _int(10, 60_000, "How often an idle worker looks for work without a notice."), ADVANCED] = (
        1_000
    )
    sweep_ms: Annotated[
        int, _int(100, 600_000, "Pause between two rounds of upkeep: lost leases, overdue jobs, retention."), ADVANCED
    ] = 5_000
    grace_ms: Annotated[
        int, _int(0, 3_600_000, "How long calls in flight may go on after a stop, a cancel or a deadline.")
    ] = 30_000
    cancel_grace_ms: Annotated[
        int,
        _int(
            0,
            3_600_000,
            "How long calls in flight may go on after a cancel, where that is less than `worker.grace_ms`; 0 aborts them at once.",
        ),
    ] = 30_000
    record_flush_ms: Annotated[int, _int(1, 10_000, "Longest a finished item waits for its commit."), ADVANCED] = 50
    record_lines_max: Annotated[int, _int(1, 10_000, "Most finished items in one commit."), ADVANCED] = 256
    record_bytes_max: Annotated[int, _int(1_024, 1 << 28, "Most bytes of finished lines in one commit."), ADVANCED] = (
        1 << 20
    )


class IngestSettings(Group, frozen=True):
    slice_count_max: Annotated[int, _int(1, 10_000, "Most items in one slice."), ADVANCED] = 64
    slice_bytes_max: Annotated[
        int, _int(1_024, 1 << 30, "Most bytes in one slice; a longer line makes a slice alone."), ADVANCED
    ] = 4 << 20
    slice_units_max: Annotated[
        int,
        _int(1, 1 << 40, "Most work units (estimated tokens) in one slice; a larger request makes a slice alone."),
        ADVANCED,
    ] = 1 << 20
    small_bytes_max: Annotated[
        int,
        _int(
            0,
            8 << 20,
            "Largest input that a worker reads inside its own process; each line counts 512 bytes more.",
        ),
        ADVANCED,
    ] = 1 << 20
    passes_max: Annotated[
        int,
        _int(1, 16, "Larger inputs that one worker process reads at once; one tenant has at most all but one of them."),
        ADVANCED,
    ] = 3
    single_model: Annotated[bool, _about("Refuse an input whose lines name different models, as OpenAI does.")] = False


class LimitsSettings(Group, frozen=True):
    file_bytes_max: Annotated[int, _int(1, 1 << 40, "Largest file that may be uploaded.")] = 209_715_200
    upload_bytes_max: Annotated[int, _int(1, 1 << 40, "Largest file that may be uploaded in parts.")] = 8 << 30
    line_bytes_max: Annotated[int, _int(64, 1 << 30, "Longest line of an input.")] = 1 << 20
    items_max: Annotated[int, _int(1, 10_000_000, "Most lines in one input.")] = 50_000
    json_depth_max: Annotated[int, _int(2, 512, "Deepest nesting in one line of an input.")] = 64
    body_bytes_max: Annotated[int, _int(1_024, 1 << 26, "Largest JSON body of an API call other than an upload.")] = (
        1 << 20
    )
    inline_bytes_max: Annotated[
        int, _int(1_024, 1 << 34, "Largest body that creates a batch with its requests inside.")
    ] = 268_435_456
    message_batch_items_max: Annotated[
        int, _int(1, 10_000_000, "Most requests in one of Anthropic's message batches.")
    ] = 100_000
    pending_jobs_max: Annotated[
        int,
        _int(
            0,
            1_000_000,
            "Most unfinished batches of one share owner (the tenant, or as `scheduler.scope_preference` says); 0 lifts the limit.",
        ),
    ] = 50
    pending_jobs_per_key_max: Annotated[
        int, _int(0, 1_000_000, "Most batches that one key may have unfinished; 0 lifts the limit.")
    ] = 0
    pending_responses_max: Annotated[
        int, _int(0, 10_000_000, "Most background responses that a tenant may have unfinished; 0 lifts the limit.")
    ] = 100_000
    queued_items_max: Annotated[
        int, _int(0, 1_000_000_000, "Most items that a tenant may have unfinished; 0 lifts the limit.")
    ] = 5_000_000
    stored_bytes_max: Annotated[
        int, _int(0, 1 << 50, "Most bytes of files that a tenant may keep; 0 lifts the limit.")
    ] = 1 << 40
    jobs_per_hour_max: Annotated[
        int, _int(0, 1_000_000, "Most batches that a tenant may create in an hour; 0 lifts the limit.")
    ] = 0
    bytes_per_day_max: Annotated[
        int, _int(0, 1 << 50, "Most bytes of input that a tenant may submit in a day; 0 lifts the limit.")
    ] = 0
    uploads_max: Annotated[int, _int(1, 10_000, "Uploads that one process receives from one tenant at once.")] = 4
    event_streams_max: Annotated[
        int, _int(1, 100_000, "Event streams and waits for a batch that one process holds open for one tenant at once.")
    ] = 200
    windows: Annotated[Literal["any", "24h"], _about("Which completion windows callers may ask for.")] = "any"
    window_min_s: Annotated[int, _int(1, 31 * DAY_S, "Shortest completion window.")] = 60
    window_max_s: Annotated[int, _int(1, 365 * DAY_S, "Longest completion window.")] = 14 * DAY_S

    def quotas(self) -> Quotas:
        """Return the limits that the store enforces for each tenant."""
        return Quotas(
            pending_jobs_max=self.pending_jobs_max,
            pending_jobs_per_key_max=self.pending_jobs_per_key_max,
            pending_responses_max=self.pending_responses_max,
            queued_items_max=self.queued_items_max,
            stored_bytes_max=self.stored_bytes_max,
            jobs_per_hour_max=self.jobs_per_hour_max,
            bytes_per_day_max=self.bytes_per_day_max,
        )


class Retry(Group, frozen=True):
    attempts_max: Annotated[
        int, _int(1, 100, "How often an item is tried; waiting for capacity does not count as a try.")
    ] = 3
    broken_attempts_max: Annotated[
        int, _int(1, 100, "How often an item is tried whose answers are no answers."), ADVANCED
    ] = 2
    backoff_ms: Annotated[int, _int(1, 3_600_000, "Longest pause before the second try; it doubles each time.")] = 500
    backoff_ms_max: Annotated[int, _int(1, 3_600_000, "Longest pause before any try.")] = 30_000
    deferral_ms: Annotated[
        int, _int(1, 600_000, "Longest pause before an item looks for capacity again."), ADVANCED
    ] = 2_000
    retry_after_ms_max: Annotated[
        int, _int(0, 7 * DAY_S * 1_000, "Longest wait that an upstream may ask for with Retry-After.")
    ] = 86_400_000
    budget_share: Annotated[
        float,
        _num(
            0,
            1,
            "Most retries on the deployment that failed, as a share of its first attempts in the last 60 s; further retries wait.",
        ),
    ] = 0.1
    budget_min: Annotated[
        int,
        _int(
            0,
            1_000_000,
            "Retries that a deployment gets in any 60 s beside that share, per process; `run`: as many as `worker.in_flight_max`.",
        ),
    ] = 3

    def policy(self) -> RetryPolicy:
        """Return these values as the retry decision takes them."""
        given = msgspec.structs.asdict(self)
        return RetryPolicy(**{name: value for name, value in given.items() if not name.startswith("budget_")})


class Retention(Group, frozen=True):
    file_s: Annotated[
        int, _int(3_600, 3_650 * DAY_S, "How long a file is kept that was uploaded without `expires_after`.")
    ] = 30 * DAY_S
    completed_s: Annotated[
        int,
        _int(
            3_600, 3_650 * DAY_S, "How long result files of a completed batch are kept, without `output_expires_after`."
        ),
    ] = 7 * DAY_S
    failed_s: Annotated[
        int,
        _int(
            3_600,
            3_650 * DAY_S,
            "How long result files of a failed, cancelled or expired batch are kept, without `output_expires_after`.",
        ),
    ] = 14 * DAY_S
    metadata_s: Annotated[
        int,
        _int(3_600, 3_650 * DAY_S, "How long an ended batch or response can be seen; longer while its files are kept."),
    ] = 30 * DAY_S
    audit_s: Annotated[int, _int(DAY_S, 3_650 * DAY_S, "How long the audit keeps what operators changed.")] = (
        365 * DAY_S
    )
    scan_max: Annotated[
        int, _int(1, 100_000, "Most rows of one kind that one round of retention or collection takes."), ADVANCED
    ] = 200
    orphan_s: Annotated[
        int, _int(60, 365 * DAY_S, "How old bytes that nothing names must be before they are collected."), ADVANCED
    ] = DAY_S


class Auth(Group, frozen=True):
    pepper: Annotated[
        Secret | None,
        _about(
            "Secret that keys are hashed with; the default is made once and kept in the data directory. Every API process needs the same."
        ),
    ] = None
    bootstrap_key: Annotated[
        Secret | None,
        _about(
            "First key of a store that has none, in the default organization; its text comes from `tidegate keys generate`."
        ),
    ] = None


class CallbacksSettings(Group, frozen=True):
    allow_hosts: Annotated[
        tuple[Host, ...],
        Meta(
            max_length=1_000,
            description="Hosts that webhooks may go to at any address and port, beside those with public addresses.",
        ),
    ] = ()
    allow_http: Annotated[bool, _about("Whether webhooks may go out over plain http, too.")] = False
    body_bytes_max: Annotated[
        int, _int(1_024, 64 << 20, "Most bytes of a callback with an item; a larger one leaves the answer out.")
    ] = 1 << 20

    def rules(self) -> TargetRules:
        return TargetRules(frozenset(host.lower().strip("[]") for host in self.allow_hosts), self.allow_http)


class RemoteSettings(Group, frozen=True):
    url: Annotated[
        Text, _about("Server elsewhere that commands ask, such as https://gateway:8080; also `--server`.")
    ] = ""
    key: Annotated[Secret | None, _about("API key for that server: env:NAME or file:PATH.")] = None


class AddedEntries(Group, frozen=True):
    env_names: Annotated[
        tuple[Annotated[str, Meta(min_length=1, max_length=255, pattern=r"^[A-Za-z0-9_]*\*?$")], ...],
        Meta(
            max_length=1_000,
            description="Environment variables that deployments added at run time may take secrets from; UP_* allows all that begin so.",
        ),
    ] = ()
    folders: Annotated[
        tuple[Annotated[str, Meta(min_length=1, max_length=4_096)], ...],
        Meta(
            max_length=1_000,
            description="Folders whose files deployments added at run time may name for keys and certificates; links must not lead out.",
        ),
    ] = ()


class Logging(Group, frozen=True):
    level: Annotated[Literal["debug", "info", "warning", "error"], _about("Least important log line to print.")] = (
        "info"
    )
    format: Annotated[Literal["text", "json"], _about("How a log line looks.")] = "text"


class Metrics(Group, frozen=True):
    host: Annotated[Host, _about("Address of the listener for metrics.")] = "127.0.0.1"
    port: Annotated[
        int, _int(0, 65_535, "Port that shows /metrics, apart from the API's and for workers too; 0 shows none.")
    ] = 0


class Settings(Group, frozen=True):
    """All settings.

    `models`, `resources`, `tenants`, `tiers`, `hooks`, `guardrails` and all of `parameters` are
    mappings by name; every other key is a plain value.
    """

    data: Annotated[Text, _about("Directory for everything that is kept on this machine.")] = ".tidegate"
    server: ServerSettings = ServerSettings()
    admin: AdminSettings = AdminSettings()
    store: StoreSettings = StoreSettings()
    blobs: BlobsSettings = BlobsSettings()
    http: Http = Http()
    upstream: UpstreamSettings = UpstreamSettings()
    gateway: GatewaySettings = GatewaySettings()
    worker: WorkerSettings = WorkerSettings()
    scheduler: SchedulerSettings = SchedulerSettings()
    redis: Redis = Redis()
    budgets: BudgetSettings = BudgetSettings()
    ingest: IngestSettings = IngestSettings()
    parameters: ParametersSettings = ParametersSettings()
    limits: LimitsSettings = LimitsSettings()
    retry: Retry = Retry()
    retention: Retention = Retention()
    auth: Auth = Auth()
    callbacks: CallbacksSettings = CallbacksSettings()
    remote: RemoteSettings = RemoteSettings()
    added: AddedEntries = AddedEntries()
    logging: Logging = Logging()
    metrics: Metrics = Metrics()
    endpoints: Annotated[
        tuple[Annotated[str, Meta(max_length=132, pattern=r"^/v1/[a-z0-9_/-]+$")], ...],
        Meta(
            max_length=64, description="Endpoints that batches may name beside the built-in ones, such as /v1/detect."
        ),
    ] = ()
    failpoints: Annotated[Text, _about("For tests: where this process should fail; see failpoints.py.")] = ""
    models: Annotated[
        dict[Annotated[str, Meta(min_length=1, max_length=255)], ModelSettings],
        Meta(max_length=10_000, description="Deployments by the model name that callers ask for."),
    ] = msgspec.field(default_factory=dict)
    resources: Annotated[
        dict[Annotated[str, Meta(min_length=1, max_length=255)], ResourceEntry],
        Meta(max_length=10_000, description="Named routes to models with budgets of their own."),
    ] = msgspec.field(default_factory=dict)
    tenants: Annotated[
        dict[Annotated[str, Meta(min_length=1, max_length=255)], TenantEntry],
        Meta(max_length=100_000, description="Weights, tiers and budgets by the organization's name."),
    ] = msgspec.field(default_factory=dict)
    tiers: Annotated[
        dict[Annotated[str, Meta(min_length=1, max_length=64)], Weight],
        Meta(max_length=64, description="Weights of service tiers by name, such as {gold: 4, bronze: 0.5}."),
    ] = msgspec.field(default_factory=dict)
    hooks: Annotated[
        dict[ShortName, HookEntry],
        Meta(max_length=64, description="Functions of your own before a call and after its answer, by name."),
    ] = msgspec.field(default_factory=dict)
    guardrails: Annotated[
        dict[ShortName, GuardrailEntry],
        Meta(max_length=256, description="What requests and answers are held to, by name."),
    ] = msgspec.field(default_factory=dict)

    @property
    def data_dir(self) -> Path:
        """Return the data directory as an absolute path."""
        return Path(self.data).expanduser().absolute()
