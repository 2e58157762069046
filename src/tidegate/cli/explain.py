"""`tidegate explain`: why a batch is or is not running now, and what the scheduler would do with it."""

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

import typer
import uvloop

from tidegate.cli import batches, options, server_client, terminal
from tidegate.core import schedule
from tidegate.core.budgets.budget import NEVER_MS, Budget, BudgetRequest, LimitBound, with_limits
from tidegate.core.deployments import Deployment, Resource
from tidegate.core.nouns import Job
from tidegate.core.schedule import eta
from tidegate.core.schedule import explain as reasons
from tidegate.core.schedule.outlooks import Outlook
from tidegate.core.window import spoken
from tidegate.settings import Settings, deployments, resources, schedule_policy, switched
from tidegate.settings.added import added
from tidegate.settings.tenants import Tenants

if TYPE_CHECKING:
    from tidegate.service import Parts

# Wider than a worker's own look, so that a batch far behind is found too.
FLOWS_MAX = 1_000
JOBS_MAX = 2_000
# So many words on tides are read; more processes say the like.
TIDES_MAX = 8
_MINUTE_MS = 60_000

Places = tuple[list[Deployment], list[Resource]]
Bindings = dict[str, list[tuple[Budget, ...]]]


def explain(
    batch: options.BatchId,
    org: options.Org = None,
    data: options.Data = None,
    config: options.Config = None,
    as_json: options.AsJson = False,
) -> None:
    """Say why a batch is or is not running now.

    Reads the store only, so it works beside a running server and with none. What a worker with room would do is worked out here from the
    same look and the same rules as there.

    Example: tidegate explain batch_0f3kQ2mZ8s1xW7vB4nD9Lc
    """
    options.check_batch_id(batch)
    settings = options.loaded(config, data).settings
    job, explain_inputs = uvloop.run(explain_inputs_of(settings, org, batch))
    sentences = reasons.explain(job, explain_inputs)
    if as_json:
        facts = dataclasses.asdict(explain_inputs)
        facts["prospects"] = facts.pop("forecasts")
        terminal.show_json({"batch": job.id, "status": job.state, "why": sentences, "standing": facts})
        return
    for sentence in sentences:
        typer.echo(terminal.clean(sentence))


async def explain_inputs_of(settings: Settings, org: str | None, batch: str) -> tuple[Job, reasons.ExplainInputs]:
    """A batch, and all that is known of why it runs or waits."""
    async with server_client.reading(settings) as parts:
        job = await batches.job_of(parts, org, batch)
        explain_inputs = await parts.store.explain_inputs(job.id)
        assert explain_inputs is not None, "the job was just read"
        outlook = await parts.store.outlook(job.id)
        if outlook is None or not outlook.models:
            return job, explain_inputs
        places = await _places(parts)
        bound = await _bound(parts, places, job, [one.model for one in outlook.models])
        spent, waits_ms = await _spent(parts, bound)
        forecasts = await _forecasts(parts, job, outlook, await _least_ms(parts, job, bound, waits_ms))
        tides_now = await parts.store.tides()
        models = [one.model for one in forecasts]
        closed = dict.fromkeys(tides_closed(places, tides_now, models), schedule.Reason.TIDE_CLOSED)
        closed |= dict.fromkeys(spent, schedule.Reason.BUDGET_SPENT)
        tides = tide_notes(places, tides_now, models)
        return job, dataclasses.replace(
            explain_inputs,
            forecasts=tuple(
                dataclasses.replace(one, notes=tides[one.model], rule=None, reason=closed[one.model])
                if one.model in closed
                else dataclasses.replace(one, notes=tides[one.model])
                for one in forecasts
            ),
            notes=tuple(spent.values()),
            work_units=sum(one.total_units for one in outlook.models),
        )


async def _places(parts: "Parts") -> Places:
    """Return every deployment and resource, configured or added at run time, without looking up any key."""
    _, entries = await parts.store.routing()
    found = added(parts.settings, [(one.kind, one.name, one.document) for one in entries], looks_up=False)
    settings = parts.settings
    return [*deployments(settings), *found.deployments], [*resources(settings), *found.resources]


async def _bound(parts: "Parts", places: Places, job: Job, models: Sequence[str]) -> Bindings:
    """The budgets that bind the batch at each model, for each deployment that could take its calls."""
    from tidegate.store.rows import limits_from
    from tidegate.upstream.calls.router import open_router

    settings = parts.settings
    tenant = await parts.store.tenant_name(job.tenant_id)
    policy = Tenants(settings).of(tenant or "")
    key = await parts.store.get_key(job.key_id) if job.key_id else None
    user, team = (key["user_name"], key["team"]) if key else (None, None)
    own = policy.budgets(job.tenant_id, user, job.key_id, job.id, job.limits, team)
    if key is not None:
        own = with_limits(own, LimitBound.KEY, str(job.key_id), limits_from(key["limits"]))
    router = open_router(settings.http.limits(), parts.clock, parts.entropy)
    try:
        router.replace(*places)
        # The budgets of a deployment that this command does not know are unknown; the batch's own bind it all the same.
        return {model: [budgets + own for budgets in router.budgets(model) or [()]] for model in models}
    finally:
        await router.close()


async def _least_ms(parts: "Parts", job: Job, bound: Bindings, waits_ms: dict[str, int]) -> dict[str, int]:
    """Return the earliest end for each model. With several models one call each is assumed: the split is not counted."""
    calls = job.run_count - job.done_count if len(bound) == 1 else 1
    taken = {model: await parts.store.calls_take_ms(ways, calls) for model, ways in bound.items()}
    return {model: max(taken[model] or 0, waits_ms.get(model, 0)) for model in bound}


async def _spent(parts: "Parts", bound: Bindings) -> tuple[dict[str, str], dict[str, int]]:
    """The models that nothing may be sent to now, with the budget that is used up, and how long each of them must wait."""
    spent, waits_ms = {}, {}
    for model, ways in bound.items():
        grants = await parts.store.look_at_budgets([BudgetRequest(budgets, 1, 1, 1) for budgets in ways])
        if grants and not any(grant.requests for grant in grants):
            soonest = min(grants, key=lambda grant: grant.wait_ms)
            when = f"in {spoken(soonest.wait_ms)}" if soonest.wait_ms < NEVER_MS else "when its limit is raised"
            spent[model] = f"{model}: nothing of it is sent now: {soonest.spent} is used up, and allows more {when}."
            waits_ms[model] = soonest.wait_ms if soonest.wait_ms < NEVER_MS else 0
    return spent, waits_ms


def tide_notes(
    places: Places, tides_now: Sequence[tuple[str, str]], models: Sequence[str]
) -> dict[str, tuple[str, ...]]:
    """Return sentences about the tides of each model's deployments, from what running processes reported lately."""
    notes = {}
    for model, serving in _serving(places, models).items():
        lines = dict.fromkeys(
            f"the tide of {place} lets batch have {why}." for place, why in tides_now if place in serving
        )
        notes[model] = (
            *list(lines)[:TIDES_MAX],
            *([f"and {len(lines) - TIDES_MAX} more."] if len(lines) > TIDES_MAX else []),
        )
    return notes


def tides_closed(places: Places, tides_now: Sequence[tuple[str, str]], models: Sequence[str]) -> list[str]:
    """Return the models without room beside interactive calls, by a recent report about every deployment that serves them."""
    shut = {place for place, why in tides_now if schedule.Reason.TIDE_CLOSED in why}
    return [model for model, serving in _serving(places, models).items() if serving and serving <= shut]


def _serving(places: Places, models: Sequence[str]) -> dict[str, set[str]]:
    """The deployments that batch work for each model may go to."""
    aims = {one.name: one.model for one in places[1]}
    takers = [one for one in places[0] if one.takes_background]
    return {
        model: {one.name for one in takers if aims.get(model, model) in one.models}
        or {one.name for one in takers if not one.models}
        for model in models
    }


async def _forecasts(
    parts: "Parts", job: Job, outlook: Outlook, least_ms: dict[str, int]
) -> tuple[schedule.FlowForecast, ...]:
    """What a worker with room for one slice of each of its models would do now."""
    from tidegate.store.snapshots import SnapshotBounds
    from tidegate.web.jobs.forecast import end_of

    models = [one.model for one in outlook.models]
    slice_items = parts.settings.ingest.slice_count_max
    policy = switched(schedule_policy(parts.settings), await parts.store.mode_override())
    paces = await parts.store.paces(models)
    snapshot = await parts.store.snapshot(
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


def _with_end(
    forecast: schedule.FlowForecast, expected: eta.Eta | None, least_ms: int, left_ms: int
) -> schedule.FlowForecast:
    if expected is None:
        return forecast
    end = eta.not_before(expected, least_ms)
    slack_ms = left_ms - end.p50_ms if forecast.slack_ms is None else forecast.slack_ms
    return dataclasses.replace(forecast, eta_p50_ms=end.p50_ms, eta_p95_ms=end.p95_ms, slack_ms=slack_ms)
