"""CPU per item and per interactive call, of this tree and of another one beside it: `python -m bench costs --against PATH`.

Both trees are run as users run them, by the interpreter and the libraries of this one: `tidegate run` for items, `tidegate serve` for
calls, in front of the same simulated engine. What counts is the CPU time of the whole process tree, PostgreSQL's included where it is the
store. An item's cost is the difference between a run and one of a quarter of its items, so that what starting costs is left out; the short
one is long enough to load all that the long one loads, where a part is loaded when it is first needed. The trees take turns, and
the first one of a pair changes from pair to pair. Without `--against` this tree is measured alone.
"""

import contextlib
import functools
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import psutil
import uvloop

from bench.gateway import ASK, Place, gateway, make_calls, open_session
from bench.inputs import chat_lines
from bench.machinery import cpu_seconds, median, repository, simulated_engine, table
from tests.support.postgres import PostgresServer

T = TypeVar("T")

PAIRS = 7
FEW_SHARE = 4
CALLS_AT_ONCE = 8
WARM_CALLS = 500
WORSE_MAX = 1.03
GUARDRAILS = {
    "length": {"prompt_bytes_max": 200_000, "answer_bytes_max": 1_000_000},
    "secrets": {"patterns": ["AKIA[0-9A-Z]{16}", "[A-Za-z0-9._%+-]{1,64}@[A-Za-z0-9.-]{1,255}"]},
}


def _environment(tree: Path, more: Mapping[str, str]) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(tree / "src"), **more}


def _command(*words: str) -> list[str]:
    return [sys.executable, "-m", "tidegate", *words]


# ---- items


def _run_cpu_s(
    environment: Mapping[str, str], engine: str, items: Path, settings: dict[str, object], server_pid: int | None
) -> float:
    """CPU seconds of one `tidegate run` and of its children, and of a database server meanwhile."""
    others = [server_pid] if server_pid else []
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        config = directory / "tidegate.yaml"
        config.write_text(json.dumps(settings))
        files = ["--data", str(directory / "data"), "--config", str(config), "-o", str(directory / "out")]
        command = _command("run", str(items), "--upstream", engine, *files)
        began = cpu_seconds(*others)
        subprocess.run(command, env=environment, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        return cpu_seconds(*others) - began


class Items:
    """Samples of what an item costs, with some settings, on some store."""

    def __init__(self, engine: str, directory: Path, count: int) -> None:
        self._engine, self._more = engine, count - count // FEW_SHARE
        self._many, self._few = directory / "many.jsonl", directory / "few.jsonl"
        lines = list(chat_lines(count))
        self._many.write_bytes(b"".join(lines))
        self._few.write_bytes(b"".join(lines[: count // FEW_SHARE]))

    def sample(
        self,
        tree: Path,
        settings: dict[str, object],
        server: PostgresServer | None = None,
        variables: Mapping[str, str] | None = None,
    ) -> float:
        spent, environment = [], _environment(tree, variables or {})
        for items in (self._many, self._few):
            store: dict[str, object] = {"store": {"url": server.create_database()}} if server else {}
            pid = server.pid() if server else None
            spent.append(_run_cpu_s(environment, self._engine, items, settings | store, pid))
        return (spent[0] - spent[1]) / self._more * 1e6


# ---- calls


def _process_cpu_s(pid: int) -> float:
    spent = psutil.Process(pid).cpu_times()
    return float(spent.user + spent.system)


def _spent_at(places: dict[Path, Place], spend: Callable[[Place, int], float], count: int, tree: Path) -> float:
    return spend(places[tree], count)


def _call_us(place: Place, count: int, *, stream: bool) -> float:
    """Microseconds that a call took of a gateway that is running."""
    body = json.dumps({**ASK, "stream": stream}).encode()

    async def send() -> None:
        async with open_session(CALLS_AT_ONCE, place.headers) as client:
            await make_calls(client, place.url, body, count, CALLS_AT_ONCE)

    began = _process_cpu_s(place.pid)
    uvloop.run(send())
    return (_process_cpu_s(place.pid) - began) / count * 1e6


# ---- side by side


def take_turns(sides: Sequence[T], pairs: int, sample: Callable[[T], float]) -> list[list[float]]:
    """What each side took in each pair."""
    took: list[list[float]] = [[] for _ in sides]
    for pair in range(pairs):
        turns = list(enumerate(sides))
        for number, side in turns if pair % 2 == 0 else reversed(turns):
            took[number].append(sample(side))
    return took


def _row(name: str, took: list[list[float]]) -> tuple[str, str, str]:
    ours = f"{median(took[0]):.0f} µs ({min(took[0]):.0f} to {max(took[0]):.0f})"
    if len(took) == 1:
        return name, ours, ""
    ratios = sorted(mine / other for mine, other in zip(*took, strict=True))
    theirs = f"{median(took[1]):.0f} µs ({min(took[1]):.0f} to {max(took[1]):.0f})"
    each = ", ".join(f"{ratio:.2f}" for ratio in ratios)
    return (
        name,
        f"{ours}; the other tree {theirs}; times the other's {median(ratios):.3f} ({each})",
        f"at most {WORSE_MAX}",
    )


class _Costs:
    """All that was measured, each on all trees."""

    def __init__(self, trees: list[Path], pairs: int) -> None:
        self._trees, self._pairs = trees, pairs
        self.found: dict[str, list[list[float]]] = {}

    def measure(self, name: str, sample: Callable[[Path], float]) -> None:
        self.found[name] = take_turns(self._trees, self._pairs, sample)

    def measure_items(self, engine: str, directory: Path, count: int) -> None:
        items = Items(engine, directory, count)
        self.measure("an item", lambda tree: items.sample(tree, {}))
        self.measure("an item, with guardrails", lambda tree: items.sample(tree, {"guardrails": GUARDRAILS}))
        server = PostgresServer(directory / "postgres")
        server.start()
        try:
            self.measure("an item, PostgreSQL", lambda tree: items.sample(tree, {}, server))
        finally:
            server.stop()

    def measure_calls(self, engine: str, count: int) -> None:
        guarded = {"guardrails": GUARDRAILS}
        kinds = {"a call": (False, {}), "a stream": (True, {}), "a call, with guardrails": (False, guarded)}
        for name, (stream, settings) in kinds.items():
            with contextlib.ExitStack() as stack:
                places = {tree: stack.enter_context(gateway(engine, tree, settings)) for tree in self._trees}
                spend = functools.partial(_call_us, stream=stream)
                for place in places.values():
                    spend(place, WARM_CALLS)
                self.measure(name, functools.partial(_spent_at, places, spend, count))


def main(quick: bool = False, against: Path | None = None) -> dict[str, float]:
    pairs, item_count, call_count = (2, 8_000, 500) if quick else (PAIRS, 20_000, 2_000)
    costs = _Costs([repository(), *([against.resolve()] if against else [])], pairs)
    with tempfile.TemporaryDirectory() as name, simulated_engine("--mode", "instant") as engine:
        Path(name).chmod(0o755)
        costs.measure_calls(engine, call_count)
        costs.measure_items(engine, Path(name), item_count)
    title = f"CPU of all processes, {pairs} pairs in turns (medians; least and most)"
    table(title, [_row(*one) for one in costs.found.items()])
    return {name: median(took[0]) for name, took in costs.found.items()}


if __name__ == "__main__":
    main("--quick" in sys.argv)
