"""The deployment states of this process, kept up to date while deployments come, change and go.

This module makes states and changes their terms; it routes nothing and sends nothing.
"""

import math
from collections.abc import Callable, Iterable

from tidegate.core.deployments import Deployment
from tidegate.core.errors import SettingsError
from tidegate.core.ports import Clock
from tidegate.core.usage.prices import Price
from tidegate.upstream.http.transport import Client, Transport
from tidegate.upstream.routing.deployment_state import DeploymentPolicy, DeploymentState
from tidegate.upstream.routing.slots import Slots
from tidegate.upstream.tide.tides import DeploymentTide, tide_terms


class Deployments(dict[str, DeploymentState]):
    """Deployment states by the deployment's name.

    With `is_alone` this process has all slots of each. `tide_for` makes a deployment's tide.
    """

    def __init__(
        self,
        transport: Transport,
        control: Transport,
        policy: DeploymentPolicy,
        clock: Clock,
        tide_for: Callable[[Deployment, Client, DeploymentState], DeploymentTide | None],
        *,
        is_alone: bool,
    ) -> None:
        super().__init__()
        # A price stays after its deployment is gone, because its last calls may still have to be
        # priced.
        self.prices: dict[str, Price] = {}
        self._transport = transport
        self._control = control
        self._policy = policy
        self._clock = clock
        self._tide_for = tide_for
        self._is_alone = is_alone
        # Deployments that are gone but have calls in flight, whose slots are shared; no call begins
        # there.
        self._leaving: list[DeploymentState] = []
        # True if items share calls at one of the deployments.
        self.is_grouping = False
        # Returns how many more calls fit under the process's connection ceiling.
        self.spare_calls = transport.free_slots

    def serve(self, deployments: Iterable[Deployment]) -> dict[str, str]:
        """Keep one state for each of these deployments.

        Return the reasons for unusable ones by name.

        No state changes before the clients of all deployments are made.
        """
        kept: dict[str, DeploymentState] = {}
        changed: list[tuple[DeploymentState, Deployment, Client, Client]] = []
        refused: dict[str, str] = {}
        for deployment in deployments:
            name = deployment.name
            if name in kept:
                refused[name] = f"two deployments are named {name!r}: give each a name of its own"
                continue
            state = self.get(name)
            if state is None or state.deployment != deployment:
                try:
                    client, control = self._transport.client_for(deployment), self._control.client_for(deployment)
                except SettingsError as error:
                    refused[name] = f"deployment {name!r}: {error}"
                    if state is not None and state.deployment.tls.has_files_of(deployment.tls):
                        # The certificate is being replaced: until that is done the earlier state
                        # stays.
                        kept[name] = state
                    continue
                if state is None or not state.deployment.is_same_server(deployment):
                    # Calls in flight at the earlier server end there, and do not count for the new
                    # one.
                    state = DeploymentState(deployment, client, control, self._policy, is_alone=self._is_alone)
                    state.tide = self._tide_for(deployment, control, state)
                changed.append((state, deployment, client, control))
            kept[name] = state
        for state, deployment, client, control in changed:
            if tide_terms(state.deployment) != tide_terms(deployment):
                state.tide = self._tide_for(deployment, control, state)
            state.update(deployment, client, control)
        if not self._is_alone:
            self._leaving += [state for state in self.values() if state not in kept.values()]
        self.clear()
        self.update(kept)
        self.is_grouping = any(state.deployment.items_per_call_max > 1 for state in kept.values())
        for name, state in kept.items():
            if state.deployment.price is not None:
                self.prices[name] = state.deployment.price
            else:
                self.prices.pop(name, None)
        return refused

    def slots(self) -> Iterable[Slots]:
        now_ms = self._clock.monotonic_ms()
        shared = [one for one in self.values() if one.deployment.takes_background or one.counts_interactive]
        return [slots for state in shared for slots in state.own_slots(now_ms)]

    def leaving_slots(self) -> Iterable[Slots]:
        """Return the slots of deployments that are gone.

        They are kept until their calls have ended.
        """
        leaving = self._leaving
        self._leaving = [state for state in leaving if state.slots.in_flight]
        return [slots for state in leaving for slots in state.own_slots(math.inf)]

    def has_shares(self) -> None:
        for state in self.values():
            state.has_share()

    def calls_in_flight(self) -> int:
        """Return how many background calls this process has in flight."""
        return sum(state.in_flight for state in self.values())

    def tides(self) -> list[DeploymentTide]:
        return [state.tide for state in self.values() if state.tide is not None]
