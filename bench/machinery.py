"""What benchmarks share: a simulated engine in a process of its own, CPU of a process and its children, medians, tables."""

import contextlib
import os
import re
import statistics
import subprocess
import sys
import threading
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


@contextlib.contextmanager
def serving(data: Path, engine: str, **variables: str) -> Iterator[tuple[str, int]]:
    """`tidegate serve` in front of this engine: its URL and its process, while it runs."""
    command = [sys.executable, "-m", "tidegate", "serve", "--data", str(data), "--port", "0", "--upstream", engine]
    env = {**os.environ, **variables}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env) as server:
        try:
            assert server.stdout is not None
            url = next(found.group(0) for line in server.stdout if (found := re.search(r"http://127\S+:\d+", line)))
            # What it goes on to log is thrown away: a full pipe would stop it.
            threading.Thread(target=server.stdout.read, daemon=True).start()
            yield url, server.pid
        finally:
            server.terminate()
            server.wait()


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
