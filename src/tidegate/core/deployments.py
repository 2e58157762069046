"""An operator's settings of model servers: the deployments, and the limits of the HTTP client that
calls them.

Half-given or impossible values are refused here, in words that say what to do, so nothing later has
to check them. This module knows no HTTP client, opens no file and reads no environment: a key
arrives as a `Secret` that was already resolved.
"""

from collections.abc import Iterable, Mapping
from enum import StrEnum
from urllib.parse import urlsplit

import msgspec
from msgspec.structs import replace

from tidegate.core.budgets.budget import Limit
from tidegate.core.errors import SettingsError
from tidegate.core.grouping.chat import ChatBatching
from tidegate.core.usage.prices import Price


class EngineKind(StrEnum):
    """The kind of server that answers; it decides how our key is presented."""

    VLLM = "vllm"
    SGLANG = "sglang"
    OPENAI = "openai"
    ANTHROPIC = "anthropic"
    GENERIC = "generic"


class Secret:
    """A text that never shows itself: printing, formatting, logging or pickling it reveals nothing.

    `source` is where it can be read again, if anywhere: `file:PATH`.
    """

    __slots__ = ("_text", "source")

    def __init__(self, text: str, source: str = "") -> None:
        self._text = text
        self.source = source

    def reveal(self) -> str:
        """Return the text itself, only for the one header or handshake that needs it."""
        return self._text

    def __repr__(self) -> str:
        return "***"

    __str__ = __repr__

    def __format__(self, spec: str) -> str:
        return "***"

    def __bool__(self) -> bool:
        return bool(self._text)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Secret) and other._text == self._text

    def __hash__(self) -> int:
        return hash((Secret, self._text))

    def __copy__(self) -> "Secret":
        return self

    def __deepcopy__(self, memo: object) -> "Secret":
        return self

    def __reduce__(self) -> str:
        raise TypeError("a secret is not written anywhere: pass the setting that names it instead")


class Tls(msgspec.Struct, frozen=True):
    """How a deployment's certificate is checked, and which one we show.

    A new `stamp` means that the files' content has changed.
    """

    ca_file: str | None = None
    cert_file: str | None = None
    key_file: str | None = None
    verify: bool = True
    stamp: str = ""

    def __post_init__(self) -> None:
        if self.key_file and not self.cert_file:
            raise SettingsError("tls.key_file is set without tls.cert_file: name the client certificate it belongs to")
        if self.ca_file and not self.verify:
            raise SettingsError(
                "tls.ca_file and tls.verify: false contradict one another: keep ca_file and remove verify: false"
            )

    def has_files_of(self, other: "Tls") -> bool:
        """Return whether both name the same files; their content does not matter."""
        return replace(self, stamp="") == replace(other, stamp="")


class Serves(StrEnum):
    """The callers that a deployment serves: one pool for both kinds, or a pool of its own for
    each."""

    INTERACTIVE = "interactive"
    BATCH = "batch"
    BOTH = "both"


class TideMode(StrEnum):
    """The ways to find the batch share of a deployment: from metrics or by learning, or not at all
    (the ceiling is the limit).
    """

    AUTO = "auto"
    OFF = "off"


class Estimate(StrEnum):
    """The ways to charge tokens before a call is sent: what such calls used to take, or all that it
    could take.
    """

    LIKELY = "likely"
    BOUND = "bound"


# A long recording is answered only after all of it was read, so silence is no sign of trouble
# there.
AUDIO_PATH = "/v1/audio/"
AUDIO_TIMEOUT_S = 600.0

_HEADER_LETTERS = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_")
_OWN_HEADERS = frozenset(
    (
        "accept",
        "accept-encoding",
        "anthropic-version",
        "authorization",
        "connection",
        "content-encoding",
        "content-length",
        "content-type",
        "expect",
        "host",
        "idempotency-key",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
        "user-agent",
        "x-api-key",
    )
)


class Hints(msgspec.Struct, frozen=True):
    """Hints about a call for the engine or router behind us; an empty name sends nothing.

    `priority_field` is a field of the body (vLLM and SGLang take `priority`; the lowest goes first
    there). The others are headers.
    """

    priority_field: str = ""
    priority: int = 100
    objective_header: str = ""
    objective: str = "batch"
    fairness_header: str = ""
    deadline_header: str = ""
    prefix_header: str = ""

    def __post_init__(self) -> None:
        for field_name in ("objective_header", "fairness_header", "deadline_header", "prefix_header"):
            name = getattr(self, field_name)
            if name and (not set(name) <= _HEADER_LETTERS or name.lower() in _OWN_HEADERS):
                raise SettingsError(
                    f"hints.{field_name} is {name!r}: use letters, digits and dashes, and no header that requests have anyway"
                )
        if not self.objective.isascii() or not self.objective.isprintable():
            raise SettingsError(f"hints.objective is {self.objective!r}: use printable ASCII")


class Queue(msgspec.Struct, frozen=True):
    """The queue that takes a deployment's requests, and the one that returns its answers.

    `url` may carry a password.
    """

    url: Secret
    requests: str
    results: str


class Deployment(msgspec.Struct, frozen=True):
    """One upstream endpoint.

    - `models` are the public names it serves; none means any model.
    - Without `is_capacity_known`, `max_in_flight` is only a ceiling: the calls it can take are
      learned from a safe start. `batch_fraction` of it is the most that background work ever takes.
    - `order`: a deployment gets calls only while none of an earlier order is fit for them; a full
      one is waited for.
    - `metrics_names` maps our names of an engine's gauges to its own, where it is neither vLLM nor
      SGLang.
    - `output_tokens_max` is the most that one answer there can have; 0: unknown.
    - `upstream_model` is the name by which the server knows the model, and with which requests are
      sent.
    - `is_drained`: by an operator's order it gets no new calls. A new `refresh_count` is the order
      to try it at once, whatever is known of its health.
    - At most `upstream_max_batch_inputs` embedding items share a call, and fewer than
      `upstream_min_batch_inputs` are not worth one. `chat_batching` says the same for chat items.
    """

    name: str
    url: str
    models: tuple[str, ...] = ()
    engine: EngineKind = EngineKind.GENERIC
    api_key: Secret | None = None
    max_in_flight: int = 64
    is_capacity_known: bool = True
    weight: float = 1.0
    order: int = 1
    read_timeout_s: float | None = None
    total_timeout_s: float = 3600.0
    endpoint_timeouts_s: Mapping[str, float] = msgspec.field(default_factory=dict)
    tls: Tls = msgspec.field(default_factory=Tls)
    limits: tuple[Limit, ...] = ()
    estimate: Estimate = Estimate.LIKELY
    tokens_in_flight_max: int = 0
    batch_fraction: float = 1.0
    tide: TideMode = TideMode.AUTO
    metrics_url: str = ""
    metrics_names: Mapping[str, str] = msgspec.field(default_factory=dict)
    hints: Hints = Hints()
    serves: Serves = Serves.BOTH
    upstream_max_batch_inputs: int = 1
    upstream_min_batch_inputs: int = 2
    chat_batching: ChatBatching = msgspec.field(default_factory=ChatBatching)
    price: Price | None = None
    output_tokens_max: int = 0
    queue: Queue | None = None
    upstream_model: str = ""
    is_drained: bool = False
    refresh_count: int = 0

    def __post_init__(self) -> None:
        where = f"deployment {self.name!r}"
        if not self.name:
            raise SettingsError("a deployment has no name: give it one, it appears in logs and on the health page")
        _check_url(where, self.url)
        if self.max_in_flight < 1:
            raise SettingsError(f"{where}: max_in_flight is {self.max_in_flight}: use 1 or more")
        if not self.weight > 0:
            raise SettingsError(f"{where}: weight is {self.weight}: use a number above 0, or remove the deployment")
        if self.order < 1:
            raise SettingsError(
                f"{where}: order is {self.order}: use 1 for those that come first, and more for later ones"
            )
        if not 0 < self.batch_fraction <= 1:
            raise SettingsError(f"{where}: batch_fraction is {self.batch_fraction}: use a number above 0 and up to 1")
        if self.tokens_in_flight_max < 0:
            raise SettingsError(
                f"{where}: tokens_in_flight_max is {self.tokens_in_flight_max}: use 0 to lift it, or more"
            )
        if self.upstream_max_batch_inputs < 1 or self.upstream_min_batch_inputs < 2:
            raise SettingsError(
                f"{where}: upstream_max_batch_inputs is 1 (off) or more, and upstream_min_batch_inputs 2 or more"
            )
        timeouts = [("read_timeout_s", self.read_timeout_s), ("total_timeout_s", self.total_timeout_s)]
        timeouts += [(f"endpoint_timeouts_s of {name}", value) for name, value in self.endpoint_timeouts_s.items()]
        for name, value in timeouts:
            if value is not None and not value > 0:
                raise SettingsError(f"{where}: {name} is {value}: use a number of seconds above 0")
        if self.queue is not None:
            self._check_queue(where)
        if self.engine is EngineKind.ANTHROPIC and self.items_per_call_max > 1:
            raise SettingsError(
                f"{where}: engine anthropic takes one item in a call: leave out chat_batching and upstream_max_batch_inputs"
            )
        if self.api_key is not None and not _fits_a_header(self.api_key.reveal()):
            raise SettingsError(f"{where}: api_key is empty or has spaces, line ends or non-ASCII characters: check it")

    def _check_queue(self, where: str) -> None:
        assert self.queue is not None
        if self.serves is not Serves.BATCH:
            raise SettingsError(f"{where}: a queue takes no interactive calls: use serves: batch with queue")
        if self.api_key is not None:
            raise SettingsError(
                f"{where}: api_key would lie in the queue for all to read: give it to what takes from the queue instead"
            )
        if self.queue.url.reveal().partition("://")[0] not in ("redis", "rediss", "unix"):
            raise SettingsError(f"{where}: queue.url must begin with redis://, rediss:// or unix://")
        if self.queue.requests == self.queue.results:
            raise SettingsError(f"{where}: queue.requests and queue.results are the same: give each a name of its own")
        if self.items_per_call_max > 1:
            raise SettingsError(
                f"{where}: what goes through a queue is not grouped: leave out the settings for batches of inputs"
            )

    def total_s(self, endpoint: str) -> float:
        """Return how long a whole call to this endpoint may take."""
        if endpoint in self.endpoint_timeouts_s:
            return self.endpoint_timeouts_s[endpoint]
        is_audio = endpoint.startswith(AUDIO_PATH) and self.queue is None
        return min(self.total_timeout_s, AUDIO_TIMEOUT_S) if is_audio else self.total_timeout_s

    @property
    def takes_background(self) -> bool:
        return self.serves is not Serves.INTERACTIVE

    @property
    def takes_interactive(self) -> bool:
        return self.serves is not Serves.BATCH

    @property
    def background_in_flight_max(self) -> int:
        """Return the most background calls that may be in flight here, over all processes."""
        most = max(1, int(self.max_in_flight * self.batch_fraction))
        return min(most, self.chat_batching.max_in_flight or most)

    @property
    def warnings(self) -> tuple[str, ...]:
        """Return warnings about settings that have no effect, in sentences for the operator."""
        if not (why := self.chat_batching.ineffective):
            return ()
        fault = "has chat_batching.mode sync_microbatch, but every chat item is sent in a call of its own because"
        return (f"Deployment {self.name} {fault} {why}.",)

    @property
    def items_per_call_max(self) -> int:
        """Return the most items that may share one call here."""
        chats = self.chat_batching
        return max(self.upstream_max_batch_inputs, chats.upstream_max_batch_size if chats.groups else 1)

    def is_same_server(self, other: "Deployment") -> bool:
        """Return whether calls to both reach the same server as the same caller, so that what is
        learned of one holds for both.
        """
        mine = (self.url, self.engine, self.api_key, self.tls, self.queue)
        return mine == (other.url, other.engine, other.api_key, other.tls, other.queue)

    def url_of(self, endpoint: str) -> str:
        """Return the URL of an endpoint: `http://h/v1` and `http://h` both give
        `http://h/v1/chat/completions`.
        """
        base = self.url.rstrip("/")
        path = endpoint if endpoint.startswith("/") else "/" + endpoint
        if base.endswith("/v1") and path.startswith("/v1/"):
            path = path[len("/v1") :]
        return base + path


def _fits_a_header(text: str) -> bool:
    return bool(text) and text.isascii() and all(33 <= ord(letter) <= 126 for letter in text)


def _check_url(where: str, url: str) -> None:
    try:
        parts = urlsplit(url)
        port_is_fine = parts.port is None or parts.port > 0
    except ValueError as wrong:
        raise SettingsError(
            f"{where}: its url cannot be read ({wrong}): write it like http://10.0.0.5:8000/v1"
        ) from None
    if parts.username is not None or parts.password is not None:
        raise SettingsError(f"{where}: its url carries a user or password: put the key in api_key instead")
    if parts.scheme not in ("http", "https") or not parts.hostname or not port_is_fine:
        raise SettingsError(f"{where}: url {url!r} is not an http(s) address: write it like http://10.0.0.5:8000/v1")
    if parts.query or parts.fragment:
        raise SettingsError(f"{where}: url {url!r} has a query or a fragment: give only the address and path")
    if any(ord(letter) <= 32 for letter in url):
        raise SettingsError(f"{where}: url {url!r} has spaces or control characters: remove them")


class Resource(msgspec.Struct, frozen=True):
    """A named route to a model with budgets of its own.

    Its `limits` replace the deployment's for the periods they name.

    `fallbacks` name other resources or models, in order: a call goes on to them while it can
    neither be done nor has been billed. `total_timeout_s` wins over that of the deployments.
    """

    name: str
    model: str
    limits: tuple[Limit, ...] = ()
    fallbacks: tuple[str, ...] = ()
    total_timeout_s: float | None = None


def fallbacks(resource: Resource, by_name: Mapping[str, Resource]) -> dict[str, Resource]:
    """Return a resource's fallbacks in order, each followed by its own fallbacks, each once."""
    found: dict[str, Resource] = {}
    ahead = list(resource.fallbacks)
    while ahead:
        name = ahead.pop(0)
        if name == resource.name or name in found:
            continue
        found[name] = by_name.get(name) or Resource(name, name)
        ahead = [*found[name].fallbacks, *ahead]
    return found


def reached_names(resources: Iterable[Resource]) -> dict[str, tuple[str, ...]]:
    """Return for each resource every name that a call to it may come under.

    These are its own name, its model's, and those of its fallbacks and their models.
    """
    by_name = {one.name: one for one in resources}
    return {
        name: tuple(
            dict.fromkeys(
                (
                    name,
                    own.model,
                    *(other for one in fallbacks(own, by_name).values() for other in (one.name, one.model)),
                )
            )
        )
        for name, own in by_name.items()
    }


class HttpLimits(msgspec.Struct, frozen=True):
    """The HTTP client's limits, fixed at start.

    `connections_max` is one ceiling per process over all deployments.

    Background work never takes `interactive_connections` of them. A client that takes nothing of
    its answer for `client_timeout_s` is given up, because it keeps one of them busy."""

    connect_timeout_s: float = 10.0
    read_timeout_s: float = 300.0
    write_timeout_s: float = 30.0
    pool_timeout_s: float = 10.0
    connections_max: int = 500
    kept_alive_max: int = 100
    kept_alive_s: float = 60.0
    response_bytes_max: int = 16 * 1024 * 1024
    header_bytes_max: int = 16 * 1024
    header_count_max: int = 128
    body_rate_min_bytes_per_s: float = 16.0
    body_rate_grace_s: float = 30.0
    interactive_connections: int = 0
    client_timeout_s: float = 60.0

    def __post_init__(self) -> None:
        for name in (
            "connect_timeout_s",
            "read_timeout_s",
            "write_timeout_s",
            "pool_timeout_s",
            "kept_alive_s",
            "client_timeout_s",
        ):
            if not getattr(self, name) > 0:
                raise SettingsError(f"{name} is {getattr(self, name)}: use a number of seconds above 0")
        for name in ("connections_max", "response_bytes_max", "header_bytes_max", "header_count_max"):
            if getattr(self, name) < 1:
                raise SettingsError(f"{name} is {getattr(self, name)}: use 1 or more")
        for name in ("kept_alive_max", "body_rate_min_bytes_per_s", "body_rate_grace_s", "interactive_connections"):
            if getattr(self, name) < 0:
                raise SettingsError(f"{name} is {getattr(self, name)}: use 0 or more")
        if self.kept_alive_max > self.connections_max:
            raise SettingsError(
                f"kept_alive_max ({self.kept_alive_max}) is above connections_max ({self.connections_max}): "
                "lower the first or raise the second"
            )
        if self.interactive_connections >= self.connections_max:
            raise SettingsError(
                f"interactive_connections ({self.interactive_connections}) leaves batch work none of connections_max "
                f"({self.connections_max}): lower the first or raise the second"
            )
