"""Organizations in the console and the admin API: budgets with what is left, spend, keys and webhooks, also under hostile names."""

from __future__ import annotations

import re
from typing import Any

import pytest

from tests.web import stages
from tests.web.calls import create, upload
from tests.web.console.world import HOSTILE, Console, csrf_of
from tidegate.settings.capacity import LimitEntry, TenantEntry
from tidegate.web.console import org_pages

ORG = f"org {HOSTILE}"


@pytest.fixture(scope="module")
def web_settings() -> dict[str, Any]:
    return {"tenants": {ORG: TenantEntry(limits=(LimitEntry(period="day", requests=10),))}}


def org_id(console: Console, name: str = ORG) -> str:
    rows = console.web.client(console.reader_key).get("/admin/v1/orgs").json()["data"]
    return str(next(row["id"] for row in rows if row["name"] == name))


def test_an_organization_is_shown_with_all_it_has(console: Console) -> None:
    reader = console.signed_in(console.reader_key)
    listed = reader.get("/console/orgs").text
    path = f"/console/orgs/{org_id(console)}"
    shown = reader.get(path)
    assert (shown.status_code, path in listed) == (200, True)
    assert "10 of 10" in shown.text
    for text in (listed, shown.text):
        assert "<script>alert" not in text
        assert "&lt;script&gt;" in text
    assert 'action="' + path not in shown.text, "one who looks gets no form"
    for wrong in ("x", "tenant_" + 22 * "0", "%3Cscript%3E"):
        assert reader.get(f"/console/orgs/{wrong}").status_code == 404


def test_budgets_over_the_api(console: Console) -> None:
    reader = console.web.client(console.reader_key)
    every = reader.get("/admin/v1/budgets").json()["data"]
    assert {one["org"]: bool(one["limits"]) for one in every} == {ORG: True, "ops": False}
    [alone] = reader.get("/admin/v1/budgets", params={"org": ORG}).json()["data"]
    assert alone["limits"][0]["remaining"]["requests"] == 10
    assert reader.get("/admin/v1/budgets", params={"org": "unknown"}).status_code == 404
    assert reader.get("/admin/v1/budgets", params={"after": "x"}).status_code == 400
    assert len(reader.get("/admin/v1/budgets", params={"limit": 1}).json()["data"]) == 1


def test_a_key_is_made_shown_once_and_revoked(console: Console) -> None:
    writer = console.signed_in(console.writer_key)
    path = f"/console/orgs/{org_id(console)}"
    token = csrf_of(writer, path)
    made = writer.post(f"{path}/keys", data={"csrf": token, "label": HOSTILE, "scope": ""})
    assert made.status_code == 200
    assert "<script>alert" not in made.text
    key = made.text.partition('<pre tabindex="0">')[2].partition("</pre>")[0]
    console.web.clock.ahead_ms += 2_001
    client = console.web.client(key)
    assert client.get("/v1/batches").status_code == 200
    assert client.get("/admin/v1/batches").status_code == 403, "no scope is never an admin's"
    assert key not in writer.get(path).text
    assert writer.post(f"{path}/keys", data={"csrf": token, "scope": "admin:everything"}).status_code == 400
    key_id = key.removeprefix("tg_live_")[:8]
    assert writer.post(f"{path}/revoke", data={"csrf": token, "key_id": "another"}).status_code == 404
    theirs = f"/console/orgs/{org_id(console, 'ops')}"
    assert writer.post(f"{theirs}/revoke", data={"csrf": token, "key_id": key_id}).status_code == 404
    assert writer.post(f"{path}/revoke", data={"csrf": token, "key_id": key_id}).status_code == 303
    console.web.clock.ahead_ms += 5_001
    assert client.get("/v1/batches").status_code == 401


def test_every_key_of_many_is_reached(console: Console, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(org_pages, "KEYS_SHOWN", 2)
    for _ in range(4):
        console.web.make_key(ORG)
    writer, path = console.signed_in(console.writer_key), f"/console/orgs/{org_id(console)}"
    seen, at = [], path
    while at:
        text = writer.get(at).text
        seen += re.findall(r'name="key_id" value="(\w+)"', text)
        found = re.search(r'href="([^"]+)">Older keys', text)
        at = found[1] if found else ""
    assert len(seen) == len(set(seen)) == 5
    form = {"csrf": csrf_of(writer, path), "key_id": seen[-1]}
    assert writer.post(f"{path}/revoke", data=form).status_code == 303
    assert writer.get(path, params={"after": "x"}).status_code == 400


@pytest.mark.parametrize(
    ("path", "empty", "query", "unmatched"),
    [
        ("audit", "No change was made yet.", "action=batch.cancel", "No change matches."),
        ("deliveries", "No deliveries yet.", "status=failed", "No delivery matches."),
    ],
)
def test_an_empty_list_tells_whether_a_filter_is_why(
    console: Console, path: str, empty: str, query: str, unmatched: str
) -> None:
    reader = console.signed_in(console.reader_key)
    everything, filtered = reader.get(f"/console/{path}").text, reader.get(f"/console/{path}?{query}").text
    assert (empty in everything, unmatched in everything) == (True, False)
    assert (empty in filtered, unmatched in filtered) == (False, True)


def test_two_runs_of_one_file_are_compared(console: Console) -> None:
    owner = console.web.client(console.web.make_key(ORG))
    file_id = upload(owner)
    first, second = create(owner, file_id)["id"], create(owner, file_id)["id"]
    failure = {1: b'{"id":"r","custom_id":"<b>x</b>","error":{"code":"<i>e</i>"}}\n'}
    for batch, answers, failures in ((first, {0: b"{}\n", 1: b"{}\n"}, {}), (second, {0: b"{}\n"}, failure)):
        stages.start(console.web, batch, 2)
        stages.finish(console.web, batch, answers, failures)
    reader = console.signed_in(console.reader_key)
    assert f"/console/batches/{first}/compare?with={second}" in reader.get(f"/console/batches/{first}").text
    shown = reader.get(f"/console/batches/{first}/compare", params={"with": second})
    assert (shown.status_code, "<i>e" in shown.text, "&lt;i&gt;e" in shown.text) == (200, False, False)
    assert '<td class="number warn">+1</td>' not in shown.text, "neither has ended"
    for batch in (first, second):
        stages.publish(console.web, batch)
    shown = reader.get(f"/console/batches/{first}/compare", params={"with": second})
    assert '<td class="number warn">+1</td>' in shown.text, "one more failed"
    for other in (first, console.batch):
        assert reader.get(f"/console/batches/{first}/compare", params={"with": other}).status_code == 400
    for wrong in ("", "x", "batch_" + 22 * "0"):
        assert reader.get(f"/console/batches/{first}/compare", params={"with": wrong}).status_code == 404
    assert "Why is this waiting" in reader.get("/console/queues").text
