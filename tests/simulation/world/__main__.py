"""`python -m tests.simulation.world SEED [COUNT]`: replay one seed with its last events, or run many."""

import argparse
import sys
import time

from tests.simulation.world import mutants
from tests.simulation.world.families import FAMILIES
from tests.simulation.world.plan import KINDS, draw
from tests.simulation.world.report import report, shrink
from tests.simulation.world.world import simulate


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation.world", description=__doc__)
    parser.add_argument("seed", type=int)
    parser.add_argument("count", type=int, nargs="?", default=1)
    parser.add_argument(
        "--without", action="append", default=[], choices=sorted(KINDS), help="leave a kind of fault out"
    )
    parser.add_argument("--mutant", choices=sorted(mutants.MUTANTS), help="plant a bug first")
    parser.add_argument("--family", choices=sorted(FAMILIES), default="", help="draw from plans of one sort of trouble")
    parser.add_argument("--trace", action="store_true", help="print every event")
    parser.add_argument("--digest", action="store_true", help="print only the digest of each trace")
    parser.add_argument("--shrink", action="store_true", help="look for the fewest kinds of fault that still break it")
    given = parser.parse_args(arguments)
    without = frozenset(given.without)
    out = sys.stdout.write
    started, broken_count, virtual_s, calls, losses = time.perf_counter(), 0, 0.0, 0, 0
    with mutants.planted(given.mutant):
        for seed in range(given.seed, given.seed + given.count):
            keep: list[str] | None = [] if given.trace else None
            verdict = simulate(draw(seed, without, given.family), keep=keep)
            if given.digest:
                out(verdict.digest + "\n")
            virtual_s += verdict.virtual_s
            calls += verdict.call_count
            losses += verdict.loss_count
            if keep is not None:
                out("\n".join(keep) + "\n")
            if verdict.broken is not None:
                broken_count += 1
                out(report(shrink(verdict) if given.shrink else verdict) + "\n")
    if given.digest:
        return 1 if broken_count else 0
    taken_s = time.perf_counter() - started
    out(
        f"{given.count} seeds, {broken_count} broken, {virtual_s / 3600:.2f} simulated hours, {calls} calls, "
        f"{losses} lost or ended workers, {taken_s:.1f} s, last digest {verdict.digest[:16]}\n"
    )
    return 1 if broken_count else 0


if __name__ == "__main__":
    sys.exit(main())
