"""How fairly ten equal tenants share a model when one of them has a hundred times the work, how soon a newcomer's one small job starts,
and what a choice costs. The pure scheduler in virtual time: four workers whose slices take as long, and cost as much, as chance has it.
"""

import heapq
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from bench.machinery import median, table
from tidegate.core.schedule import FlowView, JobView, Mode, ModelView, Policy, Snapshot, Turn, Why, choose

TENANTS, WORKERS, SLOTS = 10, 4, 8
SLICE_UNITS = 16_000
SLICE_MS = 4_000
MINUTE_MS = 60_000


@dataclass(slots=True)
class Tenant:
    share_owner: str
    slices_left: int
    served: float = 0.0
    in_flight: int = 0
    began_at: int | None = None


@dataclass(order=True, slots=True)
class Flight:
    done_at: int
    number: int
    tenant: Tenant = field(compare=False)
    worker: int = field(compare=False)
    cost: float = field(compare=False)


class Cluster:
    """One model, several workers. A look is what a store would tell; what is charged differs from what was estimated."""

    def __init__(self, tenants: list[Tenant], seed: int) -> None:
        self.tenants = {tenant.share_owner: tenant for tenant in tenants}
        self.chance = random.Random(seed)
        self.now = self.number = 0
        self.free = [SLOTS] * WORKERS
        self.turns: list[Turn | None] = [None] * WORKERS
        self.flights: list[Flight] = []
        self.policy = Policy(mode=Mode.SMART)

    def look(self, worker: int) -> Snapshot:
        waiting = [tenant for tenant in self.tenants.values() if tenant.slices_left]
        flows = [FlowView("m", tenant.share_owner, 1.0, tenant.served, tenant.in_flight) for tenant in waiting]
        jobs = [
            _job(tenant.share_owner, "m", tenant.slices_left * SLICE_UNITS + tenant.in_flight, tenant)
            for tenant in waiting
        ]
        out = sum(tenant.in_flight for tenant in self.tenants.values())
        model = ModelView("m", self.free[worker], None, out, {Why.FAIR: out}, None, 1.0, self.turns[worker])
        return Snapshot(self.now, {"m": model}, flows, jobs, {}, 1, self.free[worker], workers=WORKERS)

    def act(self, worker: int) -> None:
        choice = choose(self.look(worker), self.policy)
        self.turns[worker] = choice.turns.get("m", self.turns[worker])
        for pick in choice.picks:
            tenant = self.tenants[pick.job_id]
            for _ in range(min(pick.slice_count, tenant.slices_left)):
                self.number += 1
                lasts = int(SLICE_MS * self.chance.uniform(0.5, 1.5))
                cost = SLICE_UNITS * self.chance.uniform(0.7, 1.3)
                heapq.heappush(self.flights, Flight(self.now + lasts, self.number, tenant, worker, cost))
                tenant.slices_left -= 1
                tenant.in_flight += SLICE_UNITS
                tenant.began_at = self.now if tenant.began_at is None else tenant.began_at
                self.free[worker] -= 1

    def until(self, end_ms: int) -> None:
        for worker in range(WORKERS):
            self.act(worker)
        while self.flights and self.flights[0].done_at <= end_ms:
            done = heapq.heappop(self.flights)
            self.now = done.done_at
            done.tenant.served += done.cost
            done.tenant.in_flight -= SLICE_UNITS
            self.free[done.worker] += 1
            self.act(done.worker)
        self.now = end_ms


def _job(name: str, model: str, left: int, tenant: Tenant | None = None, queued_at: int = 0) -> JobView:
    in_flight = tenant.in_flight if tenant else 0
    share_owner = tenant.share_owner if tenant else name.partition("/")[0]
    return JobView(
        name, model, share_owner, "default", queued_at, 10**12, None, left, left, in_flight, SLICE_UNITS, None, None, 1
    )


def jain(shares: list[float]) -> float:
    """1 when all have the same, 1/n when one has everything."""
    return sum(shares) ** 2 / (len(shares) * sum(share * share for share in shares))


def share_fairly(minutes: int, seed: int) -> tuple[list[float], int]:
    """The index of each minute, and how many slices the others get before a newcomer's job of one slice."""
    enough = minutes * 1_000
    tenants = [Tenant(f"t{number}", enough * (100 if number == 0 else 1)) for number in range(TENANTS)]
    cluster = Cluster(tenants, seed)
    indices = []
    before = [0.0] * TENANTS
    for minute in range(1, minutes + 1):
        cluster.until(minute * MINUTE_MS)
        after = [tenant.served for tenant in tenants]
        indices.append(jain([now - then for now, then in zip(after, before, strict=True)]))
        before = after
    newcomer = Tenant("newcomer", 1, served=min(tenant.served for tenant in tenants))
    cluster.tenants[newcomer.share_owner] = newcomer
    dealt = cluster.number
    while newcomer.began_at is None:
        cluster.until(cluster.flights[0].done_at)
    return indices, cluster.number - dealt - 1


def look_of(models: int, flows: int, jobs: int, items: int) -> Snapshot:
    """A look at so many models, flows of each and jobs of each flow, behind which so many items wait."""
    left = max(SLICE_UNITS, items * 500 // (models * flows * jobs))
    shown = [
        _job(f"t{flow}/{number}", f"m{model}", left, queued_at=number)
        for model in range(models)
        for flow in range(flows)
        for number in range(jobs)
    ]
    awake = [FlowView(f"m{model}", f"t{flow}", 1.0, flow * 7.0, 0) for model in range(models) for flow in range(flows)]
    views = {f"m{model}": ModelView(f"m{model}", 32, None, 0, {}, 5_000.0) for model in range(models)}
    return Snapshot(10**6, views, awake, shown, {}, 64, 64)


def latency_ms(decide: Callable[[], object], rounds: int) -> tuple[float, float]:
    took = []
    for _ in range(rounds):
        # It waits for nothing, so its CPU time is what it takes, on a busy machine too.
        began = time.thread_time()
        decide()
        took.append((time.thread_time() - began) * 1_000)
    return median(took), sorted(took)[int(0.99 * (len(took) - 1))]


def main(quick: bool = False) -> None:
    minutes, rounds = (3, 20) if quick else (15, 200)
    shared = [share_fairly(minutes, seed) for seed in range(1 if quick else 5)]
    worst = min(index for indices, _ in shared for index in indices)
    usual = median([index for indices, _ in shared for index in indices])
    rows = [
        ("Jain index of tokens served, worst minute", f"{worst:.4f}", ">= 0.99"),
        ("Jain index of tokens served, median minute", f"{usual:.4f}", ""),
        (
            "slices that others get before a newcomer's first",
            f"{max(wait for _, wait in shared)}",
            f"<= {TENANTS}, one round",
        ),
    ]
    policy = Policy()
    for items in (10_000, 1_000_000, 10_000_000):
        look = look_of(10, 10, 5, items)
        p50, p99 = latency_ms(lambda look=look: choose(look, policy), rounds)  # type: ignore[misc]
        rows.append(
            (f"a choice, 10 models, 100 flows, 500 jobs shown, {items:,} items", f"{p50:.2f} ms, p99 {p99:.2f}", "flat")
        )
    look = look_of(10, 10, 50, 10_000_000)
    p50, p99 = latency_ms(lambda: choose(look, policy), rounds)
    rows.append(("a choice, 10 models, 100 flows, 5,000 jobs shown", f"{p50:.2f} ms, p99 {p99:.2f}", "< 5 ms"))
    table(f"fairness: {TENANTS} equal tenants, one with 100 times the work, {WORKERS} workers of {SLOTS} slots", rows)


if __name__ == "__main__":
    main()
