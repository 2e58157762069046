"""When a batch will be done, and whether one that is wished for can be done in time: measured rates and a sample of its input.

A forecast never keeps anything from being accepted by failing itself: where nothing was measured or the storage is away, nothing is said.
"""

from collections.abc import Sequence

import msgspec

from tidegate.core import estimate, eta
from tidegate.core.budgets import Limit
from tidegate.core.errors import ApiProblem, BlobError, StoreError
from tidegate.core.lines import LineRules, decode_request, endpoint_of
from tidegate.core.nouns import Caller, File, Job, JobRequest, ModelOutlook
from tidegate.core.states import JobState
from tidegate.core.window import spoken
from tidegate.settings.tenants import Tenants
from tidegate.web import content, wire
from tidegate.web.context import WebContext

SAMPLE_BYTES_MAX = 64 * 1024
SAMPLE_MODELS_MAX = 8
CHOICES_MAX = 128
_MINUTE_S = 60
_MINUTE_MS = 60_000


class Forecaster:
    def __init__(self, context: WebContext) -> None:
        self._store = context.store
        self._blobs = context.blobs
        self._scheduler = context.settings.scheduler
        self._tenants = Tenants(context.settings)
        self._router = context.router

    async def of_job(self, job: Job) -> wire.Forecast:
        """What can be said of a job that runs; nothing of any other."""
        if job.state is not JobState.IN_PROGRESS or job.closing is not None:
            return wire.UNKNOWN
        outlook = await self._store.outlook(job.id)
        if outlook is None or not outlook.models:
            return wire.UNKNOWN
        work_units = sum(one.total_units for one in outlook.models)
        now_minute = outlook.now // _MINUTE_MS
        ends = [eta.eta(position_of(one), rates_of(one, now_minute)) for one in outlook.models]
        known = [end for end in ends if end is not None]
        if len(known) < len(ends):
            return wire.Forecast(work_units=work_units)
        caller = Caller(job.tenant_id, key_id=job.key_id)
        least_ms = await self._least_ms(
            caller, job.item_count - job.done_count, [one.model for one in outlook.models], job.id, job.limits
        )
        last = eta.not_before(eta.Eta(max(end.p50_ms for end in known), max(end.p95_ms for end in known)), least_ms)
        return wire.Forecast(
            slack_seconds=(outlook.expires_at - outlook.now - last.p50_ms) // 1000,
            eta=wire.Eta((outlook.now + last.p50_ms) // 1000, (outlook.now + last.p95_ms) // 1000),
            work_units=work_units,
        )

    async def _least_ms(
        self, caller: Caller, calls: int, models: Sequence[str], job_id: str, job_limits: tuple[Limit, ...]
    ) -> int:
        """How long so many calls take at the least under the limits of the batch, of whoever sends it and, of one model, of its servers."""
        tenant = await self._store.tenant_name(caller.tenant_id) or ""
        own = self._tenants.of(tenant).budgets(caller.tenant_id, caller.user, caller.key_id, job_id, job_limits)
        ways = self._router.budgets(models[0]) if len(models) == 1 else []
        return max(eta.least_ms(calls, [own]), eta.least_ms(calls, ways))

    async def admit(self, caller: Caller, wanted: JobRequest, scope: str, key: str | None) -> tuple[str, ...]:
        """Warnings about a deadline that cannot be met; a refusal where the operator wants one."""
        if self._scheduler.admission == "off":
            return ()
        try:
            late = await self._hopeless(caller, wanted, scope)
            if late is None or (key and await self._store.was_made(caller.tenant_id, "batches", key)):
                return ()
        except (StoreError, BlobError):
            return ()
        if self._scheduler.admission == "refuse":
            raise ApiProblem(400, "deadline_unreachable", late, param="completion_window")
        return (late,)

    async def _hopeless(self, caller: Caller, wanted: JobRequest, scope: str) -> str | None:
        """Why it will be late: a model on which even the whole urgent share would not do, or limits that let too little through."""
        file = await self._store.get_file(caller.tenant_id, wanted.input_file_id)
        if file is None:
            return None
        now_minute = await self._store.now_ms() // _MINUTE_MS
        sample = await self._sampled(file)
        units_by_model = sampled_units(sample, file.size_bytes, LineRules(endpoint=wanted.endpoint))
        for model, units in units_by_model.items():
            outlook = await self._store.prospect(model, scope, units)
            rates = rates_of(outlook, now_minute)
            chance = eta.feasible(wanted.window_ms, position_of(outlook), rates, self._scheduler.urgent_share)
            if chance is eta.Outlook.IMPOSSIBLE:
                return (
                    f"Measured by what {model} served lately, this batch cannot be done within {spoken(wanted.window_ms)}: "
                    f"it has about {outlook.total_units:,} tokens of work. Give it a longer completion_window, or split it."
                )
        calls = sampled_count(sample, file.size_bytes)
        least_ms = await self._least_ms(caller, calls, list(units_by_model), "new", (*wanted.limits, *caller.limits))
        if least_ms <= wanted.window_ms:
            return None
        return (
            f"Under the limits that bind it, this batch cannot be done within {spoken(wanted.window_ms)}: about {calls:,} requests take "
            f"{spoken(least_ms)} at the least. Give it a longer completion_window, split it, or raise the limits."
        )

    async def _sampled(self, file: File) -> list[bytes]:
        """The lines that an input begins with."""
        end = min(file.size_bytes, SAMPLE_BYTES_MAX)
        data = b"".join([piece async for piece in content.pieces(self._store, self._blobs, file.id, 0, end)])
        lines = data.split(b"\n")
        if end < file.size_bytes:
            lines.pop()
        return lines


def sampled_count(lines: Sequence[bytes], size_bytes: int) -> int:
    """How many requests an input of this size has that goes on as these lines begin."""
    full = [line for line in lines if line.strip()]
    return len(full) * size_bytes // max(1, min(sum(len(line) + 1 for line in lines), size_bytes))


def sampled_units(lines: Sequence[bytes], size_bytes: int, rules: LineRules) -> dict[str, int]:
    """Work units by model of an input of this size that goes on as these lines begin; lines that cannot be read say nothing."""
    units: dict[str, int] = {}
    read_bytes = 0
    for line in lines:
        try:
            body = decode_request(line).body
        except (msgspec.MsgspecError, ValueError, RecursionError):
            continue
        if body.model not in units and len(units) >= SAMPLE_MODELS_MAX:
            continue
        asked = body.max_completion_tokens or body.max_output_tokens or body.max_tokens
        output = 0
        if endpoint_of(rules).generates:
            output = estimate.output_tokens(
                max(0, asked) if asked is not None else None,
                min(max(1, body.n or 1), CHOICES_MAX),
                default_tokens=rules.default_output_tokens,
                tokens_max=rules.max_tokens_max,
            )
        units[body.model] = units.get(body.model, 0) + estimate.work_units(len(line), output)
        read_bytes += len(line) + 1
    return {model: count * size_bytes // max(1, min(read_bytes, size_bytes)) for model, count in units.items()}


def position_of(outlook: ModelOutlook) -> eta.Position:
    """A job's place on a model; what the other flows have left is not known, so they are taken to have enough."""
    others = outlook.weights - outlook.weight
    return eta.Position(
        left_units=outlook.left_units,
        ahead_units=outlook.ahead_units,
        weight=outlook.weight,
        others=((others, None),) if others > 0 else (),
    )


def rates_of(outlook: ModelOutlook, now_minute: int) -> list[float]:
    """Work units a second of each whole minute; the one under way only where there is no other."""
    whole = [one for one in outlook.minutes if one.minute < now_minute]
    return [one.units / _MINUTE_S for one in whole or outlook.minutes]
