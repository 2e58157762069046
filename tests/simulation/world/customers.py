"""The callers of one run: what they send in, when they cancel, and what they must get back. They meet a healthy front door."""

import math
import random
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
from msgspec.structs import replace

from tests.simulation.world.disk import Disk
from tests.simulation.world.dry_runs import DryRuns
from tests.simulation.world.estate import CHAT, EMBEDDINGS, MESSAGES, RACE_SLOTS, UNKNOWN_MODEL, Shape
from tests.simulation.world.plan import Plan
from tests.simulation.world.provider import usage_of
from tests.simulation.world.trace import Trace
from tidegate.core import ids
from tidegate.core.answer_terms import AnswerTerms
from tidegate.core.budgets.budget import Limit
from tidegate.core.deployments import EngineKind
from tidegate.core.errors import ApiProblem
from tidegate.core.files import NewFile
from tidegate.core.follow_up import FollowUp
from tidegate.core.input.lines import MIXED
from tidegate.core.job_controls import (
    NO_CONTROLS,
    Canary,
    JobChange,
    JobControls,
    MaxErrors,
    RetryChoice,
)
from tidegate.core.job_shape import PLAIN, JobRetry, JobShape
from tidegate.core.nouns import Caller, Job, JobRequest, Usage
from tidegate.core.schedule.share_owner import share_owner_of
from tidegate.core.usage.estimate import work_units
from tidegate.core.webhooks import EVENT_TYPES, SECRET_BYTES, EndpointShape
from tidegate.store.road.outcomes import real_cost
from tidegate.store.store import Store
from tidegate.store.tenants.keys import KeyRights

LONG_WINDOW_MS = 3_600_000
POISON_WINDOW_MS = 120_000
COMPANY_AFTER_S = 25.0
USER_COUNT = 2
KEY_COUNT = 2
_REVOKED_WITHIN_S = 6.0
# An answer that fits says which call it is.
SCHEMA = '{"type":"object","properties":{"mark":{"type":"string"}},"required":["mark"]}'
_AFTER_CANARY = ("continue", "continue", "wait", "stop")
_THRESHOLDS = (
    *(JobControls(max_cost_nano=nano) for nano in (100, 800, 2_500)),
    *(JobControls(max_errors=MaxErrors(count=count)) for count in (0, 1, 3)),
    *(JobControls(max_errors=MaxErrors(share_ppm=ppm, after=after)) for ppm, after in ((100_000, 4), (200_000, 50))),
)
_CHOICES = (
    RetryChoice(("failed",)),
    RetryChoice(("failed", "expired", "cancelled")),
    RetryChoice(("expired", "cancelled")),
    RetryChoice(("failed", "cancelled"), ("batch_cancelled",)),
)


class Actions(msgspec.Struct, frozen=True):
    """What a caller does to a job beside creating it. Moments are seconds after its creation.

    `pauses` are pairs of pause and resume; without a resume it stays paused. It begins `later_s` after its creation, until that is changed
    at `moved_s`. Thresholds are given at its creation, or at `changed_s`. `word` is sent after a canary, from `word_s` on.
    `retries` are made one after the other. Once it has ended, an `edited` input is sent again. Its answers must fit `answers`. With `door`
    what becomes of each item is noted. At `window_s` its window is changed to `window_to_ms`. From `ranked_s` on it has its priority. Its
    deletion is asked for at `deletes_s`, also while it runs, and `deleted_after_s` after its end."""

    pauses: tuple[tuple[float, float | None], ...] = ()
    later_s: float = 0.0
    moved_s: float | None = None
    moved_to_s: float = 0.0
    thresholds: JobControls = NO_CONTROLS
    changed_s: float | None = None
    canary: Canary | None = None
    word: str = ""
    word_s: float = 0.0
    retries: tuple[RetryChoice, ...] = ()
    is_edited: bool = False
    answers: AnswerTerms | None = None
    door: str | None = None
    window_s: float | None = None
    window_to_ms: int = 0
    priority: int = 0
    ranked_s: float = 0.0
    deletes_s: tuple[float, ...] = ()
    deleted_after_s: float | None = None


NO_ACTIONS = Actions()


class Order(msgspec.Struct):
    """One job as its caller knows it. `asked` is which model or resource each line asks for, by its custom_id's number, and `usages` is
    what each really takes; a line that is no request has neither. `actions` is what its caller does to it while it runs. `retry_of` is the
    order of which it runs some lines again. `copies` are lines that are the same request as another: which. `reuse_of` is the order whose
    input was edited, and `unchanged` are the lines that are in both. A response with `interactive_after_ms` goes like a user's call once
    it has waited so long; it was asked for first at `asked_s` and accepted at `accepted_s`. `endpoints` are those of the lines of a job
    that has several."""

    name: str
    caller: Caller
    tenant: int
    limits: tuple[Limit, ...]
    file_id: str
    job_id: str
    custom_ids: list[str | None]
    tags: list[str]
    begin_s: float
    window_ms: int
    ordered: bool
    invalid_lines: str
    refused: bool
    cancel_s: float | None
    endpoint: str
    interactive_after_ms: int | None = None
    asked_s: float = math.inf
    accepted_s: float = math.inf
    shape: JobShape = PLAIN
    actions: Actions = NO_ACTIONS
    retry_of: "Order | None" = None
    reuse_of: "Order | None" = None
    unchanged: frozenset[str] = frozenset()
    copies: dict[str, str] = msgspec.field(default_factory=dict)
    requests: dict[str, dict[str, object]] = msgspec.field(default_factory=dict)
    bodies: list[bytes] = msgspec.field(default_factory=list)
    asked: dict[str, str] = msgspec.field(default_factory=dict)
    usages: dict[str, Usage] = msgspec.field(default_factory=dict)
    units: dict[str, int] = msgspec.field(default_factory=dict)
    endpoints: dict[str, str] = msgspec.field(default_factory=dict)

    def endpoint_of(self, tag: str) -> str:
        """Where a line is to be sent; in a job of several endpoints each line says so itself."""
        return self.endpoints.get(tag, self.endpoint)

    def source_of(self, custom_id: str) -> str:
        """The line whose request a line is: its own, or that of which it is a copy."""
        tag = custom_id.removeprefix("id-")
        return self.copies.get(tag, tag)

    def sizes(self) -> list[tuple[int, int, str]]:
        """Real cost, estimated units and model of every request."""
        return [(real_cost(usage), self.units[tag], self.asked[tag]) for tag, usage in self.usages.items()]


def race_window_ms(plan: Plan) -> int:
    """Twice what it takes with the share of the model that urgent work may have, and too short with one fair share of eight."""
    items_per_s = RACE_SLOTS / (plan.call_s_max / 2)
    urgent_s = plan.item_count_max / (items_per_s * plan.estate.policy.urgent_share)
    return int(1_000 * (5 + 2 * urgent_s))


class Customers:
    def __init__(self, plan: Plan, store: Store, disk: Disk, trace: Trace, dry_runs: DryRuns) -> None:
        self._plan = plan
        self._dry_runs = dry_runs
        self._store = store
        self._disk = disk
        self._trace = trace
        self._dice = random.Random(f"customers/{plan.seed}")
        self.orders: list[Order] = []
        self.by_job: dict[str, Order] = {}
        self.poison: set[str] = set()
        self.revocations: dict[str, float] = {}
        self.runnable_count = 0
        self.tenant_ids: list[str] = []
        self.secrets: dict[str, bytes] = {}
        self._urls: dict[str, list[str]] = {}
        self._endpoints = random.Random(f"endpoints/{plan.seed}")
        self._shapes = random.Random(f"shapes/{plan.seed}")
        self._actions = random.Random(f"wishes/{plan.seed}")
        self._lines = random.Random(f"lines/{plan.seed}")
        self._ranks = random.Random(f"ranks/{plan.seed}")
        self._deletes = random.Random(f"deletes/{plan.seed}")
        self._mixed = random.Random(f"mixed/{plan.seed}")
        self._checks = random.Random(f"checks/{plan.seed}")

    async def prepare(self, parts_of: Callable[[Order], list[Order]]) -> None:
        """Upload every input; jobs are created later, at their moments. An order may come in several parts."""
        tenant_ids = self.tenant_ids
        for number in range(len(self._plan.estate.tenants)):
            tenant_ids.append(await self._store.put_tenant(self._id("tenant"), f"tenant-{number}"))
            for key in range(KEY_COUNT):
                name = f"key-{number}-{key}"
                await self._store.put_key(Caller(tenant_ids[number], name), name.encode(), name, KeyRights())
        for number in range(self._plan.job_count):
            tenant = number % len(tenant_ids)
            for order in parts_of(self._order(f"j{number}", tenant, tenant_ids[tenant])):
                await self._upload(order)
        if self._plan.strength("receiver"):
            await self._subscribe()
        self._plan_revocations()
        tags = [tag for order in self.orders for tag in order.tags]
        self._dice.shuffle(tags)
        self.poison = set(tags[: int(self._plan.strength("poison"))])
        self._give_company()

    async def _subscribe(self) -> None:
        """Most tenants want events of their jobs' ends, some at two places."""
        dice = random.Random(f"endpoints of webhooks/{self._plan.seed}")
        for number, tenant_id in enumerate(self.tenant_ids):
            for place in range(dice.choice((0, 1, 1, 2))):
                url, secret = f"https://hooks.example/{number}/{place}", dice.randbytes(SECRET_BYTES)
                shape = EndpointShape("mine", url, EVENT_TYPES)
                await self._store.create_webhook_endpoint(tenant_id, f"we_{number}_{place}", shape, secret)
                self.secrets[url] = secret
                self._urls.setdefault(tenant_id, []).append(url)

    def awaited_events(self) -> set[tuple[str, str]]:
        """Which receiver must get the event of which job's end."""
        return {(url, order.job_id) for order in self.orders for url in self._urls.get(str(order.caller.tenant_id), [])}

    def _plan_revocations(self) -> None:
        """When which key is revoked, in seconds from the start; its jobs are there by then, or come later."""
        dice = random.Random(f"revocations/{self._plan.seed}")
        for key_id in sorted({str(order.caller.key_id) for order in self.orders}):
            if dice.random() < self._plan.strength("revoke"):
                self.revocations[key_id] = dice.uniform(0.5, self._plan.arrival_s + _REVOKED_WITHIN_S)

    def key_of(self, job_id: str) -> str | None:
        return self.by_job[job_id].caller.key_id

    async def revoke(self, key_id: str) -> None:
        await self._store.revoke_key(key_id)
        self._trace.note("operator", "revoked", key_id)

    def _give_company(self) -> None:
        """A poison item that is the last of all has nothing to be compared with, so it runs until its deadline, which comes soon here.
        Where there is a job without poison, it comes while the culprit is searched for."""
        for order in self.orders:
            if self.poison.intersection(order.tags):
                order.window_ms = min(order.window_ms, POISON_WINDOW_MS)
                order.actions = replace(order.actions, window_s=None)
            elif self.poison and order.cancel_s is None and self._plan.shape is Shape.ANY:
                order.begin_s += COMPANY_AFTER_S

    def new_job_id(self) -> str:
        return self._id("batch")

    def _id(self, kind: str) -> str:
        return ids.make(kind, self._dice.randbytes(16))

    def _order(self, name: str, tenant: int, tenant_id: str) -> Order:
        dice, plan = self._dice, self._plan
        # Sizes are very unequal: many are tiny, some are as large as they come.
        count = dice.choice((1, 2, dice.randint(1, plan.item_count_max), plan.item_count_max))
        if plan.shape is not Shape.ANY:
            count = plan.item_count_max
        count = max(count, plan.item_count_min)
        odd = dice.random() < plan.strength("odd_input")
        short = dice.random() < plan.strength("expire")
        cancelled = dice.random() < plan.strength("cancel")
        begin_s = dice.uniform(0, plan.arrival_s)
        lenient = dice.random() < 0.5
        order = Order(
            name=name,
            caller=Caller(
                tenant_id, f"key-{tenant}-{dice.randrange(KEY_COUNT)}", user=f"user-{dice.randrange(USER_COUNT)}"
            ),
            tenant=tenant,
            limits=dice.choice(plan.estate.job_limits),
            file_id=self._id("file"),
            job_id=self._id("batch"),
            custom_ids=[],
            tags=[],
            begin_s=begin_s,
            window_ms=dice.randint(300, 12_000) if short else LONG_WINDOW_MS,
            ordered=dice.random() < 0.3,
            invalid_lines="error_file" if lenient else "fail",
            refused=odd and not lenient,
            cancel_s=begin_s + dice.uniform(0, 10) if cancelled else None,
            endpoint=self._endpoints.choice(plan.estate.endpoints),
        )
        if plan.shape is Shape.RACE and not self.orders:
            order.begin_s, order.window_ms, order.ordered = 0.0, race_window_ms(plan), False
        if plan.shaped:
            order.shape = self._shape()
        order.actions = self._draw_actions(order, is_odd=odd)
        self._draw_line_actions(order, is_odd=odd)
        self._draw_later_actions(order)
        self._draw_deletes(order)
        for number in range(count):
            is_odd = odd and number == count - 1
            if order.shape.dedupe and order.tags and not is_odd and self._lines.random() < 0.5:
                self._add_copy(order, number)
            else:
                self._add_line(order, number, odd=is_odd)
        return order

    def _draw_line_actions(self, order: Order, *, is_odd: bool) -> None:
        """What is asked of lines and answers."""
        dice, plan = self._lines, self._plan
        if dice.random() < plan.strength("job_same"):
            order.shape = msgspec.structs.replace(order.shape, dedupe=True)
        elif dice.random() < plan.strength("job_edit") and not is_odd:
            order.actions = replace(order.actions, is_edited=True)
        if dice.random() < plan.strength("job_schema") and order.endpoint != EMBEDDINGS:
            terms = AnswerTerms(SCHEMA, tries_max=dice.choice((0, 1, 2)), feedback=dice.random() < 0.5)
            if plan.estate.stronger:
                terms = msgspec.structs.replace(terms, escalate_to=plan.estate.stronger)
            order.actions = replace(order.actions, answers=terms)
        # The door that wants events of items takes neither copies nor answers of an earlier job.
        is_copied = order.shape.dedupe or order.actions.is_edited
        if dice.random() < plan.strength("job_door") and not is_copied:
            order.actions, order.ordered = replace(order.actions, door="{}"), False
        if self._mixed.random() < plan.strength("job_mixed") and not is_copied and order.actions.answers is None:
            order.endpoint, order.shape = MIXED, PLAIN
            if self._mixed.random() < 0.7:
                order.actions, order.ordered = replace(order.actions, door="{}"), False

    def _draw_actions(self, order: Order, *, is_odd: bool) -> Actions:
        dice, plan = self._actions, self._plan
        actions = NO_ACTIONS
        if dice.random() < plan.strength("job_pause"):
            actions = replace(actions, pauses=self._draw_pauses(is_short=order.window_ms < LONG_WINDOW_MS))
        if dice.random() < plan.strength("job_later") and order.window_ms == LONG_WINDOW_MS:
            actions = replace(actions, later_s=dice.uniform(0.5, 6))
            if dice.random() < 0.5:
                actions = replace(actions, moved_s=dice.uniform(0.2, 4), moved_to_s=dice.choice((0.0, 5.0, 9.0)))
        if dice.random() < plan.strength("job_threshold"):
            actions = replace(actions, thresholds=dice.choice(_THRESHOLDS), changed_s=dice.choice((None, None, 3.0)))
        if dice.random() < plan.strength("job_canary"):
            canary = Canary(dice.choice((1, 3, 6)), dice.choice((0, 200_000, 1_000_000)), dice.choice(_AFTER_CANARY))
            actions = replace(actions, canary=canary)
            if canary.then == "wait" or dice.random() < 0.2:
                actions = replace(actions, word=dice.choice(("continue", "stop")), word_s=dice.uniform(0.5, 10))
        if dice.random() < plan.strength("job_retry") and not is_odd:
            actions = replace(actions, retries=tuple(dice.choices(_CHOICES, k=dice.choice((1, 2)))))
        return actions

    def _draw_later_actions(self, order: Order) -> None:
        """What is changed of a job beside its work: until when it must end, and what goes before it."""
        dice, plan = self._ranks, self._plan
        if dice.random() < plan.strength("job_window") and plan.shape is Shape.ANY:
            at_s = dice.uniform(0.1, 4)
            to_ms = int(1_000 * (at_s + dice.uniform(61, 75))) if order.window_ms == LONG_WINDOW_MS else LONG_WINDOW_MS
            # What stays paused ends with its window: with a long one it would not.
            if not any(resumed_s is None for _, resumed_s in order.actions.pauses):
                order.actions = replace(order.actions, window_s=at_s, window_to_ms=to_ms)
        if dice.random() < plan.strength("job_priority"):
            priority, ranked_s = dice.choice((-100, -1, 1, 100)), dice.choice((0.0, 0.0, dice.uniform(0.1, 4)))
            order.actions = replace(order.actions, priority=priority, ranked_s=ranked_s)

    def _draw_deletes(self, order: Order) -> None:
        dice = self._deletes
        if dice.random() < self._plan.strength("job_delete"):
            tries_s = tuple(dice.uniform(0.1, 6) for _ in range(dice.choice((0, 1, 2))))
            order.actions = replace(order.actions, deletes_s=tries_s, deleted_after_s=self._draw_deletion())

    def _draw_deletion(self) -> float | None:
        """How long after its end a job is deleted: at once, while others use what it left, or never."""
        dice = self._deletes
        return dice.choice((None, 0.0, dice.uniform(0, 1), dice.uniform(0.5, 6)))

    def _actions_again(self, order: Order) -> Actions:
        """What is done to a job that runs lines of another one again."""
        after_s = self._draw_deletion() if self._deletes.random() < self._plan.strength("job_delete") else None
        return Actions(answers=order.actions.answers, deleted_after_s=after_s)

    def _draw_pauses(self, *, is_short: bool) -> tuple[tuple[float, float | None], ...]:
        dice, at_s, pauses = self._actions, 0.0, []
        for _ in range(dice.choice((1, 2, 3))):
            paused_s = at_s + dice.uniform(0.1, 4)
            at_s = paused_s + dice.uniform(0.1, 8)
            pauses.append((paused_s, at_s))
        last_s: float | None = None if is_short and dice.random() < 0.5 else at_s
        return (*pauses[:-1], (pauses[-1][0], last_s))

    def _shape(self) -> JobShape:
        dice = self._shapes
        return JobShape(
            defaults=dice.choice(({}, {"max_tokens": 5}, {"seed": 1, "max_tokens": 5})),
            overrides=dice.choice(({}, {}, {"max_tokens": 3})),
            retry=dice.choice((None, JobRetry(5, 50, 400), JobRetry(attempts_max=1))),
            output_file_bytes_max=dice.choice((0, 700)),
        )

    def _add_line(self, order: Order, number: int, *, odd: bool) -> None:
        if odd:
            order.custom_ids.append(None)
            order.bodies.append(b"{not json")
            return
        dice, estate = self._dice, self._plan.estate
        tag = f"{order.name}-{number}"
        model = UNKNOWN_MODEL if dice.random() < 0.02 else dice.choice(estate.names)
        content = f"{tag} {'x' * dice.choice((0, 0, 20, 120))}"
        max_tokens = dice.choice((2, 8, 40))
        body: dict[str, object] = {"model": model, "messages": [{"role": "user", "content": content}]}
        if order.endpoint == MIXED:
            order.endpoints[tag] = self._mixed.choice(self._spoken())
        endpoint = order.endpoint_of(tag)
        if endpoint == EMBEDDINGS:
            body, max_tokens = {"model": model, "input": content}, 0
        else:
            body["max_tokens"] = max_tokens
        shape = order.shape
        if shape.defaults and endpoint != EMBEDDINGS and self._shapes.random() < 0.5:
            del body["max_tokens"]
            max_tokens = shape.defaults["max_tokens"]
        if endpoint != EMBEDDINGS:
            max_tokens = shape.overrides.get("max_tokens", max_tokens)
        if shape.dedupe and endpoint != EMBEDDINGS:
            body["temperature"] = 0
        self._note_request(order, tag, body, max_tokens)
        self.runnable_count += model != UNKNOWN_MODEL

    def _spoken(self) -> tuple[str, ...]:
        """What every engine of the estate can be asked; messages and chat are translated, embeddings are not."""
        engines = {one.engine for one in self._plan.estate.deployments}
        return (CHAT, MESSAGES) if EngineKind.ANTHROPIC in engines else (CHAT, MESSAGES, EMBEDDINGS)

    def _note_request(self, order: Order, tag: str, body: dict[str, object], max_tokens: int) -> None:
        """Add a line with this request, which really takes so many tokens at most."""
        endpoint = order.endpoint_of(tag)
        content = body["input"] if endpoint == EMBEDDINGS else body["messages"][0]["content"]  # type: ignore[index]
        order.requests[tag] = body
        order.asked[tag] = str(body["model"])
        order.units[tag] = work_units(len(msgspec.json.encode(body.get("messages", content))), max_tokens)
        order.usages[tag] = usage_of(str(content), max_tokens, self._plan.estate.usage_factor)
        order.custom_ids.append(f"id-{tag}")
        order.tags.append(tag)
        order.bodies.append(msgspec.json.encode({"custom_id": f"id-{tag}", "url": endpoint, "body": body}))

    def add_request(self, order: Order, dice: random.Random) -> None:
        """Give an order that comes without a file its one request."""
        tag = f"{order.name}-0"
        message = {"role": "user", "content": f"{tag} {'x' * dice.choice((0, 20, 120))}"}
        model = dice.choice(self._plan.estate.names)
        self._note_request(order, tag, {"model": model, "messages": [message], "max_tokens": 20}, 20)
        self.orders.append(order)

    def _add_copy(self, order: Order, number: int) -> None:
        """Add a line that is the same request as another, but for white space."""
        dice, tag = self._lines, f"{order.name}-{number}"
        order.copies[tag] = dice.choice(order.tags)
        body = msgspec.json.encode(order.requests[order.copies[tag]])
        if dice.random() < 0.5:
            body = body.replace(b'":', b'" : ')
        order.custom_ids.append(f"id-{tag}")
        order.bodies.append(
            b'{"custom_id":"id-%b","url":"%b","body":%b}' % (tag.encode(), order.endpoint.encode(), body)
        )

    async def send_edited(self, order: Order, job_id: str) -> Order | None:
        """Send the input of an ended job again, with some lines changed and some added; None when that is refused."""
        dice = self._lines
        edited = replace(
            order,
            name=f"{order.name}e",
            file_id=self._id("file"),
            job_id=job_id,
            custom_ids=[],
            tags=[],
            window_ms=POISON_WINDOW_MS if self.poison.intersection(order.tags) else LONG_WINDOW_MS,
            cancel_s=None,
            shape=msgspec.structs.replace(order.shape, reuse_from=order.job_id, more_inputs=()),
            actions=self._actions_again(order),
            reuse_of=order,
            requests={},
            bodies=[],
            asked={},
            usages={},
            units={},
        )
        unchanged = set()
        for tag, body in order.requests.items():
            if dice.random() < 0.15:
                continue
            max_tokens = self._tokens_of(order, body)
            if dice.random() < 0.3:
                body = _changed(body)
            else:
                unchanged.add(tag)
            self._note_request(edited, tag, body, max_tokens)
        for number in range(dice.choice((0, 1, 3))):
            first = dict(order.requests[order.tags[0]])
            tag = f"{order.name}-{len(order.custom_ids) + number}"
            self._note_request(edited, tag, _renamed(first, tag), self._tokens_of(order, first))
        edited.unchanged = frozenset(unchanged)
        if not edited.tags:
            return None
        await self._put_file(edited, edited.file_id, edited.bodies)
        try:
            await self._store.create_job(
                edited.caller, job_id, self._request(edited), share_owner=self._share_owner(order)
            )
        except ApiProblem as problem:
            self._trace.note("customer", "cannot send again", order.name, problem.code)
            return None
        self._trace.note("customer", "sent again", edited.name, job_id)
        self._add(edited)
        return edited

    def _tokens_of(self, order: Order, body: dict[str, object]) -> int:
        """How many tokens an answer may have: as the line says, unless its job says otherwise."""
        if order.endpoint == EMBEDDINGS:
            return 0
        shape = order.shape
        most = body.get("max_tokens", shape.defaults.get("max_tokens", 0))
        return int(shape.overrides.get("max_tokens", most))

    async def _upload(self, order: Order) -> None:
        files = {order.file_id: order.bodies}
        if self._plan.shaped and len(order.bodies) > 1 and self._shapes.random() < 0.5:
            at, more = self._shapes.randrange(1, len(order.bodies)), self._id("file")
            files = {order.file_id: order.bodies[:at], more: order.bodies[at:]}
            order.shape = msgspec.structs.replace(order.shape, more_inputs=(more,))
        for file_id, lines in files.items():
            await self._put_file(order, file_id, lines)
        self._add(order)

    async def _put_file(self, order: Order, file_id: str, lines: list[bytes]) -> None:
        blob_id = self._id("blob")
        await self._store.begin_blob(blob_id, "upload", "front-door")
        stamp = self._disk.put(blob_id, b"\n".join(lines) + b"\n")
        await self._store.create_file(
            order.caller,
            NewFile(file_id, blob_id, stamp, "batch", f"{order.name}.jsonl", len(lines), None),
        )

    def _add(self, order: Order) -> None:
        self.orders.append(order)
        self.by_job[order.job_id] = order

    async def create(self, order: Order) -> None:
        """Twice now and then, as after an answer that was lost."""
        actions = order.actions
        controls = actions.thresholds if actions.changed_s is None else NO_CONTROLS
        if actions.later_s:
            controls = replace(controls, not_before=await self._moment_ms(actions.later_s))
        if not actions.ranked_s:
            controls = replace(controls, priority=actions.priority)
        request = replace(self._request(order), controls=controls, canary=actions.canary)
        if self._checks.random() < self._plan.strength("job_checked"):
            await self._dry_runs.ask(order.caller, order.job_id, request)
        for _ in range(self._dice.choice((1, 1, 2))):
            await self._store.create_job(order.caller, order.job_id, request, share_owner=self._share_owner(order))
        self._trace.note("customer", "created", order.name, order.job_id)

    def _request(self, order: Order) -> JobRequest:
        return JobRequest(
            order.endpoint,
            order.file_id,
            order.window_ms,
            f"{order.window_ms}ms",
            ordered=order.ordered,
            invalid_lines=order.invalid_lines,
            limits=order.limits,
            shape=order.shape,
            answers=order.actions.answers,
            door=order.actions.door,
        )

    def _share_owner(self, order: Order) -> str:
        return share_owner_of(order.caller, self._plan.estate.scope_preference)

    async def cancel(self, order: Order) -> None:
        try:
            await self._store.cancel_job(order.caller.tenant_id, order.job_id)
        except ApiProblem as problem:
            self._trace.note("customer", "too late to cancel", order.name, problem.code)
        else:
            self._trace.note("customer", "cancelled", order.name)

    async def delete(self, order: Order) -> None:
        """Twice now and then, as after an answer that was lost. Whether it may go is for the store to say."""
        for _ in range(self._deletes.choice((1, 1, 2))):
            await self._store.forget_job(order.job_id)
        self._trace.note("customer", "asked to delete", order.name)

    async def _moment_ms(self, in_s: float) -> int:
        return await self._store.now_ms() + int(1_000 * in_s)

    async def pause(self, order: Order) -> None:
        await self._act("paused", order, self._store.pause_job(order.caller.tenant_id, order.job_id))

    async def resume(self, order: Order) -> None:
        await self._act("resumed", order, self._store.resume_job(order.caller.tenant_id, order.job_id))

    async def move(self, order: Order) -> None:
        """Say another moment before which the job does not run."""
        to_ms = await self._moment_ms(order.actions.moved_to_s) if order.actions.moved_to_s else 0
        await self._change(order, {"not_before": to_ms})

    async def set_thresholds(self, order: Order) -> None:
        given = order.actions.thresholds
        await self._change(order, {"max_cost_nano": given.max_cost_nano, "max_errors": given.max_errors})

    async def set_window(self, order: Order) -> None:
        to_ms = order.actions.window_to_ms
        change = JobChange({}, to_ms, f"{to_ms}ms")
        act = self._store.change_job(order.caller.tenant_id, order.job_id, change)
        if await self._act("changed the window of", order, act):
            order.window_ms = to_ms

    async def rank(self, order: Order) -> None:
        await self._change(order, {"priority": order.actions.priority})

    async def _change(self, order: Order, controls: dict[str, object]) -> None:
        change = self._store.change_job(order.caller.tenant_id, order.job_id, JobChange(controls))
        await self._act(f"changed {sorted(controls)} of", order, change)

    async def say(self, order: Order) -> bool:
        """Say what follows a canary; False when it was not taken."""
        goes_on = order.actions.word == "continue"
        act = self._store.end_canary(order.caller.tenant_id, order.job_id, goes_on=goes_on)
        return await self._act(f"sent {order.actions.word} to", order, act)

    async def retry(self, order: Order, choice: RetryChoice) -> str | None:
        """Ask for lines of an ended job again; return the job that runs them, or None when that is refused."""
        share_owner = self._share_owner(order)
        secret = self._actions.randbytes(SECRET_BYTES)
        new = FollowUp(order.job_id, choice, self._id("batch"), self._id("file"), self._id("file"), secret)
        try:
            job = await self._store.retry_job(order.caller, new, share_owner=share_owner)
        except ApiProblem as problem:
            self._trace.note("customer", "cannot retry", order.name, problem.code)
            return None
        if job is None:
            self._trace.note("customer", "cannot retry", order.name, "which is gone")
            return None
        self._trace.note("customer", "retried", order.name, job.id)
        return job.id

    def add_retry(self, order: Order, job_id: str, custom_ids: list[str]) -> Order:
        """Await what becomes of these lines, which run again."""
        tags = [tag for tag in order.tags if f"id-{tag}" in custom_ids]
        again = replace(
            order,
            name=f"{order.name}r",
            job_id=job_id,
            custom_ids=[one for one in order.custom_ids if one in custom_ids],
            tags=tags,
            # What a job may cost and fail holds for its retry too.
            actions=replace(self._actions_again(order), thresholds=order.actions.thresholds),
            retry_of=order,
            refused=not tags,
            copies={tag: leader for tag, leader in order.copies.items() if f"id-{tag}" in custom_ids},
            asked={tag: order.asked[tag] for tag in tags},
            usages={tag: order.usages[tag] for tag in tags},
            units={tag: order.units[tag] for tag in tags},
            cancel_s=None,
        )
        self._add(again)
        return again

    async def _act(self, what: str, order: Order, act: Awaitable[Job | None]) -> bool:
        try:
            await act
        except ApiProblem as problem:
            self._trace.note("customer", "refused:", what, order.name, problem.code)
            return False
        self._trace.note("customer", what, order.name)
        return True


def _changed(body: dict[str, object]) -> dict[str, object]:
    """Another request for the same item: its prompt is longer."""
    return _with_content(body, lambda content: f"{content} changed")


def _renamed(body: dict[str, object], tag: str) -> dict[str, object]:
    """The request of another item."""
    return _with_content(body, lambda content: f"{tag} {content.partition(' ')[2]}")


def _with_content(body: dict[str, object], change: Callable[[str], str]) -> dict[str, object]:
    if "input" in body:
        return {**body, "input": change(str(body["input"]))}
    messages: Any = body["messages"]
    return {**body, "messages": [{**one, "content": change(one["content"])} for one in messages]}
