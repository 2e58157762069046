"""The terms of an interactive call beside its request: its shape, its kind, and its usage report.

An item's call has none: where a call may be either, None stands for an item.
"""

from collections.abc import Callable
from typing import NamedTuple

from tidegate.core.deployments import EngineKind
from tidegate.core.errors import Ambiguous
from tidegate.upstream.budgets.call_receipt import OnUsage
from tidegate.upstream.calls.translation import Shaped

ShapeFor = Callable[[EngineKind], Shaped]


class Traffic(NamedTuple):
    """The terms of an interactive call.

    - `shape` gives the request in an engine's shape.
    - `flex_wait_s` above 0 makes it a flex call, which takes slots of background work and waits at
      most this long for one.
    - `owner` is the share owner of its slots, if there are several: one owner's calls leave some
      slots to the others.
    - `is_item` marks an item whose job has waited until it goes like an interactive call.
    """

    shape: ShapeFor
    is_stream: bool
    flex_wait_s: float = 0.0
    on_usage: OnUsage | None = None
    owner: str = ""
    is_item: bool = False


def goes_on(error: Ambiguous, traffic: Traffic | None) -> bool:
    """Return whether a call goes on to another deployment though this one may have done it.

    It does if the server was too busy and a user waits. An item does not go on at once: its retries
    are counted, and the next one goes to another deployment.
    """
    return traffic is not None and not traffic.is_item and error.code == "upstream_overloaded"


def is_users(traffic: Traffic | None) -> bool:
    """Return whether a user waits for the answer, so that the call goes before background work."""
    return traffic is not None and not traffic.flex_wait_s
