"""The operator's policies, by the settings and the live configuration of this moment."""

from msgspec.structs import replace

from tidegate.core.budgets.budget import Budget
from tidegate.core.input.lines import LineRules
from tidegate.core.nouns import Job, LeasedSlice
from tidegate.core.policies import Policies
from tidegate.core.retry import RetryPolicy
from tidegate.core.schedule import Policy
from tidegate.core.schedule.policy import ModeOverride
from tidegate.live_config import LiveConfig
from tidegate.settings import Settings
from tidegate.settings.policy import call_rules, schedule_policy, switched
from tidegate.settings.tenants import Tenants
from tidegate.stages.ingest.input_rules import line_rules
from tidegate.upstream.calls.translation import MESSAGES


class OperatorPolicies(Policies):
    def __init__(self, settings: Settings, live: LiveConfig) -> None:
        self._settings = settings
        self._live = live
        self.tenants: Tenants = live.tenants
        self._retry = settings.retry.policy()
        self._schedule_policy = schedule_policy(settings)
        # The content of these mappings changes when an operator adds something at run time.
        self.model_of = live.model_of
        self.reached_by = live.reached_by
        self.fields_of = live.fields_of
        self.rules = call_rules(settings)
        self.in_flight_caps = self.tenants.in_flight_caps

    def unknown_wait_ms(self, model: str) -> int:
        return self._live.unknown_wait_ms(model)

    def schedule_policy(self, override: ModeOverride) -> Policy:
        return switched(self._schedule_policy, override)

    def line_rules(self, job: Job) -> LineRules:
        rules = line_rules(self._settings, job.endpoint, job.invalid_lines, prefix_order=job.prefix_order)
        if job.endpoint == MESSAGES:
            return replace(rules, item_count_max=self._settings.limits.message_batch_items_max)
        return rules

    def weight(self, tenant: str) -> float:
        return self.tenants.of(tenant).weight

    def budgets(self, leased: LeasedSlice) -> tuple[Budget, ...]:
        return self.tenants.of(leased.tenant).budgets(
            leased.tenant_id, leased.user, leased.key_id, leased.job_id, leased.limits, leased.team
        )

    def parallel(self, leased: LeasedSlice, key_max: int) -> tuple[tuple[str, int], ...]:
        return self.tenants.of(leased.tenant).parallel(leased.tenant_id, leased.user, leased.key_id, key_max)

    def retry(self, model: str) -> RetryPolicy:
        return self._live.retry_of.get(model, self._retry)
