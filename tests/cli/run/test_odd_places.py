"""Commands pointed at places that are not what they should be: one sentence and exit code 2, and nothing of others is touched."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.cli.conftest import Desk, Serving
from tests.support.processes import wait_until
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


def test_failed_lines_that_go_to_a_device_leave_it_alone(desk: Desk) -> None:
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


@pytest.mark.parametrize(
    "closed", ["<&- >&- 2>&-", *(pytest.param(one, marks=pytest.mark.soak) for one in ("<&-", ">&-", "2>&-"))]
)
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
    """What is printed about the work is not the work."""
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
    batch = desk.json_of("batches", "create", "requests.jsonl", "--server", url, "--json")["id"]
    desk.done("batches", "watch", batch, "--server", url)
    assert desk.json_of("batches", "show", batch, "--server", url, "--json")["status"] == "completed"
    proc.terminate()
    assert proc.wait() == 0


def test_names_that_are_no_utf_8(desk: Desk) -> None:
    """Linux allows any bytes in a file's name. The store keeps text."""
    odd = os.fsdecode(b"caf\xe9")
    desk.write_requests(2).rename(desk.here / f"{odd}.jsonl")
    arguments = ("run", f"{odd}.jsonl", "--upstream", desk.engine.url)
    for again in ((), ("-o", f"{odd}.results.jsonl")):
        assert "done     2 of 2 items succeeded" in desk.done(*arguments, *again).stderr()
        assert desk.custom_ids(f"{odd}.results.jsonl") == ["c0", "c1"]
    assert desk.json_of(*arguments, "--json")["results"] == "caf\\xe9.results.jsonl"
    for more in (("--model", odd), ("--data", odd)):
        proc = desk.done(*arguments, *more, code=2)
        assert proc.stderr().startswith("tidegate: ")
        assert "Traceback" not in proc.stderr()
    (desk.here / odd).mkdir()
    elsewhere = Desk(desk.processes, desk.engine, desk.here / odd)
    elsewhere.write_requests(1)
    proc = elsewhere.done("run", "requests.jsonl", "--upstream", desk.engine.url, code=2)
    assert "caf\\xe9 is not UTF-8" in proc.stderr()
    assert "Traceback" not in proc.stderr()


def test_what_came_through_a_pipe_is_gone_after_a_kill_and_the_next_run(desk: Desk) -> None:
    """It holds prompts, and as many bytes as were piped in."""
    os.mkfifo(desk.here / "pipe")
    proc = desk.start("run", "pipe", "--upstream", desk.engine.url)
    scratch = desk.here / ".tidegate" / "scratch"
    with (desk.here / "pipe").open("wb"):
        wait_until(lambda: list(scratch.rglob("*.jsonl")), what="the input to be kept")
        proc.kill()
    desk.write_requests(1)
    desk.done("run", "requests.jsonl", "--upstream", desk.engine.url)
    assert list(scratch.rglob("*.jsonl")) == []


def test_a_file_is_uploaded_under_the_name_that_it_has(desk: Desk) -> None:
    serving = Serving(desk)
    names = {'my "own" Prüfung %.jsonl': True, "two\nlines.jsonl": False, os.fsdecode(b"\xe9.jsonl"): False}
    for name, can_be_kept in names.items():
        desk.write_requests(1).rename(desk.here / name)
        uploaded = desk.json_of("files", "upload", name, "--json")["id"]
        kept = serving.call("GET", f"/v1/files/{uploaded}")[1]["filename"]
        assert kept.isprintable()
        assert kept == name or not can_be_kept
