"""The calls log: complete, shared between processes, and never behind an answer."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import socket
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.simulate.engine.wire import Address, chat_body, request_bytes
from tests.support.engine import Engine
from tests.support.processes import Processes, wait_until
from tidegate.simulate.engine import EngineOptions

Start = Callable[[EngineOptions], Address]


def lines_of(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_every_call_is_there_when_its_answer_is(start: Start, tmp_path: Path) -> None:
    log = tmp_path / "calls.jsonl"
    address = start(EngineOptions(port=0, calls_log=str(log)))
    before = time.time()
    body = chat_body("hello")
    answer = address.call("/v1/chat/completions", body, Idempotency_Key='k"1')
    usage = json.loads(answer.body)["usage"]
    (line,) = lines_of(log)
    assert before <= float(str(line.pop("at"))) <= time.time()
    assert line == {
        "path": "/v1/chat/completions",
        "model": "sim",
        "status": 200,
        "idempotency_key": 'k"1',
        "custom": hashlib.sha256(json.dumps(body).encode()).hexdigest()[:16],
        "n": 0,
        "tokens": usage["total_tokens"],
    }
    address.behave("429")
    address.call("/v1/embeddings", {"model": "e", "input": "x"})
    address.call("/v1/nowhere", {})
    address.call("/v1/chat/completions", b"{")
    address.call("/v1/models")
    for unlogged in ("/health", "/metrics", "/simulate/calls"):
        address.call(unlogged)
    assert [(line["path"], line["status"]) for line in lines_of(log)[1:]] == [
        ("/v1/chat/completions", 429),
        ("/v1/embeddings", 200),
        ("/v1/nowhere", 404),
        ("/v1/chat/completions", 400),
        ("/v1/models", 200),
    ]


def test_calls_without_an_answer_are_there_on_arrival(start: Start, tmp_path: Path) -> None:
    log = tmp_path / "calls.jsonl"
    address = start(EngineOptions(port=0, calls_log=str(log), calls_log_fsync=True))
    with address.connect() as plug:
        plug.sendall(request_bytes("/v1/chat/completions", chat_body('{"behave":"hang"}')))
        wait_until(lambda: len(lines_of(log)) == 1, what="the hung call's line")
    with pytest.raises(ConnectionResetError):
        address.behave("reset_before")
    address.behave("half")
    assert [(line["status"], line["fault"]) for line in lines_of(log)] == [
        (0, "hang"),
        (0, "reset_before"),
        (200, "half"),
    ]


def test_a_call_that_waits_is_there_before_its_answer(start: Start, tmp_path: Path) -> None:
    log = tmp_path / "calls.jsonl"
    address = start(EngineOptions(port=0, mode="fixed", latency_ms=3_000_000, calls_log=str(log)))
    with address.connect() as plug:
        plug.sendall(request_bytes("/v1/chat/completions", chat_body("x")))
        wait_until(lambda: len(lines_of(log)) == 1, what="the waiting call's line")


def test_a_log_that_cannot_be_written_stops_the_engine(processes: Processes, tmp_path: Path) -> None:
    engine = Engine(processes, tmp_path, "--calls-log", "/dev/full")
    address = Address(engine.url)
    with pytest.raises(ConnectionError):
        address.chat("x")
    wait_until(lambda: not engine.proc.running, what="the engine to end")
    assert engine.proc.returncode == 1
    assert "No space left" in engine.proc.logs()


def test_a_log_that_cannot_be_opened_is_a_clear_error(processes: Processes, tmp_path: Path) -> None:
    with pytest.raises(AssertionError):
        Engine(processes, tmp_path, "--calls-log", str(tmp_path / "no" / "such" / "folder"))
    assert "cannot be opened" in processes.started[0].logs()


def test_several_processes_share_port_log_faults_and_counts(processes: Processes, tmp_path: Path) -> None:
    engine = Engine(processes, tmp_path, "--processes", "2")
    address = Address(engine.url)
    for number in range(40):
        assert address.chat(str(number)).status == 200
    calls = engine.calls()
    assert len({call["n"] for call in calls}) == len(calls) == 40
    assert {int(call["n"]) % 2 for call in calls} == {0, 1}
    assert [address.behave("500x3", "same").status for _ in range(6)] == [500, 500, 500, 200, 200, 200]
    engine.set_faults({"503": 1.0})
    assert {address.chat(str(number)).status for number in range(20)} == {503}
    engine.set_faults({})
    with urllib.request.urlopen(engine.root + "/simulate/calls") as seen:
        assert json.load(seen)["by_status"] == {"200": 43, "500": 3, "503": 20}
    engine.proc.popen.send_signal(signal.SIGTERM)
    assert engine.proc.popen.wait(30) == 0


def test_children_end_with_a_parent_that_was_killed(processes: Processes, tmp_path: Path) -> None:
    engine = Engine(processes, tmp_path, "--processes", "2")
    os.kill(engine.proc.pid, signal.SIGKILL)
    address = Address(engine.url)

    def gone() -> bool:
        try:
            address.connect().close()
        except ConnectionRefusedError:
            return True
        return False

    wait_until(gone, what="the children to end")


def test_a_port_that_is_taken_is_a_clear_error(processes: Processes, tmp_path: Path, address: Address) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        with pytest.raises(AssertionError):
            Engine(processes, tmp_path, port=other.getsockname()[1])
    assert "choose another port" in processes.started[0].logs()


@pytest.mark.parametrize("count", [1, 2])
def test_a_port_is_not_shared_with_another_engine(
    processes: Processes, tmp_path: Path, address: Address, count: int
) -> None:
    first = Engine(processes, tmp_path, "--processes", str(count))
    with pytest.raises(AssertionError):
        Engine(processes, tmp_path / "second", "--processes", str(count), port=first.port)
    assert "choose another port" in processes.started[1].logs()


def test_it_says_what_calls_took_and_how_many_were_beside_them(start: Start, tmp_path: Path) -> None:
    log = tmp_path / "calls.jsonl"
    address = start(EngineOptions(port=0, calls_log=str(log)))
    connections = [address.connect() for _ in range(3)]
    for count, connection in enumerate(connections, 1):
        connection.sendall(request_bytes("/v1/chat/completions", chat_body(json.dumps({"behave": "latency=600000"}))))
        wait_until(lambda count=count: len(lines_of(log)) == count, what="the call to be seen")  # type: ignore[misc]
    address.behave("503")
    assert [line.get("beside", 0) for line in lines_of(log)] == [0, 1, 2, 3]
    assert [bool(line.get("tokens")) for line in lines_of(log)] == [True, True, True, False]
    for connection in connections:
        connection.close()
