"""Commands pointed at places that are not what they should be: one sentence and exit code 2, and nothing of others is touched."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.cli.conftest import Desk
from tests.support.tidegate import TIDEGATE, behaving, chat_line


@pytest.mark.parametrize("command", ["run", "serve", "keys"])
def test_data_that_is_a_file(desk: Desk, command: str) -> None:
    desk.write_requests(1)
    (desk.here / "note").write_text("mine")
    arguments = {
        "run": ("run", "requests.jsonl", "--upstream", desk.engine.url),
        "serve": ("serve", "--port", "0", "--upstream", desk.engine.url),
        "keys": ("keys", "create", "--org", "acme"),
    }[command]
    proc = desk.done(*arguments, "--data", "note", code=2)
    assert "Traceback" not in proc.stderr()
    assert proc.stderr().startswith("tidegate: ")
    assert "note" in proc.stderr()
    assert (desk.here / "note").read_text() == "mine"


def test_a_store_that_is_no_database(desk: Desk) -> None:
    (desk.here / ".tidegate").mkdir()
    (desk.here / ".tidegate" / "tidegate.db").write_bytes(b"not a database at all, and longer than its header" * 50)
    for arguments in (("batches", "list"), ("usage",), ("doctor", "--upstream", desk.engine.url)):
        proc = desk.done(*arguments, code=1 if arguments[0] == "doctor" else 2)
        assert "Traceback" not in proc.stderr()
        assert "file is not a database" in proc.stdout() + proc.stderr()


def test_failed_lines_nobody_wants_leave_the_device_alone(desk: Desk) -> None:
    desk.write_requests(2)
    desk.done("run", "requests.jsonl", "--upstream", desk.engine.url, "-o", "/dev/null", "--errors", "/dev/null")
    assert Path("/dev/null").is_char_device()
    proc = desk.done("run", "requests.jsonl", "--upstream", desk.engine.url, "-o", "/dev/full", code=2)
    assert "tidegate: /dev/full cannot be written: No space left on device" in proc.stderr()
    proc = desk.done("run", "requests.jsonl", "--upstream", desk.engine.url, "-o", "/dev/stdout")
    assert len(proc.stdout().splitlines()) == 2


def test_results_on_stdout_say_how_failed_lines_are_seen(desk: Desk) -> None:
    desk.write([chat_line("bad", behaving("400"))])
    proc = desk.done("run", "requests.jsonl", "--upstream", desk.engine.url, "-o", "-", code=1)
    assert "failed   tidegate batches output batch_" in proc.stderr()


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_a_run_whose_standard_streams_are_closed(desk: Desk, closed: str) -> None:
    """The first files that a process opens get the free numbers: nothing of ours may be written into them, or end with them."""
    desk.write_requests(3)
    command = [TIDEGATE, "run", "requests.jsonl", "--upstream", desk.engine.url, "-o", "results.jsonl"]
    shell = ["sh", "-c", f'exec "$0" "$@" {closed}', *command]
    env = {"PATH": os.environ["PATH"], "HOME": str(desk.here)}
    proc = desk.processes.start(shell, name="run", env=env, cwd=desk.here)
    assert proc.wait(60) == 0, proc.logs()
    assert sorted(desk.custom_ids()) == ["c0", "c1", "c2"]


RUN = ("run", "requests.jsonl", "-o", "results.jsonl")
LOST_STDERR = {"a full disk": '"$0" "$@" 2>/dev/full', "a reader that left": '{ "$0" "$@" 2>&1 >&3 | true; } 3>&1'}


@pytest.mark.parametrize("lost", LOST_STDERR)
def test_a_run_whose_words_cannot_be_written(desk: Desk, lost: str) -> None:
    """What is said of the work is not the work."""
    desk.write([chat_line(f"c{number}", behaving("latency=300")) for number in range(3)])
    desk.processes.start(
        ["sh", "-c", LOST_STDERR[lost], TIDEGATE, *RUN, "--upstream", desk.engine.url],
        name="run",
        env={"PATH": os.environ["PATH"], "HOME": str(desk.here)},
        cwd=desk.here,
    ).wait(60)
    assert sorted(desk.custom_ids()) == ["c0", "c1", "c2"]


def test_a_server_whose_log_cannot_be_written(desk: Desk) -> None:
    shell = ["sh", "-c", 'exec "$0" "$@" 2>/dev/full', TIDEGATE, "serve", "--upstream", desk.engine.url, "--port", "0"]
    env = {"PATH": os.environ["PATH"], "HOME": str(desk.here)}
    proc = desk.processes.start(shell, name="serve", env=env, cwd=desk.here)
    url = proc.wait_for_line(r"^tidegate listening on (http://\S+)$").group(1)
    desk.write_requests(3)
    batch = desk.told("batches", "create", "requests.jsonl", "--server", url, "--json")["id"]
    desk.done("batches", "watch", batch, "--server", url)
    assert desk.told("batches", "show", batch, "--server", url, "--json")["status"] == "completed"
    proc.terminate()
    assert proc.wait() == 0
