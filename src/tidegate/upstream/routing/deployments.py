"""The lanes of this process, one per deployment, kept while their deployments come, change and go.

It makes lanes and changes their terms; it routes nothing and sends nothing.
"""

from collections.abc import Callable, Iterable

from tidegate.core.deployments import Deployment
from tidegate.core.errors import SettingsError
from tidegate.core.usage.prices import Price
from tidegate.upstream.http.transport import Client, Transport
from tidegate.upstream.routing.deployment_state import DeploymentPolicy, DeploymentState
from tidegate.upstream.tide.tides import DeploymentTide, tide_terms


class Deployments(dict[str, DeploymentState]):
    """By the deployment's name. `tide_for` makes the tide of a deployment, where it has one."""

    def __init__(
        self,
        transport: Transport,
        control: Transport,
        policy: DeploymentPolicy,
        tide_for: Callable[[Deployment, Client], DeploymentTide | None],
    ) -> None:
        super().__init__()
        # Calls that a deployment leaves behind still cost what they did there.
        self.prices: dict[str, Price] = {}
        self._transport = transport
        self._control = control
        self._policy = policy
        self._tide_for = tide_for
        self._is_grouping = False

    def serve(self, deployments: Iterable[Deployment], *, is_alone: bool) -> dict[str, str]:
        """Have one lane for each of these, and say which deployments cannot be used and why: those are left out.

        Nothing changes before every line is there. `is_alone`: all slots of a deployment are this process's.
        """
        kept: dict[str, DeploymentState] = {}
        changed: list[tuple[DeploymentState, Deployment, Client, Client]] = []
        refused: dict[str, str] = {}
        for deployment in deployments:
            name = deployment.name
            if name in kept:
                refused[name] = f"two deployments are named {name!r}: give each a name of its own"
                continue
            lane = self.get(name)
            if lane is None or lane.deployment != deployment:
                try:
                    line, control = self._transport.line(deployment), self._control.line(deployment)
                except SettingsError as error:
                    refused[name] = f"deployment {name!r}: {error}"
                    if lane is not None and lane.deployment.tls.has_files_of(deployment.tls):
                        # Its certificate is being replaced: until that is done the one before serves on.
                        kept[name] = lane
                    continue
                if lane is None or not lane.deployment.is_same_server(deployment):
                    # What is in flight at the server before ends there, and says nothing about this one.
                    lane = DeploymentState(deployment, line, control, self._policy)
                    lane.tide = self._tide_for(deployment, control)
                changed.append((lane, deployment, line, control))
            kept[name] = lane
        for lane, deployment, line, control in changed:
            if tide_terms(lane.deployment) != tide_terms(deployment):
                lane.tide = self._tide_for(deployment, control)
            lane.become(deployment, line, control)
            if is_alone:
                lane.slots = deployment.batch_in_flight_max
        self.clear()
        self.update(kept)
        self._is_grouping = any(lane.deployment.items_per_call_max > 1 for lane in kept.values())
        for name, lane in kept.items():
            if lane.deployment.price is not None:
                self.prices[name] = lane.deployment.price
            else:
                self.prices.pop(name, None)
        return refused

    def for_batch(self) -> list[DeploymentState]:
        return [lane for lane in self.values() if lane.deployment.takes_batch]

    def spare_calls(self, in_flight_max: int) -> int:
        """How many more calls this process may have out. Where items share calls, nobody outside can count these."""
        free = self._transport.free_slots()
        if self._is_grouping and in_flight_max:
            free = min(free, in_flight_max - sum(lane.in_flight for lane in self.values()))
        return free if free > 0 else 0

    def tides(self) -> list[DeploymentTide]:
        return [lane.tide for lane in self.values() if lane.tide is not None]
