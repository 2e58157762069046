"""The harvest of the product as shipped: first tokens of batch calls are estimated, and API and worker may be two processes.

Every row is a shape on one kind of engine, over several seeds. The engines differ from the calibrated one in what a step costs, which the
tide does not know: larger models, engines on which a sequence or a prompt costs more or less beside the same base, and steps that vary.
Where an engine is slower, chats come less often, so that it is empty as long. The idle share and the all-batch rate are each engine's own.

A trace has about 200 chats, so its p99 is the second slowest of them and varies from seed to seed. So p99 is taken over the chats of all
seeds put together, beside those of the same seeds alone; the median and the worst of single seeds are printed with it.
"""

import os
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import cache

from bench import harvest_traces
from bench.harvest_world import CALIBRATED, Apart, Costs, HarvestWorld, Report, Sight
from bench.machinery import median, table
from tidegate.core.tide.controller import Tide, TidePolicy
from tidegate.core.tide.signals import UNLIMITED_TOKENS, Decision, Signals
from tidegate.simulate.engine.model import EngineLimits

SLOTS = 256
LIMITS = EngineLimits(max_num_seqs=SLOTS, prefill_chunk_tokens=512)
# From one process to another through PostgreSQL, in ms, every twentieth of 300 notices while two cores had four times as much to do as they
# could (`python -m bench harvest_processes` prints them).
NOTICE_MS = (0.5, 0.5, 0.5, 0.5, 0.5, 0.5, 0.6, 0.6, 0.6, 0.7, 1.0, 1.8, 2.3, 2.9, 3.6, 4.2, 5.1, 6.5, 8.3, 23.1)
SHAPES = {
    "one process": Sight(first_tokens=False),
    "apart": Sight(first_tokens=False, apart=Apart(NOTICE_MS)),
    "apart, a tenth of notices lost": Sight(first_tokens=False, apart=Apart(NOTICE_MS, lost_share=0.1)),
    "apart, polls alone": Sight(first_tokens=False, apart=Apart()),
    "one process, no engine metrics": Sight(first_tokens=False, metrics=False),
    "apart, no engine metrics": Sight(first_tokens=False, metrics=False, apart=Apart(NOTICE_MS)),
}
ENGINES = {
    "calibrated": CALIBRATED,
    "4 times as slow": Costs(4.0, 4.0, 4.0),
    "base 2": Costs(base=2.0),
    "base 0.5": Costs(base=0.5),
    "sequence 2.5": Costs(sequence=2.5),
    "sequence 1.5": Costs(sequence=1.5),
    "sequence 0.4": Costs(sequence=0.4),
    "prompt 2": Costs(prompt=2.0),
    "steps vary": Costs(spread=0.15),
}
FIRST_TOKEN_MAX, BETWEEN_MAX = 1.10, 1.08
HARVEST_MIN = {"bursty": 0.85, "steady": 0.75}


class Full:
    """All slots for batch."""

    def observe(self, signals: Signals) -> Decision:
        return Decision(SLOTS, UNLIMITED_TOKENS, 0, "full")


@dataclass(frozen=True)
class Case:
    """One run beside the same users alone."""

    trace: str
    engine: str
    shape: str
    seed: int
    duration_s: float


@dataclass(frozen=True)
class Ratios:
    """Interactive times to first token, with batch and alone; mean time between tokens, times alone's; and the harvest."""

    case: Case
    ttft_ms: Sequence[float]
    alone_ttft_ms: Sequence[float]
    between: float
    harvest: float

    @property
    def first_token(self) -> float:
        """The p99 time to first token, times alone's."""
        return _p99(self.ttft_ms) / _p99(self.alone_ttft_ms)

    @property
    def holds(self) -> bool:
        is_harvest_enough = self.harvest >= HARVEST_MIN[self.case.trace]
        return self.first_token <= FIRST_TOKEN_MAX and self.between <= BETWEEN_MAX and is_harvest_enough


@cache
def all_batch_rate(engine: str) -> float:
    """Tokens a millisecond without other calls."""
    costs = ENGINES[engine]
    items = harvest_traces.batch()
    full = HarvestWorld(LIMITS, [], items, Full(), 10_000.0 * max(1.0, costs.base), Sight(), costs).run()
    return full.batch_tokens / full.duration_ms


def run(case: Case) -> Ratios:
    """One case, in virtual time."""
    costs = ENGINES[case.engine]
    slower = max(1.0, costs.base)
    duration_ms = case.duration_s * 1000 * slower
    arrivals = [(at_ms * slower, ask) for at_ms, ask in harvest_traces.TRACES[case.trace](case.duration_s, case.seed)]

    def world(policy: Tide | None) -> Report:
        items = harvest_traces.batch(case.seed)
        return HarvestWorld(LIMITS, arrivals, items, policy, duration_ms, SHAPES[case.shape], costs, case.seed).run()

    alone = world(None)
    tide = world(Tide(TidePolicy(calls_max=SLOTS)))
    idle_share = 1 - alone.busy_ms / duration_ms
    ideal = idle_share * all_batch_rate(case.engine)
    between = [sum(one.between_ms) / len(one.between_ms) for one in (tide, alone)]
    harvest = tide.batch_tokens / duration_ms / ideal
    return Ratios(case, tide.ttft_ms, alone.ttft_ms, between[0] / between[1], harvest)


def _p99(values: Sequence[float]) -> float:
    return sorted(values)[min(len(values) - 1, int(0.99 * len(values)))]


def cases(quick: bool) -> list[Case]:
    """Every shape on the calibrated engine, and the two shapes of the product with bursts and on all other engines."""
    seeds, duration_s = ((1,), 40.0) if quick else (range(1, 9), 200.0)
    both = tuple(SHAPES)[:2]
    todo = [("steady", "calibrated", shape) for shape in (both if quick else SHAPES)]
    todo += [("bursty", "calibrated", shape) for shape in both]
    todo += [("steady", engine, shape) for engine in tuple(ENGINES)[1:] for shape in both if not quick]
    return [Case(*one, seed, duration_s) for one in todo for seed in seeds]


def main(quick: bool = False) -> dict[str, float]:
    todo = cases(quick)
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        found = list(pool.map(run, todo))
    rows: list[tuple[str, str, str]] = []
    figures: dict[str, float] = {}
    for trace, engine, shape in dict.fromkeys((one.trace, one.engine, one.shape) for one in todo):
        mine = [one for one in found if (one.case.trace, one.case.engine, one.case.shape) == (trace, engine, shape)]
        columns = [[getattr(one, name) for one in mine] for name in ("first_token", "between", "harvest")]
        middle, between, harvest = (median(column) for column in columns)
        first = _p99([ms for one in mine for ms in one.ttft_ms]) / _p99(
            [ms for one in mine for ms in one.alone_ttft_ms]
        )
        single = f"single seeds {middle:.2f}, worst {max(columns[0]):.2f}, {max(columns[1]):.3f}, {min(columns[2]):.2f}"
        held = f"{sum(one.holds for one in mine)} of {len(mine)} seeds hold"
        rows.append((f"{trace}, {engine}, {shape}", f"{first:.2f}, {between:.3f}, {harvest:.2f} ({single})", held))
        figures |= {f"first token, {trace}, {engine}, {shape}": first, f"harvest, {trace}, {engine}, {shape}": harvest}
    title = "The harvest as shipped: first token p99 over all seeds and between tokens mean, vs alone; harvest (single seeds)"
    table(f"{title}; bounds {FIRST_TOKEN_MAX:g}, {BETWEEN_MAX:g}, {HARVEST_MIN}", rows)
    return figures


if __name__ == "__main__":
    main("--quick" in sys.argv)
