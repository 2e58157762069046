"""How long a command takes that has next to nothing to do: `tidegate --help` and a `run` of ten lines, in turns with `python -c pass`."""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from bench.inputs import chat_lines
from bench.machinery import cpu_seconds, median, simulated_engine, table

HELP_BUDGET_S, RUN_BUDGET_S = 0.3, 0.8
LINES = 10
ROUNDS = 15


def _measured(command: Sequence[str]) -> tuple[float, float]:
    """Return how long a command took, and how much CPU it took."""
    began_s, began_cpu_s = time.perf_counter(), cpu_seconds()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return time.perf_counter() - began_s, cpu_seconds() - began_cpu_s


def main(quick: bool = False) -> dict[str, float]:
    python = [sys.executable]
    tidegate = [str(Path(sys.executable).with_name("tidegate"))]
    bare: list[tuple[float, float]] = []
    helped: list[tuple[float, float]] = []
    runs: list[tuple[float, float]] = []
    with simulated_engine("--mode", "instant") as engine, tempfile.TemporaryDirectory() as place:
        requests = Path(place, "requests.jsonl")
        requests.write_bytes(b"".join(chat_lines(LINES)))
        # The first of each reads its files from the disk.
        for number in range(1 + (3 if quick else ROUNDS)):
            data = os.path.join(place, f"data-{number}")
            run = [*tidegate, "run", str(requests), "--upstream", engine, "--data", data, "-o", f"{data}.jsonl"]
            for command, figures in (([*python, "-c", "pass"], bare), ([*tidegate, "--help"], helped), (run, runs)):
                figures.append(_measured(command))
    bare_s, help_s, run_s = (median([took_s for took_s, _ in figures[1:]]) for figures in (bare, helped, runs))
    run_cpu_s = median([cpu_s for _, cpu_s in runs[1:]])
    table(
        f"A start, medians; python -c pass takes {bare_s * 1000:.0f} ms",
        [
            ("tidegate --help", f"{help_s:.2f} s, {help_s / bare_s:.1f} times", f"under {HELP_BUDGET_S} s"),
            (
                f"tidegate run of {LINES} lines",
                f"{run_s:.2f} s ({run_cpu_s:.2f} s CPU), {run_s / bare_s:.1f} times",
                f"under {RUN_BUDGET_S} s",
            ),
        ],
    )
    return {"help_s": help_s, "run_s": run_s, "bare_s": bare_s}


if __name__ == "__main__":
    main("--quick" in sys.argv)
