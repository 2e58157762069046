"""Clients that split text at every Unicode line break read result files and streams whole."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.processes import Processes
from tests.upstream.raw_server import Peer, Request
from tests.web.gateway_world import ASK, CHAT, GatewayWorld
from tests.web.upstream import Upstream, answers, streams

BREAKS = "\u2028\u2029\u0085"
TEXT = f"one{BREAKS}two \u20ac\u2027\u202a\u00c2 \\{BREAKS}"


def whole_chat(content: str) -> bytes:
    choice = {"index": 0, "message": {"role": "assistant", "content": content}, "finish_reason": "stop"}
    return json.dumps({"id": "x", "choices": [choice]}, ensure_ascii=False).encode()


@pytest.fixture
def upstream() -> Iterator[Upstream]:
    async def script(request: Request, peer: Peer) -> None:
        """Item 0 is answered, item 1 refused, item 2 gets something that is no answer, each with the breaks in it."""
        number = json.loads(request.body)["messages"][0]["content"] if request.body else ""
        if not number:
            await peer.answer(200, b'{"data":[{"id":"m"}]}')
        elif number == "0":
            await peer.answer(200, whole_chat(TEXT))
        elif number == "1":
            await peer.answer(400, json.dumps({"error": {"message": TEXT}}, ensure_ascii=False).encode())
        else:
            await peer.answer(200, f"<p>{TEXT}</p>".encode())

    with Upstream(script) as made:
        yield made


def test_every_result_line_is_one_line_to_every_client(
    processes: Processes, tmp_path: Path, upstream: Upstream
) -> None:
    lines = [
        {"custom_id": f"c{n}", "url": CHAT, "body": {"model": "m", "messages": [{"role": "user", "content": str(n)}]}}
        for n in range(3)
    ]
    lines.append({**lines[0], "custom_id": f"bad{BREAKS}"})
    source, results, errors = (tmp_path / name for name in ("in.jsonl", "out.jsonl", "errors.jsonl"))
    source.write_text("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines), "utf-8")
    command = [sys.executable, "-m", "tidegate", "run", str(source), "--upstream", upstream.url]
    command += ["--data", str(tmp_path / "data"), "-o", str(results), "--errors", str(errors)]
    command += ["--invalid-lines", "error_file"]
    env = {"TIDEGATE_RETRY_ATTEMPTS_MAX": "1", "PATH": ""}
    done = processes.completed(command, env=env)
    assert done.returncode == 1, done.stderr
    by_id: dict[str, Any] = {}
    for path in (results, errors):
        text = path.read_bytes().decode()
        assert text.splitlines() == text.removesuffix("\n").split("\n")
        by_id |= {line["custom_id"]: line for line in map(json.loads, text.splitlines())}
    assert by_id["c0"]["response"]["body"]["choices"][0]["message"]["content"] == TEXT
    assert by_id["c1"]["response"]["body"]["error"]["message"] == TEXT
    assert by_id["c2"]["tidegate"]["raw"] == f"<p>{TEXT}</p>"
    assert len(by_id) == 4


@pytest.mark.parametrize("piece_bytes", [1, 2, 3, 4, 1_000])
def test_an_event_is_one_line_to_every_client(world: GatewayWorld, piece_bytes: int) -> None:
    event = json.dumps({"choices": [{"delta": {"content": TEXT}}]}, ensure_ascii=False)
    sent = f"data: {event}\n\ndata: [DONE]\n\n".encode()
    pieces = [sent[at : at + piece_bytes] for at in range(0, len(sent), piece_bytes)]
    world.start(streams(*pieces))
    with world.client().stream("POST", CHAT, json={**ASK, "stream": True}) as answer:
        text = b"".join(answer.iter_raw()).decode()
    assert text.splitlines() == text.split("\n")[:-1]
    assert json.loads(text.splitlines()[0].removeprefix("data: ")) == json.loads(event)


def test_a_stream_that_is_cut_inside_a_character_is_passed_on_as_it_came(world: GatewayWorld) -> None:
    sent = b'data: {"choices":[]}\n\ndata: [DONE]\n\n: \xe2\x80'
    world.start(streams(sent))
    with world.client().stream("POST", CHAT, json={**ASK, "stream": True}) as answer:
        assert b"".join(answer.iter_raw()) == sent


def test_a_translated_event_is_one_line_to_every_client(world: GatewayWorld) -> None:
    event = json.dumps({"id": "x", "choices": [{"index": 0, "delta": {"content": TEXT}}]}, ensure_ascii=False)
    world.start(streams(f"data: {event}\n\ndata: [DONE]\n\n".encode()))
    ask = {**ASK, "max_tokens": 9, "stream": True}
    with world.client().stream("POST", "/v1/messages", json=ask) as answer:
        text = b"".join(answer.iter_raw()).decode()
    assert text.splitlines() == text.split("\n")[:-1]
    assert TEXT in [json.loads(line[6:]).get("delta", {}).get("text") for line in text.splitlines() if "data: " in line]


def test_a_whole_answer_keeps_its_characters(world: GatewayWorld) -> None:
    world.start(answers(whole_chat(TEXT)))
    assert world.client().post(CHAT, json=ASK).json() == json.loads(whole_chat(TEXT))
