"""The page of all limits: its settings exist, and its numbers are those of the code."""

from __future__ import annotations

from fractions import Fraction

import pytest

from tests.docs.pages import codes, page, rows
from tests.docs.test_settings import DEPLOYMENT_KEYS, ENTRY_KEYS, KEYS
from tidegate.core.deployments import Deployment
from tidegate.stages import perform
from tidegate.upstream.calls import slot_queue
from tidegate.upstream.routing import deployment_state, key_slots
from tidegate.worker import leasing

PAGE = page("docs/limits.md")
# What stands as code on the page and is neither a setting nor a file.
FIELDS = {"Retry-After", "limits", "not_before", 'service_tier: "flex"', "interactive_after_seconds"}
PARTS = {Fraction(1, 8): "an eighth", Fraction(1, 16): "a sixteenth"}


def _seconds(ms: float) -> str:
    return f"{ms / 1000:g} s"


def test_the_limits_are_numbered_in_their_order() -> None:
    numbers = [row[0] for row in rows(PAGE) if row[0].isdigit()]
    assert numbers == [str(number) for number in range(1, len(numbers) + 1)]


def test_every_setting_on_the_page_exists() -> None:
    known = KEYS | ENTRY_KEYS | DEPLOYMENT_KEYS | FIELDS
    assert {code for code in codes(PAGE) if code not in known and not code.endswith(".py")} == set()


@pytest.mark.parametrize(
    ("row", "words"),
    [
        (
            "parallel calls of a key, a user, a tenant",
            f"{key_slots.WAITING_CALLS_MAX} calls wait up to {key_slots.WAIT_S:g} s; "
            f"others come back in {key_slots.AGAIN_MS} ms",
        ),
        ("retries of a deployment", f"again in {_seconds(slot_queue.RETRY_BUDGET_WAIT_MS)}"),
        (
            "slices of background responses that have waited for `interactive_after_seconds`",
            f"| {leasing.LONG_WAITING_MAX} |",
        ),
        (
            "requests whose audio is fetched from an address",
            f"| {perform.FETCHED_FILES_MAX}, and for one share owner {perform.FETCHES_PER_OWNER_MAX} that",
        ),
        ("requests whose audio is fetched from an address", f"comes back in {perform.FETCH_AGAIN_MS} ms"),
    ],
    ids=lambda value: value[:20],
)
def test_a_row_has_the_numbers_of_the_code(row: str, words: str) -> None:
    line = next(line for line in PAGE.splitlines() if row in line)
    assert words in line


def test_the_text_has_the_numbers_of_the_code() -> None:
    text = " ".join(PAGE.split())
    users, others = (
        PARTS[Fraction(part)] for part in (deployment_state.FREE_FOR_USERS, deployment_state.FREE_FOR_OTHERS)
    )
    assert deployment_state.USERS_COME_MS == 60_000, "the page says: for a minute after the last"
    assert f"for a minute after the last, batch work leaves {users} of the slots free" in text
    assert f"One tenant's interactive calls leave {others} of the slots" in text
    assert (
        f"each API process lets at most {Deployment('d', 'http://h').max_in_flight} users' calls through at once"
        in text
    )
