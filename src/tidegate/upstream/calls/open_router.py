"""The opening of a router with its transports: this process's connections, and queues."""

from collections.abc import Callable

from tidegate import metrics
from tidegate.core.deployments import HttpLimits, Queue
from tidegate.core.ports import Clock, Entropy, RequestQueue
from tidegate.upstream.calls.router import Router
from tidegate.upstream.http.transport import AiohttpTransport, Transport
from tidegate.upstream.queue.asynchronous import Office, QueueTransport
from tidegate.upstream.routing.deployment_state import DeploymentPolicy
from tidegate.upstream.routing.probe import CONTROL_LIMITS
from tidegate.upstream.routing.slots import Capacity


def open_router(
    limits: HttpLimits,
    clock: Clock,
    entropy: Entropy,
    policy: DeploymentPolicy | None = None,
    capacity: Capacity | None = None,
    open_queue: Callable[[Queue], RequestQueue] | None = None,
) -> Router:
    """Return a router over aiohttp, and over queues for deployments with one.

    It serves no deployment yet.

    Call this inside the running loop, and close the router with it.
    """
    direct = AiohttpTransport(limits)
    metrics.upstream_connections.set_function(direct.connections_in_use)
    metrics.upstream_connections_max.set(limits.connections_max)
    transport: Transport = direct
    control: Transport = AiohttpTransport(CONTROL_LIMITS)
    if open_queue is not None:
        office = Office(open_queue, limits, clock, entropy)
        transport, control = QueueTransport(transport, office), QueueTransport(control, office)
    return Router(transport, control, clock, entropy, policy, capacity)
