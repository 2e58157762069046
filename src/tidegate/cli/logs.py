"""How log lines look: to stderr, one line each, fields capped, nothing in them that a terminal or a parser would obey."""

import logging
import sys
from typing import Any

import structlog
from structlog.typing import EventDict, WrappedLogger

from tidegate.cli.screen import clean
from tidegate.settings import Settings

FIELD_CHARS_MAX = 2_000
_LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}


class _Stderr:
    """Looks stderr up at every line, so that a progress bar which borrows it keeps its place."""

    def msg(self, line: str) -> None:
        sys.stderr.write(line + "\n")
        sys.stderr.flush()

    log = debug = info = warn = warning = fatal = failure = err = error = critical = exception = msg


class _Libraries(logging.Handler):
    """What a library says through Python's own logging, as a line like any other."""

    def emit(self, record: logging.LogRecord) -> None:
        structlog.get_logger().log(record.levelno, "library", name=record.name, said=record.getMessage())


def configure(settings: Settings, *, quiet: bool = False) -> None:
    """Set up logging once, before any work; `quiet` is for commands whose own words are the story."""
    level = _LEVELS[settings.logging.level]
    processors: list[Any] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True, key="at"),
        structlog.processors.format_exc_info,
        _capped,
    ]
    if settings.logging.format == "json":
        processors.append(structlog.processors.JSONRenderer())
    else:
        processors.append(_as_text)
    structlog.configure(
        processors=processors,
        wrapper_class=structlog.make_filtering_bound_logger(max(level, logging.WARNING) if quiet else level),
        logger_factory=lambda *_: _Stderr(),
        cache_logger_on_first_use=False,
    )
    root = logging.getLogger()
    if not any(isinstance(handler, _Libraries) for handler in root.handlers):
        root.addHandler(_Libraries(logging.WARNING))
    # A body that cannot be read is its sender's mistake, and told to the sender.
    logging.getLogger("python_multipart").setLevel(logging.ERROR)


def _capped(logger: WrappedLogger, method: str, event: EventDict) -> EventDict:
    for name, value in event.items():
        if isinstance(value, str) and len(value) > FIELD_CHARS_MAX:
            event[name] = value[:FIELD_CHARS_MAX] + "…"
    return event


def _as_text(logger: WrappedLogger, method: str, event: EventDict) -> str:
    trace = event.pop("exception", None)
    head = f"{event.pop('at')} {event.pop('level'):<7} {event.pop('event')}"
    line = " ".join([head, *(f"{name}={clean(value)}" for name, value in event.items())])
    return f"{line}\n{trace}" if trace else line
