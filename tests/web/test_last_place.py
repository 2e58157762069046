"""Creates that come at once for the last place of a limit, at every door that makes work: one is accepted, the others leave nothing."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx2
import pytest

from tests.web.calls import upload
from tests.web.server import WebServer, model_at

AT_ONCE = 8
ROUNDS = 3
HI = [{"role": "user", "content": "hi"}]
BODIES: dict[str, tuple[str, dict[str, Any]]] = {
    "completion-batch": (
        "/v1/completion-batch/{org}/prod",
        {"type": "ASYNC", "items": [{"resourceId": "m", "request": {"messages": HI}}]},
    ),
    "message batches": (
        "/v1/messages/batches",
        {"requests": [{"custom_id": "a", "params": {"model": "m", "max_tokens": 5, "messages": HI}}]},
    ),
    "responses": ("/v1/responses", {"model": "m", "input": "hi", "background": True}),
    "batches": ("/v1/batches", {"endpoint": "/v1/embeddings"}),
}


@pytest.fixture(scope="module")
def web_settings() -> dict[str, Any]:
    return {"limits": {"pending_jobs_max": 1, "pending_responses_max": 1}, "models": {"m": model_at()}}


@pytest.fixture
def web(web_on_both: WebServer) -> WebServer:
    return web_on_both


def all_at_once(client: httpx2.Client, org: str, door: str, key: str | None = None) -> list[httpx2.Response]:
    path, body = BODIES[door]
    if door == "batches":
        body = {**body, "input_file_id": upload(client)}
    headers = {"Idempotency-Key": key} if key else {}
    with ThreadPoolExecutor(AT_ONCE) as threads:
        posts = threads.map(lambda _: client.post(path.format(org=org), json=body, headers=headers), range(AT_ONCE))
        return list(posts)


def file_count(client: httpx2.Client) -> int:
    return len(client.get("/v1/files").json()["data"])


@pytest.mark.parametrize("door", list(BODIES))
def test_the_last_place_is_taken_once(web: WebServer, door: str) -> None:
    for number in range(ROUNDS):
        client = web.client(web.make_key(org := f"org-{number}"))
        answers = all_at_once(client, org, door)
        codes = sorted(answer.status_code for answer in answers)
        assert codes[0] in (200, 201), [answer.text for answer in answers]
        assert codes[1:] == [429] * (AT_ONCE - 1), [answer.text for answer in answers]
        assert all("retry-after" in answer.headers for answer in answers if answer.status_code == 429)
        assert file_count(client) == (0 if door == "responses" else 1)


@pytest.mark.parametrize("door", list(BODIES))
def test_one_create_that_is_sent_several_times_takes_one_place(web: WebServer, door: str) -> None:
    for number in range(ROUNDS):
        client = web.client(web.make_key(org := f"org-{number}"))
        answers = all_at_once(client, org, door, "same")
        # On a busy machine a copy that waited long for the others is asked to come again.
        made = [answer for answer in answers if answer.status_code != 409]
        assert {answer.status_code for answer in made} <= {200, 201}, [answer.text for answer in answers]
        assert len({answer.json().get("id") or answer.json()["batchId"] for answer in made}) == 1
        assert all("retry-after" in answer.headers for answer in answers if answer.status_code == 409)
        assert file_count(client) == (0 if door == "responses" else 1)
        # The place is taken: another create is refused in each of its copies. One that lost its input to a copy is asked to come again.
        answers = all_at_once(client, org, door, "other")
        assert {answer.status_code for answer in answers} <= {409, 429}, [answer.text for answer in answers]
        assert 429 in {answer.status_code for answer in answers}
        assert all("retry-after" in answer.headers for answer in answers)
        assert file_count(client) == {"responses": 0, "batches": 2}.get(door, 1)
