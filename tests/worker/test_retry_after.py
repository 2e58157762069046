"""What the operator sets for retries holds for deployments as it does for the items that wait."""

from __future__ import annotations

from typing import Any

from tidegate.core.deployments import Deployment
from tidegate.core.errors import Throttled
from tidegate.service import deployment_policy
from tidegate.settings.groups import Retry, Settings
from tidegate.settings.scheduling import Redis
from tidegate.upstream.routing.deployment_state import DeploymentPolicy, DeploymentState, RetryBudgetPolicy

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


def test_each_figure_of_how_a_deployment_is_treated_is_what_its_setting_says() -> None:
    """An item's last attempt is its own: what it shares a call with could be at fault."""
    settings = Settings(
        retry=Retry(attempts_max=7, budget_share=0.3, budget_min=11, retry_after_ms_max=60_000),
        redis=Redis(model_rest_ms_min=1_234, model_rest_ms_max=5_678),
    )
    assert deployment_policy(settings) == DeploymentPolicy(
        retry_budget=RetryBudgetPolicy(0.3, 11),
        retry_after_ms_max=60_000,
        attempts_grouped=6,
        model_rest_ms_min=1_234,
        model_rest_ms_max=5_678,
    )
    assert deployment_policy(Settings(retry=Retry(attempts_max=1))).attempts_grouped == 1
