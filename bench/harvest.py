"""The harvest: how much batch work flows beside interactive users of the same engine, and what they feel of it.

The engine is the modelled one (its step costs were measured on an H200) with a prefill chunk of 512 tokens, in virtual time.
Interactive chats come in bursts or steadily; the batch backlog has no end. Every policy meets the same arrivals and items:
the tide, no control, each fixed limit, additive increase with halving on refusals only, and a capacity fraction.

What the figures mean:

- *Alone* is the same interactive trace on the same engine without batch.
- *Time to first token* is measured at the gateway, network hops included. *Between tokens* is every gap between two tokens of one
  interactive call; its mean is over all gaps, so long answers count more.
- A policy *holds* when p99 time to first token and mean time between tokens are both at most 10 % above alone.
- *Idle share* is the share of time in which the engine, alone, had no interactive call to work on; for steady arrivals too, where it
  is what Poisson arrivals leave empty between calls.
- The *all-batch rate* is what the same engine does with 256 batch calls always in flight and no other calls.
- *Batch tokens* are prompt tokens of calls that reached their first token and the answer tokens they emitted, minus all of a call that
  was aborted later; a prompt that is handed back and sent again counts once. What was computed in vain is shown as wasted.
- *As shipped* stands in `harvest_shipped.py`: first tokens estimated, API and worker in one process and apart, other engines, other seeds.
- The *harvest* is the batch rate as a share of (idle share x all-batch rate). It can be above 1: some work fits beside users.
"""

import math
import os
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass

from bench import harvest_picture, harvest_shipped, harvest_traces
from bench.harvest_world import CALIBRATED, Costs, HarvestWorld, Policy, Report, Sight
from bench.machinery import repository, table
from tidegate.core.tide.controller import Tide, TidePolicy
from tidegate.core.tide.learner import Learner
from tidegate.core.tide.signals import UNLIMITED_TOKENS, Decision, Signals
from tidegate.simulate.engine.model import EngineLimits

SLOTS = 256
PLAIN = EngineLimits(max_num_seqs=SLOTS, prefill_chunk_tokens=512)
PRIORITY = EngineLimits(max_num_seqs=SLOTS, prefill_chunk_tokens=512, priority_scheduling=True)
SEES_ALL = Sight()
FIXED = (1, 2, 3, 4, 6, 8, 16, 64)
FIXED_QUICK = (1, 2, 4, 8)
FLOOD_CALLS = 1000
SLOWER_MAX = 1.10
HARVEST_MIN = {"bursty": 0.85, "steady": 0.75}


class Fixed:
    """A constant number of calls, whatever happens."""

    def __init__(self, calls: int) -> None:
        self._decision = Decision(calls, UNLIMITED_TOKENS, 0, "fixed")

    def observe(self, signals: Signals) -> Decision:
        return self._decision


class OnRefusals:
    """One more call per round of answers, half as many after a refusal: this engine queues, as real ones do, and never refuses."""

    def __init__(self) -> None:
        self._learner = Learner(FLOOD_CALLS, by_pace=False)

    def observe(self, signals: Signals) -> Decision:
        self._learner.observe(signals.now_ms, signals.in_flight, signals.ended, signals.refusals)
        return Decision(self._learner.calls, UNLIMITED_TOKENS, 0, "on refusals")


class Fraction:
    """A quarter of the engine's slots for batch, less what interactive calls take."""

    def observe(self, signals: Signals) -> Decision:
        return Decision(max(0, SLOTS // 4 - (signals.interactive or 0)), UNLIMITED_TOKENS, 0, "fraction")


@dataclass(frozen=True)
class Run:
    """One policy on one trace; `alone` has none."""

    name: str
    trace: str
    duration_s: float
    fixed: int = 0
    engine: EngineLimits = PLAIN
    sight: Sight = SEES_ALL
    seed: int = harvest_traces.SEED
    costs: Costs = CALIBRATED

    def policy(self) -> Policy | None:
        if self.fixed:
            return Fixed(self.fixed)
        if self.name.startswith("tide"):
            return Tide(TidePolicy(calls_max=SLOTS))
        others: dict[str, Callable[[], Policy]] = {"on refusals": OnRefusals, "fraction 1/4": Fraction}
        return others[self.name]() if self.name in others else None


@dataclass(frozen=True)
class Found:
    run: Run
    report: Report
    ttft_ms: tuple[float, float]
    between_ms: tuple[float, float]
    between_mean_ms: float

    @property
    def batch_rate(self) -> float:
        return self.report.batch_tokens / self.report.duration_ms * 1000

    def drawn(self) -> harvest_picture.DrawnRun:
        return harvest_picture.DrawnRun(
            self.run.name, self.batch_rate, self.ttft_ms[1], self.between_mean_ms, self.report.line
        )


def percentile(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0


def measure(run: Run) -> Found:
    """One run, in virtual time."""
    arrivals = harvest_traces.TRACES[run.trace](run.duration_s, run.seed)
    items = harvest_traces.batch(run.seed)
    report = HarvestWorld(
        run.engine, arrivals, items, run.policy(), run.duration_s * 1000, run.sight, run.costs, run.seed
    ).run()
    gaps, firsts = report.between_ms, report.ttft_ms
    found = Found(
        run,
        report,
        (percentile(firsts, 0.5), percentile(firsts, 0.99)),
        (percentile(gaps, 0.5), percentile(gaps, 0.99)),
        sum(gaps) / max(1, len(gaps)),
    )
    # The figures are taken; the lists are too long to send back from a process.
    report.ttft_ms, report.between_ms = [], []
    return found


def runs(trace: str, duration_s: float, quick: bool) -> list[Run]:
    """Alone first, then the tide as recommended, then everything beside it."""

    def run(name: str, fixed: int = 0, engine: EngineLimits = PLAIN, sight: Sight = SEES_ALL) -> Run:
        return Run(name, trace, duration_s, fixed, engine, sight)

    return [
        run("alone"),
        run("tide"),
        run("tide, first tokens estimated", sight=Sight(first_tokens=False)),
        run("tide, gateway without metrics", sight=Sight(metrics=False)),
        run("tide, metrics without gateway", sight=Sight(gateway=False)),
        run("tide, priority scheduling", engine=PRIORITY),
        *(run(f"fixed {calls}", fixed=calls) for calls in (FIXED_QUICK if quick else FIXED)),
        run("fraction 1/4"),
        run("on refusals"),
        run("no control", fixed=FLOOD_CALLS),
        run("no control, priority scheduling", fixed=FLOOD_CALLS, engine=PRIORITY),
    ]


def holds(found: Found, alone: Found) -> bool:
    return (
        found.ttft_ms[1] <= SLOWER_MAX * alone.ttft_ms[1]
        and found.between_mean_ms <= SLOWER_MAX * alone.between_mean_ms
    )


def show(trace: str, all_found: list[Found], ideal_rate: float) -> dict[str, float]:
    """Print one trace's table and return the figures that have budgets."""
    alone, tide = all_found[:2]
    calls = len(harvest_traces.TRACES[trace](alone.run.duration_s))
    print(f"\nThe harvest, {trace} arrivals: {calls} interactive calls in {alone.run.duration_s:.0f} s")
    heads = (
        "first token ms p50",
        "p99",
        "vs alone",
        "between ms p50",
        "p99",
        "mean",
        "vs alone",
        "batch tok/s",
        "harvest",
    )
    print(f"  {'':<32}" + "".join(f"{head:>{len(head) + 2}}" for head in heads) + "  handed back  wasted tok  holds")
    for one in all_found:
        slower = one.ttft_ms[1] / alone.ttft_ms[1], one.between_mean_ms / alone.between_mean_ms
        print(
            f"  {one.run.name:<32}{one.ttft_ms[0]:>20.1f}{one.ttft_ms[1]:>9.1f}{slower[0]:>10.2f}"
            f"{one.between_ms[0]:>16.2f}{one.between_ms[1]:>6.1f}{one.between_mean_ms:>7.2f}{slower[1]:>10.3f}"
            f"{one.batch_rate:>13,.0f}{one.batch_rate / ideal_rate:>9.3f}"
            f"{one.report.handed_back:>13}{one.report.wasted_tokens:>12}  {'yes' if holds(one, alone) else 'no'}"
        )
    fixed = [one for one in all_found if one.run.fixed and holds(one, alone)]
    best = max(fixed, key=lambda one: one.batch_rate, default=None)
    times = tide.batch_rate / best.batch_rate if best else math.inf
    print(
        f"  the best fixed limit that holds: {best.run.name if best else 'none'}; the tide has {times:.1f} times its rate"
    )
    return {
        f"first token, {trace}": tide.ttft_ms[1] / alone.ttft_ms[1],
        f"between tokens, {trace}": tide.between_mean_ms / alone.between_mean_ms,
        f"harvest, {trace}": tide.batch_rate / ideal_rate,
        f"times the best fixed, {trace}": times,
    }


def main(quick: bool = False) -> dict[str, float]:
    durations_s = {"bursty": 60.0, "steady": 60.0} if quick else {"bursty": 300.0, "steady": 420.0}
    todo = {trace: runs(trace, duration_s, quick) for trace, duration_s in durations_s.items()}
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        full = pool.submit(measure, Run("all batch", "none", 60.0, fixed=SLOTS))
        pending = {trace: [pool.submit(measure, run) for run in listed] for trace, listed in todo.items()}
        found = {trace: [one.result() for one in listed] for trace, listed in pending.items()}
    all_batch_rate = full.result().batch_rate
    figures: dict[str, float] = {}
    rows: list[tuple[str, str, str]] = []
    for trace, listed in found.items():
        idle_share = 1 - listed[0].report.busy_ms / listed[0].report.duration_ms
        mine = show(trace, listed, idle_share * all_batch_rate)
        first, between, harvest, times = mine.values()
        figures |= mine
        setting = f"idle share {idle_share:.2f} of {all_batch_rate:,.0f} batch tok/s"
        rows.append(
            (f"{trace}: first token p99 and between tokens mean, vs alone", f"{first:.3f}, {between:.3f}", "1.10")
        )
        budget = f"at least {HARVEST_MIN[trace]:.2f}"
        rows.append((f"{trace}: harvest ({setting})", f"{harvest:.3f}", budget))
        rows.append((f"{trace}: times the best fixed limit that holds", f"{times:.1f}", "at least 3 (bursty)"))
    table("The harvest, the tide as recommended", rows)
    figures |= harvest_shipped.main(quick)
    if not quick:
        drawn = [one.drawn() for one in found["bursty"]]
        harvest_picture.draw(repository() / "docs" / "images" / "harvest.svg", drawn, all_batch_rate)
    return figures


if __name__ == "__main__":
    main("--quick" in sys.argv)
