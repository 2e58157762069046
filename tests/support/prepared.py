"""The product's processes without the second that loading takes: forked from one that has everything loaded already.

What is forked is a process of its own, in a session of its own, with its own environment, directory and output. It runs the same `main` as
the installed command, the module that `python -m` names, or the code after `python -c`. Only the loading is shared, and at its end the
memory of what was loaded is left to the system instead of being freed object by object, which cost ten times the fork. Processes with
preloaded libraries are forked from one that has the same libraries preloaded. A process that needs a real start (another interpreter's
environment, another system than Linux) gets one: `fits` says so. The installed command itself is started by the tests of the command line.

Run as a module it is the process that forks: asks come over a socket, one datagram each, and so do the answers.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn

ASK_BYTES_MAX = 1 << 18
POLL_S = 0.005
REPOSITORY = Path(__file__).resolve().parents[2]
READ_ONCE = ("PYTHON", "LD_LIBRARY_PATH", "LC_", "MALLOC", "TZ")
# These change nothing here, or are followed by hand in a forked process.
HARMLESS = ("PYTHONUNBUFFERED", "PYTHONDONTWRITEBYTECODE", "PYTHONPATH")
TIDEGATE = str(Path(sys.executable).with_name("tidegate"))
MODULES = ("tidegate", "tests.contracts.", "tests.faults.")


def fits(args: Sequence[str], env: Mapping[str, str] | None) -> bool:
    """Whether this command may be forked: it loads the product, and its interpreter would be set up as this one is."""
    if sys.platform != "linux" or not _loads_the_product(args):
        return False
    return env is None or _read_once(env) == _read_once(os.environ)


def _loads_the_product(args: Sequence[str]) -> bool:
    if args[0] == TIDEGATE:
        return True
    if args[0] != sys.executable or len(args) < 3:
        return False
    how, what = args[1:3]
    # A bare interpreter starts faster than one that has the product loaded.
    return (how == "-c" and "tidegate" in what) or (how == "-m" and what.startswith(MODULES))


def _read_once(env: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in env.items() if name.startswith(READ_ONCE) and name not in HARMLESS}


class Prepared:
    """The one that forks, and the way to it. It ends when this process and all that were forked from it do, however that is."""

    def __init__(self, preloaded: str) -> None:
        self._line, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._popen = subprocess.Popen(
                [sys.executable, "-m", "tests.support.prepared", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                cwd=REPOSITORY,
                env={**os.environ, "LD_PRELOAD": preloaded},
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        self._one_at_a_time = threading.Lock()
        self._asker = os.getpid()

    def ask(self, question: dict[str, object], fds: Sequence[int] = ()) -> int | None:
        with self._one_at_a_time:
            if self._asker != os.getpid():
                self._open_own_line()
            socket.send_fds(self._line, [json.dumps(question).encode()], fds)
            answer = self._line.recv(ASK_BYTES_MAX)
        if not answer:
            raise RuntimeError(f"the process that forks others ended ({self._popen.poll()})")
        reply: int | None = json.loads(answer)
        return reply

    def _open_own_line(self) -> None:
        """A process that was forked from the one that began it would read the answers of others: it gets a line of its own."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs, self._line as shared:
            socket.send_fds(shared, [json.dumps({"line": True}).encode()], [theirs.fileno()])
        self._line, self._asker = ours, os.getpid()


_prepared: dict[str, Prepared] = {}
_preparing = threading.Lock()


def prepared(preloaded: str) -> Prepared:
    """The one of this process whose children have these libraries preloaded; begun when it is first asked for."""
    with _preparing:
        if preloaded not in _prepared:
            _prepared[preloaded] = Prepared(preloaded)
        return _prepared[preloaded]


class Forked:
    """One forked process, as far as `subprocess.Popen` is needed for it. Its files are one for what it says and one for errors, or a
    terminal that it also reads from."""

    def __init__(
        self, args: Sequence[str], files: Sequence[int], env: Mapping[str, str] | None, cwd: Path | None
    ) -> None:
        self.returncode: int | None = None
        given = dict(os.environ if env is None else env)
        self._parent = prepared(given.get("LD_PRELOAD", ""))
        question: dict[str, object] = {
            "args": [*args],
            "env": given,
            "cwd": str(Path.cwd() if cwd is None else cwd),
        }
        pid = self._parent.ask(question, files)
        assert pid is not None
        self.pid = pid
        try:
            self._alive_fd: int | None = os.pidfd_open(pid)
        except OSError:
            # It has ended already, or the system has no such thing: then its parent is asked.
            self._alive_fd = None

    def poll(self) -> int | None:
        if self.returncode is None and not self._lives_on(0):
            self.returncode = self._parent.ask({"pid": self.pid})
            if self.returncode is not None and self._alive_fd is not None:
                os.close(self._alive_fd)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        deadline = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            left_s = None if deadline is None else deadline - time.monotonic()
            if left_s is not None and timeout is not None and left_s < 0:
                raise subprocess.TimeoutExpired(TIDEGATE, timeout)
            if not self._lives_on(left_s):
                # Its parent is about to learn of its end.
                time.sleep(POLL_S)
        return code

    def _lives_on(self, within_s: float | None) -> bool:
        """Whether it has not ended within this time; the system says so, and the one that forks is not asked in vain."""
        if self._alive_fd is None:
            return False
        ends = select.poll()
        ends.register(self._alive_fd, select.POLLIN)
        return not ends.poll(None if within_s is None else within_s * 1_000)

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)


# ---- the process that forks


class _Nursery:
    def __init__(self) -> None:
        self._ended: dict[int, int] = {}
        signal.signal(signal.SIGCHLD, self._reap)

    def _reap(self, *_: object) -> None:
        """A process that ended is gone at once, for tests that look for it by its number."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if not pid:
                return
            self._ended[pid] = os.waitstatus_to_exitcode(status)

    def serve(self, first: socket.socket) -> list[str]:
        """Answer asks until no process is left to ask; a process that was forked gets the command that it is to run."""
        lines = [first]
        while lines:
            for line in select.select(lines, [], [])[0]:
                message, fds, _, _ = socket.recv_fds(line, ASK_BYTES_MAX, 2)
                ask = json.loads(message or "null")
                if ask is None:
                    lines.remove(line)
                    line.close()
                elif "line" in ask:
                    lines.append(socket.socket(fileno=fds[0]))
                elif "pid" in ask:
                    # Answered once: the system gives the number to another process some day.
                    _answer(line, self._ended.pop(ask["pid"], None))
                elif pid := os.fork():
                    for fd in fds:
                        os.close(fd)
                    _answer(line, pid)
                else:
                    for each in lines:
                        each.close()
                    _become(ask, fds)
                    return list(ask["args"])
        return []


def _answer(line: socket.socket, reply: int | None) -> None:
    # The process that asked may have been killed meanwhile.
    with contextlib.suppress(BrokenPipeError):
        line.send(json.dumps(reply).encode())


def _become(ask: dict[str, object], files: list[int]) -> None:
    """What an interpreter finds when it is started, here by hand."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.setsid()
    os.chdir(str(ask["cwd"]))
    is_in_terminal = len(files) == 1
    for standard, own in enumerate(files * 3) if is_in_terminal else enumerate(files, 1):
        os.dup2(own, standard)
    for own in files:
        os.close(own)
    if is_in_terminal:
        take_terminal()
    env, args = ask["env"], ask["args"]
    assert isinstance(env, dict)
    assert isinstance(args, list)
    inherited = {"", str(REPOSITORY), *_python_path(os.environ)}
    is_command = args[0] == TIDEGATE
    beside = [] if is_command else [os.getcwd()]
    sys.path[:] = [*beside, *_python_path(env), *(path for path in sys.path if path not in inherited)]
    os.environ.clear()
    os.environ.update(env)
    # Like the interpreter: after `-c` the code is no argument, and `runpy` replaces the module's name by its file.
    sys.argv = args if is_command else ["-c" if args[1] == "-c" else args[2], *args[3:]]
    for name, standard, buffering in (("stdout", 1, -1), ("stderr", 2, 1)):
        file = open(standard, "w", buffering, "utf-8", "backslashreplace", closefd=False)  # noqa: SIM115
        setattr(sys, name, file)
        setattr(sys, f"__{name}__", file)
    tempfile.tempdir = None


def take_terminal() -> None:
    """Have a new session take its terminal for its own, and notice when it is closed, though the tests may run under nohup."""
    os.close(os.open(os.ttyname(0), os.O_RDWR))
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


def _python_path(env: Mapping[str, str]) -> list[str]:
    return [path for path in env.get("PYTHONPATH", "").split(os.pathsep) if path]


def _load() -> None:
    """Everything that a role or a command of the product may need, and so what it loads late: a client of Redis alone takes 0.2 s."""
    import importlib
    import pkgutil

    import tidegate

    for module in pkgutil.walk_packages(tidegate.__path__, "tidegate."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
    assert tidegate.__version__
    # Looking up a host's name and reading a file load these.
    assert all("localhost".encode(one) for one in ("idna", "ascii", "utf-8-sig"))
    _build_what_a_start_builds()


def _build_what_a_start_builds() -> None:
    """Build commands and routes, and read options, settings and the store's texts once: all of it is the same at every start, and half of
    its cost."""
    from unittest.mock import MagicMock

    import typer.main

    from tidegate.cli.app import app
    from tidegate.settings import load
    from tidegate.store.database import postgres
    from tidegate.store.database.queries import statements
    from tidegate.store.database.schema import current_schema
    from tidegate.web.app import build_app

    command = typer.main.get_command(app)
    with command.make_context("tidegate", ["config"]) as context:
        command.get_command(context, "config").make_context("config", [])  # type: ignore[attr-defined]
    # Every command is loaded here, once for all processes.
    assert all(command.commands.values())  # type: ignore[attr-defined]
    made = typer.main.get_command
    typer.main.get_command = lambda typer_instance: command if typer_instance is app else made(typer_instance)
    # These are kept where they are asked for.
    assert all(step.checksum for step in current_schema().steps)
    assert all(postgres._sql(name) for name in statements())
    # The patterns of the routes stay in the cache of `re`.
    build_app(MagicMock(settings=load(None, REPOSITORY, {}, {}).settings))


def main() -> None:
    with socket.socket(fileno=int(sys.argv[1])) as line:
        line.set_inheritable(False)
        _load()
        gc.collect()
        gc.freeze()
        command = _Nursery().serve(line)
    if command:
        try:
            _run(command)
        except SystemExit as ended:
            _end(ended.code)
        _end(None)


def _run(command: list[str]) -> None:
    if command[0] == TIDEGATE:
        from tidegate.cli import main as tidegate_command

        tidegate_command()
    elif command[1] == "-m":
        runpy.run_module(command[2], run_name="__main__", alter_sys=True)
    else:
        exec(compile(command[2], "<string>", "exec"), {"__name__": "__main__"})


def _end(code: object) -> NoReturn:
    """Do what an interpreter does at its end, in its order: wait for threads, do what was registered, let lost objects complain, write out
    what was printed."""
    if code is not None and not isinstance(code, int):
        print(code, file=sys.stderr)
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    gc.collect()
    for file in (sys.stdout, sys.stderr):
        file.flush()
    os._exit(code if isinstance(code, int) else int(code is not None))


if __name__ == "__main__":
    main()
