"""`make bench`: every benchmark in turn, or those that are named. `--quick` for a look instead of a measurement."""

import argparse
import gc
import importlib
from pathlib import Path

NAMES = (
    "ingest", "prefix", "engine", "harvest", "harvest_processes", "fairness", "decision", "contention", "transport", "gateway", "policy",
    "limits", "capacity", "throughput", "grouping", "cluster", "publish", "control", "memory", "completion_batch", "background",
    "scrape", "console", "lists", "schema", "start", "traces", "costs",
)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument("names", nargs="*", choices=[*NAMES, []], help=f"which ones: {', '.join(NAMES)} (default: all)")
    parser.add_argument("--quick", action="store_true", help="small inputs and few rounds")
    parser.add_argument(
        "--against", type=Path, metavar="PATH", help="costs: another checkout, to be measured beside this one"
    )
    parser.add_argument("--items", action="store_true", help="lists: store 10 million items too")
    chosen = parser.parse_args()
    more = {"costs": {"against": chosen.against}, "lists": {"items": chosen.items}}
    # As in the product's own processes (`tidegate/cli`); what is measured beside it in the same process has it too.
    gc.set_threshold(20_000)
    for name in chosen.names or NAMES:
        importlib.import_module(f"bench.{name}").main(quick=chosen.quick, **more.get(name, {}))


if __name__ == "__main__":
    main()
