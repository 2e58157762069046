"""The check of a batch before it is created (`validate_only`).

It returns all that is known of the batch. Nothing is sent or kept.

The input goes through the pass of ingest, in a scratch directory. Forecasts use what was measured
lately.
"""

import asyncio
import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import IO

import msgspec

from tidegate.core.budgets.ahead import CallsAhead
from tidegate.core.files import File
from tidegate.core.input.lines import LineRules
from tidegate.core.input.turns import IngestLane, ingest_bytes
from tidegate.core.job_shape import AS_WRITTEN, InputPart
from tidegate.core.nouns import Caller, IngestPlan, JobRequest, LineError
from tidegate.core.policy.policy_rules import names_allowed
from tidegate.core.schedule import eta
from tidegate.core.schedule.job_estimate import EstimateRange, ModelLoad, cost_nano, input_tokens, output_tokens
from tidegate.core.schedule.outlooks import Backlog, ModelOutlook
from tidegate.core.schedule.share_owner import share_owner_of
from tidegate.core.usage.estimate import escaped_bytes, prompt_tokens
from tidegate.core.usage.prices import nano_of, units_text
from tidegate.stages.ingest.earlier_job import EarlierJobs, earlier_gone, remove_earlier
from tidegate.stages.ingest.ingest_file import InputPasses
from tidegate.stages.ingest.ingest_write import BadItem
from tidegate.stages.ingest.input_rules import line_rules
from tidegate.stages.ingest.join_input import in_file
from tidegate.store.file_bytes import file_bytes
from tidegate.web.context import WebContext
from tidegate.web.http.tenant_slots import dry_run_slots
from tidegate.web.jobs.creation import JobCreation
from tidegate.web.jobs.forecast import Forecaster, end_by_rates
from tidegate.web.jobs.limit_rooms import CallerLimit, LimitRooms, LimitSides

# Passes that this process makes at once in each lane: one over a large input may take a core.
_PASSES_MAX = 2
# The least share of a prompt that a model reads: that of a prompt made of escapes alone, each for
# two bytes of text.
_READ_SHARE_MIN = 1 / 3
ERROR_FILE = "error_file"
_bad_item = msgspec.json.Decoder(BadItem).decode


class TokenRange(msgspec.Struct):
    p5: int
    p50: int
    p95: int


class CostShown(msgspec.Struct):
    p5: str
    p50: str
    p95: str


class Tokens(msgspec.Struct):
    """`input` is the p50 of `input_range`."""

    input: int
    input_range: TokenRange
    output: TokenRange


NO_TOKENS = Tokens(0, TokenRange(0, 0, 0), TokenRange(0, 0, 0))


class EtaSeconds(msgspec.Struct):
    p50: int
    p95: int


class Refusal(msgspec.Struct):
    """One reason for refusals: of `count` requests, or of the whole batch if `count` is null."""

    code: str
    message: str
    count: int | None


class BindingLimit(msgspec.Struct):
    bound: str
    period: str
    remaining: LimitSides
    binds: bool


class JobEstimate(msgspec.Struct):
    """All that is known of a batch before it is created.

    `cost` is in the currency of the operator's prices; `eta` is null if nothing was measured.
    `deduplicated` requests have the answer of another one, and `reused` ones that of an earlier
    batch: they are not run, and count neither in `tokens` nor in `cost`. `bad_lines` are the first
    of the `bad_count` lines that would fail.
    """

    errors: Sequence[LineError]
    item_count: int
    bad_count: int
    bad_lines: Sequence[LineError]
    deduplicated: int
    reused: int
    tokens: Tokens
    cost: CostShown
    eta: EtaSeconds | None
    shared_prefix_share: float | None
    limits: list[BindingLimit]
    refused: list[Refusal]


class JobValidation:
    def __init__(self, context: WebContext, creation: JobCreation) -> None:
        self._store = context.store
        self._blobs = context.blobs
        self._settings = context.settings
        self._router = context.router
        self._model_of = context.model_of()
        self._scratch = context.scratch
        self._servers = context.servers
        self._creation = creation
        self._rooms = LimitRooms(context)
        self._forecaster = Forecaster(context)
        self._passes = InputPasses()
        levels = context.settings.parameters.levels()
        self._earlier = EarlierJobs(context.store, context.blobs, lambda job: levels)
        # A tenant has one pass of each lane at a time, so that its large inputs do not block those
        # of others.
        self._own_turns = {lane: dry_run_slots() for lane in IngestLane}
        self._turns = {lane: asyncio.Semaphore(_PASSES_MAX) for lane in IngestLane}

    async def validate(self, caller: Caller, wanted: JobRequest) -> JobEstimate:
        """Read the input through and return what a batch made of it would be."""
        files = await self._store.batch_inputs(caller.tenant_id, wanted)
        cost_bytes = sum(ingest_bytes(file.size_bytes, file.line_count) for file in files)
        is_small = cost_bytes <= self._settings.ingest.small_bytes_max
        lane = IngestLane.SMALL if is_small else IngestLane.LARGE
        async with self._own_turns[lane].taken(caller.tenant_id), self._turns[lane]:
            plan, bad_lines, escaped = await self._plan(caller, wanted, files, lane)
            if plan.errors:
                return await self._unusable(caller, wanted, files, lane, plan.errors)
        loads, bad_count = _loads(plan)
        share_owner = share_owner_of(caller, self._settings.scheduler.scope_preference)
        shared_share = plan.shared_prefix_bytes / plan.prompt_bytes if plan.prompt_bytes else 0.0
        read_share = _read_share(plan, escaped)
        output, cost = EstimateRange(), EstimateRange()
        outlooks: list[ModelOutlook] = []
        for load in loads:
            units = load.input_tokens + load.output_tokens_max
            outlook = await self._store.forecast(load.model, share_owner, Backlog(units, load.items), self._servers)
            answers = output_tokens(load, outlook.minutes)
            output += answers
            # Scheduling counts the bytes of requests; the cost counts only what a model reads of
            # them.
            read = msgspec.structs.replace(load, input_tokens=int(read_share * load.input_tokens))
            cost += cost_nano(read, answers, self._router.prices(load.model), shared_share)
            outlooks.append(outlook)
        rooms = await self._rooms.of_caller(caller, wanted.limits)
        prompts = input_tokens(prompt_tokens(int(read_share * (plan.prompt_bytes - plan.file_bytes))))
        needs = (sum(load.items for load in loads), prompts.p50 + output.p50, cost.p50)
        least_ms = await self._forecaster.least_ms(
            caller, CallsAhead(needs[0]), [one.model for one in loads], "new", wanted.limits
        )
        return JobEstimate(
            (),
            plan.item_count,
            bad_count,
            bad_lines,
            plan.copied.deduplicated,
            plan.copied.reused,
            Tokens(prompts.p50, _shown(prompts), _shown(output)),
            CostShown(units_text(cost.p5), units_text(cost.p50), units_text(cost.p95)),
            None if least_ms is None else _eta(outlooks, least_ms),
            round(shared_share, 4) if plan.prompt_bytes else None,
            [_binding(room, *needs) for room in rooms],
            await self._refused(caller, wanted, loads),
        )

    async def _unusable(
        self, caller: Caller, wanted: JobRequest, files: Sequence[File], lane: IngestLane, errors: Sequence[LineError]
    ) -> JobEstimate:
        """Return what keeps this input from being a batch, and the other bad lines, so that all of
        it can be fixed at once.
        """
        lenient = msgspec.structs.replace(wanted, invalid_lines=ERROR_FILE)
        plan, bad_lines, _ = await self._plan(caller, lenient, files, lane)
        known = {(error.line, error.message) for error in errors}
        more = [error for error in bad_lines if (error.line, error.message) not in known]
        refused = await self._refused(caller, wanted, _loads(plan)[0])
        found, lines = (
            [*errors, *more][: self._rules(caller, wanted).errors_max],
            sum(file.line_count for file in files),
        )
        return JobEstimate(found, lines, 0, (), 0, 0, NO_TOKENS, CostShown("0", "0", "0"), None, None, [], refused)

    async def _plan(
        self, caller: Caller, wanted: JobRequest, files: Sequence[File], lane: IngestLane
    ) -> tuple[IngestPlan, Sequence[LineError], int]:
        """Read the input through.

        Return the plan, the first lines that would fail, and how many bytes are escapes.
        """
        escaped = 0
        rules = self._rules(caller, wanted)
        with _passing(self._scratch, 2 + len(files)) as (joined_path, work_path, *paths):
            for file, path in zip(files, paths, strict=True):
                with path.open("xb") as copy:
                    async for chunk in file_bytes(self._store, self._blobs, file.id, 0, file.size_bytes):
                        escaped += await asyncio.to_thread(_copy, chunk, copy)
            try:
                if job_id := wanted.shape.reuse_from:
                    earlier = await self._earlier.fetch(caller.tenant_id, job_id, work_path)
                    if earlier is None:
                        return IngestPlan(0, None, [], 0, 0, 0, [earlier_gone(job_id)]), (), 0
                    rules = msgspec.structs.replace(rules, earlier=earlier)
                if len(files) == 1 and not rules.levels:
                    plan = await self._passes(paths[0], work_path, rules, lane)
                else:
                    parts = tuple(InputPart(file.id, str(path)) for file, path in zip(files, paths, strict=True))
                    rules = msgspec.structs.replace(rules, parts=parts)
                    plan = await self._passes(joined_path, work_path, rules, lane)
                return plan, await asyncio.to_thread(_bad_lines, plan, work_path, rules.errors_max), escaped
            finally:
                remove_earlier(work_path)

    def _rules(self, caller: Caller, wanted: JobRequest) -> LineRules:
        rules = line_rules(self._settings, wanted.endpoint, wanted.invalid_lines, prefix_order=wanted.prefix_order)
        levels = (*rules.levels, *wanted.shape.levels())
        places = wanted.shape.places or AS_WRITTEN
        rules = msgspec.structs.replace(rules, levels=levels, dedupe=wanted.shape.dedupe, places=places)
        if caller.key_id is None:
            return rules
        return msgspec.structs.replace(rules, models=names_allowed(caller.models, caller.resources, self._model_of))

    async def _refused(self, caller: Caller, wanted: JobRequest, loads: Sequence[ModelLoad]) -> list[Refusal]:
        found = [
            Refusal("model_not_found", f"No deployment here serves the model {load.model}.", load.items)
            for load in loads
            if not self._router.knows(load.model)
        ]
        for problem in await self._creation.refusals(caller, wanted):
            found.append(Refusal(problem.code, problem.message, None))
        return found


@contextmanager
def _passing(scratch: Path, count: int) -> Iterator[list[Path]]:
    """Yield paths for one pass, and delete the files afterwards."""
    name = scratch / f"validation-{secrets.token_hex(8)}"
    paths = [name.with_suffix(f".{number}") for number in range(count)]
    try:
        yield paths
    finally:
        for path in paths:
            path.unlink(missing_ok=True)


def _copy(chunk: bytes, copy: IO[bytes]) -> int:
    """Write a piece of an input, and return how many of its bytes are escapes."""
    copy.write(chunk)
    return escaped_bytes(chunk)


def _read_share(plan: IngestPlan, escaped: int) -> float:
    """Return the share of the prompts' text that models read: all but escapes.

    Lines that are not run are taken to have as many escapes as others.
    """
    run_count = sum(one.count for one in plan.slices if one.model)
    unread = escaped * run_count / max(1, plan.item_count)
    return max(_READ_SHARE_MIN, 1 - unread / max(1, plan.prompt_bytes - plan.file_bytes))


def _bad_lines(plan: IngestPlan, work_path: Path, count_max: int) -> list[LineError]:
    """Return the first lines that ingest found bad, in the order of the input.

    They are at the end of the work file.
    """
    bad = [one for one in plan.slices if not one.model]
    if not bad:
        return []
    with work_path.open("rb") as work:
        work.seek(bad[0].work_at)
        items = [_bad_item(text) for text in islice(work, min(count_max, sum(one.count for one in bad)))]
    return [LineError(item.code, in_file(item.file, item.message), item.param, item.line) for item in items]


def _shown(tokens: EstimateRange) -> TokenRange:
    return TokenRange(tokens.p5, tokens.p50, tokens.p95)


def _loads(plan: IngestPlan) -> tuple[list[ModelLoad], int]:
    """Return what a plan asks of each model, and how many of its lines are item errors.

    Prompts are counted by model only if there is one model; otherwise they are divided by work
    units.
    """
    items: dict[str, int] = {}
    units: dict[str, int] = {}
    for one in plan.slices:
        items[one.model] = items.get(one.model, 0) + one.count
        units[one.model] = units.get(one.model, 0) + one.work_units
    bad_count = items.pop("", 0)
    units.pop("", None)
    total = sum(units.values())
    prompts = min(prompt_tokens(plan.prompt_bytes - plan.file_bytes), total)
    loads = []
    for model, count in items.items():
        input_tokens = prompts * units[model] // max(1, total)
        loads.append(ModelLoad(model, count, input_tokens, units[model] - input_tokens))
    return loads, bad_count


def _eta(outlooks: Sequence[ModelOutlook], least_ms: int) -> EtaSeconds | None:
    """Return when the last model is done, under limits that take at least `least_ms`; None if a
    model was not measured.
    """
    ends = [end_by_rates(one) for one in outlooks]
    known = [end for end in ends if end is not None]
    if not known or len(known) < len(ends):
        return None
    last = eta.not_before(eta.Eta(max(end.p50_ms for end in known), max(end.p95_ms for end in known)), least_ms)
    return EtaSeconds(last.p50_ms // 1000, last.p95_ms // 1000)


def _binding(room: CallerLimit, requests: int, tokens: int, nano: int) -> BindingLimit:
    """Return a limit with whether it has too little left for the whole batch."""
    return BindingLimit(room.bound, room.period, room.remaining, _exceeds(room.remaining, requests, tokens, nano))


def _exceeds(left: LimitSides, requests: int, tokens: int, nano: int) -> bool:
    return (
        (left.requests is not None and requests > left.requests)
        or (left.tokens is not None and tokens > left.tokens)
        or (left.cost is not None and nano > nano_of(left.cost))
    )


def together(parts: Sequence[JobEstimate]) -> JobEstimate:
    """Return what several batches take that run one after another.

    A limit binds if it has too little left for all of them.
    """
    prompts, answers = (
        TokenRange(*(sum(one) for one in zip(*map(msgspec.structs.astuple, ranges), strict=True)))
        for ranges in ([one.tokens.input_range for one in parts], [one.tokens.output for one in parts])
    )
    least, likely, most = (sum(map(nano_of, one)) for one in zip(*(_costs(part) for part in parts), strict=True))
    ends = [part.eta for part in parts if part.eta is not None]
    run = sum(part.item_count - part.bad_count - part.deduplicated - part.reused for part in parts)
    needs = (run, prompts.p50 + answers.p50, likely)
    limits = {(one.bound, one.period): one for part in parts for one in part.limits}
    refused: dict[tuple[str, str], Refusal] = {}
    for one in (refusal for part in parts for refusal in part.refused):
        known = refused.setdefault((one.code, one.message), Refusal(one.code, one.message, None))
        known.count = known.count if one.count is None else (known.count or 0) + one.count
    shared = sum((part.shared_prefix_share or 0) * part.tokens.input for part in parts)
    return JobEstimate(
        [error for part in parts for error in part.errors],
        sum(part.item_count for part in parts),
        sum(part.bad_count for part in parts),
        [error for part in parts for error in part.bad_lines],
        sum(part.deduplicated for part in parts),
        sum(part.reused for part in parts),
        Tokens(prompts.p50, prompts, answers),
        CostShown(units_text(least), units_text(likely), units_text(most)),
        None if len(ends) < len(parts) else EtaSeconds(sum(end.p50 for end in ends), sum(end.p95 for end in ends)),
        round(shared / prompts.p50, 4) if prompts.p50 else None,
        [
            BindingLimit(one.bound, one.period, one.remaining, _exceeds(one.remaining, *needs))
            for one in limits.values()
        ],
        list(refused.values()),
    )


def _costs(part: JobEstimate) -> tuple[str, str, str]:
    return part.cost.p5, part.cost.p50, part.cost.p95
