"""The console without a browser: who sees it, what forms it takes, and that no text of a tenant becomes markup."""

from __future__ import annotations

import re
from typing import Any

import pytest
from starlette.routing import Route

from tests.web import stages
from tests.web.calls import create, upload
from tests.web.console.world import HOSTILE, PAGES, Console, csrf_of
from tidegate import metrics
from tidegate.core import keys
from tidegate.core.errors import StoreUnavailable
from tidegate.core.ids import item_id
from tidegate.store.tenants.keys import KeyRights
from tidegate.web.console.session import COOKIE, SESSION_S


def test_a_batch_is_shown_as_it_stands_and_actions_say_what_they_do(console: Console) -> None:
    writer = console.signed_in(console.writer_key)
    path = f"/console/batches/{console.batch}"
    running = writer.get(path).text
    assert "<span>cost so far</span>" in running
    assert ">Mark failed</button>" in running
    stages.finish(console.web, console.batch, {2: b"{}\n"})
    stages.publish(console.web, console.batch)
    ended = writer.get(path).text
    assert "<span>cost</span>" in ended
    assert ">Retry failed</button>" in ended


def test_what_is_not_there_is_reported_in_words_for_operators(console: Console) -> None:
    content = console.signed_in(console.web.make_key("ops", scopes=["admin:write", "admin:content"]))
    absent = "batch_" + 22 * "0"
    csrf = {"csrf": csrf_of(content, f"/console/batches/{console.batch}")}
    gets = {
        f"/batches/{absent}": "under Batches in the console",
        f"/batches/{console.batch}/compare?with={absent}": "under Batches in the console",
        f"/batches/{console.batch}/items/{absent}": "/items",
        f"/batches/{console.batch}/results/output": "has not ended yet",
        "/batches/check?file=x": "on the page for a new batch",
    }
    answers = {path: content.get(f"/console{path}") for path in gets}
    replay = "/deliveries/evt_x.whk_x/replay"
    answers[replay] = content.post(f"/console{replay}", data=csrf, headers={"Origin": console.web.url})
    for path, words in (gets | {replay: "under Deliveries in the console"}).items():
        assert answers[path].status_code == 404, (path, answers[path].text)
        assert words in answers[path].text, path
        assert "/v1/batches/" not in answers[path].text, path
        assert "List yours" not in answers[path].text, path
    api = console.web.client(console.reader_key).get(f"/admin/v1/batches/{absent}").json()["error"]["message"]
    assert api.startswith(f"No batch found with id '{absent}'. ")
    assert api.endswith("GET /admin/v1/batches.")


def test_every_page_is_shown_to_operators_alone_and_escapes_everything(console: Console) -> None:
    reader = console.signed_in(console.reader_key)
    outside = console.web.client()
    odd = "%22%3E%3Cscript%3Ealert"
    for path in (
        *PAGES,
        f"/batches/{console.batch}",
        f"/batches/{console.batch}/items",
        f"/batches?q={odd}&status=&org=",
        f"/operations/impact?action=cancel&q={odd}&org=",
    ):
        shown = reader.get(f"/console{path}")
        assert shown.status_code == 200, shown.text
        assert "script-src 'self'" in shown.headers["content-security-policy"]
        assert "require-trusted-types-for 'script'" in shown.headers["content-security-policy"]
        for bad in ("<script>alert", "<img src=x", "<b>x</b>", "<i>bad</i>", "onclick=", "style="):
            assert bad not in shown.text, path
        refused = outside.get(f"/console{path}")
        assert (refused.status_code, refused.headers.get("location")) == (303, "/console/sign-in")
    page = reader.get(f"/console/batches/{console.batch}").text
    assert ("http_400" in page, "bad&lt;" in page) == (True, False), (
        "a model server may quote the request in place of a code"
    )
    assert "&lt;script&gt;" in reader.get("/console/batches").text
    for batch_id in ("x", "batch_" + 22 * "0", "%3Cscript%3E"):
        absent = reader.get(f"/console/batches/{batch_id}")
        assert (absent.status_code, absent.headers["content-type"]) == (404, "text/html; charset=utf-8")
        assert "<script>" not in absent.text
    for query in ("status=asleep", "after=x", "mood=1", "q=" + 600 * "x"):
        assert reader.get(f"/console/batches?{query}").status_code == 400
        assert reader.get(f"/console/operations/impact?action=pause&{query}").status_code == 400
    for path in PAGES[2:]:
        if path not in ("/queues", "/deployments", "/playground"):
            assert reader.get(f"/console{path}?after=x").status_code == 400, path
    assert reader.get("/console/operations/impact?action=explode").status_code == 400
    assert "/console/deployments/edit" not in reader.get("/console").text, (
        "the palette leads to no page that is refused"
    )
    assert reader.get("/console/").headers["location"] == "/console"
    lost = reader.get("/console/no/such/page")
    assert (lost.status_code, lost.headers["content-type"]) == (404, "text/html; charset=utf-8")
    assert reader.get("/console/operations/op_" + 22 * "0").status_code == 404
    for query in ("outcome=x", "code=" + 200 * "x", "after=x", "mood=1"):
        assert reader.get(f"/console/batches/{console.batch}/items?{query}").status_code == 400


def test_a_session_opens_the_console_and_nothing_else(console: Console) -> None:
    writer = console.signed_in(console.writer_key)
    assert writer.get("/admin/v1/batches").status_code == 401
    assert writer.get("/v1/batches").status_code == 401
    bearer = console.web.client(console.writer_key)
    assert bearer.get("/console").status_code == 303, "a key opens no page: it is not what a browser sends"
    tenant = console.web.make_key("acme")
    for wrong in (tenant, "", "x", console.writer_key + "x", console.writer_key[:-1], HOSTILE):
        refused = console.web.client().post("/console/sign-in", data={"key": wrong})
        assert refused.status_code in (401, 403)
        assert "set-cookie" not in refused.headers
        assert "<script>" not in refused.text


@pytest.mark.parametrize(
    "bend", [lambda c: c[:-1] + "0", lambda c: c.replace(".", "..", 1), lambda c: "x", lambda c: "é.ñ"]
)
def test_a_forged_session_is_none(console: Console, bend: Any) -> None:
    writer = console.signed_in(console.writer_key)
    name, _, value = writer.headers["Cookie"].partition("=")
    assert name == COOKIE
    bent = bend(value)
    if bent == value:
        bent = value[:-1] + "1"
    raw = f"{COOKIE}={bent}".encode("latin-1")
    assert console.web.client().get("/console", headers=[(b"Cookie", raw)]).status_code == 303


def test_a_session_ends_with_its_time_and_with_its_key(console: Console) -> None:
    writer, reader = console.signed_in(console.writer_key), console.signed_in(console.reader_key)
    key_id = str(keys.public_id_of(console.writer_key))
    assert console.web.run(console.web.store.rotate_key(key_id, b"another", 60_000))
    assert writer.get("/console").status_code == 303
    assert reader.get("/console").status_code == 200
    console.web.clock.ahead_ms += SESSION_S * 1000
    assert reader.get("/console").status_code == 303


@pytest.mark.parametrize("end", ["revoked", "expired"])
def test_a_session_ends_when_its_key_does(console: Console, end: str) -> None:
    reader, key_id = console.signed_in(console.reader_key), str(keys.public_id_of(console.reader_key))
    store = console.web.store
    if end == "revoked":
        assert console.web.run(store.revoke_key(key_id))
    else:
        assert console.web.run(store.change_key(key_id, KeyRights(expires_at=console.web.clock.now_ms() + 1_000)))
        assert reader.get("/console").status_code == 200
        console.web.clock.ahead_ms += 1_001
    assert reader.get("/console").status_code == 303


def test_a_session_is_held_to_where_its_key_may_be_used(start_web: Any) -> None:
    console = Console(start_web(server={"trusted_proxies": ("127.0.0.1",)}))
    writer = console.signed_in(console.writer_key)
    here = {"X-Forwarded-For": "198.51.100.7"}
    assert writer.get("/console", headers=here).status_code == 200
    key_id = str(keys.public_id_of(console.writer_key))
    rights = KeyRights(addresses=keys.addresses_text(["198.51.100.0/24"]))
    assert console.web.run(console.web.store.change_key(key_id, rights))
    assert writer.get("/console", headers=here).status_code == 200
    token = re.search(r'name="csrf" value="(\w+)"', writer.get("/console", headers=here).text)
    assert token
    path = f"/console/batches/{console.batch}/pause"
    before = metrics.counted(metrics.repair_actions)["pause,done"]
    assert writer.post(path, data={"csrf": token[1]}, headers=here).status_code == 303
    assert metrics.counted(metrics.repair_actions)["pause,done"] == before + 1
    [noted] = console.web.client(console.reader_key).get("/admin/v1/audit").json()["data"]
    assert (noted["action"], noted["address"]) == ("batch.pause", "198.51.100.7")
    assert "strict-transport-security" not in writer.get("/console", headers=here).headers
    for path in ("/console", "/console/sign-in"):
        over_https = writer.get(path, headers={**here, "X-Forwarded-Proto": "https"})
        assert over_https.headers["strict-transport-security"] == "max-age=31536000"
    elsewhere = writer.get("/console", headers={"X-Forwarded-For": "203.0.113.1"})
    assert (elsewhere.status_code, elsewhere.headers["location"]) == (303, "/console/sign-in")


def test_a_key_is_not_taken_over_a_network_in_the_clear(start_web: Any) -> None:
    console = Console(start_web(server={"trusted_proxies": ("127.0.0.1",)}))
    client, form = console.web.client(), {"key": console.reader_key}
    there = {"X-Forwarded-For": "203.0.113.9"}
    refused = client.post("/console/sign-in", data=form, headers=there)
    assert (refused.status_code, "set-cookie" in refused.headers) == (403, False)
    assert "Sign in over HTTPS" in refused.text
    over_https = client.post("/console/sign-in", data=form, headers={**there, "X-Forwarded-Proto": "https"})
    assert over_https.status_code == 303


def test_odd_forms_are_refused(console: Console) -> None:
    writer = console.signed_in(console.writer_key)
    form = {"csrf": csrf_of(writer, "/console"), **{f"field{number}": "" for number in range(40)}}
    for path in ("/console/operations", "/console/sign-in"):
        refused = writer.post(path, data=form)
        assert (refused.status_code, "32 fields" in refused.text) == (400, True), refused.text
    for origin in ("http://[", "://", "null", "https://"):
        foreign = writer.post("/console/operations", data={"csrf": form["csrf"]}, headers={"Origin": origin})
        assert (foreign.status_code, "another site" in foreign.text) == (403, True), foreign.text


def test_an_action_needs_the_scope_the_token_and_our_own_page(console: Console) -> None:
    writer, reader = console.signed_in(console.writer_key), console.signed_in(console.reader_key)
    page, path = f"/console/batches/{console.batch}", f"/console/batches/{console.batch}/pause"
    token = csrf_of(writer, page)
    refusals = [
        reader.post(path, data={"csrf": csrf_of(reader, page)}),
        writer.post(path, data={"csrf": ""}),
        writer.post(path, data={"csrf": csrf_of(reader, page)}),
        writer.post(path, data={"csrf": token}, headers={"Origin": "https://evil.example"}),
        writer.post(path, data={"csrf": token}, headers={"Origin": "null"}),
        writer.post(path, data={"csrf": token}, headers={"Sec-Fetch-Site": "cross-site"}),
        writer.post(path, data={"csrf": token}, headers={"Sec-Fetch-Site": "same-site"}),
        writer.post(path, json={"csrf": token}),
        writer.post(path, data={"csrf": token, "x": "y" * 20_000}),
        console.web.client().post(path, data={"csrf": token}),
    ]
    assert [one.status_code for one in refusals] == [403, 403, 403, 403, 403, 403, 403, 415, 413, 303]
    assert console.web.job(console.batch).paused_at is None
    assert "Pause" not in reader.get(page).text
    done = writer.post(path, data={"csrf": token}, headers={"Origin": console.web.url, "Sec-Fetch-Site": "same-origin"})
    assert (done.status_code, done.headers["location"]) == (303, page)
    assert console.web.job(console.batch).paused_at is not None
    assert f"key:{keys.public_id_of(console.writer_key)}" in writer.get("/console/audit").text
    assert writer.post(f"{page}/abandon", data={"csrf": token}).status_code == 409
    assert writer.post(f"{page}/explode", data={"csrf": token}).status_code == 404


def test_a_session_that_was_signed_out_of_is_over_for_every_copy_of_its_cookie(console: Console) -> None:
    reader, other = console.signed_in(console.reader_key), console.signed_in(console.reader_key)
    assert reader.post("/console/sign-out", data={"csrf": csrf_of(other, "/console")}).status_code == 403
    out = reader.post("/console/sign-out", data={"csrf": csrf_of(reader, "/console")})
    assert (out.status_code, out.headers["location"]) == (303, "/console/sign-in")
    assert 'tidegate=""' in out.headers["set-cookie"]
    # This client keeps its cookie, as one who copied it would.
    assert reader.get("/console").status_code == 303
    assert reader.post("/console/sign-out", data={"csrf": csrf_of(other, "/console")}).status_code == 303
    assert other.get("/console").status_code == 200, "another session of the same key goes on"


def test_one_who_only_looks_can_do_nothing(console: Console) -> None:
    """Every route that changes something, as the app has them: with a right token of the reader's own, and with none of a writer's."""
    writer, reader = console.signed_in(console.writer_key), console.signed_in(console.reader_key)
    own = csrf_of(reader, "/console")
    paths = [
        route.path
        for route in console.web.app.routes
        if isinstance(route, Route) and route.path.startswith("/console") and "POST" in (route.methods or ())
    ]
    acting = [path for path in paths if path not in ("/console/sign-in", "/console/sign-out")]
    assert len(acting) > 5
    for path in acting:
        at = re.sub(r"{(\w+)}", lambda found: console.batch if found[1] == "batch_id" else "pause", path)
        refused = reader.post(at, data={"csrf": own, "name": "x"})
        assert (refused.status_code, "insufficient_scope" in refused.text) == (403, True), path
        forged = writer.post(at, data={"csrf": own, "name": "x"})
        # An upload is refused in a test of its own: this is no form with a file.
        assert forged.status_code == (415 if path.endswith("/upload") else 403), path
    assert console.web.client(console.reader_key).get("/admin/v1/audit").json()["data"] == []


def test_an_action_on_a_filter_shows_its_impact_and_begins(console: Console) -> None:
    writer, reader = console.signed_in(console.writer_key), console.signed_in(console.reader_key)
    asked = f"q={console.batch}&action=pause"
    seen = writer.get(f"/console/operations/impact?{asked}").text
    assert "Pause 1 batch<" in seen
    assert "<button" not in reader.get(f"/console/operations/impact?{asked}").text.partition("<main>")[2]
    form = {"csrf": csrf_of(writer, "/console/batches"), "action": "pause", "q": console.batch}
    assert reader.post("/console/operations", data={**form, "csrf": csrf_of(reader, "/console")}).status_code == 403
    assert writer.post("/console/operations", data={**form, "csrf": ""}).status_code == 403
    assert writer.post("/console/operations", data={**form, "action": "explode"}).status_code == 400
    begun = writer.post("/console/operations", data=form)
    assert begun.status_code == 303, begun.text
    path = begun.headers["location"]
    assert "0 of 1 batches done" in reader.get(path).text
    assert writer.post(f"{path}/cancel", data={"csrf": form["csrf"]}).status_code == 303
    ended = reader.get(path).text
    assert ("cancelled" in ended, "0 batches done; 1 matched when it began" in ended) == (True, True)
    assert console.web.job(console.batch).paused_at is None


def test_requests_and_responses_need_a_scope_and_are_noted(console: Console) -> None:
    web, path = console.web, f"/console/batches/{console.batch}/items"
    content = web.make_key("ops", scopes=["admin:read", "admin:content"])
    reader, allowed = console.signed_in(console.reader_key), console.signed_in(content)
    item = item_id(console.batch, 1)
    assert reader.get(f"{path}/{item}").status_code == 403
    admin = f"/admin/v1/batches/{console.batch}/items"
    assert web.client(console.writer_key).get(f"{admin}/{item}").status_code == 403
    listed = web.client(console.reader_key).get(admin, params={"outcome": "failed"}).json()["data"]
    assert [(one["custom_id"], one["error"]) for one in listed] == [("<b>x</b>", {"code": "http_400", "message": ""})]
    shown = allowed.get(f"{path}/{item}")
    assert (shown.status_code, "&lt;i&gt;bad" in shown.text, "<i>bad" in shown.text) == (200, True, False)
    assert web.client(content).get(f"{admin}/{item}").json()["response"]["status_code"] == 400
    for wrong in ("x", "%3Cscript%3E", item_id(console.batch, 999)):
        assert allowed.get(f"{path}/{wrong}").status_code == 404
        assert web.client(content).get(f"{admin}/{wrong}").status_code == 404
    noted = web.client(content).get("/admin/v1/audit", params={"target": console.batch}).json()["data"]
    assert [(one["action"], one["after"]) for one in noted] == 2 * [("batch.item_read", {"custom_id": "<b>x</b>"})]


def test_results_are_downloaded_with_a_scope_and_noted(console: Console) -> None:
    web, path = console.web, f"/console/batches/{console.batch}/results"
    content = web.make_key("ops", scopes=["admin:read", "admin:content"])
    writer, allowed = console.signed_in(console.writer_key), console.signed_in(content)
    assert allowed.get(f"{path}/output").status_code == 404, "it has not ended"
    stages.finish(web, console.batch, {2: b"{}\n"})
    stages.publish(web, console.batch)
    assert "Download the answers" not in writer.get(f"/console/batches/{console.batch}").text
    assert writer.get(f"{path}/output").status_code == 403
    assert "Download the answers" in allowed.get(f"/console/batches/{console.batch}").text
    taken = allowed.get(f"{path}/errors")
    assert (taken.status_code, b"<i>bad</i>" in taken.content) == (200, True)
    assert taken.headers["content-type"] == "application/octet-stream"
    assert taken.headers["content-disposition"].startswith("attachment")
    assert "sandbox" in taken.headers["content-security-policy"]
    for kind in ("input", "%3Cscript%3E"):
        assert allowed.get(f"{path}/{kind}").status_code == 404
    noted = web.client(content).get("/admin/v1/audit", params={"target": console.batch}).json()["data"]
    assert [(one["action"], one["after"]) for one in noted] == [("batch.download", {"file": "errors"})]


def test_a_group_of_errors_runs_again(console: Console) -> None:
    writer, page = console.signed_in(console.writer_key), f"/console/batches/{console.batch}"
    assert "Retry this group" not in writer.get(page).text
    stages.finish(console.web, console.batch, {2: b"{}\n"})
    stages.publish(console.web, console.batch)
    shown = re.search(r'name="kinds" value="([0-9a-f]{16})"><button>Retry this group', writer.get(page).text)
    assert shown is not None
    form = {"csrf": csrf_of(writer, page), "kinds": shown[1]}
    assert writer.post(f"{page}/retry", data={**form, "kinds": "<i>"}).status_code == 400
    made = writer.post(f"{page}/retry", data=form)
    assert made.status_code == 303, made.text
    [retry] = console.web.job(console.batch).retried_by
    assert made.headers["location"] == f"/console/batches/{retry}"
    choice = console.web.job(retry).retry_choice
    assert choice is not None
    assert (choice.codes, choice.kinds) == ((), (shown[1],))
    api = console.web.client(console.writer_key)
    [kind] = api.get(f"/admin/v1/batches/{console.batch}/errors").json()["data"]
    assert (kind["id"], kind["code"], kind["requests"]) == (shown[1], "http_400", 1)
    again = api.post(f"/admin/v1/batches/{console.batch}/retry", json={"kinds": [kind["id"]]})
    assert again.json()["id"] == retry, "the same choice is the same retry"
    refused = api.post(f"/admin/v1/batches/{console.batch}/retry", json={"kinds": ["*"]})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "kinds[0]")


def test_without_keys_this_machine_may_look(start_web: Any) -> None:
    client = start_web().client()
    shown = client.get("/console")
    assert (shown.status_code, "read only" in shown.text) == (200, True)
    assert client.get("/console", headers={"X-Forwarded-For": "9.9.9.9"}).status_code == 403
    assert client.get("/console", headers={"Sec-Fetch-Site": "cross-site"}).status_code == 403
    made = create(client, upload(client))["id"]
    for path in (f"/console/batches/{made}/cancel", "/console/sign-out"):
        assert client.post(path, data={"csrf": ""}).status_code == 403


def test_no_page_shows_signed_out_while_the_store_is_gone(console: Console, monkeypatch: pytest.MonkeyPatch) -> None:
    reader = console.signed_in(console.reader_key)
    token = csrf_of(reader, "/console")

    async def gone(body: Any) -> Any:
        raise StoreUnavailable("the database is away")

    with monkeypatch.context() as patched:
        patched.setattr(console.web.store._driver, "free", gone)
        answer = reader.post("/console/sign-out", data={"csrf": token})
    assert (answer.status_code, "set-cookie" in answer.headers) == (503, False)
    assert reader.get("/console").status_code == 200
    assert reader.post("/console/sign-out", data={"csrf": token}).status_code == 303
    assert reader.get("/console").status_code == 303


def test_a_page_says_so_while_the_store_is_gone(console: Console, monkeypatch: pytest.MonkeyPatch) -> None:
    reader = console.signed_in(console.reader_key)

    async def gone(body: Any) -> Any:
        raise StoreUnavailable("the database is away")

    monkeypatch.setattr(console.web.store._driver, "read", gone)
    answer = reader.get("/console")
    assert (answer.status_code, answer.headers["content-type"]) == (503, "text/html; charset=utf-8")
