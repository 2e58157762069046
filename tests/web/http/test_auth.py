"""Keys: who gets in, who does not, and that the answer never says why."""

from __future__ import annotations

import asyncio
import secrets
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx2
import msgspec
import pytest
from starlette.datastructures import Headers
from starlette.requests import Request

from tests.support.ports import FairDice, HandClock
from tests.support.processes import wait_until
from tests.support.syncs import noted_syncs
from tests.web.calls import LINES, create, is_error, upload
from tests.web.server import CONTROL_TOKEN, OPERATOR, PEPPER, WebServer, model_at
from tidegate.core import keys
from tidegate.core.deployments import Secret
from tidegate.core.errors import ApiProblem, SettingsError
from tidegate.core.policies import Policies
from tidegate.settings.groups import Auth
from tidegate.stages.ingest.ingest import IngestStage
from tidegate.stages.ingest.ingest_file import InputPasses
from tidegate.web.admin.audit import AuditTrail
from tidegate.web.admin.keys import KeyRequest, KeyRotation, bootstrap_key, make_key, rotate_key
from tidegate.web.doors import SCOPES
from tidegate.web.http import auth
from tidegate.web.http.auth import ADDRESS_FAILURES_MAX, DOUBTFUL_LOOK_UPS, KEY_FAILURES_MAX, Authenticator
from tidegate.web.http.failures import Failures
from tidegate.web.http.loopback import is_loopback, is_sent_without_a_network, require_key
from tidegate.web.http.pepper import can_check_keys, claim_pepper, pepper_of

REFUSED = {"status": 401, "code": "invalid_api_key"}
DAY_MS = 86_400_000


def get(web: WebServer, key: str | None, path: str = "/v1/files") -> httpx2.Response:
    with web.client(key) as client:
        return client.get(path)


def unknown_key() -> str:
    return keys.make(secrets.token_bytes(keys.RANDOM_BYTES)).text.reveal()


@pytest.fixture
def web(start_web: Any) -> WebServer:
    server: WebServer = start_web()
    return server


@pytest.mark.parametrize("header", ["X-Forwarded-For", "Forwarded", "X-Real-IP", "Via"])
def test_without_keys_a_forwarded_request_is_refused(web: WebServer, header: str) -> None:
    with web.client() as client:
        is_error(client.get("/v1/files", headers={header: "198.51.100.9"}), {"status": 403, "code": "local_only"})


def test_without_keys_anyone_here_is_the_default_tenant(web: WebServer) -> None:
    assert get(web, None).status_code == 200
    assert get(web, "sk-whatever-the-sdk-sends").status_code == 200
    assert web.statement("select name from tenants") == [("default",)]


def test_where_other_machines_can_connect_every_call_needs_a_key_even_from_here(start_web: Any) -> None:
    """A proxy on this machine would make all callers local."""
    web: WebServer = start_web(server={"host": "0.0.0.0"})
    with web.client() as client:
        is_error(client.get("/v1/files"), REFUSED)


def test_with_a_key_every_call_needs_one(web: WebServer) -> None:
    assert get(web, None).status_code == 200
    key = web.make_key("acme")
    assert get(web, key).status_code == 200
    refusals = [
        get(web, None),
        get(web, "sk-something"),
        get(web, unknown_key()),
        get(web, key[:-1] + ("0" if key[-1] != "0" else "1")),
        get(web, key.upper()),
        get(web, key + "0"),
    ]
    for answer in refusals:
        is_error(answer, REFUSED)
        assert answer.headers["www-authenticate"] == "Bearer"
    assert len({answer.content for answer in refusals}) == 1
    assert get(web, None, "/healthz").status_code == 200
    assert get(web, None, "/readyz").status_code == 200


def test_the_first_key_counts_at_once(web: WebServer) -> None:
    """That there is no key is believed for a while; but who shows one would otherwise make things as somebody else."""
    assert get(web, None).status_code == 200
    key = web.make_key("acme")
    web.clock.ahead_ms -= 2_001
    with web.client(key) as client:
        file_id = upload(client)
        web.clock.ahead_ms += 2_001
        assert client.get(f"/v1/files/{file_id}").status_code == 200
    owners = "select t.name from files f join tenants t on t.id = f.tenant_id"
    assert web.statement(owners) == [("acme",)]


def test_the_key_of_the_settings_is_made_in_a_store_without_keys_alone(web: WebServer) -> None:
    first, second = (keys.make(secrets.token_bytes(keys.RANDOM_BYTES)).text for _ in range(2))
    for text in (first, first, second):
        web.run(bootstrap_key(AuditTrail(web.store, FairDice(), "settings"), FairDice(), PEPPER, text))
    web.clock.ahead_ms += 2_001
    assert get(web, first.reveal()).status_code == 200
    is_error(get(web, second.reveal()), REFUSED)
    with pytest.raises(SettingsError, match="is no key"):
        web.run(bootstrap_key(AuditTrail(web.store, FairDice(), "settings"), FairDice(), PEPPER, Secret("sk-x")))


def test_a_wrong_secret_under_a_right_name(web: WebServer) -> None:
    key = web.make_key("acme")
    body = key[: len(keys.PREFIX) + keys.PUBLIC_LENGTH] + "0" * keys.SECRET_LENGTH
    forged = body + keys._check(body)
    assert keys.public_id_of(forged) == keys.public_id_of(key)
    is_error(get(web, forged), REFUSED)


def test_other_ways_to_send_a_key_do_not_count(web: WebServer) -> None:
    key = web.make_key("acme")
    with web.client() as client:
        for headers in ({"Authorization": key}, {"Authorization": f"Basic {key}"}, {"Cookie": f"key={key}"}):
            is_error(client.get("/v1/files", headers=headers), REFUSED)
        is_error(client.get(f"/v1/files?api_key={key}"), REFUSED)
        assert client.get("/v1/files", headers={"Authorization": f"bearer  {key}"}).status_code == 200


def test_revoked_within_two_seconds(web: WebServer) -> None:
    key = web.make_key("acme")
    assert get(web, key).status_code == 200
    assert web.run(web.store.revoke_key(str(keys.public_id_of(key))))
    web.clock.ahead_ms += 2_001
    is_error(get(web, key), REFUSED)


def test_a_key_works_only_from_the_addresses_that_it_names(start_web: Any) -> None:
    """The answer is that for a wrong key; a proxy that is trusted says where the caller is, and no caller does."""
    web: WebServer = start_web(server={"trusted_proxies": ("127.0.0.1",)})
    free, key = web.make_key("acme"), web.make_key("acme", addresses=["198.51.100.0/24", "2001:db8::/32"])

    def asked(text: str, forwarded: str) -> httpx2.Response:
        with web.client(text) as client:
            return client.get("/v1/files", headers={"X-Forwarded-For": forwarded} if forwarded else {})

    for forwarded in ("198.51.100.7", "203.0.113.1, 198.51.100.7", "2001:db8::1"):
        assert asked(key, forwarded).status_code == 200
    for forwarded in ("", "203.0.113.1", "198.51.100.7, 203.0.113.1", "2001:db9::1"):
        is_error(asked(key, forwarded), REFUSED)
        assert asked(free, forwarded).status_code == 200
    path = f"/admin/v1/keys/{keys.public_id_of(key)}/change"
    with web.client() as client:
        for wrong in (["nowhere"], ["10.0.0.0/33"], [""], ["10.0.0.1"] * 101):
            refused = client.post(path, json={"addresses": wrong}, headers=OPERATOR)
            is_error(refused, {"status": 400, "code": "invalid_parameter", "param": "addresses"})
        assert client.post(path, json={"addresses": ["203.0.113.1"]}, headers=OPERATOR).json()["changed"]
    web.clock.ahead_ms += 2_001
    assert [asked(key, one).status_code for one in ("203.0.113.1", "198.51.100.7")] == [200, 401]
    with web.client() as client:
        assert client.post(path, json={"addresses": []}, headers=OPERATOR).json()["changed"]
    web.clock.ahead_ms += 2_001
    assert asked(key, "192.0.2.1").status_code == 200


def test_a_rotated_key_has_two_secrets_for_a_while(web: WebServer) -> None:
    old = web.make_key("acme")
    assert get(web, old).status_code == 200
    key_id = str(keys.public_id_of(old))
    with web.client() as client:
        path = f"/admin/v1/keys/{key_id}/rotate"
        assert client.post(path, json={"grace_ms": 60_000}).status_code == 401
        answer = client.post(path, json={"grace_ms": 60_000}, headers=OPERATOR)
        unknown = client.post("/admin/v1/keys/00000000/rotate", json={}, headers=OPERATOR)
        graces = [
            client.post(
                f"/admin/v1/keys/{keys.public_id_of(web.make_key('acme'))}/rotate", json=asked, headers=OPERATOR
            )
            for asked in ({"grace_ms": 90 * DAY_MS}, {"grace_ms": 90 * DAY_MS + 1}, {"grace_ms": -1})
        ]
    is_error(unknown, {"status": 404, "code": "key_not_found"})
    assert [one.status_code for one in graces] == [200, 400, 400]
    new = answer.json()["key"]
    assert (keys.public_id_of(new), new != old) == (key_id, True)
    # The new one is right at once, though the old one's row is still believed.
    assert [get(web, one).status_code for one in (new, old)] == [200, 200]
    web.clock.ahead_ms += 60_001
    assert get(web, new).status_code == 200
    is_error(get(web, old), REFUSED)
    assert web.run(web.store.revoke_key(key_id))
    web.clock.ahead_ms += 2_001
    is_error(get(web, new), REFUSED)


def test_a_new_secret_works_at_once_and_the_former_one_to_the_end_of_its_grace(
    web: WebServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever of the key's row is still believed."""
    monkeypatch.setattr(auth, "BELIEVED_MS", 100_000)
    old = web.make_key("acme")
    assert get(web, old).status_code == 200
    with web.client() as client:
        path = f"/admin/v1/keys/{keys.public_id_of(old)}/rotate"
        new = client.post(path, json={"grace_ms": 300_000}, headers=OPERATOR).json()["key"]
    assert get(web, new).status_code == 200
    web.clock.ahead_ms += 250_000
    assert get(web, old).status_code == 200
    web.clock.ahead_ms += 50_000
    assert get(web, new).status_code == 200
    is_error(get(web, old), REFUSED)


def test_the_audit_names_the_address_behind_a_trusted_proxy(start_web: Any) -> None:
    web: WebServer = start_web(server={"trusted_proxies": ("127.0.0.1",)})
    with web.client(web.make_key("ops", scopes=["admin:write"])) as client:
        client.headers["X-Forwarded-For"] = "198.51.100.7"
        assert client.post("/admin/v1/keys", json={"org": "acme"}).status_code == 200
        [noted] = client.get("/admin/v1/audit").json()["data"]
    assert (noted["action"], noted["address"]) == ("key.create", "198.51.100.7")


def test_a_key_is_changed_by_the_operator_alone(web: WebServer) -> None:
    key = web.make_key("acme")
    key_id = str(keys.public_id_of(key))
    with web.client(key) as client:
        path = f"/admin/v1/keys/{key_id}/change"
        assert client.post(path, json={"scopes": ["files:read"]}).status_code == 403
        wanted: dict[str, Any]
        for wanted in (
            {"scopes": ["everything"]},
            {"scopes": ["admin:read", "files:read"]},
            {"scopes": []},
            {"models": [""]},
            {"resources": ["x" * 256]},
            {"limits": [{"period": "minute"}]},
            {"limits": [{"period": "fortnight", "requests": 1}]},
            {"limits": [{"period": "minute", "requests": -1}]},
            {"expires_after_ms": 0},
            {"expires_after_ms": 1 << 60},
            {"secret": "mine"},
        ):
            assert client.post(path, json=wanted, headers=OPERATOR).status_code == 400, wanted
        wanted = {"models": ["small"], "resources": ["r"], "limits": [{"period": "minute", "requests": 9}]}
        assert client.post(path, json=wanted, headers=OPERATOR).json() == {"id": key_id, "changed": True}
        assert client.post("/admin/v1/keys/..%2F/change", json=wanted, headers=OPERATOR).status_code in (200, 404)
        absent = client.post("/admin/v1/keys/00000000/change", json=wanted, headers=OPERATOR)
        assert absent.json() == {"id": "00000000", "changed": False}
    row = web.run(web.store.get_key(key_id))
    assert row is not None
    assert (keys.models_from(row["models"]), keys.models_from(row["resources"])) == (
        frozenset({"small"}),
        frozenset({"r"}),
    )


def test_keys_are_deleted_by_the_operator_alone(web: WebServer) -> None:
    one, two, other = web.make_key("acme"), web.make_key("acme"), web.make_key("other")
    ids = [str(keys.public_id_of(key)) for key in (one, two, other)]
    path = "/admin/v1/keys/delete"
    with web.client(other) as client:
        assert client.post(path, json={"org": "acme"}).status_code == 403
        for wanted in (
            {},
            {"id": ids[0], "org": "acme"},
            {"org": ""},
            {"org": "a\x00"},
            {"org": "x" * 256},
            {"all": True},
        ):
            assert client.post(path, json=wanted, headers=OPERATOR).status_code == 400, wanted
        for unknown in ({"id": "00000000"}, {"id": "'; drop"}, {"org": "unknown"}):
            assert client.post(path, json=unknown, headers=OPERATOR).json() == {"deleted": []}
        assert client.post(path, json={"id": ids[0]}, headers=OPERATOR).json() == {"deleted": [ids[0]]}
        assert client.post(path, json={"org": "acme"}, headers=OPERATOR).json() == {"deleted": [ids[1]]}
    web.clock.ahead_ms += 2_001
    for key in (one, two):
        is_error(get(web, key), REFUSED)
    assert get(web, other).status_code == 200
    with web.client() as client:
        assert client.post(path, json={"id": ids[2]}, headers=OPERATOR).json() == {"deleted": [ids[2]]}
    web.clock.ahead_ms += 2_001
    is_error(get(web, ""), REFUSED)


def test_expired_to_the_moment(web: WebServer) -> None:
    key = web.make_key("acme", expires_at=web.clock.now_ms() + 60_000)
    assert get(web, key).status_code == get(web, key).status_code == 200
    web.clock.ahead_ms += 60_000
    is_error(get(web, key), REFUSED)


def test_a_key_that_was_found_right_a_moment_ago_expires_to_the_moment_too(
    web: WebServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(auth, "BELIEVED_MS", 100_000)
    looked_up = asked(web, monkeypatch, "get_key")
    key = web.make_key("acme", expires_at=web.clock.now_ms() + 60_000)
    assert get(web, key).status_code == get(web, key).status_code == 200
    assert len(looked_up) == 1
    web.clock.ahead_ms += 60_000
    is_error(get(web, key), REFUSED)


def test_a_key_that_is_checked_each_time_lives_until_it_expires(start_web: Any) -> None:
    """Its row is believed for a while, and the row's age counts in what is left of it."""
    web: WebServer = start_web(server={"trusted_proxies": ("127.0.0.1",)})
    key = web.make_key("acme", addresses=["198.51.100.0/24"], expires_at=web.clock.now_ms() + 60_000)
    with web.client(key) as client:
        client.headers["X-Forwarded-For"] = "198.51.100.7"
        assert [client.get("/v1/files").status_code for _ in range(3)] == [200] * 3


def test_scopes(web: WebServer) -> None:
    reader = web.make_key("acme", scopes=["files:read", "batches:read"])
    with web.client(reader) as client:
        assert client.get("/v1/files").status_code == 200
        assert client.get("/v1/batches").status_code == 200
        for answer in (
            client.post("/v1/files", files={"file": ("a", LINES)}, data={"purpose": "batch"}),
            client.delete("/v1/files/file_0000000000000000000000"),
            client.post("/v1/batches", json={}),
            client.post("/v1/batches/batch_0000000000000000000000/cancel"),
        ):
            is_error(answer, {"status": 403, "code": "insufficient_scope"})
            assert answer.json()["error"]["type"] == "permission_error"


def test_a_large_upload_with_a_wrong_key_is_answered_cleanly(web: WebServer) -> None:
    web.make_key("acme")
    with web.client(unknown_key()) as client:
        answer = client.post("/v1/files", files={"file": ("a", b"x" * 30_000_000)}, data={"purpose": "batch"})
    is_error(answer, REFUSED)
    assert web.statement("select count(*) from blobs") == [(0,)]


def test_failures_from_one_address_are_bounded_and_harm_no_one_else(web: WebServer) -> None:
    key = web.make_key("acme")
    assert get(web, key).status_code == 200
    with web.client("sk-wrong") as client:
        answers = [client.get("/v1/files").status_code for _ in range(ADDRESS_FAILURES_MAX + 5)]
    assert answers == [401] * ADDRESS_FAILURES_MAX + [429] * 5
    # A key that was right before still is, from the same address.
    assert get(web, key).status_code == 200
    # So is one that was never used here, and the operator: only wrong ones wait.
    assert get(web, web.make_key("other")).status_code == 200
    with web.client() as client:
        assert client.get("/v1/files", headers=OPERATOR).status_code == 200
        assert client.get("/v1/files", headers={"X-Tidegate-Control": "wrong"}).status_code == 429
    refused = get(web, unknown_key())
    assert refused.status_code == 429
    assert 1 <= int(refused.headers["retry-after"]) <= 61
    web.clock.ahead_ms += 61_000
    is_error(get(web, unknown_key()), REFUSED)


def test_failures_under_one_name_are_bounded(web: WebServer) -> None:
    web.make_key("acme")
    key = unknown_key()
    assert [get(web, key).status_code for _ in range(KEY_FAILURES_MAX + 1)] == [401] * KEY_FAILURES_MAX + [429]


def test_a_right_key_is_let_in_after_any_number_of_wrong_secrets_under_its_name(web: WebServer) -> None:
    key = web.make_key("acme")
    public_id = keys.public_id_of(key)
    assert public_id is not None
    forged = keys.remake(public_id, secrets.token_bytes(keys.RANDOM_BYTES)).text.reveal()
    answers = [get(web, forged).status_code for _ in range(KEY_FAILURES_MAX + 5)]
    assert answers == [401] * KEY_FAILURES_MAX + [429] * 5
    assert get(web, key).status_code == 200


def test_only_keys_that_were_never_right_wait_while_a_few_wrong_ones_are_looked_up(
    web: WebServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sender of many wrong keys keeps the store busy with a few of them, and callers that were let in before do not wait."""
    proven, revoked = web.make_key("acme"), web.make_key("acme")
    assert [get(web, key).status_code for key in (proven, revoked)] == [200, 200]
    revoked_id = str(keys.public_id_of(revoked))
    assert web.run(web.store.revoke_key(revoked_id))
    web.clock.ahead_ms += 2_001
    assert get(web, revoked).status_code == 401
    with web.client("sk-wrong") as client:
        assert {client.get("/v1/files").status_code for _ in range(ADDRESS_FAILURES_MAX)} == {401, 429}
    web.clock.ahead_ms += 2_001
    look_up, looked_up, may_answer = web.store.get_key, list[str](), asyncio.Event()

    async def slow(public_id: str) -> Any:
        if public_id != keys.public_id_of(proven):
            looked_up.append(public_id)
            await may_answer.wait()
        return await look_up(public_id)

    async def turn() -> None:
        pass

    async def answer() -> None:
        may_answer.set()

    monkeypatch.setattr(web.store, "get_key", slow)
    with ThreadPoolExecutor(DOUBTFUL_LOOK_UPS + 2) as pool:
        wrong = [pool.submit(get, web, unknown_key()) for _ in range(DOUBTFUL_LOOK_UPS)]
        wait_until(lambda: len(looked_up) == DOUBTFUL_LOOK_UPS, 20, "the first to be looked up")
        wrong += [pool.submit(get, web, key) for key in (unknown_key(), revoked)]
        wait_until(lambda: len(web.app.busy) == DOUBTFUL_LOOK_UPS + 2, 20, "the others to come")
        web.run(turn())
        assert len(looked_up) == DOUBTFUL_LOOK_UPS
        assert get(web, proven).status_code == 200
        web.run(answer())
        assert {one.result().status_code for one in wrong} == {429}


def test_behind_a_proxy_each_caller_has_failures_of_its_own(start_web: Any) -> None:
    web: WebServer = start_web(server={"trusted_proxies": ("127.0.0.1", "10.0.0.0/8")})
    web.make_key("acme")

    def status(forwarded: str) -> int:
        with web.client("sk-wrong") as client:
            return client.get("/v1/files", headers={"X-Forwarded-For": forwarded}).status_code

    loud = [status("198.51.100.9, 203.0.113.7, 10.1.2.3") for _ in range(ADDRESS_FAILURES_MAX + 1)]
    assert loud[-2:] == [401, 429]
    assert status("203.0.113.7") == 429, "further left stands what a caller may have made up"
    assert status("203.0.113.8") == 401
    loud = [status(f"2001:db8:1:2::{number}") for number in range(ADDRESS_FAILURES_MAX + 1)]
    assert loud[-2:] == [401, 429], "who has one address of such a network has all of them"
    assert status("2001:db8:1:3::1") == 401


def test_the_table_of_failures_cannot_grow(web: WebServer) -> None:
    failures = Failures(web.clock, 3, names_max=10)
    for number in range(1000):
        failures.add(str(number))
    assert len(failures) == 10
    for _ in range(3):
        failures.add("loud")
    assert failures.wait_s("loud") > 0
    assert failures.wait_s("quiet") == 0


def test_a_wait_after_failures_is_the_rest_of_the_window() -> None:
    clock = HandClock()
    failures = Failures(clock, 2)
    failures.add("loud")
    clock.advance(10_000)
    failures.add("loud")
    assert failures.wait_s("loud") == 51, "it counts from the first failure"
    clock.advance(49_999)
    assert failures.wait_s("loud") == 1
    clock.advance(1)
    assert failures.wait_s("loud") == 0
    failures.add("loud")
    assert failures.wait_s("loud") == 0, "a new window has begun"


def test_last_used_is_remembered(web: WebServer) -> None:
    key = web.make_key("acme")
    get(web, key)
    # It is written beside the answer, not before it.
    wait_until(lambda: web.run(web.store.list_keys(10))[0]["last_used_at"] is not None, 30, "the use to be remembered")


def asked(web: WebServer, monkeypatch: pytest.MonkeyPatch, name: str) -> list[str]:
    """What the store is asked under this name from now on."""
    real, seen = getattr(web.store, name), []

    async def ask(*given: str) -> Any:
        seen.append("".join(given))
        return await real(*given)

    monkeypatch.setattr(web.store, name, ask)
    return seen


def test_a_key_is_looked_up_and_noted_once_in_a_while_and_few_are_remembered(
    web: WebServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(auth, "ROWS_MAX", 2)
    looked_up, noted = asked(web, monkeypatch, "get_key"), asked(web, monkeypatch, "mark_key_used")
    texts = [web.make_key("acme") for _ in range(3)]
    first, second, third = (str(keys.public_id_of(text)) for text in texts)
    for at in (0, 1, 0, 1, 2, 1, 2, 0):
        assert get(web, texts[at]).status_code == 200
    assert looked_up == [first, second, third, first]
    web.clock.ahead_ms += 59_000
    assert get(web, texts[0]).status_code == 200
    web.clock.ahead_ms += 1_001
    assert get(web, texts[0]).status_code == 200
    assert looked_up[4:] == [first]
    wait_until(lambda: len(noted) >= 5, 30, "the uses to be noted")
    assert noted == [first, second, third, first, first]


def test_that_there_is_no_key_is_asked_once_in_two_seconds(web: WebServer, monkeypatch: pytest.MonkeyPatch) -> None:
    looked = asked(web, monkeypatch, "any_key")
    for moved_ms, count in ((0, 1), (1_000, 1), (1_001, 2)):
        web.clock.ahead_ms += moved_ms
        assert get(web, None).status_code == get(web, None).status_code == 200
        assert len(looked) == count


def test_the_operator_of_this_machine(web: WebServer) -> None:
    key = web.make_key("acme")
    with web.client(key) as client:
        file_id = upload(client)
    with web.client() as client:
        as_acme = {**OPERATOR, "X-Tidegate-Tenant": "acme"}
        assert [file["id"] for file in client.get("/v1/files", headers=as_acme).json()["data"]] == [file_id]
        as_default = OPERATOR
        assert client.get("/v1/files", headers=as_default).json()["data"] == []
        for name in ("unknown", "%00", "%ff%fe", "%E2%80%AEemca", "a" * 4_000, "%", "acme%20"):
            unknown = {**OPERATOR, "X-Tidegate-Tenant": name}
            is_error(client.get("/v1/files", headers=unknown), {"status": 404, "code": "tenant_not_found"})
        for token in ("", "wrong", CONTROL_TOKEN + "x"):
            is_error(client.get("/v1/files", headers={"X-Tidegate-Control": token}), REFUSED)


@pytest.mark.parametrize("name", ["ünï 🎉", "100%", "a%20b", "a+b", "名" * 255])
def test_the_operator_may_speak_for_a_tenant_of_any_name(web: WebServer, name: str) -> None:
    with web.client(web.make_key(name)) as client:
        file_id = upload(client)
    with web.client() as client:
        named = {**OPERATOR, "X-Tidegate-Tenant": quote(name, safe="")}
        assert [file["id"] for file in client.get("/v1/files", headers=named).json()["data"]] == [file_id]


@pytest.mark.parametrize(
    ("wanted", "sent", "client"), [(CONTROL_TOKEN, CONTROL_TOKEN, "10.0.0.9"), (None, "", "127.0.0.1")]
)
def test_a_control_token_from_elsewhere_or_of_no_server_is_refused(
    web: WebServer, wanted: str | None, sent: str, client: str
) -> None:
    headers = [(b"x-tidegate-control", sent.encode())]
    request = Request({"type": "http", "headers": headers, "client": (client, 1), "method": "GET", "path": "/"})
    context = msgspec.structs.replace(web.context, control_token=None if wanted is None else Secret(wanted))

    async def ask() -> int:
        try:
            await Authenticator(context).caller(request, "files:read")
        except ApiProblem as problem:
            return problem.status
        return 200

    assert web.run(ask()) == 401


@pytest.mark.parametrize(
    "host", ["127.0.0.1", "127.9.9.9", "::1", "[::1]", "localhost", "a.localhost", "::ffff:127.0.0.1"]
)
def test_this_machine(host: str) -> None:
    assert is_loopback(host)


@pytest.mark.parametrize(
    "host", ["0.0.0.0", "::", "10.0.0.1", "example.com", "localhost.example.com", "", "127.0.0.1.nip.io"]
)
def test_not_this_machine(host: str) -> None:
    assert not is_loopback(host)


@pytest.mark.parametrize(
    ("client", "headers", "without"),
    [
        ("127.0.0.1", {"host": "gateway.example"}, True),
        ("172.18.0.1", {"host": "localhost:8081"}, True),
        ("172.18.0.1", {"host": "[::1]:8081"}, True),
        ("172.18.0.1", {"host": "gateway.example"}, False),
        ("172.18.0.1", {"host": "localhost.example:8081"}, False),
        ("172.18.0.1", {"host": "[:"}, False),
        ("172.18.0.1", {}, False),
        # A proxy elsewhere may call us by a name of its own, for someone who called it over a network.
        ("172.18.0.1", {"host": "localhost:8081", "x-forwarded-for": "203.0.113.9"}, False),
        ("172.18.0.1", {"host": "localhost:8081", "via": "1.1 proxy"}, False),
    ],
)
def test_what_a_browser_sends_stays_on_its_machine(client: str, headers: dict[str, str], without: bool) -> None:
    assert is_sent_without_a_network(client, Headers(headers)) is without


def test_a_first_key_is_asked_for_until_there_is_one(web: WebServer) -> None:
    with pytest.raises(SettingsError, match="tidegate keys generate"):
        web.run(require_key(web.store))
    web.make_key("acme")
    web.run(require_key(web.store))


def test_the_pepper_is_made_once_and_private(web: WebServer, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = msgspec.structs.replace(web.settings, data=str(tmp_path / "data"))
    path, synced = tmp_path / "data" / "pepper", noted_syncs(monkeypatch)
    pepper = pepper_of(settings)
    assert len(pepper) >= 32
    assert pepper_of(settings) == pepper
    assert synced[1:] == [path.parent], "its name is durable too"
    with monkeypatch.context() as earlier:
        # Another process looked before it was there, and makes one as well.
        earlier.setattr(Path, "exists", lambda path: False)
        assert pepper_of(settings) == pepper
    assert path.stat().st_mode & 0o777 == 0o600
    assert [entry.name for entry in path.parent.iterdir()] == ["pepper"]
    path.write_bytes(b"short")
    with pytest.raises(SettingsError, match="too short"):
        pepper_of(settings)
    path.unlink()
    assert len(pepper_of(settings)) >= 32, "its directory is there already"
    path.unlink()
    path.mkdir()
    with pytest.raises(SettingsError, match=r"cannot be used \(Is a directory\)\. Give this user the rights"):
        pepper_of(settings)


def test_keys_can_be_checked_only_with_the_pepper_that_they_were_hashed_with(web: WebServer, tmp_path: Any) -> None:
    """It makes and claims none: `doctor` asks."""

    def can_check(**auth: Any) -> bool | None:
        settings = msgspec.structs.replace(web.settings, data=str(tmp_path / "data"), auth=Auth(**auth))
        return web.run(can_check_keys(settings, web.store))

    assert can_check() is True, "there is no key"
    web.make_key("acme")
    web.run(claim_pepper(web.store, b"p" * 32))
    assert can_check() is None
    assert can_check(pepper=Secret("p" * 32)) is True
    assert can_check(pepper=Secret("q" * 32)) is False
    assert not (tmp_path / "data").exists()


def test_no_process_with_another_pepper_makes_a_secret(web: WebServer) -> None:
    """No other process could check it."""
    with web.client() as client:
        key_id = client.post("/admin/v1/keys", json={"org": "acme"}, headers=OPERATOR).json()["id"]
    trail, dice, other = AuditTrail(web.store, FairDice(), "operator"), FairDice(), b"q" * 32
    for made in (
        make_key(trail, dice, other, KeyRequest("acme")),
        rotate_key(trail, dice, other, key_id, KeyRotation()),
    ):
        with pytest.raises(ApiProblem) as refused:
            web.run(made)
        assert (refused.value.status, refused.value.code) == (503, "pepper_differs")


def test_a_key_never_shows_itself(web: WebServer) -> None:
    made = keys.make(bytes(range(keys.RANDOM_BYTES)))
    text = made.text.reveal()
    assert text.startswith("tg_live_")
    assert len(text) == 65
    assert text not in repr(made)
    assert keys.public_id_of(text) == made.public_id
    assert made == keys.make(bytes(range(keys.RANDOM_BYTES)))


@pytest.mark.parametrize("text", ["", "tg_live_", "tg_live_" + "0" * 57, "x" * 10_000, "tg_live_" + "é" * 57, "\n"])
def test_what_is_no_key(text: str) -> None:
    assert keys.public_id_of(text) is None


def test_every_single_mistyped_letter_is_noticed() -> None:
    text = keys.make(b"\x55" * keys.RANDOM_BYTES).text.reveal()
    for at in range(len(text)):
        assert keys.public_id_of(text[:at] + ("a" if text[at] != "a" else "b") + text[at + 1 :]) is None


def test_scope_and_model_texts() -> None:
    assert keys.scopes_from(SCOPES.text([])) == frozenset(SCOPES.tenant)
    assert SCOPES.text(["batches:read", "files:read"]) == "files:read batches:read"
    with pytest.raises(ValueError, match="files:read"):
        SCOPES.text(["files:everything"])
    assert keys.models_from(keys.models_text(["b c", "a,d"])) == {"b c", "a,d"}
    assert keys.models_from("") == frozenset()


def test_models_of_a_key(start_web: Any) -> None:
    web: WebServer = start_web(models={"small": model_at(), "org/large": model_at()})
    both = web.make_key("acme")
    one = web.make_key("acme", models=["small"])
    assert [model["id"] for model in get(web, both, "/v1/models").json()["data"]] == ["org/large", "small"]
    assert [model["id"] for model in get(web, one, "/v1/models").json()["data"]] == ["small"]


def test_a_batch_may_name_only_the_models_of_its_key(start_web: Any, tmp_path: Path) -> None:
    web: WebServer = start_web()
    key = web.make_key("acme", models=["small"])
    with web.client(key) as client:
        allowed = create(client, upload(client, LINES.replace(b'"m"', b'"small"')))
        refused = create(client, upload(client, LINES))
        lenient = create(client, upload(client, LINES), invalid_lines="error_file")
        ingest = IngestStage(web.store, web.blobs, FairDice(), tmp_path, Policies(), InputPasses())
        while web.run(ingest.next(web.worker_id)):
            pass
        assert client.get(f"/v1/batches/{allowed['id']}").json()["status"] == "in_progress"
        assert client.get(f"/v1/batches/{lenient['id']}").json()["status"] == "in_progress"
        failed = client.get(f"/v1/batches/{refused['id']}").json()
    assert failed["status"] == "failed"
    [error] = failed["errors"]["data"]
    assert (error["code"], error["line"], error["param"]) == ("model_not_found", 1, "body.model")
    assert "This key does not allow the model 'm'" in error["message"]
