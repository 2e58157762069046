"""A key that is revoked over PostgreSQL stops working in every process, for calls that are open too."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx2

from tests.cli.conftest import Desk
from tests.support.processes import wait_until
from tests.support.tidegate import operator_headers
from tests.upstream.raw_server import Peer, Request
from tests.web.upstream import STREAM_HEAD, Upstream, chunk, chunked

ASK = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "stream": True}


async def endless(request: Request, peer: Peer) -> None:
    await peer.send(STREAM_HEAD, chunked(chunk("hi")))
    await peer.until_gone()


def streamed(url: str, key: str) -> Iterator[str]:
    headers = {"Authorization": f"Bearer {key}"}
    with httpx2.Client(timeout=60, trust_env=False) as client:
        with client.stream("POST", f"{url}/v1/chat/completions", json=ASK, headers=headers) as answer:
            assert answer.status_code == 200
            yield from (line for line in answer.iter_lines() if line)


def test_a_revoked_key_cuts_the_streams_of_every_process(desk: Desk, migrated_postgres_url: str) -> None:
    with Upstream(endless) as upstream:
        (desk.here / "c.yaml").write_text(f"models: {{m: {{deployments: [{{url: '{upstream.url}'}}]}}}}")
        usual = ("--config", "c.yaml")
        # Without a server on this machine a command writes to the database itself.
        made = desk.json_of(
            "keys", "create", "--org", "acme", *usual, "--json", TIDEGATE_STORE_URL=migrated_postgres_url
        )
        found = []
        for _ in range(2):
            proc = desk.start("api", "--port", "0", *usual, TIDEGATE_STORE_URL=migrated_postgres_url)
            found.append(proc.wait_for_line(r"^tidegate listening on (http://\S+)$").group(1))
        streams = [streamed(url, made["key"]) for url in found]
        for stream in streams:
            assert "hi" in next(stream)
        desk.done("keys", "revoke", made["id"], *usual, TIDEGATE_STORE_URL=migrated_postgres_url)
        for stream in streams:
            assert "invalid_api_key" in list(stream)[-1]
        wait_until(lambda: all(post.gone.is_set() for post in upstream.posts), 20, "the server to see them gone")


def test_a_key_that_no_api_process_would_take_is_not_made(desk: Desk, migrated_postgres_url: str) -> None:
    """Each data directory has a pepper of its own, unless the settings name one for all."""
    store: dict[str, Any] = {"TIDEGATE_STORE_URL": migrated_postgres_url}
    made = desk.json_of("keys", "create", "--org", "acme", "--json", **store)
    refused = desk.done("keys", "create", "--org", "acme", "--data", "elsewhere", code=2, **store)
    assert "Set auth.pepper" in refused.stderr()
    assert "Set auth.pepper" in desk.done("keys", "rotate", made["id"], "--data", "elsewhere", code=2, **store).stderr()
    # What needs no pepper works from any machine.
    desk.done("keys", "revoke", made["id"], "--data", "elsewhere", **store)


def test_an_api_process_whose_pepper_is_not_that_of_the_keys_does_not_start(
    desk: Desk, migrated_postgres_url: str
) -> None:
    """It would reject every key; a worker, which judges none, starts."""
    store: dict[str, Any] = {"TIDEGATE_STORE_URL": migrated_postgres_url}
    made = desk.json_of("keys", "create", "--org", "acme", "--json", **store)
    for _ in range(2):
        refused = desk.done("api", "--port", "0", "--data", "elsewhere", code=2, **store)
        assert "hashed with another pepper" in refused.stderr()
        assert "Set auth.pepper" in refused.stderr()
    desk.start("api", "--port", "0", **store).wait_for_line(r"^tidegate listening on (http://\S+)$")
    desk.done("keys", "delete", made["id"], "--data", "elsewhere", **store)
    desk.start("api", "--port", "0", "--data", "elsewhere", **store).wait_for_line(
        r"^tidegate listening on (http://\S+)$"
    )


def test_of_two_api_processes_with_peppers_of_their_own_the_one_that_made_the_first_key_goes_on(
    desk: Desk, migrated_postgres_url: str
) -> None:
    """While there are no keys both start. No caller of the other one is blamed for a key that is right."""
    store: dict[str, Any] = {"TIDEGATE_STORE_URL": migrated_postgres_url}
    urls = []
    for data in ("first", "second"):
        proc = desk.start("api", "--port", "0", "--data", data, **store)
        urls.append(proc.wait_for_line(r"^tidegate listening on (http://\S+)$").group(1))
    first, second = urls
    with httpx2.Client(timeout=60, trust_env=False) as client:
        operators = [operator_headers(desk.here / data) for data in ("first", "second")]
        made = client.post(f"{first}/admin/v1/keys", json={"org": "acme"}, headers=operators[0]).json()
        bearer = {"Authorization": f"Bearer {made['key']}"}
        assert client.get(f"{first}/v1/files", headers=bearer).status_code == 200
        for _ in range(40):
            answer = client.get(f"{second}/v1/files", headers=bearer)
            assert (answer.status_code, answer.json()["error"]["code"]) == (503, "pepper_differs")
        refused = client.post(f"{second}/admin/v1/keys", json={"org": "acme"}, headers=operators[1])
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "pepper_differs")

        def checks(url: str) -> Any:
            return client.get(f"{url}/readyz").json()["checks"]["keys"]

        wait_until(lambda: "Set auth.pepper" in checks(second), 20, "the second process to be unready")
        assert checks(first) == "ok"
    desk.start("api", "--port", "0", "--data", "first", **store).wait_for_line(r"^tidegate listening on (http://\S+)$")
