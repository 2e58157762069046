"""The forecast when a batch will be done, and whether a new one can be done in time.

It uses measured rates and a sample of the input.

A failing forecast never keeps a batch from being accepted: without measurements or storage there is
no forecast.
"""

from collections.abc import Sequence
from operator import sub

import msgspec

from tidegate.core.budgets.ahead import CallsAhead
from tidegate.core.budgets.budget import Limit, LimitBound, with_limits
from tidegate.core.errors import ApiProblem, BlobError, StoreError
from tidegate.core.files import File
from tidegate.core.input.lines import DEFAULT_MODELS, LineRules, decode_request, endpoint_of, path_of, prompt_of
from tidegate.core.input.parameters import BodyShaper
from tidegate.core.nouns import Caller, Job, JobRequest
from tidegate.core.schedule import eta
from tidegate.core.schedule.outlooks import Backlog, ModelOutlook, Outlook
from tidegate.core.states import JobState
from tidegate.core.usage import estimate
from tidegate.core.usage.inline_files import unread_bytes
from tidegate.core.window import spoken
from tidegate.core.wording import in_words
from tidegate.store.database.rows import limits_from
from tidegate.store.file_bytes import file_bytes
from tidegate.web.context import WebContext
from tidegate.web.jobs.forecast_shapes import UNKNOWN, EtaShown, Forecast

SAMPLE_BYTES_MAX = 64 * 1024
SAMPLE_MODELS_MAX = 8
CHOICES_MAX = 128
# A job's own pace counts if it was alone for at least this share of its time.
_ALONE_MIN = 0.9
# Moments are shown to the nearest second.
_HALF_S_MS = 500


class Forecaster:
    def __init__(self, context: WebContext) -> None:
        self._store = context.store
        self._blobs = context.blobs
        self._scheduler = context.settings.scheduler
        self._slots_max = context.settings.worker.in_flight_max
        self._tenants = context.tenants()
        self._router = context.router
        self._levels = context.settings.parameters.levels()

    async def of_job(self, job: Job) -> Forecast:
        """Return the forecast of a running job; UNKNOWN for any other."""
        if job.state is not JobState.IN_PROGRESS or job.closing is not None:
            return UNKNOWN
        outlook = await self._store.outlook(job.id)
        if outlook is None or not outlook.models:
            return UNKNOWN
        work_units = sum(one.total.units for one in outlook.models)
        caller = await self._caller_of(job)
        least_ms = await self.least_ms(
            caller, calls_ahead(job), [one.model for one in outlook.models], job.id, job.limits
        )
        if least_ms is None:
            return Forecast(work_units=work_units)
        ends = [end_of(one, outlook, is_limited=least_ms > 0) for one in outlook.models]
        known = [end for end in ends if end is not None]
        if len(known) < len(ends):
            return Forecast(work_units=work_units)
        last = eta.not_before(eta.Eta(max(end.p50_ms for end in known), max(end.p95_ms for end in known)), least_ms)
        return Forecast(
            slack_seconds=(outlook.expires_at - outlook.now - last.p50_ms) // 1000,
            eta=EtaShown(
                (outlook.now + last.p50_ms + _HALF_S_MS) // 1000, (outlook.now + last.p95_ms + _HALF_S_MS) // 1000
            ),
            work_units=work_units,
        )

    async def _caller_of(self, job: Job) -> Caller:
        """Return the caller who made a job, with the limits that its key has now."""
        key = await self._store.get_key(job.key_id) if job.key_id else None
        if key is None:
            return Caller(job.tenant_id, key_id=job.key_id)
        limits = limits_from(key["limits"])
        return Caller(job.tenant_id, key_id=job.key_id, team=key["team"], user=key["user_name"], limits=limits)

    async def least_ms(
        self, caller: Caller, calls: CallsAhead, models: Sequence[str], job_id: str, job_limits: tuple[Limit, ...]
    ) -> int | None:
        """Return how long these calls take at least under the limits of the batch, its tenant,
        team, user and key and, with one model, of its servers; None if they can never all be sent.
        """
        tenant = await self._store.tenant_name(caller.tenant_id) or ""
        policy = self._tenants.of(tenant)
        own = policy.budgets(caller.tenant_id, caller.user, caller.key_id, job_id, job_limits, caller.team)
        if caller.key_id:
            own = with_limits(own, LimitBound.KEY, caller.key_id, caller.limits)
        servers = self._router.budgets(models[0]) if len(models) == 1 else []
        return await self._store.calls_take_ms([(*own, *way) for way in servers or [()]], calls)

    async def admit(self, caller: Caller, wanted: JobRequest, share_owner: str, key: str | None) -> tuple[str, ...]:
        """Return warnings about a deadline that cannot be met; raise a 400 if the operator wants a
        refusal.
        """
        if self._scheduler.admission == "off":
            return ()
        try:
            late = await self._hopeless(caller, wanted, share_owner)
            if late is None or (key and await self._store.was_made(caller.tenant_id, "batches", key)):
                return ()
        except (StoreError, BlobError):
            return ()
        if self._scheduler.admission == "refuse":
            raise ApiProblem(400, "deadline_unreachable", late, param="completion_window")
        return (late,)

    async def _hopeless(self, caller: Caller, wanted: JobRequest, share_owner: str) -> str | None:
        """Return why the batch will be late: it is too much for the whole urgent share of a model,
        or its limits allow too little. None if it can be in time.
        """
        try:
            files = await self._store.batch_inputs(caller.tenant_id, wanted)
        except ApiProblem:
            return None
        slots = self._slots_max * await self._store.workers_alive()
        # Other files are assumed to be like the beginning of the first one.
        sample, rules = await self._sampled(files[0]), LineRules(endpoint=wanted.endpoint)
        size_bytes = sum(file.size_bytes for file in files)
        calls = sampled_count(sample, size_bytes)
        if levels := (*self._levels, *wanted.shape.levels()):
            shaper, read_bytes = BodyShaper(levels, rules), sum(map(len, sample))
            sample = [shaper.shaped(line) for line in sample]
            size_bytes = size_bytes * sum(map(len, sample)) // max(1, read_bytes)
        units_by_model = sampled_units(sample, size_bytes, rules)
        for model, units in units_by_model.items():
            outlook = await self._store.forecast(model, share_owner, Backlog(units, calls))
            best = eta.best_rates(outlook.minutes, slots)
            if best is None:
                continue
            chance = eta.feasible(wanted.window_ms, position_of(outlook), [best[0]], self._scheduler.urgent_share)
            # A call's time may follow its tokens or be the same for all calls: the batch is
            # hopeless only if it is by both measures.
            is_too_many = 1_000 * calls * units > wanted.window_ms * best[1] * max(1, sum(units_by_model.values()))
            if chance is eta.JobOutlook.IMPOSSIBLE and is_too_many:
                return (
                    f"Measured by what {model} served lately, this batch cannot be done within {spoken(wanted.window_ms)}: "
                    f"it has about {in_words(units, 'token')} of work. Give it a longer completion_window, or split it."
                )
        least_ms = await self.least_ms(caller, CallsAhead(calls), list(units_by_model), "new", wanted.limits)
        if least_ms is None:
            return (
                "Under the limits that bind it, this batch can never be done: they leave fewer than its about "
                f"{in_words(calls, 'request')}. Split it, or raise the limits."
            )
        if least_ms <= wanted.window_ms:
            return None
        return (
            f"Under the limits that bind it, this batch cannot be done within {spoken(wanted.window_ms)}: about "
            f"{in_words(calls, 'request takes', 'requests take')} {spoken(least_ms)} at the least. "
            "Give it a longer completion_window, split it, or raise the limits."
        )

    async def _sampled(self, file: File) -> list[bytes]:
        """Return the whole lines at the beginning of an input."""
        end = min(file.size_bytes, SAMPLE_BYTES_MAX)
        data = b"".join([chunk async for chunk in file_bytes(self._store, self._blobs, file.id, 0, end)])
        lines = data.split(b"\n")
        if end < file.size_bytes:
            lines.pop()
        return lines


def calls_ahead(job: Job) -> CallsAhead:
    """Return the calls that a job still has to make, each with the average tokens of its calls so
    far.
    """
    answered = job.answered_count
    tokens_each = (job.usage.input_tokens + job.usage.output_tokens) // answered if answered else 0
    return CallsAhead(job.run_count - job.done_count, tokens_each)


def sampled_count(lines: Sequence[bytes], size_bytes: int) -> int:
    """Return the number of requests in an input of this size, if all of it is like these lines."""
    full = [line for line in lines if line.strip()]
    return len(full) * size_bytes // max(1, min(sum(len(line) + 1 for line in lines), size_bytes))


def sampled_units(lines: Sequence[bytes], size_bytes: int, rules: LineRules) -> dict[str, int]:
    """Return the work units by model of an input of this size, if all of it is like these lines.

    Lines that cannot be read are skipped.
    """
    units: dict[str, int] = {}
    read_bytes = 0
    for line in lines:
        try:
            request = decode_request(line)
        except (msgspec.MsgspecError, ValueError, RecursionError):
            continue
        body, path = request.body, path_of(request.url, rules)
        model = body.model or DEFAULT_MODELS.get(path, "")
        if model not in units and len(units) >= SAMPLE_MODELS_MAX:
            continue
        if not model or not model.isprintable():
            # Ingest refuses such a line, and not every database can look the name up.
            continue
        asked = body.max_completion_tokens or body.max_output_tokens or body.max_tokens
        output = 0
        if endpoint_of(path).generates:
            output = estimate.output_tokens(
                max(0, asked) if asked is not None else None,
                min(max(1, body.n or 1), CHOICES_MAX),
                default_tokens=rules.default_output_tokens,
                tokens_max=rules.max_tokens_max,
            )
        # Counted as in ingest: the text that the model reads, without the JSON around it.
        parts = [bytes(part) for part in (prompt_of(body, path), body.tools, body.instructions, body.system)]
        prompt_bytes = sum(len(part) - unread_bytes(part) for part in parts)
        units[model] = units.get(model, 0) + estimate.work_units(prompt_bytes, output)
        read_bytes += len(line) + 1
    return {model: count * size_bytes // max(1, min(read_bytes, size_bytes)) for model, count in units.items()}


def position_of(outlook: ModelOutlook) -> eta.Position:
    """Return a job's position among the work for a model."""
    return eta.Position(outlook.left, outlook.ahead, outlook.weight, outlook.others)


def end_of(model: ModelOutlook, outlook: Outlook, *, is_limited: bool) -> eta.Eta | None:
    """Return when a job is done with a model, by its own progress or else by what the model served
    lately; None if nothing was measured.

    A job that waits for its limits does not show the model's pace, so its progress is ignored.
    """
    takes, done = eta.fitted(model.minutes), Backlog(*map(sub, model.total, model.left))
    begun_ms_ago = outlook.now - outlook.begun_at if outlook.begun_at is not None else 0
    # Beside other flows a job progresses by slices, in turns, which shows no steady pace.
    was_alone = not model.others and outlook.now - model.shared_since >= _ALONE_MIN * begun_ms_ago
    rate = eta.own_rate(done, begun_ms_ago, model.minutes, takes) if was_alone and not is_limited else None
    return _end_at(model, takes, rate)


def end_by_rates(model: ModelOutlook) -> eta.Eta | None:
    """Return when a job that has not begun is done with a model, by what the model served lately;
    None if nothing was measured.
    """
    return _end_at(model, eta.fitted(model.minutes), None)


def _end_at(model: ModelOutlook, takes: eta.RequestCost, own_rate: float | None) -> eta.Eta | None:
    rate = eta.recent_rate(model.minutes, takes) if own_rate is None else own_rate
    return eta.eta(position_of(model), eta.busy_rates(model.minutes, takes), rate_now=rate, takes=takes)
