"""Run tests in several processes: `pytest -n 6`. One process imports and collects everything, and the workers are forked from it.

So ten thousand tests are collected once and not once a worker. Each worker has a range of the tests. Two workers of three begin with those
that start processes, which wait for them half of the time, and the others have work for the cores meanwhile. A worker whose range is empty
steals half of the longest one, of tests that wait as long as there are any. A worker that ends in the middle of a test fails that test, and
a new worker goes on with its range.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import math
import os
import random
import signal
import threading
import traceback
import warnings
from collections import deque
from collections.abc import Iterator
from multiprocessing.connection import Connection, Pipe, wait
from typing import Any, NoReturn

import pytest
from _pytest.runner import runtestprotocol
from _pytest.tmpdir import TempPathFactory

# The test that runs, the one after it, which says which fixtures stay, and one that is on its way.
AHEAD = 3
WORKERS_LOST_MAX = 20
# The fixtures through which tests start processes.
STARTERS = frozenset(("processes", "module_processes"))


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("workers")
    group._addoption("-n", dest="workers", type=int, default=0, metavar="COUNT", help="run tests in so many processes")


def pytest_addhooks(pluginmanager: pytest.PytestPluginManager) -> None:
    pluginmanager.add_hookspecs(WorkerHooks)


class WorkerHooks:
    def pytest_worker_started(self, config: pytest.Config, number: int) -> None:
        """A worker was forked; called in its process."""


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection() -> Iterator[None]:
    """Collect no garbage meanwhile, and leave what is made here out of every later collection: it stays."""
    gc.disable()
    yield
    gc.collect()
    gc.freeze()
    gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool | None:
    options = session.config.option
    if options.workers < 1 or options.collectonly or session.testsfailed:
        return None
    count = min(options.workers, len(session.items))
    others = [thread.name for thread in threading.enumerate() if thread is not threading.current_thread()]
    assert not others, f"importing the tests started threads, and no process may fork then: {others}"
    _Controller(session, count).run()
    return True


class _Worker:
    """A forked process as the controller sees it."""

    def __init__(self, number: int, line: Connection, pid: int, tests: deque[int]) -> None:
        self.number = number
        self.line = line
        self.pid = pid
        self.tests = tests
        self.given: deque[int] = deque()
        self.has_all = False


class _Controller:
    def __init__(self, session: pytest.Session, count: int) -> None:
        self._session = session
        self._config = session.config
        self._workers: list[_Worker] = []
        self._lost = 0
        self._waiting = {number for number, item in enumerate(session.items) if _waits(item)}
        # Making it empties it, so it is made once, before the workers have theirs in it.
        self._config._tmp_path_factory.getbasetemp()  # type: ignore[attr-defined]
        for number, tests in enumerate(_dealt(session, count)):
            self._fork(number, tests)

    def run(self) -> None:
        try:
            for worker in self._workers:
                self._give(worker)
            while self._workers:
                ready = wait([worker.line for worker in self._workers])
                for worker in [worker for worker in self._workers if worker.line in ready]:
                    self._receive_from(worker)
                if self._session.shouldfail:
                    raise self._session.Failed(self._session.shouldfail)
                if self._session.shouldstop:
                    raise self._session.Interrupted(self._session.shouldstop)
        finally:
            for worker in self._workers:
                os.kill(worker.pid, signal.SIGKILL)
                self._end(worker)

    def _fork(self, number: int, tests: deque[int]) -> None:
        ours, theirs = Pipe()
        pid = os.fork()
        if not pid:
            ours.close()
            for other in self._workers:
                other.line.close()
            _work(self._session, number, theirs)
        theirs.close()
        self._workers.append(_Worker(number, ours, pid, tests))

    def _give(self, worker: _Worker) -> None:
        while len(worker.given) < AHEAD and not worker.has_all:
            if not worker.tests:
                self._steal_for(worker)
            if worker.tests:
                worker.given.append(worker.tests.popleft())
                worker.line.send(worker.given[-1])
            else:
                worker.has_all = True
                worker.line.send(None)

    def _steal_for(self, worker: _Worker) -> None:
        richest = max((other.tests for other in self._workers), key=lambda tests: (self._waiting_in(tests), len(tests)))
        stolen = [richest.pop() for _ in range((len(richest) + 1) // 2)]
        worker.tests.extend(reversed(stolen))

    def _waiting_in(self, tests: deque[int]) -> int:
        return sum(number in self._waiting for number in tests)

    def _receive_from(self, worker: _Worker) -> None:
        kind, content = _receive(worker.line)
        if kind == "ended":
            self._end(worker)
            if worker.given:
                self._replace(worker)
            return
        if kind == "warning":
            self._warn(**content)
            return
        worker.given.popleft()
        with contextlib.suppress(OSError):
            self._give(worker)
        for data in content:
            report = self._config.hook.pytest_report_from_serializable(config=self._config, data=data)
            self._config.hook.pytest_runtest_logreport(report=report)

    def _warn(self, category: str, text: str, filename: str, lineno: int, **where: Any) -> None:
        message = warnings.WarningMessage(text, type(category, (Warning,), {}), filename, lineno)
        self._config.hook.pytest_warning_recorded.call_historic(kwargs={"warning_message": message, **where})

    def _replace(self, worker: _Worker) -> None:
        """Fail the test in which a worker ended, and go on with a new one."""
        item = self._session.items[worker.given.popleft()]
        report = pytest.TestReport(
            nodeid=item.nodeid,
            location=item.location,
            keywords={},
            outcome="failed",
            longrepr=f"the worker's process ended while it ran {item.nodeid}",
            when="call",
        )
        self._config.hook.pytest_runtest_logreport(report=report)
        self._lost += 1
        if self._lost > WORKERS_LOST_MAX:
            raise self._session.Interrupted(f"{self._lost} workers ended")
        self._fork(worker.number, worker.given + worker.tests)
        self._give(self._workers[-1])

    def _end(self, worker: _Worker) -> None:
        worker.line.close()
        os.waitpid(worker.pid, 0)
        self._workers = [other for other in self._workers if other is not worker]


def _dealt(session: pytest.Session, count: int) -> list[deque[int]]:
    """A share for each worker."""
    usual_s = float(session.config.getini("timeout") or 0)
    long, waiting, others = set[int](), list[int](), list[int]()
    for number, item in enumerate(session.items):
        (waiting if _waits(item) else others).append(number)
        if _timeout_s(item, usual_s) > usual_s:
            long.add(number)
    if count > 1 and waiting and others:
        patient = count * 2 // 3
        return _shares(waiting, long, patient) + _shares(others, long, count - patient)
    return _shares(sorted(waiting + others), long, count)


def _shares(tests: list[int], long: set[int], count: int) -> list[deque[int]]:
    """A range of the tests for each, and before it some of those that may take long, which must not begin last."""
    first = [number for number in tests if number in long]
    rest = [number for number in tests if number not in long]
    starts = [number * len(rest) // count for number in range(count + 1)]
    return [
        deque([*first[number::count], *rest[start:end]])
        for number, (start, end) in enumerate(itertools.pairwise(starts))
    ]


def _waits(item: pytest.Item) -> bool:
    return not STARTERS.isdisjoint(getattr(item, "fixturenames", ()))


def _timeout_s(item: pytest.Item, usual_s: float) -> float:
    marker = item.get_closest_marker("timeout")
    return usual_s if marker is None else float(marker.args[0]) or math.inf


def _receive(line: Connection) -> tuple[str, Any]:
    try:
        message: tuple[str, Any] = line.recv()
    except (EOFError, OSError):
        return "ended", None
    return message


# ---- the process that is forked


def _work(session: pytest.Session, number: int, line: Connection) -> NoReturn:
    try:
        _begin(session.config, number)
        reporter = _Reporter(line)
        session.config.pluginmanager.register(reporter)
        # What was warned of before the fork is repeated to every new plugin, and the controller knows it.
        reporter.tells_warnings = True
        current = line.recv()
        while current is not None:
            following = line.recv()
            item = session.items[current]
            item.config.hook.pytest_runtest_protocol(
                item=item, nextitem=None if following is None else session.items[following]
            )
            reporter.send()
            current = following
    except (EOFError, BrokenPipeError, KeyboardInterrupt):
        # The controller ended, or ends because of the same Ctrl-C.
        pass
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(0)


def _begin(config: pytest.Config, number: int) -> None:
    """Let go of what all workers would share: captured output, the directory for temporary files, and a generator's state."""
    capture = config.pluginmanager.getplugin("capturemanager")
    assert capture is not None
    capture.stop_global_capturing()
    capture.start_global_capturing()
    capture.suspend_global_capture(in_=False)
    factory: TempPathFactory = config._tmp_path_factory  # type: ignore[attr-defined]
    factory._basetemp = factory.mktemp(f"worker-{number}-")
    random.seed()
    config.hook.pytest_worker_started(config=config, number=number)


class _Reporter:
    """Sends reports instead of showing them."""

    def __init__(self, line: Connection) -> None:
        self.tells_warnings = False
        self._line = line
        self._reports: list[Any] = []

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item, nextitem: pytest.Item | None) -> bool:
        reports = runtestprotocol(item, log=False, nextitem=nextitem)
        serialize = item.config.hook.pytest_report_to_serializable
        self._reports = [serialize(config=item.config, report=report) for report in reports]
        return True

    def pytest_warning_recorded(
        self,
        warning_message: warnings.WarningMessage,
        when: str,
        nodeid: str,
        location: tuple[str, int, str] | None,
    ) -> None:
        if not self.tells_warnings:
            return
        warning = {
            "category": warning_message.category.__name__,
            "text": str(warning_message.message),
            "filename": warning_message.filename,
            "lineno": warning_message.lineno,
        }
        self._line.send(("warning", warning | {"when": when, "nodeid": nodeid, "location": location}))

    def send(self) -> None:
        """Send them when everything around the test is done."""
        self._line.send(("done", self._reports))
