"""What benchmarks share: a simulated engine in a process of its own, CPU of a process and its children, medians, tables."""

import contextlib
import os
import re
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil


@contextlib.contextmanager
def simulated_engine(*options: str) -> Iterator[str]:
    """The engine's URL, while it runs."""
    command = [sys.executable, "-m", "tidegate.simulate.engine", "--port", "0", *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            for line in process.stdout:
                if found := re.search(r"listening on (\S+)", line):
                    yield found.group(1)
                    break
            else:
                raise RuntimeError("the simulated engine did not start")
        finally:
            process.terminate()
            process.wait()


def cpu_seconds(*others: int) -> float:
    """CPU used so far by this process, its finished children, and these other processes with their children."""
    times = os.times()
    total = times.user + times.system + times.children_user + times.children_system
    for pid in others:
        process = psutil.Process(pid)
        for one in [process, *process.children(recursive=True)]:
            with contextlib.suppress(psutil.NoSuchProcess):
                spent = one.cpu_times()
                total += spent.user + spent.system + spent.children_user + spent.children_system
    return total


def rss_bytes(pid: int) -> int:
    """Resident memory that belongs to a process alone or is shared, without the page cache of files."""
    return int(psutil.Process(pid).memory_info().rss)


def median(values: Sequence[float]) -> float:
    return statistics.median(values)


def table(title: str, rows: Sequence[tuple[str, str, str]]) -> None:
    """Print what was measured: name, figure, budget."""
    print(f"\n{title}")
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    for name, figure, budget in rows:
        print(f"  {name:<{widths[0]}}  {figure:>{widths[1]}}  {budget}")
    sys.stdout.flush()


def repository() -> Path:
    return Path(__file__).resolve().parent.parent
