"""Looks through long bodies with an operator's patterns in a process of its own, which can be ended when it takes too long.

Nothing else can stop a regular expression: it holds the whole interpreter until it is done, and what a stranger writes may keep one
busy for minutes. The process is started when the first such body comes and ends with this one. One body is looked through at a time,
within a limit of processor time, so that a busy machine makes nobody's text too long; a limit of real time stands behind it.
"""

import asyncio
import contextlib
import signal
import struct
import subprocess
import sys
from collections.abc import Sequence
from typing import IO

import msgspec

from tidegate.core.guardrails import PASS, Pass, Patterns, PatternSpec, Refuse, Transformed, Verdict
from tidegate.flow.own_code import Overran, OwnCode

PROCESSOR_S = 1.0
REAL_S = 10.0
_HEAD = struct.Struct(">I")


class _Ask(msgspec.Struct, array_like=True):
    rule: int
    is_answer: bool
    body: bytes


class _Said(msgspec.Struct, array_like=True):
    """`code` is empty for what passes, and `body` is None for what passes as it is."""

    code: str = ""
    message: str = ""
    body: bytes | None = None
    overran: bool = False


class _Looker:
    """One such process, from its first question on. Whoever gives one up never asks it again, so nobody hears another's answer."""

    def __init__(self, specs: Sequence[PatternSpec]) -> None:
        self._specs = list(specs)
        self._process: subprocess.Popen[bytes] | None = None
        self._is_given_up = False

    def ask(self, ask: _Ask) -> _Said:
        """In a thread: this waits for as long as it takes."""
        if self._process is None:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "tidegate.flow.long_looks"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
            )
            if self._is_given_up:
                self.give_up()
            _put(self._process.stdin, msgspec.msgpack.encode(self._specs))
        _put(self._process.stdin, msgspec.msgpack.encode(ask))
        return msgspec.msgpack.decode(_get(self._process.stdout), type=_Said)

    def give_up(self) -> None:
        self._is_given_up = True
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            for pipe in (self._process.stdin, self._process.stdout):
                # Whoever still reads or writes has been told by now; what was not written is nobody's any more.
                with contextlib.suppress(OSError, ValueError):
                    assert pipe is not None
                    pipe.close()


class LongLooks:
    """`look` raises Overran when a body takes too long, and OSError when there is no process to look."""

    def __init__(self, specs: Sequence[PatternSpec]) -> None:
        self._specs = specs
        self._looker = _Looker(specs)
        self._lock: asyncio.Lock | None = None
        self._exchange = OwnCode("long looks", _Looker.ask, REAL_S)

    async def look(self, rule: int, body: bytes, *, is_answer: bool) -> Verdict:
        if self._lock is None:
            self._lock = asyncio.Lock()
        async with self._lock:
            looker = self._looker
            try:
                said: _Said = await self._exchange.call(looker, _Ask(rule, is_answer, body))
            except BaseException:
                self._looker = _Looker(self._specs)
                looker.give_up()
                raise
        if said.overran:
            raise Overran
        if said.code:
            return Refuse(said.code, said.message)
        return PASS if said.body is None else Transformed(said.body)

    def close(self) -> None:
        self._looker.give_up()
        self._exchange.close()


def _put(pipe: IO[bytes] | None, said: bytes) -> None:
    assert pipe is not None
    pipe.write(_HEAD.pack(len(said)) + said)
    pipe.flush()


def _get(pipe: IO[bytes] | None) -> bytes:
    assert pipe is not None
    head = pipe.read(_HEAD.size)
    said = pipe.read(_HEAD.unpack(head)[0]) if len(head) == _HEAD.size else b""
    if len(head) < _HEAD.size or len(said) < _HEAD.unpack(head)[0]:
        raise ConnectionError("the process that looks through long texts has ended")
    return said


class _TooLong(Exception):
    pass


def _too_long(number: int, frame: object) -> None:
    raise _TooLong


def _looked(rails: list[Patterns], ask: _Ask) -> _Said:
    rail = rails[ask.rule]
    try:
        signal.setitimer(signal.ITIMER_VIRTUAL, PROCESSOR_S)
        try:
            verdict = rail.check_answer(ask.body) if ask.is_answer else rail.check_prompt(ask.body)
        finally:
            signal.setitimer(signal.ITIMER_VIRTUAL, 0)
    except _TooLong:
        return _Said(overran=True)
    match verdict:
        case Refuse():
            return _Said(verdict.code, verdict.message)
        case Transformed():
            return _Said(body=verdict.body)
        case Pass():
            return _Said()


def main() -> None:
    """The process itself: it answers until nobody asks any more, and leaves interrupts to the one who started it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGVTALRM, _too_long)
    asked, said = sys.stdin.buffer, sys.stdout.buffer
    specs = msgspec.msgpack.decode(_get(asked), type=list[PatternSpec])
    rails = [
        Patterns(one.name, one.patterns, one.action, replacement=one.replacement, text_chars_max=one.text_chars_max)
        for one in specs
    ]
    while True:
        try:
            frame = _get(asked)
        except ConnectionError:
            return
        _put(said, msgspec.msgpack.encode(_looked(rails, msgspec.msgpack.decode(frame, type=_Ask))))


if __name__ == "__main__":
    main()
