"""The object store goes away while a cluster works and while it finalises: everything waits, then everything is there."""

from __future__ import annotations

import re
import time

import httpx2
import pytest

from tests.faults.conftest import MakeSite
from tests.faults.test_process_dedupe import lines as repeated
from tests.faults.test_process_operations import operator
from tests.support.processes import wait_until
from tests.support.proxy import Proxies, Proxy
from tests.support.s3 import S3Server
from tests.support.tidegate import ASK_S, END_S, IN_FLIGHT, Site, behaving, requests, s3_env

TRIES = 3


@pytest.fixture
def wire(proxies: Proxies, s3_server: S3Server) -> Proxy:
    return proxies.open(s3_server.port)


@pytest.fixture
def site_over_wire(make_site: MakeSite, wire: Proxy, s3_server: S3Server, s3_bucket: str) -> Site:
    """A cluster that reaches its object store through a wire that can be cut."""
    site = make_site("cluster")
    site.env |= s3_env(s3_server, s3_bucket, f"http://{wire.address}")
    return site


def cut(wire: Proxy) -> None:
    """From now on every connection to the object store breaks at its first byte; returns when some were tried."""
    wire.cut(0)
    before = wire.connections_accepted
    wait_until(
        lambda: wire.connections_accepted >= before + TRIES, END_S, "the object store to be missed", poll_s=ASK_S
    )


def test_objects_are_away_while_items_run(site_over_wire: Site, wire: Proxy) -> None:
    site = site_over_wire
    lines = requests(24, lambda number: behaving("latency=200"))
    site.begin()
    batch_id = site.submit(lines)
    site.until_called(IN_FLIGHT + 1)
    cut(wire)
    assert site.batch(batch_id)["status"] == "in_progress"
    wire.heal()
    site.judge(batch_id, lines)


@pytest.mark.soak
def test_an_upload_is_refused_while_objects_are_away(site_over_wire: Site, wire: Proxy) -> None:
    """The object store is tried for half a minute before the caller gets the error."""
    site = site_over_wire
    site.api()
    wire.cut(0)
    with httpx2.Client(base_url=site.url, timeout=100) as client:
        files = {"file": ("in.jsonl", "\n".join(requests(4)).encode())}
        refused = client.post("/v1/files", files=files, data={"purpose": "batch"})
    assert refused.status_code == 503, refused.text
    assert int(refused.headers["Retry-After"]) > 0
    wire.heal()
    assert site.get("/v1/files")["data"] == []


@pytest.mark.soak
@pytest.mark.timeout(400)
def test_a_file_that_is_dropped_in_the_console_is_refused_while_objects_are_away(
    site_over_wire: Site, wire: Proxy
) -> None:
    """The page says so in a sentence; no file and no bytes are left, and the same form works later."""
    site = site_over_wire
    site.api()
    key = operator(site).api_key
    with httpx2.Client(base_url=site.url, timeout=300) as browser:
        entered = browser.post("/console/sign-in", data={"key": key})
        browser.cookies.clear()
        browser.headers["Cookie"] = entered.headers["set-cookie"].partition(";")[0]
        found = re.search(r'name="csrf" value="([0-9a-f]+)"', browser.get("/console").text)
        assert found is not None
        form = {"csrf": found[1], "org": "ops", "endpoint": "/v1/chat/completions"}
        files = {"file": ("in.jsonl", "\n".join(requests(4)).encode())}
        wire.cut(0)
        refused = browser.post("/console/batches/upload", data=form, files=files)
        assert refused.status_code == 503, refused.text
        assert refused.headers["content-type"].startswith("text/html")
        assert int(refused.headers["Retry-After"]) > 0
        wire.heal()
        assert site.rows("select id from files") == []
        taken = browser.post("/console/batches/upload", data=form, files=files)
    assert taken.status_code == 303, taken.text
    assert len(site.rows("select id from files")) == 1
    site.end_all()
    site.collect_garbage()
    assert site.blobs() == site.named_blobs()


def test_objects_are_away_while_a_job_is_finalised(site_over_wire: Site, wire: Proxy) -> None:
    """Only what never ran, or an order that was asked for, needs the object store at the end."""
    site = site_over_wire
    lines = requests(12)
    site.begin("record_committed=sleep:0.3")
    batch_id = site.submit(lines, ordered=True)
    site.until_status(batch_id, "in_progress", "finalizing")
    site.until_called(len(lines))
    cut(wire)
    assert site.batch(batch_id)["status"] in ("finalizing", "in_progress")
    wire.heal()
    results = site.judge(batch_id, lines)
    assert [line["custom_id"] for line in results.output] == [f"c{number}" for number in range(12)]


def test_objects_are_away_while_a_cancelled_job_is_closed(site_over_wire: Site, wire: Proxy) -> None:
    site = site_over_wire
    lines = requests(24, lambda number: behaving("latency=200"))
    victim = site.begin("job_closed=kill")
    batch_id = site.submit(lines)
    site.until_called(IN_FLIGHT + 1)
    assert site.cancel(batch_id).status_code == 200
    assert victim.wait() == -9
    site.relieve()
    cut(wire)
    assert site.batch(batch_id)["status"] in ("finalizing", "cancelling")
    wire.heal()
    site.judge(batch_id, lines, "cancelled")


def test_objects_are_away_while_copies_are_published(site_over_wire: Site, wire: Proxy) -> None:
    """The lines of identical requests are written at the end: they wait for the object store, and nothing is called again."""
    site = site_over_wire
    lines = repeated(24, 8)
    site.begin("record_committed=sleep:0.3")
    batch_id = site.submit(lines, dedupe=True)
    site.until_called(8)
    cut(wire)
    assert site.batch(batch_id)["status"] in ("finalizing", "in_progress")
    wire.heal()
    results = site.judge(batch_id, lines)
    assert results.batch["tidegate"]["deduplicated"] == 16
    assert len(site.calls_of(batch_id)) == 8


def test_an_operation_is_done_while_objects_are_away(site_over_wire: Site, wire: Proxy) -> None:
    """A cancel of everything that matches is a matter of the database; the batches end when their lines can be written."""
    site = site_over_wire
    lines = requests(4)
    site.begin()
    batches = [site.submit(lines, not_before=int(time.time()) + 7200) for _ in range(3)]
    for batch_id in batches:
        site.until_status(batch_id, "in_progress")
    asked = operator(site)
    wire.cut(0)
    made = asked.client().post("/admin/v1/operations", json={"action": "cancel", "filter": {}})
    assert made.status_code == 200, made.text
    path = f"/admin/v1/operations/{made.json()['id']}"
    wait_until(lambda: asked.get(path)["status"] == "completed", END_S, "the operation to be completed", poll_s=ASK_S)
    assert (asked.get(path)["done"], asked.get(path)["failed"]) == (3, 0)

    def statuses() -> set[str]:
        return {asked.get(f"/admin/v1/batches/{batch_id}")["status"] for batch_id in batches}

    assert statuses() <= {"cancelling", "finalizing"}
    wire.heal()
    wait_until(lambda: statuses() == {"cancelled"}, END_S, "the batches to be cancelled", poll_s=ASK_S)
    for batch_id in batches:
        counts = asked.get(f"/admin/v1/batches/{batch_id}")["request_counts"]
        assert (counts["total"], counts["cancelled"]) == (len(lines), len(lines))
