"""The operator's bound on Retry-After holds for the deployment that rests as it does for the items that wait."""

from __future__ import annotations

from typing import Any

from tidegate.core.deployments import Deployment
from tidegate.core.errors import Throttled
from tidegate.service import deployment_policy
from tidegate.settings.groups import Retry, Settings
from tidegate.upstream.routing.deployment_state import DeploymentState

DAY_MS = 86_400_000


def rests_for_ms(settings: Settings) -> float:
    nothing: Any = None
    place = Deployment("here", "http://127.0.0.1:1/v1")
    state = DeploymentState(place, nothing, nothing, deployment_policy(settings), is_alone=True)
    state.failed(Throttled("429", status=429, retry_after_ms=100 * DAY_MS), "key", 1_000.0, 0.5)
    return state.ready_at_ms() - 1_000.0


def test_a_deployment_rests_no_longer_than_the_setting_allows() -> None:
    assert rests_for_ms(Settings()) == DAY_MS
    assert rests_for_ms(Settings(retry=Retry(retry_after_ms_max=60_000))) == 60_000
