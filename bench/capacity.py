"""What a batch gets done behind servers without metrics, where the number of calls is learned, beside the best fixed number for it.

Mixes of items on modelled engines, each behind a server that says nothing about itself, in virtual time, with the real router, lane, tide
and learner. And the same for a server that refuses a share of its calls, beside one that refuses none.
"""

import random

from bench.capacity_world import EngineServer, Item, RefusingServer, Server, SteadyServer, run
from bench.machinery import table
from tidegate.core.deployments import Deployment
from tidegate.simulate.engine.model import EngineLimits

CEILING = 64
FIXED = (8, 16, 32, 64)
# The calibrated engine; one with a sixteenth of the slots, behind which calls queue; one whose cache is soon full, which then preempts.
ENGINES = {
    "256 slots": EngineLimits(),
    "16 slots": EngineLimits(max_num_seqs=16),
    "small cache": EngineLimits(kv_blocks=768),
}
REFUSED_SHARES = (0.001, 0.01, 0.03, 0.1)
REFUSAL_SLOTS = 36


def mixes(scale: float) -> dict[str, list[Item]]:
    """Short answers, long ones, mixed lengths, and two models of which one answers briefly."""
    dice = random.Random(7)
    lengths = [int(min(1_500.0, max(4.0, dice.lognormvariate(4.0, 1.2)))) for _ in range(int(3_000 * scale))]
    return {
        "short": [Item("m", 100, dice.randint(8, 24)) for _ in range(int(8_000 * scale))],
        "long": [Item("m", 400, dice.randint(300, 600)) for _ in range(int(1_500 * scale))],
        "mixed lengths": [Item("m", 200, length) for length in lengths],
        "two models": [
            Item("a", 200, dice.randint(10, 40)) if number % 2 else Item("b", 400, dice.randint(150, 300))
            for number in range(int(3_000 * scale))
        ],
        "embeddings, then chats": [Item("e", 100, 0)] * int(6_000 * scale)
        + [Item("m", 100, dice.randint(200, 400)) for _ in range(int(1_500 * scale))],
    }


def seconds(items: list[Item], server: EngineLimits, calls: int | None) -> float:
    """How long these items take with a fixed number of calls in flight; None: the number is learned."""
    place = Deployment("one", "http://one/v1", max_in_flight=calls or CEILING, is_capacity_known=calls is not None)
    return run([(place, lambda: EngineServer(server))], items).seconds


def learned_share(items: list[Item], server: EngineLimits, fixed: tuple[int, ...] = FIXED) -> tuple[float, int]:
    """What the learned number gets done, as a share of what the best fixed one does, and which that is."""
    took = {calls: seconds(items, server, calls) for calls in fixed}
    best = min(took, key=lambda calls: took[calls])
    return took[best] / seconds(items, server, None), best


def refused(share: float, count: int, status: int = 429, *, learned: bool = False) -> tuple[float, float]:
    """What is done beside a server that refuses nothing, and which share of calls was refused."""

    def server() -> Server:
        return RefusingServer(SteadyServer(), share, status) if share else SteadyServer()

    items = [Item("m", 100, 10)] * count
    place = Deployment("one", "http://one/v1", max_in_flight=REFUSAL_SLOTS, is_capacity_known=not learned)
    alone = run([(place, SteadyServer)], items)
    report = run([(place, server)], items)
    calls = report.witness.statuses
    return report.rate / alone.rate, calls[status] / calls.total()


def main(quick: bool = False) -> dict[str, float]:
    scale, count = (0.2, 3_000) if quick else (0.5, 6_000)
    found: dict[str, float] = {}
    rows = []
    for engine, limits in ENGINES.items():
        for mix, items in mixes(scale).items():
            share, best = learned_share(items, limits)
            found[f"{engine}, {mix}"] = share
            rows.append((f"{mix}, {engine}", f"{share:.2f} (best of {best})", "at least 0.90"))
    table("Work done with a learned number of calls, as a share of the best fixed number's", rows)
    rows = []
    for status, learned in ((429, False), (429, True), (503, False)):
        for share in REFUSED_SHARES:
            rate, got = refused(share, count, status, learned=learned)
            how = "learned" if learned else "stated"
            found[f"{share:.1%} of {status}, {how}"] = rate
            budget = "at least 0.85" if share == 0.01 else ""
            rows.append((f"{share:.1%} of {status}, calls {how}", f"{rate:.2f}, {got:.2%} refused", budget))
    table(f"Work done at a server of {REFUSAL_SLOTS} slots and 150 ms that refuses calls with Retry-After: 1", rows)
    return found


if __name__ == "__main__":
    main()
