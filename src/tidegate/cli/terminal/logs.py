"""The format of log lines: one line each on stderr, with capped fields and without characters that
control a terminal or a parser."""

import logging
import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Hashable
from typing import Any

import structlog
from structlog.typing import EventDict, WrappedLogger

from tidegate.cli.terminal.terminal import clean
from tidegate.settings import Settings

FIELD_CHARS_MAX = 2_000
TRACE_LINE_CHARS_MAX = 500
REPEAT_S = 10.0
# The most lines of one event about different things within REPEAT_S.
EVENT_LINES_MAX = 20
_KNOWN_MAX = 1_000
_LIMITED_LEVELS = ("warning", "error", "critical")
# These fields may differ although the same thing happens again.
_WORDS = ("error", "problem", "fault", "message", "request_id")
# No field should hold a key: this catches keys in the texts of libraries and servers. The first
# characters stay, because they name the key.
_KEYS = re.compile(r"(tg_live_[0-9A-Za-z]{0,8}|\bsk-|\b[Bb]earer (?=\S*[0-9]))[\w.~+/=-]{12,}")
_LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}


class _Stderr:
    """A logger that looks up sys.stderr for every line, so that lines go through a progress bar
    that replaces it."""

    def msg(self, line: str) -> None:
        sys.stderr.write(line + "\n")
        sys.stderr.flush()

    log = debug = info = warn = warning = fatal = failure = err = error = critical = exception = msg


class _Libraries(logging.Handler):
    """A handler that logs records of libraries, from Python's own logging, like any other event."""

    def emit(self, record: logging.LogRecord) -> None:
        structlog.get_logger().log(record.levelno, "library", name=record.name, message=record.getMessage())


class Repeats:
    """A filter that passes a repeated warning or error only once in a while; the next one that
    passes has the count of dropped ones."""

    def __init__(self, now_ms: Callable[[], float]) -> None:
        self._now_ms = now_ms
        self._passed_ms: dict[Hashable, float] = {}
        self._dropped: Counter[Hashable] = Counter()
        self._lines: dict[str, tuple[float, int]] = {}

    def __call__(self, logger: WrappedLogger, method: str, event: EventDict) -> EventDict:
        if event.get("level") not in _LIMITED_LEVELS:
            return event
        name, now_ms = str(event.get("event")), self._now_ms()
        about = (name, *(f"{key}={event[key]}" for key in sorted(event) if key not in _WORDS))
        if now_ms - self._passed_ms.get(about, -REPEAT_S * 1000) < REPEAT_S * 1000 or self._is_full(name, now_ms):
            self._dropped[about if about in self._passed_ms else name] += 1
            raise structlog.DropEvent
        dropped = self._dropped.pop(about, 0) + self._dropped.pop(name, 0)
        self._passed_ms.pop(about, None)
        self._passed_ms[about] = now_ms
        if len(self._passed_ms) > _KNOWN_MAX:
            oldest = next(iter(self._passed_ms))
            del self._passed_ms[oldest]
            self._dropped.pop(oldest, None)
        return {**event, "repeated": dropped} if dropped else event

    def _is_full(self, name: str, now_ms: float) -> bool:
        began_ms, count = self._lines.get(name, (now_ms, 0))
        if now_ms - began_ms >= REPEAT_S * 1000:
            began_ms, count = now_ms, 0
        self._lines[name] = (began_ms, count + 1)
        return count >= EVENT_LINES_MAX


def configure(settings: Settings, *, quiet: bool = False) -> None:
    """Set up logging once, before any work. With `quiet` only errors are logged, for commands that
    print their own messages."""
    level = _LEVELS[settings.logging.level]
    processors: list[Any] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        Repeats(lambda: time.monotonic() * 1000),
        structlog.processors.TimeStamper(fmt="iso", utc=True, key="at"),
        structlog.processors.format_exc_info,
        _capped,
    ]
    processors += [
        structlog.processors.JSONRenderer() if settings.logging.format == "json" else _as_text,
        _without_keys,
    ]
    structlog.configure(
        processors=processors,
        wrapper_class=structlog.make_filtering_bound_logger(max(level, logging.ERROR) if quiet else level),
        logger_factory=lambda *_: _Stderr(),
        cache_logger_on_first_use=False,
    )
    root = logging.getLogger()
    if not any(isinstance(handler, _Libraries) for handler in root.handlers):
        root.addHandler(_Libraries(logging.WARNING))
    # A body that cannot be parsed is its sender's mistake, and the sender gets an answer.
    logging.getLogger("python_multipart").setLevel(logging.ERROR)


def _capped(logger: WrappedLogger, method: str, event: EventDict) -> EventDict:
    for name, value in event.items():
        if name == "exception":
            event[name] = _capped_trace(str(value))
        elif isinstance(value, str) and len(value) > FIELD_CHARS_MAX:
            event[name] = value[:FIELD_CHARS_MAX] + "…"
    return event


def _capped_trace(trace: str) -> str:
    """Keep the end of a traceback, which has the error and where it was raised, and cap each line
    so that none crowds out the others."""
    lines = [
        line if len(line) <= TRACE_LINE_CHARS_MAX else line[:TRACE_LINE_CHARS_MAX] + "…" for line in trace.split("\n")
    ]
    kept, size = [], 0
    for line in reversed(lines):
        size += len(line) + 1
        if size > FIELD_CHARS_MAX:
            kept.append("…")
            break
        kept.append(line)
    return "\n".join(reversed(kept))


def _without_keys(logger: WrappedLogger, method: str, line: str) -> str:
    return _KEYS.sub(r"\1***", line)


def _as_text(logger: WrappedLogger, method: str, event: EventDict) -> str:
    trace = event.pop("exception", None)
    head = f"{event.pop('at')} {event.pop('level'):<7} {event.pop('event')}"
    line = " ".join([head, *(f"{name}={clean(value)}" for name, value in event.items())])
    return "\n".join([line, *(clean(row) for row in trace.split("\n"))]) if trace else line
