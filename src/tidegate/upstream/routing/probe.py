"""Two cheap questions to a deployment, over the control client: is it there, and with which models?

The first saves items: while a breaker is open, a server that does not even answer `GET /models`
gets no item that would fail. The second is for `doctor` and for `/v1/models`. Neither counts as a
call, and neither changes a deployment's health by itself.
"""

import asyncio
from collections.abc import Mapping
from datetime import datetime
from urllib.parse import quote

import msgspec
from yarl import URL

from tidegate.core.deployments import EngineKind, HttpLimits
from tidegate.core.errors import Unavailable, UpstreamError
from tidegate.core.ports import Clock
from tidegate.upstream.http import classify
from tidegate.upstream.routing.deployment_state import FAILING, DeploymentState

PROBE_TIMEOUT_S = 5.0
MODELS_ENDPOINT = "/v1/models"

# Probes and questions of `doctor` have separate connections, so that a full pool cannot make a
# server look unhealthy.
CONTROL_LIMITS = HttpLimits(
    connect_timeout_s=5,
    read_timeout_s=5,
    write_timeout_s=5,
    pool_timeout_s=2,
    connections_max=8,
    kept_alive_max=4,
    response_bytes_max=1024 * 1024,
)

# Callers see a server's report of a model, so values that are too long or too large are dropped.
COUNT_MAX = 200_000_000_000
WORDS_CHARS_MAX = 255

# A server with a broken GET and a working POST would never get a call, so now and then an item is
# sent without a probe.
UNANNOUNCED_EVERY = 12


class Listed(msgspec.Struct, frozen=True):
    """A server's report of a model beside its name; 0 or empty if it reports no usable value."""

    created_s: int = 0
    owned_by: str = ""
    display_name: str = ""
    context_tokens: int = 0

    def beside(self, other: "Listed") -> "Listed":
        """Return this report combined with another one of the model; the smaller context counts."""
        contexts = [one.context_tokens for one in (self, other) if one.context_tokens]
        return Listed(
            self.created_s or other.created_s,
            self.owned_by or other.owned_by,
            self.display_name or other.display_name,
            min(contexts, default=0),
        )


class Probe(msgspec.Struct, frozen=True):
    """A deployment's answer to `GET /models`. `message` says what to do if it is not healthy.

    If `is_whole` is false there are more models than it listed. `leads_to` is a redirect's target.
    """

    deployment: str
    reachable: bool
    status: int
    models: tuple[str, ...]
    took_ms: float
    message: str
    listed: Mapping[str, Listed] = msgspec.field(default_factory=dict)
    is_whole: bool = True
    leads_to: str = ""


class _Model(msgspec.Struct):
    """A model as OpenAI, Anthropic, vLLM and SGLang list it; values of a wrong type are ignored."""

    id: str
    created: object = None
    created_at: object = None
    owned_by: object = None
    display_name: object = None
    max_model_len: object = None


class _Models(msgspec.Struct):
    data: list[_Model]
    has_more: object = False


async def probe(state: DeploymentState) -> None:
    """Raise Unavailable if the server is clearly not there, so that no item serves as the probe."""
    if state.count_probe() % UNANNOUNCED_EVERY == 0:
        return
    try:
        reply = await state.control.get(state.url(MODELS_ENDPOINT), PROBE_TIMEOUT_S)
    except UpstreamError as wrong:
        why, code = wrong.message, wrong.code if isinstance(wrong, Unavailable) else None
    else:
        if reply.status < 500:
            return
        why, code = f"GET /models was answered with status {reply.status}", FAILING
    raise Unavailable(why, code=code)


class SideProbes:
    """Probes of deployments with an open circuit, beside users' calls.

    A call is not risked on a server that does not even answer `GET /models`.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._tasks: dict[str, asyncio.Task[None]] = {}

    def ask(self, state: DeploymentState) -> None:
        """Ask once while calls go on; the deployment's breaker gets the answer."""
        name = state.deployment.name
        if name not in self._tasks:
            self._tasks[name] = task = asyncio.create_task(self._ask(state))
            task.add_done_callback(lambda _: self._tasks.pop(name, None))

    async def _ask(self, state: DeploymentState) -> None:
        try:
            await probe(state)
        except Unavailable:
            # The next question comes one interval later.
            state.breaker.begin_probe(self._clock.monotonic_ms())
            state.breaker.end_probe()
        else:
            state.breaker.probe_answered()

    async def close(self) -> None:
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def ask_models(state: DeploymentState, clock: Clock, timeout_s: float = PROBE_TIMEOUT_S) -> Probe:
    began_ms = clock.monotonic_ms()
    name = state.deployment.name
    # Anthropic lists twenty models unless more are asked for.
    endpoint = f"{MODELS_ENDPOINT}?limit=1000" if state.deployment.engine is EngineKind.ANTHROPIC else MODELS_ENDPOINT
    try:
        status, headers, body = await state.control.get(state.url(endpoint), timeout_s)
    except UpstreamError as wrong:
        return Probe(name, False, 0, (), clock.monotonic_ms() - began_ms, wrong.message)
    took_ms = clock.monotonic_ms() - began_ms
    models: tuple[str, ...] = ()
    listed: dict[str, Listed] = {}
    is_whole = True
    message = leads_to = ""
    if status in (401, 403):
        message = f"it says {status} to our key: check the deployment's api_key"
    elif 300 <= status <= 399:
        leads_to = classify.redirect_target(headers)
        message = (
            f"GET {MODELS_ENDPOINT} is redirected ({status}) to {leads_to or 'nowhere'}, and redirects are not followed: "
            "set the deployment's url to the final address"
        )
    elif status != 200:
        message = f"GET {MODELS_ENDPOINT} was answered with status {status}: check the deployment's url"
    else:
        try:
            page = msgspec.json.decode(body, type=_Models)
            models, is_whole = tuple(model.id for model in page.data), page.has_more is not True
            listed = {model.id: _listed(model) for model in page.data}
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            message = (
                f"GET {MODELS_ENDPOINT} did not answer with a list of models: is this an OpenAI-compatible server?"
            )
    return Probe(name, True, status, models, took_ms, message, listed, is_whole, leads_to)


async def knows_model(state: DeploymentState, model: str, timeout_s: float = PROBE_TIMEOUT_S) -> bool:
    """Return whether a server knows a model by its name, though it may not list it."""
    # Callers choose the names, so this URL is not kept among those of the deployment.
    url = URL(state.deployment.url_of(f"{MODELS_ENDPOINT}/{quote(model, safe='')}"))
    try:
        reply = await state.control.get(url, timeout_s)
    except UpstreamError:
        return False
    return reply.status == 200


def _listed(model: _Model) -> Listed:
    created_s = _count(model.created)
    if not created_s and isinstance(model.created_at, str):
        try:
            created_s = max(0, int(datetime.fromisoformat(model.created_at).timestamp()))
        except (ValueError, OverflowError):
            created_s = 0
    return Listed(created_s, _words(model.owned_by), _words(model.display_name), _count(model.max_model_len))


def _count(value: object) -> int:
    return value if type(value) is int and 0 < value <= COUNT_MAX else 0


def _words(value: object) -> str:
    return value if isinstance(value, str) and len(value) <= WORDS_CHARS_MAX and value.isprintable() else ""
