"""`tidegate webhooks` as an operator uses it: beside a running server, which holds the embedded store, and without one."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import httpx2
import pytest

from tests.cli.conftest import Desk, chat
from tests.support.processes import Proc, wait_until
from tests.support.receiver import Got, Receiver

ALLOWED = {"TIDEGATE_CALLBACKS_ALLOW_HOSTS": "127.0.0.1", "TIDEGATE_CALLBACKS_ALLOW_HTTP": "true"}
WAIT_S = 60.0


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with Receiver() as made:
        yield made


def shown(proc: Proc) -> Any:
    return json.loads(proc.stdout())


def end_batch(client: httpx2.Client) -> None:
    data = {"purpose": "batch"}
    file = client.post("/v1/files", files={"file": ("in.jsonl", chat("a", "hi").encode())}, data=data).json()
    body = {"input_file_id": file["id"], "endpoint": "/v1/chat/completions", "completion_window": "24h"}
    batch = client.post("/v1/batches", json=body).json()["id"]
    wait_until(lambda: client.get(f"/v1/batches/{batch}").json()["completed_at"], WAIT_S, "the batch to end")


def test_an_operator_lists_tests_and_replays(desk: Desk, receiver: Receiver) -> None:
    statuses = {"now": 410}

    def answer(_: Got) -> int:
        return statuses["now"]

    receiver.answer = answer
    serve = desk.start("serve", "--upstream", desk.engine.url, "--port", "0", **ALLOWED)
    url = serve.wait_for_line(r"^tidegate listening on (http://\S+)$").group(1)
    with httpx2.Client(base_url=url, timeout=30) as client:
        assert shown(desk.done("webhooks", "list", "--json")) == []
        shape = {"name": "mine", "url": receiver.url, "event_types": ["batch.completed"]}
        made = client.post("/v1/webhook_endpoints", json=shape).json()
        end_batch(client)

        def disabled() -> bool:
            [row] = shown(desk.done("webhooks", "list", "--json"))
            return bool(
                row
                == {
                    "id": made["id"],
                    "name": "mine",
                    "url": receiver.url,
                    "events": "batch.completed",
                    "state": "disabled (gone)",
                }
            )

        wait_until(disabled, WAIT_S, "the endpoint to be disabled")
        [failed] = shown(desk.done("webhooks", "list", "--failed", "--json"))
        assert (failed["attempts"], failed["failure"]) == (1, "http_4xx")
        desk.done("webhooks", "test", made["id"], code=1)
        statuses["now"] = 204
        assert shown(desk.done("webhooks", "test", made["id"], "--json"))["status_code"] == 204
        sent = len(receiver.got)
        assert shown(desk.done("webhooks", "replay", "--failed", "--json")) == [failed["delivery"]]
        wait_until(lambda: len(receiver.got) > sent, WAIT_S, "the event to come again")
        wait_until(
            lambda: shown(desk.done("webhooks", "list", "--json"))[0]["state"] == "enabled", WAIT_S, "the endpoint"
        )
    logs = serve.stdout() + serve.stderr()
    assert made["signing_secret"] not in logs
    assert not re.search(r"whsec_\w", logs)


def test_what_cannot_be_is_refused_in_words(desk: Desk) -> None:
    desk.done("keys", "create", "--org", "acme")
    for arguments, says in (
        (("test", "x"), "not the id"),
        (("test", "whk_0000000000000000000000"), "no webhook endpoint"),
        (("test", "whk_0000000000000000000000"), "`tidegate webhooks list --org NAME` shows them"),
        (("test", "whk_0000000000000000000000", "--org", "acme"), "`tidegate webhooks list --org acme` shows them"),
        (("test", "whk_0000000000000000000000", "--event", "batch.begun"), "batch.completed"),
        (("replay",), "--failed"),
        (("replay", "evt_x.whk_y"), "no delivery"),
        (("list", "--org", "nobody"), "nobody"),
    ):
        assert says in desk.done("webhooks", *arguments, code=2).logs(), arguments
    for arguments in (("list",), ("list", "--failed")):
        assert "--org NAME lists those of another organization" in desk.done("webhooks", *arguments).logs()
        assert "--org NAME" not in desk.done("webhooks", *arguments, "--org", "acme").logs()
