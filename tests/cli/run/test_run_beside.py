"""Several `tidegate run` in one directory at the same time: each runs its own file, and none takes or pays for another's."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from tests.cli.conftest import Desk, Serving, store_taken
from tests.support.engine import Engine
from tests.support.processes import wait_until
from tests.support.tidegate import behaving, chat_line

WAIT_S = 90
SLOW = behaving("latency=150")


def test_the_same_requests_are_run_by_one_process_at_a_time(desk: Desk) -> None:
    desk.write([chat_line("a", behaving("latency=3000"))])
    first = desk.run()
    wait_until(lambda: len(desk.called()) >= 1, what="the first call")
    for arguments in ((), ("-o", "other.jsonl")):
        second = desk.run(*arguments)
        assert second.wait() == 2, second.logs()
        assert f"being run here already, by another process (pid {first.pid})" in second.stderr()
    desk.write([chat_line("a", "edited")])
    edited = desk.run()
    assert edited.wait() == 2, "an edited file is another version of the same run"
    assert first.wait(WAIT_S) == 0, first.logs()
    assert len(desk.called()) == 1


def test_runs_of_different_files_go_on_beside_each_other_and_after_a_kill(desk: Desk, tmp_path: Path) -> None:
    other = Engine(desk.processes, tmp_path / "other engine")
    ours, theirs = [[chat_line(f"{name}{number}", f"{SLOW} {name}{number}") for number in range(120)] for name in "ab"]
    desk.write(ours)
    desk.write(theirs, "more.jsonl")
    more = ("run", "more.jsonl", "--upstream", other.url, "-o", "more.results.jsonl", "--json")
    first, second = desk.run("--json"), desk.start(*more)
    wait_until(lambda: len(desk.called()) >= 16 and len(other.calls()) >= 16, what="calls of both")
    first.kill()
    looked = desk.done("batches", "list", "--json")
    assert len(json.loads(looked.stdout())) == 2
    again = desk.run("--json")
    summaries = []
    for proc in (again, second):
        assert proc.wait(WAIT_S) == 0, proc.logs()
        summaries.append(json.loads(proc.stdout()))
    assert [line["custom_id"] for line in desk.results()] == [f"a{number}" for number in range(120)]
    assert [line["custom_id"] for line in desk.results("more.results.jsonl")] == [f"b{number}" for number in range(120)]
    assert sum(call["path"] == "/v1/chat/completions" for call in other.calls()) == 120
    assert len(desk.called()) <= 120 + 32, "only what was in flight is called again"
    desk.verified(summaries[0]["batch"])
    desk.done("verify", summaries[1]["batch"], "--witness", str(other.calls_log))


def test_a_run_leaves_what_another_left_to_that_one(desk: Desk) -> None:
    desk.write([chat_line(f"c{number}", f"{SLOW} {number}") for number in range(60)])
    first = desk.run()
    wait_until(lambda: len(desk.called()) >= 8, what="calls")
    first.interrupt()
    assert first.wait(WAIT_S) == 130, first.logs()
    before = len(desk.called())
    desk.write([chat_line("one", "say")], "more.jsonl")
    desk.done("run", "more.jsonl", "--upstream", desk.engine.url, "-o", "more.results.jsonl")
    assert len(desk.called()) == before + 1
    assert desk.run().wait(WAIT_S) == 0
    assert len(desk.called()) == 60 + 1


def test_a_server_has_the_directory_to_itself(desk: Desk) -> None:
    desk.write_requests(1)
    server = Serving(desk).proc
    refused = desk.run()
    assert refused.wait() == 2
    assert f"another process (pid {server.pid}) already writes" in refused.stderr()
    assert "Or give the file to that server: tidegate batches create requests.jsonl" in refused.stderr()
    server.terminate()
    assert server.wait() == 0
    desk.write([chat_line("a", behaving("hang"))])
    run = desk.run()
    wait_until(lambda: len(desk.called()) >= 1, what="the first call")
    assert desk.run().wait() == 2, "the same file is being run already"
    second = desk.start("serve", "--port", "0", "--upstream", desk.engine.url)
    second.wait_for_line(rf"^Waiting up to 3 s for another process \(pid {run.pid}\) that writes to \S*tidegate\.db\.$")
    assert second.wait() == 2
    assert f"another process (pid {run.pid}) already writes" in second.stderr()


def test_a_server_that_waits_for_the_store_says_so_as_a_line_of_json(desk: Desk) -> None:
    with store_taken(desk):
        server = desk.start("serve", "--port", "0", "--upstream", desk.engine.url, TIDEGATE_LOGGING_FORMAT="json")
        event = json.loads(server.wait_for_line("^.*store_awaited.*$").group(0))
        assert event["why"].startswith("Waiting up to 3 s for another process (pid unknown)")
    server.wait_for_line("process_started")


def test_a_command_asks_a_server_that_took_the_store_after_its_look(desk: Desk) -> None:
    Serving(desk)
    late = """
import sys
from tidegate.cli import main
from tidegate.cli.terminal import server_client
look, blind = server_client._started_server, [True]
server_client._started_server = lambda settings: None if blind and blind.pop() else look(settings)
sys.argv = ["tidegate", "keys", "create", "--org", "first"]
main()
"""
    env = {"PATH": os.environ["PATH"], "HOME": str(desk.here)}
    proc = desk.processes.start([sys.executable, "-c", late], name="late", env=env, cwd=desk.here)
    assert proc.wait(WAIT_S) == 0, proc.logs()
    assert proc.stdout().count("\n") == 1, "the key alone"


def test_a_command_waits_for_a_server_that_is_starting(desk: Desk) -> None:
    with store_taken(desk):
        early = desk.start("keys", "create", "--org", "first")
        early.wait_for_line(r"^Waiting up to 10 s for the server that is starting over \S*\.tidegate\.$")
        assert early.running, early.logs()
    assert early.wait(WAIT_S) == 0, early.logs()
    assert early.stdout().count("\n") == 1, "the key alone"
    server = desk.start("serve", "--port", "0", "--upstream", desk.engine.url)
    desk.done("keys", "create", "--org", "second")
    server.wait_for_line("^tidegate listening on")
    listed = desk.json_of("keys", "list", "--json")
    assert {one["org"] for one in listed} == {"first", "second"}
    server.terminate()
    assert server.wait() == 0
