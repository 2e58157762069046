"""Copies of one create at two API processes over one PostgreSQL: they know nothing of each other, and the store makes one object of all."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import asyncpg
import httpx2
import pytest

from tests.support.processes import Processes
from tests.support.server import Server
from tests.support.tidegate import write_config
from tests.web.calls import upload
from tests.web.server import NOWHERE
from tests.web.test_copies_at_once import DOORS, KEY, Create, as_form, as_json, is_asked_to_come_again, response

COPIES, ROUNDS = 12, 4
MADE = (200, 201)
# What a create makes: the rows of each kind of object.
COUNTS = """select 'jobs', count(*) from jobs union all select 'webhook_endpoints', count(*) from webhook_endpoints
union all select 'uploads', count(*) from uploads union all select 'upload_parts', count(*) from upload_parts"""


class TwoApis:
    """Two processes of `tidegate api` over one store and one directory."""

    def __init__(self, processes: Processes, directory: Path, postgres_url: str) -> None:
        self._postgres_url = postgres_url
        config = write_config(directory, {"models": {"m": {"deployments": [{"url": NOWHERE}]}}})
        env = {"TIDEGATE_STORE_URL": postgres_url}
        apis = [Server(processes, directory, "api", "--config", config, env=env) for _ in range(2)]
        self.clients = [api.start() for api in apis]

    def counts(self) -> dict[str, int]:
        async def ask() -> dict[str, int]:
            connection = await asyncpg.connect(self._postgres_url)
            try:
                rows = await connection.fetch(COUNTS)
                return {str(row[0]): int(row[1]) for row in rows}
            finally:
                await connection.close()

        return asyncio.run(ask())


@pytest.fixture
def apis(processes: Processes, tmp_path: Path, migrated_postgres_url: str) -> Iterator[TwoApis]:
    two = TwoApis(processes, tmp_path, migrated_postgres_url)
    yield two
    for client in two.clients:
        client.close()


def creates(client: httpx2.Client, text: str) -> dict[str, Create]:
    """The same create at every door."""
    every = {name: door(client, text) for name, door in DOORS.items() if name != "parts"}
    place = "/v1/completion-batch/default/prod"
    every["completion-batch"] = Create(place, every["completion-batch"].content_type, every["completion-batch"].body)
    begun = client.post(
        "/v1/uploads", json={"bytes": 9, "filename": "f", "mime_type": "text/plain", "purpose": "batch"}
    )
    every["parts"] = as_form(f"/v1/uploads/{begun.json()['id']}/parts", "data", text.encode())
    return {**every, "responses": response(text)}


def send(client: httpx2.Client, create: Create, key: str) -> httpx2.Response:
    headers = {"Idempotency-Key": key, "Content-Type": create.content_type}
    return client.post(create.path, content=create.body, headers=headers)


def key_of(door: str, round_number: int) -> str:
    return f"{KEY}-{door.replace(' ', '-')}-{round_number}"


def named(answer: Any) -> str:
    return str(answer.get("batchId") or answer["id"])


def test_copies_at_two_processes_make_one_object_at_every_door(apis: TwoApis) -> None:
    """Under load: every door at once, each with a dozen copies, half of them at either process."""
    upload(apis.clients[0])
    with ThreadPoolExecutor(COPIES * 4) as threads:
        for round_number in range(ROUNDS):
            every = creates(apis.clients[0], f"same {round_number}")
            before = apis.counts()
            sent = {
                (door, copy): threads.submit(send, apis.clients[copy % 2], create, key_of(door, round_number))
                for copy in range(COPIES)
                for door, create in every.items()
            }
            answers = {name: one.result() for name, one in sent.items()}
            for door in every:
                made = set()
                for (name, _), answer in answers.items():
                    if name != door:
                        continue
                    if answer.status_code in MADE:
                        made.add(named(answer.json()))
                    else:
                        is_asked_to_come_again(answer)
                assert len(made) == 1, (door, made)
            new = {name: count - before[name] for name, count in apis.counts().items()}
            # A batch, a message batch, a completion batch and a response are jobs.
            assert new == {"jobs": 4, "webhook_endpoints": 1, "uploads": 1, "upload_parts": 1}
            for door, create in creates(apis.clients[0], f"another {round_number}").items():
                if door != "parts":
                    refused = send(apis.clients[round_number % 2], create, key_of(door, round_number))
                    assert refused.status_code == 422, (door, refused.text)


@pytest.mark.parametrize("text", ["same", "another"])
def test_a_copy_at_another_process_does_not_wait_for_a_slow_first(apis: TwoApis, text: str) -> None:
    """The first is under way at one process, with a byte of its body to come; the copy at the other makes the object."""
    slow = as_json("/v1/messages/batches", _message_batch("same"))
    quick = as_json("/v1/messages/batches", _message_batch(text))
    port = apis.clients[0].base_url.port
    with socket.create_connection(("127.0.0.1", port), timeout=60) as first:
        head = (
            f"POST {slow.path} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nContent-Type: {slow.content_type}\r\n"
            f"Content-Length: {len(slow.body)}\r\nIdempotency-Key: {KEY}\r\nConnection: close\r\n\r\n"
        )
        first.sendall(head.encode() + slow.body[:-1])
        made = send(apis.clients[1], quick, KEY)
        assert made.status_code == 200, made.text
        first.sendall(slow.body[-1:])
        received = b""
        while piece := first.recv(65_536):
            received += piece
    status = int(received.split()[1])
    assert status == (200 if text == "same" else 422), received
    if text == "same":
        assert made.json()["id"].encode() in received
    assert apis.counts()["jobs"] == 1
    assert len(apis.clients[0].get("/v1/files").json()["data"]) == 1


def _message_batch(text: str) -> dict[str, Any]:
    params = {"model": "m", "max_tokens": 5, "messages": [{"role": "user", "content": text}]}
    return {"requests": [{"custom_id": "a", "params": params}]}
