"""`tidegate webhooks` as an operator uses it: beside a running server, which holds the embedded store, and without one."""

from __future__ import annotations

import re

from tests.cli.conftest import Desk, Serving
from tests.support.processes import wait_until
from tests.support.receiver import ALLOWED, Got, Receiver
from tests.support.tidegate import requests

WAIT_S = 60.0


def test_an_operator_lists_tests_and_replays(desk: Desk, receiver: Receiver) -> None:
    statuses = {"now": 410}

    def answer(_: Got) -> int:
        return statuses["now"]

    receiver.answer = answer
    serving = Serving(desk, **ALLOWED)
    with serving.client() as client:
        assert desk.json_of("webhooks", "list", "--json") == []
        shape = {"name": "mine", "url": receiver.url, "event_types": ["batch.completed"]}
        made = client.post("/v1/webhook_endpoints", json=shape).json()
        path = f"/v1/batches/{serving.submit(requests(1))}"
        wait_until(lambda: client.get(path).json()["completed_at"], WAIT_S, "the batch to end")

        def disabled() -> bool:
            [row] = desk.json_of("webhooks", "list", "--json")
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
        [failed] = desk.json_of("webhooks", "list", "--failed", "--json")
        assert (failed["attempts"], failed["failure"]) == (1, "http_4xx")
        assert desk.json_of("webhooks", "list", "--failed", "--all", "--json") == [{"org": "default", **failed}]
        assert desk.done("webhooks", "test", made["id"], code=1).stderr() == f"{made['id']} answered with status 410.\n"
        statuses["now"] = 204
        assert desk.json_of("webhooks", "test", made["id"], "--json") == {"id": made["id"], "status_code": 204}
        sent = len(receiver.got)
        assert desk.json_of("webhooks", "replay", "--failed", "--json") == [failed["delivery"]]
        wait_until(lambda: len(receiver.got) > sent, WAIT_S, "the event to come again")
        wait_until(lambda: desk.json_of("webhooks", "list", "--json")[0]["state"] == "enabled", WAIT_S, "the endpoint")
        theirs = serving.client()
        theirs.headers["Authorization"] = f"Bearer {desk.json_of('keys', 'create', '--org', 'acme', '--json')['key']}"
        other = theirs.post("/v1/webhook_endpoints", json={**shape, "name": "theirs"}).json()
        every = desk.json_of("webhooks", "list", "--all", "--json")
        assert {(one["org"], one["id"]) for one in every} == {("acme", other["id"]), ("default", made["id"])}
    logs = serving.proc.stdout() + serving.proc.stderr()
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
        (("list", "--org", "unknown"), "unknown"),
        (("list", "--all", "--org", "acme"), "without --org"),
        (("list", "--all", "--server", "http://127.0.0.1:1"), "on the server's machine"),
    ):
        assert says in desk.done("webhooks", *arguments, code=2).logs(), arguments
    for arguments in (("list",), ("list", "--failed")):
        assert "--org NAME lists those of another organization" in desk.done("webhooks", *arguments).logs()
        assert "--org NAME" not in desk.done("webhooks", *arguments, "--org", "acme").logs()
