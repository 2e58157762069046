"""What the overview says: failures of requests and of batches apart, what is stuck and why, and when a deployment is tried again."""

from __future__ import annotations

import re
from typing import Any

from msgspec.structs import replace

from tidegate.web.admin.overview import DeploymentHealth, EndedBatches, ModelBacklog, Overview
from tidegate.web.http.pages import commands, health_word, live_part

AWAY = DeploymentHealth(
    "gpu-1", ["m"], "open", 0, 0, 8, 3_200, 0, {}, "Connection refused", [], [], 0, 0, 0, unhealthy_seconds=75
)
WAITING = ModelBacklog("m/1", 1, 20, 800, 90, 3_600, 0.0, 0.0, "unhealthy")
QUIET = Overview("overview", [], [], [], [], 1, [])


def shown(overview: Overview) -> str:
    """Return the text of the live part, without its tags."""
    values: dict[str, Any] = {"overview": overview, "point": {"requests": 0.0, "tokens": 0.0}, "workers": []}
    return " ".join(re.sub(r"<[^>]*>", " ", live_part("console/overview.html", **values)).split())


def test_failed_requests_and_failed_batches_are_counted_apart() -> None:
    ended = [EndedBatches("completed", 3, 2_070, 10), EndedBatches("failed", 1, 0, 0)]
    text = shown(replace(QUIET, ended_last_hour=ended))
    assert "4 finished in the last hour, 1 failed 2,070 requests, 10 failed" in text
    text = shown(replace(QUIET, ended_last_hour=ended[:1]))
    assert "3 finished in the last hour 2,070 requests, 10 failed" in text


def test_a_model_that_nothing_can_serve_needs_a_look_and_one_that_is_full_does_not() -> None:
    assert "Needs a look m/1 : 20 requests wait, the oldest for 1m 30s: no deployment of it is healthy." in shown(
        replace(QUIET, models=[WAITING])
    )
    for calm in (replace(WAITING, closed="no_available_slots"), replace(WAITING, requests=0)):
        assert "Needs a look" not in shown(replace(QUIET, models=[calm]))


def test_a_circuit_says_since_when_it_is_open_and_when_it_is_tried_again() -> None:
    assert health_word(AWAY) == "circuit open for 1m 15s, next try in 4s"
    assert health_word(replace(AWAY, state="closed", rests_for_ms=0, unhealthy_seconds=None)) == "healthy"


def test_commands_in_a_sentence_are_code_and_nothing_of_it_is_markup() -> None:
    assert commands("see `tidegate doctor` <b>") == "see <code>tidegate doctor</code> &lt;b&gt;"
