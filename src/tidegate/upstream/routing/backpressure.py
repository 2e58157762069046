"""Back-pressure of a whole model: if no deployment of it is healthy, all processes let it rest.

- The rest is an entry in Redis. Without Redis each process learns only from its own breakers, and
  counts its rests in the metrics.
- Only background work rests; users' calls are tried.
- A rest always ends. A process that obeyed one tries the model itself before it obeys the next,
  because another process that alone cannot reach the servers must not keep it from them.
- Rests that deployments ask for (Retry-After) are separate, and the longer of the two wins.
"""

import math
from collections.abc import Iterable

from tidegate import metrics
from tidegate.core.ports import Clock, Rests
from tidegate.upstream.routing.deployment_state import DeploymentPolicy, DeploymentState

GROUP = "model:"
# The group of deployments that serve any model; its rests are not shared.
_ANY_MODEL = ""
_NO_HEALTHY = "no_healthy_deployment"


class Backpressure:
    def __init__(
        self, rests: Rests | None, clock: Clock, policy: DeploymentPolicy, states: Iterable[DeploymentState]
    ) -> None:
        self._rests = rests
        self._clock = clock
        self._min_ms = policy.model_rest_ms_min
        self._max_ms = policy.model_rest_ms_max
        self._states = states
        self._deaf: set[str] = set()
        self._ill: dict[str, list[DeploymentState]] = {}

    def failed(self, state: DeploymentState) -> None:
        """Note that a call to this deployment failed in a way that counts against its health."""
        now_ms = self._clock.monotonic_ms()
        for model in state.deployment.models or (_ANY_MODEL,):
            self._deaf.discard(model)
            group = self._group(model)
            if not group or not all(one.breaker.is_open for one in group):
                continue
            rest_ms = max(0.0, min(one.rest_ends_ms(now_ms) for one in group) - now_ms)
            if self._rests is not None and self._max_ms and model != _ANY_MODEL:
                rest_ms = min(max(rest_ms, self._min_ms), self._max_ms)
                self._rests.publish(GROUP + model, math.ceil(rest_ms))
                self._ill[model] = group
            metrics.model_deferrals.of(_NO_HEALTHY).inc()
            metrics.model_deferral_seconds.of(_NO_HEALTHY).observe(rest_ms / 1000)

    def answered(self, state: DeploymentState) -> None:
        """Note that a deployment is healthy, so that its models no longer rest by others' reports.

        This is called only if processes share rests.
        """
        for model in state.deployment.models:
            if model not in self._deaf or state.background_rests_until_ms:
                self._deaf.add(model)
                for one in self._group(model):
                    one.rest_background_until(0.0)

    def obey(self) -> None:
        """Obey rests that deployments asked of other processes, and rests of whole models.

        A model's reported rest is obeyed once, and the next one only after a call of this process
        to that model has failed.
        """
        if self._rests is None:
            return
        now_ms = self._clock.monotonic_ms()
        current = self._rests.current()
        for state in self._states:
            state.rest_until(current.get(state.deployment.name, 0.0))
        for name, until_ms in current.items():
            model = name.removeprefix(GROUP)
            if not name.startswith(GROUP) or model in self._deaf or until_ms <= now_ms:
                continue
            self._deaf.add(model)
            group = self._group(model)
            if self._ill.get(model) and not any(one in self._ill[model] for one in group):
                # The reports are about servers that were replaced since, or that have another key
                # now.
                continue
            for one in group:
                one.rest_background_until(until_ms)

    def _group(self, model: str) -> list[DeploymentState]:
        return [
            state
            for state in self._states
            if state.deployment.takes_background
            and (model in state.deployment.models if model else not state.deployment.models)
        ]
