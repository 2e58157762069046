"""The request for the usage of streams, and the deployments that accept it.

- A call that a server refuses because of the option is sent again without it, and the server gets
  no further requests with it while this process runs.
- Until a server has accepted the option once, any 400 or 422 may be about it; later only a refusal
  that names it.
"""

from collections.abc import Callable
from typing import NamedTuple

from tidegate.core.answers.stream_options import ENDPOINTS, asking_for_usage, without_asking
from tidegate.core.errors import Ambiguous, Refused, UpstreamError
from tidegate.upstream.routing.deployment_state import DeploymentState

_NAMES = (b"stream_options", b"include_usage")


class Asking(NamedTuple):
    """A request that asks for usage.

    `plain` makes it without the option; `is_extra`: the caller did not ask.
    """

    body: bytes
    plain: Callable[[], bytes | None]
    is_extra: bool


class UsageAsking:
    """A memory of the deployments, by name and address, that accept the option."""

    def __init__(self) -> None:
        self._takes: dict[tuple[str, str], bool] = {}

    def request(self, state: DeploymentState, endpoint: str, body: bytes, *, is_translated: bool) -> Asking | None:
        """Return a request that asks for this stream's usage; None if the body stays as it is."""
        if endpoint not in ENDPOINTS:
            return None
        if is_translated:
            # The translation has asked already, and needs the usage.
            return Asking(body, lambda: without_asking(body), is_extra=False)
        asking = asking_for_usage(body)
        return None if asking is None else Asking(asking, lambda: body, is_extra=True)

    def takes(self, state: DeploymentState) -> bool | None:
        """Return whether the deployment accepts the option; None before the first answer."""
        return self._takes.get(_key(state))

    def learn(self, state: DeploymentState, *, takes: bool) -> None:
        self._takes[_key(state)] = takes

    def may_be_refused_for(self, state: DeploymentState, error: UpstreamError) -> bool:
        """Return whether this failure may be about the option."""
        if names_the_option(error):
            return True
        return isinstance(error, Refused) and error.status in (400, 422) and self.takes(state) is None


def names_the_option(error: BaseException) -> bool:
    """Return whether a server's refusal names the option; some refuse it with a 500."""
    if not isinstance(error, Refused | Ambiguous) or error.status < 400:
        return False
    return any(name in error.body for name in _NAMES)


def _key(state: DeploymentState) -> tuple[str, str]:
    return state.deployment.name, state.deployment.url
