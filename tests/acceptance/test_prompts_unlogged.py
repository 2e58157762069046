"""A prompt that stands out, at every door and in everything that can go wrong with it: no log line has it, at any level, and no span.

A real process at the debug level, with a model server that quotes what it was sent in its errors, as many do. No page of the console has
it for an operator whose key may not read requests and responses.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.collector import Collector
from tests.support.console import console_pages
from tests.support.engine import Engine
from tests.support.processes import Processes
from tests.support.tidegate import Site, chat_line
from tests.upstream.raw_server import Peer, Request
from tests.web.upstream import Upstream

CANARY = "prompt-canary-93b1"
MESSAGES = [{"role": "user", "content": CANARY}]


async def quotes_the_prompt(request: Request, peer: Peer) -> None:
    """Answers an error with the whole body in it, an answer that is no JSON, or a broken stream; the model's name says which."""
    model = json.loads(request.body)["model"] if request.body else "404"
    quoted = json.dumps(request.body.decode())
    if model == "garbage":
        await peer.answer(200, f"<html>{CANARY}</html>".encode())
    elif model == "half":
        await peer.send(b"HTTP/1.1 200 OK\r\nContent-Length: 999\r\n\r\n", b'{"id": "' + CANARY.encode())
        peer.close()
    elif model == "header":
        await peer.send(b"HTTP/1.1 200 OK\r\n" + CANARY.encode() + b"\r\n\r\n")
    else:
        await peer.answer(int(model), f'{{"error": {{"message": {quoted}, "code": {quoted}}}}}'.encode())


MODELS = ("400", "401", "404", "413", "422", "429", "500", "503", "garbage", "half", "header")
BAD_LINES = (
    f'{{"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {{"model": "400", "messages": "{CANARY}',
    json.dumps({"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": CANARY}),
    json.dumps({"custom_id": "a", "method": CANARY, "url": "/v1/chat/completions", "body": {"model": "400", "messages": MESSAGES}}),
    json.dumps({"custom_id": "a", "method": "POST", "url": f"/{CANARY}", "body": {"model": "400", "messages": MESSAGES}}),
    json.dumps({"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {"messages": MESSAGES}}),
    json.dumps({"custom_id": 7, "prompt": CANARY}),
    f'"{CANARY}"',
    f"\ufeff{CANARY}\x00",
)  # fmt: skip


@pytest.fixture
def collector() -> Iterator[Collector]:
    with Collector() as made:
        yield made


@pytest.mark.timeout(300)
def test_no_prompt_is_ever_logged_traced_or_shown(processes: Processes, tmp_path: Path, collector: Collector) -> None:
    quoting = Upstream(quotes_the_prompt)
    site = Site("embedded", processes, tmp_path, Engine(processes, tmp_path / "engine"), {})
    site.configure(models={name: {"deployments": [{"url": quoting.url}]} for name in MODELS})
    site.env |= {
        **collector.env,
        "TIDEGATE_LOGGING_LEVEL": "debug",
        "TIDEGATE_RETRY_BACKOFF_MS": "20",
        "TIDEGATE_RETRY_ATTEMPTS_MAX": "2",
        "TIDEGATE_UPSTREAM_URL": "",
    }
    server = site.serve()
    try:
        _run_batches(site)
        _ask_every_door(site)
        key = site.operate("keys", org="ops", scopes=["admin:write"])["key"]
        pages = console_pages(site.url, key)
        collector.until("process-batch")
    finally:
        quoting.close()
    output = server.stdout() + server.stderr()
    assert CANARY not in output, [line for line in output.splitlines() if CANARY in line]
    # Of a line that is refused, its url is named: that is no prompt.
    shown = {address: text.replace(f"&#39;/{CANARY}&#39;", "") for address, text in pages.items()}
    assert [address for address, text in shown.items() if CANARY in address + text] == []
    assert any("/items" in address for address in pages), sorted(pages)
    spans = collector.spans()
    assert [span for span in spans if CANARY in str(span)] == []
    assert {"process-batch", "create-batch", "chat garbage"} <= {span.name for span in spans}
    for event in ("job_failed", "job_completed"):
        assert event in output, f"there is no {event}: the search would prove nothing"


def _run_batches(site: Site) -> None:
    for line in BAD_LINES:
        for more in ({}, {"invalid_lines": "error_file"}):
            batch_id = site.submit([line], **more)
            site.until_status(batch_id, "failed", "completed")
    lines = [chat_line(f"{model}-{number}", CANARY, model) for model in MODELS for number in range(2)]
    stopped = site.submit(lines, max_errors={"count": 2})
    site.until_status(stopped, "failed")
    # What is tried again for longer is cancelled with the rest.
    batch_id = site.submit(lines)
    site.until_done(batch_id, 8)
    site.cancel(batch_id)
    site.until_status(batch_id, "cancelled")


def _ask_every_door(site: Site) -> None:
    client = site.client()
    for model in MODELS:
        for stream in (False, True):
            body = {"model": model, "messages": MESSAGES, "stream": stream}
            client.post("/v1/chat/completions", json=body)
            client.post("/v1/messages", json={**body, "max_tokens": 5})
        client.post("/v1/responses", json={"model": model, "input": CANARY})
        client.post("/v1/embeddings", json={"model": model, "input": CANARY})
    paths = (
        "chat/completions",
        "messages",
        "messages/batches",
        "batches",
        "completion-batch/default/prod",
        "responses",
    )
    for path in paths:
        for broken in (f'{{"model": "400", "messages": "{CANARY}', f'"{CANARY}"', f'{{"{CANARY}": 1}}', CANARY):
            client.post(f"/v1/{path}", content=broken, headers={"Content-Type": "application/json"})
        client.post(f"/v1/{path}", files={"file": ("a", CANARY), CANARY: ("b", CANARY)})
    client.get(f"/v1/files/{CANARY}")
