"""The explanation why a job runs or waits, for commands and doors alike.

It uses the store, the settings and the reports of workers.

The prediction of what a worker with room would do uses a worker's own view of the store and its
rules.
"""

from collections.abc import Callable, Sequence

import msgspec

from tidegate.core import schedule
from tidegate.core.budgets.ahead import CallsAhead
from tidegate.core.budgets.budget import NEVER_MS, Budget, BudgetRequest, Grant, Limit, LimitBound, with_limits
from tidegate.core.deployments import Deployment, Resource
from tidegate.core.nouns import Job
from tidegate.core.ports import Blobs, ReportedWorker
from tidegate.core.schedule import eta
from tidegate.core.schedule.endings import FailedItems
from tidegate.core.schedule.explain import ExplainInputs, SpentBudget, UnhealthyModel, explain, waits_for
from tidegate.core.schedule.outlooks import Outlook
from tidegate.core.states import JOB_ENDED
from tidegate.core.usage.prices import units_text
from tidegate.core.wording import in_words
from tidegate.settings import Settings, deployments, resources, schedule_policy, switched
from tidegate.settings.added import added
from tidegate.settings.tenants import Tenants
from tidegate.store.database.rows import limits_from
from tidegate.store.road.leases import SnapshotBounds
from tidegate.store.store import Store
from tidegate.upstream.calls.router import Router
from tidegate.web.jobs.error_groups import error_groups
from tidegate.web.jobs.forecast import calls_ahead, end_of
from tidegate.web.jobs.reported_health import reported_troubles

# Wider than a worker's own view, so that a batch far behind is found too.
FLOWS_MAX = 1_000
JOBS_MAX = 2_000
# The reports about tides that are shown; further processes report much the same.
TIDES_MAX = 8

RoutingEntries = tuple[list[Deployment], list[Resource]]
Bindings = dict[str, list[tuple[Budget, ...]]]


class Explanation(msgspec.Struct, frozen=True):
    """Why a batch runs or waits, in sentences.

    `waits_for` is the first reason why it makes no progress; null if none is known. `models` are
    the models that its lines ask for.
    """

    object: str
    batch_id: str
    status: str
    waits_for: str | None
    why: list[str]
    models: list[str]


class Explainer:
    """The maker of explanations.

    `elsewhere` has the deployments and resources that a server has by settings that this process
    was not given.
    """

    def __init__(
        self,
        store: Store,
        blobs: Blobs,
        settings: Callable[[], Settings],
        router: Router,
        elsewhere: RoutingEntries | None = None,
    ) -> None:
        self._store = store
        self._blobs = blobs
        self._read_settings = settings
        self._router = router
        self._elsewhere = elsewhere or ([], [])

    async def explanation(self, job: Job, *, for_owner: bool) -> Explanation:
        """Explain a job to the operator, or to its owner without the facts that only the operator
        may know.
        """
        inputs = await self.inputs(job)
        sentences = explain(job, inputs, for_owner=for_owner)
        reason = waits_for(job, inputs, for_owner=for_owner)
        models = await self._store.models_of_job(job.id)
        return Explanation("batch.explanation", job.id, str(job.state), reason or None, sentences, models)

    async def inputs(self, job: Job) -> ExplainInputs:
        """Return everything that is known about why a job runs or waits."""
        inputs = await self._store.explain_inputs(job.id)
        assert inputs is not None, "the job was just read"
        if job.state in JOB_ENDED:
            groups = await error_groups(self._store, self._blobs, job)
            failed = FailedItems(tuple(groups.counts.most_common()), groups.is_partial)
            return msgspec.structs.replace(inputs, failed=failed)
        workers = await self._store.worker_reports()
        inputs = msgspec.structs.replace(inputs, workers=tuple(workers))
        outlook = await self._store.outlook(job.id)
        if outlook is None or not outlook.models:
            return inputs
        settings = self._read_settings()
        routing = await self._routing_entries(settings)
        bound = await self._bound(settings, job, [one.model for one in outlook.models])
        spent, waits_ms = await self._spent(job, bound)
        least_ms = await self._least_ms(job, bound, waits_ms)
        forecasts = await self._forecasts(settings, job, outlook, least_ms)
        models = [one.model for one in forecasts]
        tides_now = await self._store.tides()
        unhealthy = unhealthy_models(routing, workers, models)
        closed = dict.fromkeys(tides_closed(routing, tides_now, models), schedule.Reason.TIDE_CLOSED)
        closed |= dict.fromkeys((one.model for one in spent), schedule.Reason.BUDGET_SPENT)
        closed |= dict.fromkeys((one.model for one in unhealthy if one.is_all), schedule.Reason.UNHEALTHY)
        tides = tide_notes(routing, tides_now, models)
        return msgspec.structs.replace(
            inputs,
            forecasts=tuple(
                msgspec.structs.replace(one, notes=tides[one.model], rule=None, reason=closed[one.model])
                if one.model in closed
                else msgspec.structs.replace(one, notes=tides[one.model])
                for one in forecasts
            ),
            unhealthy=unhealthy,
            spent=spent,
            work_units=sum(one.total.units for one in outlook.models),
        )

    async def _routing_entries(self, settings: Settings) -> RoutingEntries:
        """Return every deployment and resource, configured or added at run time, without looking up
        any key.
        """
        _, entries = await self._store.routing()
        found = added(settings, [(one.kind, one.name, one.document) for one in entries], looks_up=False)
        more_deployments, more_resources = self._elsewhere
        return (
            [*deployments(settings), *found.deployments, *more_deployments],
            [*resources(settings), *found.resources, *more_resources],
        )

    async def _bound(self, settings: Settings, job: Job, models: Sequence[str]) -> Bindings:
        """Return the budgets that bind the batch at each model, one group for each deployment that
        could take its calls.
        """
        tenant = await self._store.tenant_name(job.tenant_id)
        policy = Tenants(settings).of(tenant or "")
        key = await self._store.get_key(job.key_id) if job.key_id else None
        user, team = (key["user_name"], key["team"]) if key else (None, None)
        own = policy.budgets(job.tenant_id, user, job.key_id, job.id, job.limits, team)
        if key is not None:
            own = with_limits(own, LimitBound.KEY, str(job.key_id), limits_from(key["limits"]))
        # This process may not know the deployments of a model; the batch's own budgets bind all the
        # same.
        return {model: [budgets + own for budgets in self._router.budgets(model) or [()]] for model in models}

    async def _least_ms(self, job: Job, bound: Bindings, waits_ms: dict[str, int]) -> dict[str, int]:
        """Return the shortest time to the end for each model.

        With several models it counts one call each, because the split is unknown.
        """
        calls = calls_ahead(job) if len(bound) == 1 else CallsAhead(1)
        taken = {model: await self._store.calls_take_ms(ways, calls) for model, ways in bound.items()}
        return {model: max(taken[model] or 0, waits_ms.get(model, 0)) for model in bound}

    async def _spent(self, job: Job, bound: Bindings) -> tuple[tuple[SpentBudget, ...], dict[str, int]]:
        """Return the used-up budgets of the models that cannot be called now, and how long each
        model must wait.
        """
        spent, waits_ms = [], {}
        for model, ways in bound.items():
            grants = await self._store.look_at_budgets([BudgetRequest(budgets, 1, 1, 1) for budgets in ways])
            if grants and not any(grant.requests for grant in grants):
                grant, budgets = min(zip(grants, ways, strict=True), key=lambda one: one[0].wait_ms)
                budget = next(one for one in budgets if one.id == grant.spent)
                org = await self._store.tenant_name(job.tenant_id) or ""
                spent.append(_spent_budget(model, budget, grant, org))
                waits_ms[model] = grant.wait_ms if grant.wait_ms < NEVER_MS else 0
        return tuple(spent), waits_ms

    async def _forecasts(
        self, settings: Settings, job: Job, outlook: Outlook, least_ms: dict[str, int]
    ) -> tuple[schedule.FlowForecast, ...]:
        """Return what a worker with room for one slice of each of the job's models would do now."""
        models = [one.model for one in outlook.models]
        slice_items = settings.ingest.slice_count_max
        policy = switched(schedule_policy(settings), await self._store.mode_override())
        paces = await self._store.paces(models)
        snapshot = await self._store.snapshot(
            "",
            {model: schedule.ModelRoom(slice_items, pace=paces[model]) for model in models},
            SnapshotBounds(flows_max=FLOWS_MAX, jobs_per_flow_max=JOBS_MAX, jobs_max=JOBS_MAX),
            slice_items=slice_items,
            slices_max=len(models),
        )
        ends = {one.model: end_of(one, outlook, is_limited=least_ms.get(one.model, 0) > 0) for one in outlook.models}
        found = schedule.forecasts(snapshot, schedule.choose(snapshot, policy), policy, job.id)
        shown = {one.model for one in found}
        found += tuple(schedule.forecast_not_ready(one, policy) for one in outlook.models if one.model not in shown)
        left_ms = outlook.expires_at - outlook.now
        return tuple(_with_end(one, ends.get(one.model), least_ms.get(one.model, 0), left_ms) for one in found)


def _spent_budget(model: str, budget: Budget, grant: Grant, org: str) -> SpentBudget:
    """Return a budget that is used up, in words."""
    names = {
        LimitBound.TENANT: f"organization {org}",
        LimitBound.TEAM: f"team {budget.name.partition('/')[2]}",
        LimitBound.USER: f"user {budget.name.partition('/')[2]}",
        LimitBound.JOB: "this batch",
    }
    figures = ", ".join(_figures(limit) for limit in budget.limits if limit.enabled)
    if budget.in_money and grant.tightest == budget.id:
        figures += f"; {units_text(grant.left_nano)} left"
    return SpentBudget(
        model,
        names.get(budget.bound, f"{budget.bound} {budget.name}"),
        figures,
        grant.wait_ms if grant.wait_ms < NEVER_MS else None,
        budget.bound not in (LimitBound.DEPLOYMENT, LimitBound.RESOURCE),
    )


def _figures(limit: Limit) -> str:
    sides = (
        None if limit.requests is None else in_words(limit.requests, "request"),
        None if limit.tokens is None else in_words(limit.tokens, "token"),
        None if limit.nano is None else f"{units_text(limit.nano)} of cost",
    )
    period = "in all" if limit.period == "lifetime" else f"a {limit.period}"
    return f"{' and '.join(side for side in sides if side)} {period}"


def unhealthy_models(
    routing: RoutingEntries, workers: Sequence[ReportedWorker], models: Sequence[str]
) -> tuple[UnhealthyModel, ...]:
    """Return the models with deployments to which a living worker sends nothing."""
    reported = reported_troubles(workers)
    falls_back = {one.name for one in routing[1] if one.fallbacks}
    found = []
    for model, serving in _serving(routing, models).items():
        troubles = tuple(reported[name] for name in sorted(serving & reported.keys()))
        if troubles:
            found.append(UnhealthyModel(model, troubles, len(troubles) == len(serving) and model not in falls_back))
    return tuple(found)


def tide_notes(
    routing: RoutingEntries, tides_now: Sequence[tuple[str, str]], models: Sequence[str]
) -> dict[str, tuple[str, ...]]:
    """Return sentences about the tides of each model's deployments, from what running processes
    reported lately.
    """
    notes = {}
    for model, serving in _serving(routing, models).items():
        lines = dict.fromkeys(
            f"the tide of {place} lets batch have {why}." for place, why in tides_now if place in serving
        )
        notes[model] = (
            *list(lines)[:TIDES_MAX],
            *([f"and {len(lines) - TIDES_MAX} more."] if len(lines) > TIDES_MAX else []),
        )
    return notes


def tides_closed(routing: RoutingEntries, tides_now: Sequence[tuple[str, str]], models: Sequence[str]) -> list[str]:
    """Return the models without room beside interactive calls, as reported lately for every
    deployment that serves them.
    """
    closed = {place for place, why in tides_now if schedule.Reason.TIDE_CLOSED in why}
    return [model for model, serving in _serving(routing, models).items() if serving and serving <= closed]


def _serving(routing: RoutingEntries, models: Sequence[str]) -> dict[str, set[str]]:
    """Return the deployments to which background work for each model may go."""
    aims = {one.name: one.model for one in routing[1]}
    takers = [one for one in routing[0] if one.takes_background]
    return {
        model: {one.name for one in takers if aims.get(model, model) in one.models}
        or {one.name for one in takers if not one.models}
        for model in models
    }


def _with_end(
    forecast: schedule.FlowForecast, expected: eta.Eta | None, least_ms: int, left_ms: int
) -> schedule.FlowForecast:
    if expected is None:
        return forecast
    end = eta.not_before(expected, least_ms)
    slack_ms = left_ms - end.p50_ms if forecast.slack_ms is None else forecast.slack_ms
    return msgspec.structs.replace(forecast, eta_p50_ms=end.p50_ms, eta_p95_ms=end.p95_ms, slack_ms=slack_ms)
