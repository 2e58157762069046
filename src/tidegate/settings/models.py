"""The engine's deployments, resources and shared slots, made from the settings."""

import hashlib
from collections.abc import Iterator, Mapping, Sequence

import msgspec
from msgspec.structs import replace

from tidegate.core.budgets.budget import Limit, Period
from tidegate.core.deployments import Deployment, EngineKind, Estimate, Hints, Queue, Resource, Serves, TideMode, Tls
from tidegate.core.errors import SettingsError
from tidegate.core.grouping.chat import ChatAdapter, ChatBatching
from tidegate.core.retry import RetryPolicy
from tidegate.core.usage.prices import Price, Surcharge, nano_of
from tidegate.settings.capacity import LimitEntry, ModelDeployment, ModelSettings, ModelTerms, ResourceEntry
from tidegate.settings.groups import Settings
from tidegate.settings.key_path import KeyPath

ANY_MODEL = "upstream"
GLOBAL_SLOTS = "global"
# The most calls at once for a deployment whose operator does not say how many it can take.
MAX_IN_FLIGHT = 64
_OWN_ENGINES = ("vllm", "sglang")
MODEL_SLOTS = "model:"
_SERVERS_CHARS = 16
# Headers of the call itself: a hint under such a name would break the call or show our key.
_TAKEN_HEADERS = frozenset(
    {
        "authorization", "connection", "content-encoding", "content-length", "content-type", "host", "idempotency-key", "te", "trailer",
        "transfer-encoding", "upgrade", "x-api-key",
    }
)  # fmt: skip
_TAKEN_FIELDS = frozenset(
    {"model", "messages", "input", "prompt", "stream", "stream_options", "max_tokens", "n", "tools"}
)


def deployments(settings: Settings) -> tuple[Deployment, ...]:
    """Return the deployments of all models, and that for every model if `upstream.url` is set."""
    found = [deployment_of(name_of(model, index, entry), model, entry) for _, model, index, entry in _entries(settings)]
    if settings.upstream.url:
        found.append(_any_model(settings))
    return tuple(found)


def servers_name(settings: Settings) -> str:
    """Return one name for the model servers of these settings.

    Their order, and a `/` or `/v1` at the end of an address, do not change it.
    """
    served = sorted(
        (*one.models, one.url.rstrip("/").removesuffix("/v1"), one.upstream_model) for one in deployments(settings)
    )
    return hashlib.sha256(repr(served).encode()).hexdigest()[:_SERVERS_CHARS]


def resources(settings: Settings) -> tuple[Resource, ...]:
    """Return all named routes. One with a model's name binds all calls for that model."""
    return tuple(resource_of(name, entry) for name, entry in settings.resources.items())


def resource_of(name: str, entry: ResourceEntry) -> Resource:
    return Resource(name, entry.model or name, limits_of(entry.limits), entry.fallbacks, entry.total_timeout_s)


def name_of(model: str, index: int, entry: ModelDeployment) -> str:
    """Return the deployment's own name, or the model's name with the place in its list."""
    return entry.name or f"{model}/{index + 1}"


def slot_caps(settings: Settings) -> dict[str, int]:
    """Return how many calls batch work may have in flight over all processes.

    The keys are deployments' names, `model:NAME`, and `global`.
    """
    caps = {one.name: one.background_in_flight_max for one in deployments(settings) if one.takes_background}
    caps |= {MODEL_SLOTS + model: most for model, most in model_caps(settings).items()}
    if settings.worker.in_flight_max_global:
        caps[GLOBAL_SLOTS] = settings.worker.in_flight_max_global
    return caps


def limits_of(entries: Sequence[LimitEntry]) -> tuple[Limit, ...]:
    return tuple(
        Limit(
            Period(one.period),
            one.requests,
            one.tokens,
            one.enabled,
            None if one.cost is None else nano_of(one.cost),
            one.batches,
            one.bytes,
        )
        for one in entries
    )


def problems(settings: Settings) -> Iterator[tuple[KeyPath, str]]:
    """Return the problems of deployments and resources, each with the path of its cause."""
    names: dict[str, KeyPath] = {ANY_MODEL: ("upstream", "url")} if settings.upstream.url else {}
    if settings.upstream.url:
        try:
            _any_model(settings)
        except SettingsError as error:
            yield ("upstream", "url"), f"cannot be used: {error}"
        if settings.models:
            yield (
                ("upstream", "url"),
                "and `models` are both set: one gateway serves every model, or each model names its own deployments; remove one of them",
            )
    for model, entry in settings.models.items():
        if problem := retry_problem(settings, entry):
            yield ("models", model, "retry"), problem
    for path, model, index, place in _entries(settings):
        name = name_of(model, index, place)
        yield from deployment_problems(path, name, model, place)
        if name in names:
            other = ".".join(str(part) for part in names[name])
            yield path, f"has the name {name!r}, which {other} has already; give it another one"
        names[name] = path
    yield from _resource_problems(settings)


def retry_problem(settings: Settings, entry: ModelSettings | ModelTerms) -> str:
    """Return the problem of a model's retry settings; empty if there is none."""
    policy = retry_of(settings, entry)
    if policy is None or policy.backoff_ms <= policy.backoff_ms_max:
        return ""
    return f"has backoff_ms ({policy.backoff_ms:,}) above backoff_ms_max ({policy.backoff_ms_max:,}); lower the first"


def deployment_problems(path: KeyPath, name: str, model: str, entry: ModelDeployment) -> Iterator[tuple[KeyPath, str]]:
    """Return the problems of one deployment on its own."""
    yield from limit_problems((*path, "limits"), entry.limits)
    yield from _hint_problems((*path, "hints"), entry)
    try:
        deployment_of(name, model, entry)
    except SettingsError as error:
        yield path, f"cannot be used: {error}"
    if name == GLOBAL_SLOTS or name.startswith(MODEL_SLOTS):
        yield path, f"has the name {name!r}, which counts calls of all deployments; give it another one"


def fallback_loop(name: str, by_name: Mapping[str, Resource]) -> list[str]:
    """Return the way from a resource over its fallbacks back to itself; empty if there is none."""
    ways = [[name]]
    seen: set[str] = set()
    while ways:
        way = ways.pop()
        last = by_name.get(way[-1])
        for after in last.fallbacks if last is not None else ():
            if after == name:
                return [*way, after]
            if after not in seen:
                seen.add(after)
                ways.append([*way, after])
    return []


def limit_problems(path: KeyPath, entries: Sequence[LimitEntry]) -> Iterator[tuple[KeyPath, str]]:
    """Return the problems of a list of limits.

    - A limit may not be empty, and a period may not stand in the list twice.
    - Cost, batches and bytes are limits of tenants, teams, users and keys only.
    """
    seen: set[str] = set()
    for index, entry in enumerate(entries):
        if (entry.requests, entry.tokens, entry.cost, entry.batches, entry.bytes) == (None,) * 5:
            yield (*path, index), "limits nothing: give requests, tokens or both, or remove it"
        if path[0] in ("models", "resources") and (entry.cost, entry.batches, entry.bytes) != (None,) * 3:
            yield (*path, index), "limits cost, batches or bytes, which only tenants, teams, users and keys have"
        if entry.cost is not None:
            try:
                nano_of(entry.cost)
            except SettingsError as error:
                yield (*path, index, "cost"), f"cannot be used: {error}"
        if entry.period in seen:
            yield (*path, index), f"names the period {entry.period} a second time; put both numbers in one entry"
        seen.add(entry.period)


def _resource_problems(settings: Settings) -> Iterator[tuple[KeyPath, str]]:
    by_name = {one.name: one for one in resources(settings)}
    for name, entry in settings.resources.items():
        path = ("resources", name)
        yield from limit_problems((*path, "limits"), entry.limits)
        model = entry.model or name
        if model not in settings.models and not settings.upstream.url:
            yield (*path, "model"), f"is {model!r}, which `models` does not name; list it there or fix the name"
        elif name in settings.models and model != name:
            yield (*path, "model"), f"is {model!r}, but {name!r} is itself a model; give the resource another name"
        for index, after in enumerate(entry.fallbacks):
            if after not in settings.models and after not in settings.resources and not settings.upstream.url:
                problem = f"is {after!r}, which neither `models` nor `resources` names; list it there or fix the name"
                yield (*path, "fallbacks", index), problem
        if way := fallback_loop(name, by_name):
            yield (*path, "fallbacks"), f"lead back to it ({' -> '.join(way)}); take one of them away"


def _hint_problems(path: KeyPath, entry: ModelDeployment) -> Iterator[tuple[KeyPath, str]]:
    hints = entry.hints
    names = ("objective_header", "fairness_header", "deadline_header", "prefix_header")
    given = [(name, str(getattr(hints, name)).lower()) for name in names if getattr(hints, name)]
    for index, (name, header) in enumerate(given):
        if header in _TAKEN_HEADERS:
            yield (*path, name), f"is {header!r}, a header of the call itself; choose another name"
        if header in [other for _, other in given[:index]]:
            yield (*path, name), f"is {header!r}, which another hint has already; choose another name"
    if hints.priority_field in _TAKEN_FIELDS:
        yield (*path, "priority_field"), f"is {hints.priority_field!r}, a field of the request itself; use `priority`"


def _entries(settings: Settings) -> Iterator[tuple[KeyPath, str, int, ModelDeployment]]:
    for model, entry in settings.models.items():
        for index, deployment in enumerate(entry.deployments):
            yield ("models", model, "deployments", index), model, index, deployment


def deployment_of(name: str, model: str, entry: ModelDeployment) -> Deployment:
    """Return the deployment that an entry describes; raise SettingsError if it cannot be used."""
    return Deployment(
        name=name,
        url=entry.url,
        models=(model,),
        engine=EngineKind(entry.engine),
        api_key=entry.api_key,
        max_in_flight=entry.max_in_flight or MAX_IN_FLIGHT,
        is_capacity_known=entry.max_in_flight is not None or entry.queue is not None,
        weight=entry.weight,
        order=entry.order,
        read_timeout_s=entry.read_timeout_s,
        endpoint_timeouts_s=entry.endpoint_timeouts_s,
        total_timeout_s=entry.total_timeout_s if entry.queue is None else entry.queue.timeout_s,
        tls=Tls(**msgspec.structs.asdict(entry.tls)),
        limits=limits_of(entry.limits),
        estimate=Estimate(entry.estimate),
        tokens_in_flight_max=entry.tokens_in_flight_max,
        batch_fraction=entry.batch_fraction,
        # The processor that takes calls from a queue sets the pace.
        tide=TideMode(entry.tide) if entry.queue is None else TideMode.OFF,
        metrics_url=entry.metrics_url,
        metrics_names=entry.metrics_names,
        hints=Hints(**msgspec.structs.asdict(entry.hints)),
        serves=Serves.BATCH if entry.queue is not None and entry.serves == "both" else Serves(entry.serves),
        price=price_of(entry),
        output_tokens_max=entry.output_tokens_max,
        upstream_max_batch_inputs=entry.upstream_max_batch_inputs,
        upstream_min_batch_inputs=entry.upstream_min_batch_inputs,
        chat_batching=_chat_batching(entry),
        queue=_queue(model, entry),
        upstream_model=entry.upstream_model or "",
    )


def _queue(model: str, entry: ModelDeployment) -> Queue | None:
    queue = entry.queue
    if queue is None:
        return None
    pool = queue.pool or model
    # The list of results is ours alone: a result that another reader takes is lost to us.
    requests, results = f"llm-d-async:requests:{pool}", f"llm-d-async:results:{pool}:tidegate"
    return Queue(queue.url, queue.requests or requests, queue.results or results)


def _chat_batching(entry: ModelDeployment) -> ChatBatching:
    chat = msgspec.structs.asdict(entry.chat_batching)
    return ChatBatching.named(chat.pop("mode"), adapter=ChatAdapter(chat.pop("adapter")), **chat)


def price_of(entry: ModelDeployment) -> Price | None:
    """Return a deployment's price; None if its tokens cost nothing."""
    given = entry.price
    price = Price.of(given.input, given.cached, given.output, given.batch_factor)
    if not (price.input_nano or price.cached_nano or price.output_nano):
        return None
    # An engine that the operator runs charges no extra, whatever a request asks for.
    covers = Surcharge if entry.engine in _OWN_ENGINES else map(Surcharge, given.covers)
    return msgspec.structs.replace(price, covers=frozenset(covers))


def retry_policies(
    settings: Settings, more: Mapping[str, ModelTerms] | None = None, named: Sequence[Resource] = ()
) -> dict[str, RetryPolicy]:
    """Return the retry policies by model and resource; those without one follow `retry` alone.

    `more` and `named` are terms of models and resources that were added at run time.
    """
    own = {}
    for model, entry in _terms(settings, more).items():
        if (policy := retry_of(settings, entry)) is not None:
            own[model] = policy
    return own | {one.name: own[one.model] for one in (*resources(settings), *named) if one.model in own}


def retry_of(settings: Settings, entry: ModelSettings | ModelTerms) -> RetryPolicy | None:
    """Return a model's own retry policy; None if it sets nothing of it."""
    given = {name: value for name, value in msgspec.structs.asdict(entry.retry).items() if value is not None}
    return replace(settings.retry.policy(), **given) if given else None


def model_caps(settings: Settings, more: Mapping[str, ModelTerms] | None = None) -> dict[str, int]:
    """Return how many calls batch work may have in flight for each model, over all processes.

    `more` has terms of models that were added at run time.
    """
    return {name: one.in_flight_max for name, one in _terms(settings, more).items() if one.in_flight_max}


def _terms(settings: Settings, more: Mapping[str, ModelTerms] | None) -> dict[str, ModelSettings | ModelTerms]:
    """Return the terms of all models. The settings win over terms that were added."""
    return {**(more or {}), **settings.models}


def _any_model(settings: Settings) -> Deployment:
    # By default it has the worker's slots: an operator who raises those means this one upstream.
    return Deployment(
        name=ANY_MODEL,
        url=settings.upstream.url,
        engine=EngineKind(settings.upstream.engine),
        api_key=settings.upstream.api_key,
        max_in_flight=settings.upstream.max_in_flight or settings.worker.in_flight_max,
        is_capacity_known=settings.upstream.max_in_flight > 0,
        read_timeout_s=settings.upstream.read_timeout_s or None,
        total_timeout_s=settings.upstream.total_timeout_s,
        tls=Tls(
            settings.upstream.ca_file or None,
            settings.upstream.cert_file or None,
            settings.upstream.key_file or None,
            verify=settings.upstream.verify,
        ),
    )
