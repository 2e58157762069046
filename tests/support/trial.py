"""A trial of limits by the clock: four workers under requests and tokens per minute, with short and with long calls, first in quiet, then
while workers are killed and Redis forgets. It measures and asserts nothing.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tests.support.crew import Crew, deployment, per_minute
from tests.support.processes import wait_until
from tests.support.redis import RedisServer
from tests.support.tidegate import behaving, requests
from tests.support.windows import MINUTE_S, Use, exceeded, fullest, mean_use, used

# The first few seconds belong to finding out who has how much.
SETTLING_S = 5.0
KILL_EVERY_S = 12.0
FLUSH_EVERY_S = 4.0
TOKENS_PER_CALL = 2_000
SETTINGS = {
    "TIDEGATE_WORKER_LEASE_MS": "5000",
    "TIDEGATE_WORKER_HEARTBEAT_MS": "1000",
    "TIDEGATE_WORKER_SWEEP_MS": "1000",
    "TIDEGATE_WORKER_IN_FLIGHT_MAX": "256",
    "TIDEGATE_INGEST_SLICE_COUNT_MAX": "16",
}


@dataclass(frozen=True)
class Case:
    """One limited model; `limit` counts requests, or tokens where `by_tokens`."""

    model: str
    limit: int
    latency_ms: int
    by_tokens: bool = False

    @property
    def calls_per_minute(self) -> int:
        return self.limit // TOKENS_PER_CALL if self.by_tokens else self.limit


CASES = (
    Case("rpm-short", 600, 100),
    Case("rpm-long", 120, 20_000),
    Case("tpm-short", 300 * TOKENS_PER_CALL, 100, by_tokens=True),
    Case("tpm-long", 100 * TOKENS_PER_CALL, 20_000, by_tokens=True),
)


@dataclass(frozen=True)
class Finding:
    """What one case came to. Windows are counted by the moment of sending, and once more by arrival; `quiet_used` is their mean."""

    case: Case
    quiet_used: float
    faulty_used: float
    exceeded: int
    fullest: int
    exceeded_by_arrival: int
    calls: int


def config(url: str) -> dict[str, Any]:
    """The settings of the trial: a model for each case."""
    models = {}
    for case in CASES:
        limits = per_minute(tokens=case.limit) if case.by_tokens else per_minute(case.limit)
        models[case.model] = deployment(url, max_in_flight=512, limits=limits)
    return {"models": models}


def run(crew: Crew, redis: RedisServer | None, quiet_minutes: float, faulty_minutes: float) -> list[Finding]:
    """Both phases, one after the other, on a crew that was not started."""
    crew.start()
    for case in CASES:
        crew.site.submit(_lines(case, math.ceil((quiet_minutes + faulty_minutes + 2) * case.calls_per_minute)))
    for case in CASES:
        crew.until_called(1, case.model)
    begin = max(min(call["at"] for call in crew.calls(case.model)) for case in CASES) + SETTLING_S
    quiet_until = begin + quiet_minutes * MINUTE_S
    _until(quiet_until)
    _disturb(crew, redis, quiet_until + faulty_minutes * MINUTE_S)
    return [_judge(crew, case, begin, quiet_until, faulty_minutes) for case in CASES]


def _lines(case: Case, count: int) -> list[str]:
    """Prompts of about the same tokens, so that what a call is charged before it is sent is near what it takes."""
    padding = "tide " * (TOKENS_PER_CALL * 4 // 5) if case.by_tokens else ""
    script = behaving(f"latency={case.latency_ms}")
    return requests(count, lambda number: f"{padding}{number} {script}", case.model)


def _until(moment: float) -> None:
    wait_until(lambda: time.time() >= moment, 3_600, "the clock", poll_s=0.5)


def _disturb(crew: Crew, redis: RedisServer | None, end: float) -> None:
    """Kill a worker and begin another again and again; let Redis forget everything, and crash once."""
    began = time.time()
    kill_at, flush_at, crash_at = began, began, (began + end) / 2
    while (now := time.time()) < end:
        if now >= kill_at:
            kill_at += KILL_EVERY_S
            crew.kill_one()
            crew.add_worker()
        if redis is not None and now >= flush_at:
            flush_at += FLUSH_EVERY_S
            redis.command("FLUSHALL")
        if redis is not None and now >= crash_at:
            crash_at = end
            redis.stop()
            redis.start()
        _until(min(kill_at, flush_at, end))


def _judge(crew: Crew, case: Case, begin: float, quiet_until: float, faulty_minutes: float) -> Finding:
    taken: Mapping[str, int] = {call["idempotency_key"]: call.get("tokens", 0) for call in crew.calls(case.model)}
    sent = crew.sent_tokens(case.model) if case.by_tokens else crew.sent(case.model)
    arrived: list[Use] = [
        (call["at"], taken[call["idempotency_key"]] if case.by_tokens else 1) for call in crew.calls(case.model)
    ]
    faulty_until = quiet_until + faulty_minutes * MINUTE_S
    return Finding(
        case,
        mean_use(sent, begin, quiet_until, case.limit),
        used(sent, quiet_until, faulty_until, case.limit) if faulty_minutes else 0.0,
        exceeded(sent, case.limit),
        fullest(sent),
        exceeded(arrived, case.limit),
        len(sent),
    )
