"""The callers of one run: what they send in, when they cancel, and what they must get back. They meet a healthy front door."""

import random
from dataclasses import dataclass, field

import msgspec

from tests.simulation.world.disk import Disk
from tests.simulation.world.estate import EMBEDDINGS, RACE_SLOTS, UNKNOWN_MODEL, Shape
from tests.simulation.world.plan import Plan
from tests.simulation.world.provider import usage_of
from tests.simulation.world.trace import Trace
from tidegate.core import ids
from tidegate.core.budgets.budget import Limit
from tidegate.core.errors import ApiProblem
from tidegate.core.job_shape import PLAIN, JobRetry, JobShape
from tidegate.core.nouns import Caller, JobRequest, NewFile, Usage
from tidegate.core.schedule.share_owner import share_owner_of
from tidegate.core.usage.estimate import work_units
from tidegate.core.webhooks import EVENT_TYPES, SECRET_BYTES, EndpointShape
from tidegate.store.flow_accounting import real_cost
from tidegate.store.keys import KeyRights
from tidegate.store.store import Store

LONG_WINDOW_MS = 3_600_000
POISON_WINDOW_MS = 120_000
COMPANY_AFTER_S = 25.0
USER_COUNT = 2
KEY_COUNT = 2
_REVOKED_WITHIN_S = 6.0


@dataclass(slots=True)
class Order:
    """One job as its caller knows it. `asked` is which model or resource each line asks for, by its custom_id's number, and `usages` is
    what each really takes; a line that is no request has neither."""

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
    shape: JobShape = PLAIN
    bodies: list[bytes] = field(default_factory=list)
    asked: dict[str, str] = field(default_factory=dict)
    usages: dict[str, Usage] = field(default_factory=dict)
    units: dict[str, int] = field(default_factory=dict)

    def sizes(self) -> list[tuple[int, int, str]]:
        """Real cost, estimated units and model of every request."""
        return [(real_cost(usage), self.units[tag], self.asked[tag]) for tag, usage in self.usages.items()]


def race_window_ms(plan: Plan) -> int:
    """Twice what it takes with the share of the model that urgent work may have, and too short with one fair share of eight."""
    items_per_s = RACE_SLOTS / (plan.call_s_max / 2)
    urgent_s = plan.item_count_max / (items_per_s * plan.estate.policy.urgent_share)
    return int(1_000 * (5 + 2 * urgent_s))


class Customers:
    def __init__(self, plan: Plan, store: Store, disk: Disk, trace: Trace) -> None:
        self._plan = plan
        self._store = store
        self._disk = disk
        self._trace = trace
        self._dice = random.Random(f"customers/{plan.seed}")
        self.orders: list[Order] = []
        self.poison: set[str] = set()
        self.revocations: dict[str, float] = {}
        self.runnable_count = 0
        self.tenant_ids: list[str] = []
        self.secrets: dict[str, bytes] = {}
        self._urls: dict[str, list[str]] = {}
        self._endpoints = random.Random(f"endpoints/{plan.seed}")
        self._shapes = random.Random(f"shapes/{plan.seed}")

    async def prepare(self) -> None:
        """Upload every input; jobs are created later, at their moments."""
        tenant_ids = self.tenant_ids
        for number in range(len(self._plan.estate.tenants)):
            tenant_ids.append(await self._store.put_tenant(self._id("tenant"), f"tenant-{number}"))
            for key in range(KEY_COUNT):
                name = f"key-{number}-{key}"
                await self._store.put_key(Caller(tenant_ids[number], name), name.encode(), name, KeyRights())
        for number in range(self._plan.job_count):
            tenant = number % len(tenant_ids)
            await self._upload(self._order(f"j{number}", tenant, tenant_ids[tenant]))
        if self._plan.strength("receiver"):
            await self._subscribe()
        self._plan_revocations()
        tags = [tag for order in self.orders for tag in order.tags]
        self._dice.shuffle(tags)
        self.poison = set(tags[: int(self._plan.strength("poison"))])
        self._give_company()

    async def _subscribe(self) -> None:
        """Most tenants want to hear of their jobs' ends, some at two places."""
        dice = random.Random(f"endpoints of webhooks/{self._plan.seed}")
        for number, tenant_id in enumerate(self.tenant_ids):
            for place in range(dice.choice((0, 1, 1, 2))):
                url, secret = f"https://hooks.example/{number}/{place}", dice.randbytes(SECRET_BYTES)
                shape = EndpointShape("mine", url, EVENT_TYPES)
                await self._store.create_webhook_endpoint(tenant_id, f"we_{number}_{place}", shape, secret)
                self.secrets[url] = secret
                self._urls.setdefault(tenant_id, []).append(url)

    def awaited_events(self) -> set[tuple[str, str]]:
        """Which receiver must hear of which job's end."""
        return {(url, order.job_id) for order in self.orders for url in self._urls.get(str(order.caller.tenant_id), [])}

    def _plan_revocations(self) -> None:
        """When which key is revoked, in seconds from the start; its jobs are there by then, or come later."""
        dice = random.Random(f"revocations/{self._plan.seed}")
        for key_id in sorted({str(order.caller.key_id) for order in self.orders}):
            if dice.random() < self._plan.strength("revoke"):
                self.revocations[key_id] = dice.uniform(0.5, self._plan.arrival_s + _REVOKED_WITHIN_S)

    def key_of(self, job_id: str) -> str | None:
        return next(order.caller.key_id for order in self.orders if order.job_id == job_id)

    async def revoke(self, key_id: str) -> None:
        await self._store.revoke_key(key_id)
        self._trace.note("operator", "revoked", key_id)

    def _give_company(self) -> None:
        """A poison item that is the last of all has nothing to be compared with, so it runs until its deadline, which comes soon here.
        Where there is a job without poison, it comes while the culprit is searched for."""
        for order in self.orders:
            if self.poison.intersection(order.tags):
                order.window_ms = min(order.window_ms, POISON_WINDOW_MS)
            elif self.poison and order.cancel_s is None and self._plan.shape is Shape.ANY:
                order.begin_s += COMPANY_AFTER_S

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
        for number in range(count):
            self._add_line(order, number, odd=odd and number == count - 1)
        return order

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
        if order.endpoint == EMBEDDINGS:
            body, max_tokens = {"model": model, "input": content}, 0
        else:
            body["max_tokens"] = max_tokens
        shape = order.shape
        if shape.defaults and order.endpoint != EMBEDDINGS and self._shapes.random() < 0.5:
            del body["max_tokens"]
            max_tokens = shape.defaults["max_tokens"]
        if order.endpoint != EMBEDDINGS:
            max_tokens = shape.overrides.get("max_tokens", max_tokens)
        order.asked[tag] = model
        order.units[tag] = work_units(len(msgspec.json.encode(body.get("messages", content))), max_tokens)
        order.usages[tag] = usage_of(content, max_tokens, estate.usage_factor)
        order.custom_ids.append(f"id-{tag}")
        order.tags.append(tag)
        self.runnable_count += model != UNKNOWN_MODEL
        order.bodies.append(msgspec.json.encode({"custom_id": f"id-{tag}", "url": order.endpoint, "body": body}))

    async def _upload(self, order: Order) -> None:
        files = {order.file_id: order.bodies}
        if self._plan.shaped and len(order.bodies) > 1 and self._shapes.random() < 0.5:
            at, more = self._shapes.randrange(1, len(order.bodies)), self._id("file")
            files = {order.file_id: order.bodies[:at], more: order.bodies[at:]}
            order.shape = msgspec.structs.replace(order.shape, more_inputs=(more,))
        for file_id, lines in files.items():
            blob_id = self._id("blob")
            await self._store.begin_blob(blob_id, "upload", "front-door")
            stamp = self._disk.put(blob_id, b"\n".join(lines) + b"\n")
            await self._store.create_file(
                order.caller,
                NewFile(file_id, blob_id, stamp, "batch", f"{order.name}.jsonl", len(lines), None),
            )
        self.orders.append(order)

    async def create(self, order: Order) -> None:
        """Twice now and then, as after an answer that was lost."""
        request = JobRequest(
            order.endpoint,
            order.file_id,
            order.window_ms,
            f"{order.window_ms}ms",
            ordered=order.ordered,
            invalid_lines=order.invalid_lines,
            limits=order.limits,
            shape=order.shape,
        )
        share_owner = share_owner_of(order.caller, self._plan.estate.scope_preference)
        for _ in range(self._dice.choice((1, 1, 2))):
            await self._store.create_job(order.caller, order.job_id, request, share_owner=share_owner)
        self._trace.note("customer", "created", order.name, order.job_id)

    async def cancel(self, order: Order) -> None:
        try:
            await self._store.cancel_job(order.caller.tenant_id, order.job_id)
        except ApiProblem as problem:
            self._trace.note("customer", "too late to cancel", order.name, problem.code)
        else:
            self._trace.note("customer", "cancelled", order.name)
