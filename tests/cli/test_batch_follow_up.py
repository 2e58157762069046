"""What follows a batch, from the command line: the word after a canary, a look at its requests, and a retry."""

from __future__ import annotations

import json
from typing import Any

import httpx2
import pytest

from tests.cli.conftest import Desk, behaving, chat
from tests.support.processes import wait_until

NO_BATCH = "batch_0000000000000000000000"
WAIT_S = 60.0


@pytest.fixture
def url(desk: Desk) -> str:
    """The address of a server beside the desk."""
    serve = desk.start("serve", "--upstream", desk.engine.url, "--port", "0")
    return str(serve.wait_for_line(r"listening on (http://\S+)").group(1))


def submit(url: str, lines: list[str], **more: Any) -> str:
    files = {"file": ("in.jsonl", "\n".join(lines).encode() + b"\n")}
    with httpx2.Client(base_url=url, timeout=WAIT_S) as client:
        file_id = client.post("/v1/files", files=files, data={"purpose": "batch"}).json()["id"]
        asked = {"input_file_id": file_id, "endpoint": "/v1/chat/completions", "completion_window": "24h", **more}
        return str(client.post("/v1/batches", json=asked).json()["id"])


def until(url: str, batch_id: str, state: str) -> None:
    def there() -> bool:
        batch = httpx2.get(f"{url}/v1/batches/{batch_id}", timeout=WAIT_S).json()
        return state in (batch["status"], batch["tidegate"]["canary"]["state"])

    wait_until(there, WAIT_S, f"{batch_id} to be {state}")


def test_a_canary_is_let_go_looked_at_and_what_failed_runs_again(desk: Desk, url: str) -> None:
    lines = [chat(f"c{number}", behaving("400") if number == 3 else f"say {number}") for number in range(12)]
    batch_id = submit(url, lines, canary={"items": 2, "then": "wait", "max_error_share": 1}, prefix_order=False)
    until(url, batch_id, "waiting")
    assert "goes on" in desk.done("batches", "canary", batch_id, "continue").logs()
    until(url, batch_id, "completed")
    assert "cannot be" in desk.done("batches", "canary", batch_id, "continue", code=2).stderr()
    [failed] = json.loads(desk.done("batches", "items", batch_id, "--outcome", "failed", "--json").stdout())
    assert (failed["custom_id"], failed["status_code"]) == ("c3", 400)
    assert json.loads(desk.done("batches", "items", batch_id, "c3").stdout())["request"]["custom_id"] == "c3"
    again = json.loads(desk.done("batches", "retry", batch_id, "--json").stdout())
    assert again["id"] != batch_id
    assert json.loads(desk.done("batches", "retry", batch_id, "--json").stdout())["id"] == again["id"]
    # The engine refuses it each time.
    desk.done("batches", "watch", again["id"], code=1)
    # From another machine, where the server reads them.
    listed = desk.done("batches", "items", again["id"], "--server", url).stdout()
    assert "c3" in listed
    assert "c4" not in listed


def test_a_question_that_nobody_can_answer_names_the_option(desk: Desk, url: str) -> None:
    """Commands of a script have no terminal to ask at."""
    batch_id = submit(url, [chat("c0", behaving("400"))])
    desk.done("batches", "watch", batch_id, code=1)
    file_id = json.loads(desk.done("batches", "show", batch_id, "--json").stdout())["error_file_id"]
    for asks in (["batches", "delete", batch_id], ["batches", "abandon", batch_id], ["files", "delete", file_id]):
        said = desk.done(*asks, code=2).stderr()
        assert "give --yes" in said
        assert "Aborted" not in said
    desk.done("files", "delete", file_id, "--yes")
    desk.done("batches", "delete", batch_id, "--yes")


def test_a_retry_by_code_says_what_becomes_of_a_code_that_no_request_has(desk: Desk, url: str) -> None:
    batch_id = submit(url, [chat("c0", behaving("400"))])
    desk.done("batches", "watch", batch_id, code=1)
    said = desk.done("batches", "retry", batch_id, "--code", "no_such_code").stderr()
    assert "nothing_to_retry" in said
    assert f"tidegate batches items {batch_id} --outcome failed" in said
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
