"""What follows a batch, from the command line: the word after a canary, a look at its requests, and a retry."""

from __future__ import annotations

import pytest

from tests.cli.conftest import Desk, Serving
from tests.support.processes import wait_until
from tests.support.tidegate import behaving, chat_line

NO_BATCH = "batch_0000000000000000000000"
WAIT_S = 60.0


def until(serving: Serving, batch_id: str, state: str) -> None:
    def there() -> bool:
        batch = serving.call("GET", f"/v1/batches/{batch_id}")[1]
        return state in (batch["status"], batch["tidegate"]["canary"]["state"])

    wait_until(there, WAIT_S, f"{batch_id} to be {state}")


def test_a_canary_is_let_go_looked_at_and_what_failed_runs_again(desk: Desk, serving: Serving) -> None:
    lines = [chat_line(f"c{number}", behaving("400") if number == 3 else f"say {number}") for number in range(12)]
    batch_id = serving.submit(lines, canary={"items": 2, "then": "wait", "max_error_share": 1}, prefix_order=False)
    until(serving, batch_id, "waiting")
    assert "goes on" in desk.done("batches", "canary", batch_id, "continue").logs()
    until(serving, batch_id, "completed")
    assert "cannot be" in desk.done("batches", "canary", batch_id, "continue", code=2).stderr()
    [failed] = desk.json_of("batches", "items", batch_id, "--outcome", "failed", "--json")
    assert (failed["custom_id"], failed["status_code"]) == ("c3", 400)
    assert desk.json_of("batches", "items", batch_id, "c3")["request"]["custom_id"] == "c3"
    again = desk.json_of("batches", "retry", batch_id, "--json")
    assert again["id"] != batch_id
    assert desk.json_of("batches", "retry", batch_id, "--json")["id"] == again["id"]
    # The engine refuses it each time.
    desk.done("batches", "watch", again["id"], code=1)
    # From another machine, where the server reads them.
    listed = desk.done("batches", "items", again["id"], "--server", serving.url).stdout()
    assert "c3" in listed
    assert "c4" not in listed


def test_a_question_without_a_terminal_names_the_option(desk: Desk, serving: Serving) -> None:
    """Commands of a script have no terminal to ask at."""
    batch_id = serving.submit([chat_line("c0", behaving("400"))])
    desk.done("batches", "watch", batch_id, code=1)
    file_id = desk.json_of("batches", "show", batch_id, "--json")["error_file_id"]
    for asks in (["batches", "delete", batch_id], ["batches", "abandon", batch_id], ["files", "delete", file_id]):
        error = desk.done(*asks, code=2).stderr()
        assert "give --yes" in error
        assert "Aborted" not in error
    desk.done("files", "delete", file_id, "--yes")
    desk.done("batches", "delete", batch_id, "--yes")


def test_a_retry_by_code_says_what_becomes_of_a_code_that_no_request_has(desk: Desk, serving: Serving) -> None:
    batch_id = serving.submit([chat_line("c0", behaving("400"))])
    desk.done("batches", "watch", batch_id, code=1)
    error = desk.done("batches", "retry", batch_id, "--code", "no_such_code").stderr()
    assert "nothing_to_retry" in error
    assert f"tidegate batches items {batch_id} --outcome failed" in error
    assert "runs them again" in desk.done("batches", "retry", batch_id).stderr()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["canary", NO_BATCH, "continue"], NO_BATCH),
        (["canary", NO_BATCH, "hope"], "continue"),
        (["items", NO_BATCH, "c0", "--outcome", "failed"], "--outcome"),
        (["items", "nonsense"], "no batch id"),
        (["retry", NO_BATCH, "--outcome", "answered"], "outcome"),
    ],
)
def test_what_cannot_be_done_is_named(desk: Desk, arguments: list[str], says: str) -> None:
    proc = desk.done("batches", *arguments, code=2)
    assert says in proc.stderr()
    assert "Traceback" not in proc.stderr()
