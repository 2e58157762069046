"""The benches still run: `python -m bench` knows each of them, and each prints its table. How fast anything is, no test says."""

from __future__ import annotations

import importlib
import inspect
import subprocess
import sys
from pathlib import Path

import pytest

from bench.__main__ import NAMES

REPOSITORY = Path(__file__).resolve().parents[2]
# What benches are made of, and one that needs another program beside it.
PARTS = {
    *("__init__", "__main__", "machinery", "inputs", "litellm_proxy", "backlog"),
    *("capacity_world", "ingest_turns"),
    *("harvest_picture", "harvest_shipped", "harvest_traces", "harvest_world"),
}
LONGEST_S = 900


def test_every_benchmark_is_listed_and_nothing_else() -> None:
    modules = {path.stem for path in (REPOSITORY / "bench").glob("*.py")}
    assert modules - PARTS == set(NAMES)
    assert modules >= PARTS


@pytest.mark.parametrize("name", NAMES)
def test_a_benchmark_can_be_imported_and_has_an_entry(name: str) -> None:
    entry = importlib.import_module(f"bench.{name}").main
    assert "quick" in inspect.signature(entry).parameters


@pytest.mark.soak
@pytest.mark.timeout(LONGEST_S + 60)
@pytest.mark.parametrize("name", NAMES)
def test_a_benchmark_prints_its_table(name: str) -> None:
    command = [sys.executable, "-m", "bench", name, "--quick"]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=LONGEST_S, check=False)
    assert done.returncode == 0, done.stdout[-2_000:] + done.stderr[-4_000:]
    # A row of a table is indented, and has a name and a figure.
    rows = [line for line in done.stdout.splitlines() if line.startswith("  ") and any(map(str.isdigit, line))]
    assert rows, done.stdout
