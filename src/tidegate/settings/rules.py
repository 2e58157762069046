"""Rules over several settings: defaults that follow from others, and values that do not fit."""

from collections.abc import Iterator
from ipaddress import ip_network
from pathlib import Path
from urllib.parse import urlsplit

import msgspec

from tidegate.core.deployments import Secret
from tidegate.settings import body_fields, models, parameters, policy, tenants
from tidegate.settings.groups import Settings
from tidegate.settings.key_path import KeyPath

STORE_SCHEMES = ("sqlite", "postgresql", "postgres")
BLOB_SCHEMES = ("file", "s3", "az")
DEFAULT_QUEUE = "default"
REDIS_SCHEMES = ("redis", "rediss", "unix")
_WITH_PASSWORD = (("store", "url"), ("redis", "url"))


def completed(settings: Settings) -> Settings:
    """Return the settings with store and blobs in the data directory by default."""
    data = settings.data_dir
    store, blobs = settings.store, settings.blobs
    if store.url is None:
        store = msgspec.structs.replace(store, url=Secret(f"sqlite://{data / 'tidegate.db'}"))
    if not blobs.url:
        blobs = msgspec.structs.replace(blobs, url=f"file://{data / 'blobs'}")
    return msgspec.structs.replace(settings, store=store, blobs=blobs)


def local_path(url: str) -> Path:
    """Return the path in a sqlite:/// or file:/// URL.

    It is absolute, unless it begins with a dot (`sqlite:///./tidegate.db`).
    """
    rest = url.partition(":///")[2]
    path = Path(rest) if rest.startswith(".") else Path("/" + rest.lstrip("/"))
    return path.absolute()


def redacted(url: str) -> str:
    """Return a URL without its password, to show it."""
    head, at, tail = url.rpartition("@")
    scheme, slashes, userinfo = head.partition("://")
    return f"{scheme}{slashes}{userinfo.partition(':')[0]}:***{at}{tail}" if at and ":" in userinfo else url


def is_worth_hiding(path: KeyPath, text: str) -> bool:
    """Return whether this text is really a secret.

    A URL of the store, of Redis or of a queue is one only if it has a password.
    """
    return (path not in _WITH_PASSWORD and path[-2:] != ("queue", "url")) or redacted(text) != text


def problems(settings: Settings) -> Iterator[tuple[KeyPath, str]]:
    """Return all problems of the settings: for each the key to fix, and what to do."""
    yield from _url_problems(settings)
    yield from models.problems(settings)
    yield from body_fields.problems(settings)
    yield from parameters.problems(settings.parameters)
    yield from tenants.problems(settings)
    yield from policy.problems(settings)
    yield from _scheduler_problems(settings)
    worker, http, limits, retry = settings.worker, settings.http, settings.limits, settings.retry
    for key, low, other, high in (
        ("worker.heartbeat_ms", worker.heartbeat_ms * 3, "a third of worker.lease_ms", worker.lease_ms),
        ("http.kept_alive_max", http.kept_alive_max, "http.connections_max", http.connections_max),
        ("worker.in_flight_max", worker.in_flight_max, "http.connections_max", http.connections_max),
        ("limits.window_min_s", limits.window_min_s, "limits.window_max_s", limits.window_max_s),
        ("limits.line_bytes_max", limits.line_bytes_max, "limits.file_bytes_max", limits.file_bytes_max),
        ("retry.backoff_ms", retry.backoff_ms, "retry.backoff_ms_max", retry.backoff_ms_max),
    ):
        if low > high:
            yield tuple(key.split(".")), f"is more than {other} ({high:,}); lower it or raise the other"


def warnings(settings: Settings) -> list[str]:
    """Return warnings about settings that work but that an operator should know about."""
    found = []
    if settings.store.is_postgresql and not settings.blobs.is_object_store:
        found.append(
            "The store is PostgreSQL but blobs are local files: every process must run on this host, or set blobs.url to s3://… or az://…."
        )
    if settings.redis.url is not None and not settings.store.is_postgresql:
        found.append(
            "redis.url is set though the store is on this machine alone, which deals limits out as fast; remove it."
        )
    for one in models.deployments(settings):
        if not one.tls.verify:
            found.append(
                f"The certificate of deployment {one.name} is not checked (verify: false), so anyone may answer in its place; use ca_file."
            )
        found += one.warnings
    if settings.scheduler.shadow_mode == settings.scheduler.mode:
        found.append("scheduler.shadow_mode is scheduler.mode itself and will never differ; choose another, or none.")
    return found


def _scheduler_problems(settings: Settings) -> Iterator[tuple[KeyPath, str]]:
    scheduler = settings.scheduler
    for name, words in (("scope_preference", scheduler.scope_preference), ("queues", scheduler.queues)):
        if len(set(words)) < len(words):
            yield ("scheduler", name), "names one twice; keep each once"
    if DEFAULT_QUEUE not in scheduler.queues:
        yield ("scheduler", "queues"), f"lacks `{DEFAULT_QUEUE}`, where batches go that name no queue; add it"
    for queue in scheduler.queue_weights:
        if queue not in scheduler.queues:
            yield ("scheduler", "queue_weights", queue), "is not one of scheduler.queues; add it there or remove it"
    if scheduler.fast_lane and scheduler.fast_lane_share + scheduler.urgent_share > 1:
        yield ("scheduler", "fast_lane_share"), "and scheduler.urgent_share are more than the whole together; lower one"
    if scheduler.fast_lane and scheduler.fast_lane_units >= scheduler.large_units:
        yield ("scheduler", "fast_lane_units"), "must be below scheduler.large_units: a batch is small or large"


def _url_problems(settings: Settings) -> Iterator[tuple[KeyPath, str]]:
    store, blobs = settings.store, settings.blobs
    if _scheme(store.location) not in STORE_SCHEMES:
        yield ("store", "url"), "must begin with sqlite:///, or postgresql://"
    elif store.is_postgresql and not _has_host_or_socket(store.location):
        yield ("store", "url"), "names no database: write postgresql://USER:PASSWORD@HOST:5432/DATABASE"
    if settings.redis.url is not None and _scheme(settings.redis.location) not in REDIS_SCHEMES:
        yield ("redis", "url"), "must begin with redis://, rediss:// or unix://"
    for text in settings.server.trusted_proxies:
        if not _is_network(text):
            yield ("server", "trusted_proxies"), f"{text!r} is neither an address nor a range such as 10.0.0.0/8"
    if settings.metrics.port and settings.metrics.port == settings.server.port:
        yield ("metrics", "port"), "is server.port; metrics have a port of their own"
    for group, port in (("server", settings.server.port), ("metrics", settings.metrics.port)):
        if port and settings.admin.port == port:
            yield ("admin", "port"), f"is {group}.port; the admin API and the console have a port of their own"
    if settings.remote.url and not is_http_url(settings.remote.url):
        yield ("remote", "url"), "must be a URL such as https://gateway:8080, without a key in it"
    for path, url in _metrics_urls(settings):
        if url and not is_http_url(url):
            yield path, "must be a URL such as http://10.0.0.5:8000/metrics, without a key in it"
    if _scheme(blobs.url) not in BLOB_SCHEMES:
        yield ("blobs", "url"), "must begin with file:///, s3:// or az://"
    elif blobs.is_object_store and not urlsplit(blobs.url).netloc:
        yield ("blobs", "url"), "names no bucket: write s3://BUCKET/PREFIX or az://CONTAINER/PREFIX"
    elif blobs.is_object_store and not store.is_postgresql:
        yield (
            ("blobs", "url"),
            "is an object store while the store is on this machine alone: set store.url to a postgresql:// address, or keep both here",
        )
    if (blobs.access_key_id is None) != (blobs.secret_access_key is None):
        yield ("blobs", "access_key_id"), "and blobs.secret_access_key go together: give both or neither"
    if blobs.endpoint and not is_http_url(blobs.endpoint):
        yield ("blobs", "endpoint"), "must be a URL such as https://s3.example.com:9000, without a key in it"
    elif blobs.endpoint.startswith("http://") and not blobs.allow_http:
        yield ("blobs", "endpoint"), "is plain http; use https, or set blobs.allow_http: true if the network is yours"


def _metrics_urls(settings: Settings) -> Iterator[tuple[KeyPath, str]]:
    for model, entry in settings.models.items():
        for index, deployment in enumerate(entry.deployments):
            yield ("models", model, "deployments", index, "metrics_url"), deployment.metrics_url


def is_http_url(url: str) -> bool:
    """Return whether this is a web address without a key in it."""
    try:
        parts = urlsplit(url)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.username is None and parts.port != 0
    except ValueError:
        return False


def _scheme(url: str) -> str:
    return url.partition("://")[0]


def _has_host_or_socket(url: str) -> bool:
    parts = urlsplit(url)
    return bool(parts.path.strip("/")) and (bool(parts.netloc) or "host=" in parts.query)


def _is_network(text: str) -> bool:
    try:
        ip_network(text, strict=False)
    except ValueError:
        return False
    return True
