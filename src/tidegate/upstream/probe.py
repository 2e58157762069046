"""Two cheap questions to a deployment, over the control client: is anybody there, and which models do you serve?

The first spares items: while a breaker is open, a server that does not even answer `GET /models` gets no item to fail. The
second is for `doctor`. Neither counts as a call, and neither changes a deployment's health by itself.
"""

from dataclasses import dataclass

import msgspec

from tidegate.core.errors import Unavailable, UpstreamError
from tidegate.core.ports import Clock
from tidegate.upstream.lane import Lane

PROBE_TIMEOUT_S = 5.0
MODELS_ENDPOINT = "/v1/models"

# A server whose GET is broken though its POST works would stay shut for ever, so now and then an item goes without a knock.
UNANNOUNCED_EVERY = 12


@dataclass(frozen=True, slots=True)
class Probe:
    """What a deployment said to `GET /models`. `message` says what to do when it is not well."""

    deployment: str
    reachable: bool
    status: int
    models: tuple[str, ...]
    took_ms: float
    message: str


class _Model(msgspec.Struct):
    id: str


class _Models(msgspec.Struct):
    data: list[_Model]


async def knock(lane: Lane) -> None:
    """Raise Unavailable when the server is plainly not there: then the item that was to be the probe is not used up."""
    lane.probes += 1
    if lane.probes % UNANNOUNCED_EVERY == 0:
        return
    try:
        reply = await lane.control.get(lane.url(MODELS_ENDPOINT), PROBE_TIMEOUT_S)
    except UpstreamError as wrong:
        why = wrong.message
    else:
        if reply.status < 500:
            return
        why = f"GET /models was answered with status {reply.status}"
    raise Unavailable(f"{lane.deployment.name} is still away: {why}")


async def ask_models(lane: Lane, clock: Clock) -> Probe:
    began_ms = clock.monotonic_ms()
    name = lane.deployment.name
    try:
        status, _, body = await lane.control.get(lane.url(MODELS_ENDPOINT), PROBE_TIMEOUT_S)
    except UpstreamError as wrong:
        return Probe(name, False, 0, (), clock.monotonic_ms() - began_ms, wrong.message)
    took_ms = clock.monotonic_ms() - began_ms
    models: tuple[str, ...] = ()
    message = ""
    if status in (401, 403):
        message = f"it says {status} to our key: check the deployment's api_key"
    elif status != 200:
        message = f"GET {MODELS_ENDPOINT} was answered with status {status}: check the deployment's url"
    else:
        try:
            models = tuple(model.id for model in msgspec.json.decode(body, type=_Models).data)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            message = (
                f"GET {MODELS_ENDPOINT} did not answer with a list of models: is this an OpenAI-compatible server?"
            )
    return Probe(name, True, status, models, took_ms, message)
