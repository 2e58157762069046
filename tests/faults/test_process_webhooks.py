"""Webhooks while processes die: every event of a batch's end arrives at least once, under one id, on both stores."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.processes import wait_until
from tests.support.receiver import Receiver
from tests.support.tidegate import END_S, Site, requests

ALLOWED = {"TIDEGATE_CALLBACKS_ALLOW_HOSTS": "127.0.0.1", "TIDEGATE_CALLBACKS_ALLOW_HTTP": "true"}


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with Receiver() as made:
        yield made


@pytest.mark.parametrize(
    ("border", "sent_max"),
    [
        # After a 2xx that nobody recorded it is sent once more.
        ("webhook_sent=kill", 2),
        # The event was committed with the end of the batch, and nothing of it was sent.
        ("publish_committed=kill", 1),
    ],
)
def test_a_worker_killed_on_the_way_of_an_event(site: Site, receiver: Receiver, border: str, sent_max: int) -> None:
    site.env |= ALLOWED
    victim = site.begin(border)
    shape = {"name": "hook", "url": receiver.url, "event_types": ["batch.completed"]}
    assert site.client().post("/v1/webhook_endpoints", json=shape).status_code == 200
    lines = requests(4)
    batch_id = site.submit(lines)
    assert victim.wait() == -9
    if not site.embedded:
        [waiting] = site.get("/v1/webhook_deliveries")["data"]
        assert waiting["status"] == "pending"
    site.relieve()

    def delivered() -> bool:
        return [one["status"] for one in site.get("/v1/webhook_deliveries")["data"]] == ["delivered"]

    wait_until(delivered, END_S, "the event to be delivered")
    assert len(receiver.got) == sent_max
    assert {got.id for got in receiver.got} == {f"evt_{batch_id.removeprefix('batch_')}"}
    assert len({got.body for got in receiver.got}) == 1
    site.judge(batch_id, lines)
