"""Bounds that are constants in the engine, made tiny for one run so that they are met; and an ear for internal errors."""

from collections.abc import Callable, Iterator, MutableMapping
from contextlib import contextmanager
from typing import Any

import structlog

from tidegate.core import store_clock, webhooks
from tidegate.core.budgets import counting
from tidegate.core.budgets.budget import Period
from tidegate.core.budgets.counting import Span
from tidegate.core.tide import controller, prefill
from tidegate.stages import lease
from tidegate.stages.tend import compact_extents
from tidegate.upstream.routing import slots
from tidegate.worker import leased_work, leasing, runners, trial, upkeep

PIECES_MAX = 4
# A minute and an hour of this world.
SPANS = {Period.MINUTE: Span(5_000, 250), Period.HOUR: Span(20_000, 1_000)}
_TINY = (
    (leased_work, "SHORT_WAIT_MS", 1_500),
    (leasing, "SHORT_WAIT_MS", 1_500),
    (runners, "SHORT_WAIT_MS", 1_500),
    (lease, "READ_AGAIN_MS", 1_500),
    (counting, "_SPANS", SPANS),
    (upkeep, "_UPKEEP_EVERY", 3),
    (slots, "PERIOD_S", 0.8),
    (store_clock, "FOLLOW_AFTER_MS", 2_000),
    (controller, "HAND_BACK_TOKENS_MIN", 20),
    (prefill, "MARGIN", 20.0),
    (trial, "FIRST_ROUNDS", 4),
    (trial, "REST_S_MAX", 5.0),
    (webhooks, "_WAITS_S", (0.2, 0.5, 1, 1, 2, 2, 2, 2, 2)),
    (compact_extents, "PIECES_MAX", PIECES_MAX),
)


@contextmanager
def tiny_settings() -> Iterator[None]:
    """Waits, sweeps and files in pieces come up within seconds and a few lines."""
    before = [(module, name, getattr(module, name)) for module, name, _ in _TINY]
    try:
        for module, name, value in _TINY:
            setattr(module, name, value)
        yield
    finally:
        for module, name, value in before:
            setattr(module, name, value)


@contextmanager
def overheard(breaks: Callable[[str], None]) -> Iterator[None]:
    """Say nothing; but a worker that stops for an internal error is a broken promise in itself."""

    def listen(logger: Any, method: str, event: MutableMapping[str, Any]) -> Any:
        if event.get("event") in ("worker_broken", "work_file_gone"):
            breaks(
                f"an internal error: {event.get('loop')}: {structlog.processors.format_exc_info(logger, method, event)}"
            )
        raise structlog.DropEvent

    before = structlog.get_config()
    structlog.configure(processors=[listen], wrapper_class=structlog.make_filtering_bound_logger(40))
    try:
        yield
    finally:
        structlog.configure(**before)
