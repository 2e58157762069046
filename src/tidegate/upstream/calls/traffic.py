"""What an interactive call brings beside its request: how an engine must be asked, whether it is streamed, and who hears what it used.

Batch work brings nothing: where a call may be either, None means that it is an item's.
"""

from collections.abc import Callable
from typing import NamedTuple

from tidegate.core.deployments import EngineKind
from tidegate.core.errors import Ambiguous
from tidegate.upstream.budgets.call_receipt import OnUsage
from tidegate.upstream.calls.translation import Shaped

Shape = Callable[[EngineKind], Shaped]


class Traffic(NamedTuple):
    """`shape` says how an engine must hear the call; `flex_wait_s` above 0 makes it a flex call, which takes batch's slots and waits so
    long for one. `owner` is whose slots it takes, where there are others: one owner's calls leave some to the others'. `is_item`: it is
    the item of a job that has waited until it goes like an interactive call."""

    shape: Shape
    is_stream: bool
    flex_wait_s: float = 0.0
    on_usage: OnUsage | None = None
    owner: str = ""
    is_item: bool = False


def goes_on(error: Ambiguous, traffic: Traffic | None) -> bool:
    """Return whether a call goes on to another deployment though this one may have done it: when the server was too busy and a user waits.

    An item does not: its retries are counted, and its next one goes to another deployment."""
    return traffic is not None and not traffic.is_item and error.code == "upstream_overloaded"


def is_users(traffic: Traffic | None) -> bool:
    """Whether someone waits for the answer, so that the call goes before batch work."""
    return traffic is not None and not traffic.flex_wait_s
