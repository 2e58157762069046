"""When a batch will be done, as its callers see it; and what cannot be done in time, warned of or refused."""

from __future__ import annotations

import json
from typing import Any

import httpx2
import pytest

from tests.web import stages
from tests.web.calls import create, is_error, upload
from tests.web.server import WebServer
from tidegate.core.input.lines import LineRules
from tidegate.core.schedule.outlooks import Backlog, Minute, ModelOutlook, Outlook
from tidegate.web.jobs.forecast import end_by_rates, end_of, sampled_units

LINE = json.dumps(
    {
        "custom_id": "a",
        "method": "POST",
        "url": "/v1/chat/completions",
        "body": {"model": "m", "max_tokens": 1_000, "messages": []},
    }
).encode()
CHAT = {"endpoint": "/v1/chat/completions"}


def measured(web: WebServer, units_per_s: int, minutes: int = 5) -> None:
    """As if workers had served the model at this rate in the last whole minutes."""
    now_minute = web.run(web.store.now_ms()) // 60_000
    for minute in range(now_minute - minutes, now_minute):
        columns = "insert into rates (model, minute, worker_id, units, tokens, items) values "
        web.rewrite(columns + str(("m", minute, "worker_x", units_per_s * 60, units_per_s * 60, 1)))


def input_of(client: httpx2.Client, count: int) -> str:
    return upload(client, b"".join(LINE.replace(b'"a"', b'"a%d"' % number) + b"\n" for number in range(count)))


def running(web: WebServer, client: httpx2.Client, **more: Any) -> dict[str, Any]:
    batch_id = stages.running(web, client, 10, **more)
    web.rewrite("update job_models set work_units = 60000 where job_id = '$'".replace("$", batch_id))
    return dict(client.get(f"/v1/batches/{batch_id}").json())


def test_the_pace_of_a_job_that_waits_for_its_limits_is_not_the_models() -> None:
    """A tenth of the job took ten minutes; the model serves a hundred units a second."""
    minutes = (Minute(7, 6_000, 6_000, 60, busy_ms=60_000, call_ms=60_000),)
    model = ModelOutlook("m", Backlog(60_000, 60), Backlog(54_000, 54), 0, Backlog(), 1.0, 1.0, 1, minutes)
    outlook = Outlook(600_000, 0, 10**9, None, 0, 1, (model,))
    limited, free = (end_of(model, outlook, is_limited=is_limited) for is_limited in (True, False))
    assert limited is not None
    assert free is not None
    assert limited.p50_ms == 540_000
    assert free.p50_ms == pytest.approx(9 * 600_000, rel=0.01)
    assert end_by_rates(model) == limited


def test_a_dry_run_says_how_long_the_batch_would_take(start_web: Any) -> None:
    web: WebServer = start_web()
    with web.client() as client:
        line = LINE.replace(b"[]", b'[{"role": "user", "content": "hello"}]')
        lines = b"".join(line.replace(b'"a"', b'"a%d"' % number) + b"\n" for number in range(10))
        wanted = CHAT | {"validate_only": True, "input_file_id": upload(client, lines), "completion_window": "1h"}
        assert client.post("/v1/batches", json=wanted).json()["eta_seconds"] is None
        measured(web, 100)
        eta = client.post("/v1/batches", json=wanted).json()["eta_seconds"]
        # Ten answers of a thousand tokens, at 100 a second.
        assert 100 <= eta["p50"] <= 105
        assert eta["p50"] <= eta["p95"]


def test_a_running_batch_says_when_it_will_be_done(start_web: Any) -> None:
    web: WebServer = start_web()
    with web.client() as client:
        measured(web, 100)
        before_s = web.run(web.store.now_ms()) // 1000
        batch = running(web, client, completion_window="1h")
        shown = batch["tidegate"]
        after_s = web.run(web.store.now_ms()) // 1000
        assert shown["eta"]["p50"] <= shown["eta"]["p95"]
        # 60,000 units at 100 a second, alone: ten minutes.
        assert before_s + 600 - 1 <= shown["eta"]["p50"] <= after_s + 600 + 1
        assert abs(shown["slack_seconds"] - (batch["expires_at"] - shown["eta"]["p50"])) <= 2
        assert (shown["work_units"], shown["size_class"]) == (60_000, "m")
        listed = client.get("/v1/batches").json()["data"][0]["tidegate"]
        assert (listed["eta"], listed["slack_seconds"], listed["size_class"]) == (None, None, None)


def test_a_batch_that_is_late_has_negative_slack(start_web: Any) -> None:
    web: WebServer = start_web()
    with web.client() as client:
        measured(web, 10)
        assert running(web, client, completion_window="1m")["tidegate"]["slack_seconds"] < 0


def test_no_batch_is_forecast_to_be_done_sooner_than_its_limits_let_it(start_web: Any) -> None:
    web: WebServer = start_web()
    four = [{"period": "minute", "requests": 4}]
    with web.client() as client:
        measured(web, 1_000_000)
        before_s = web.run(web.store.now_ms()) // 1000
        batch = running(web, client, limits=four)
        # Ten calls at four a minute: two more minutes after the first four.
        assert batch["tidegate"]["eta"]["p50"] >= before_s + 120
        assert batch["tidegate"]["eta"]["p95"] >= before_s + 120
        late = create(client, input_of(client, 30), completion_window="3m", limits=four)
        assert "about 30 requests take 7m" in late["tidegate"]["warnings"][0]
        fine = create(client, input_of(client, 30), completion_window="8m", limits=four)
        assert fine["tidegate"]["warnings"] == []


def test_where_nothing_was_measured_there_is_no_forecast(start_web: Any) -> None:
    web: WebServer = start_web()
    with web.client() as client:
        waiting = create(client, upload(client))
        assert (waiting["tidegate"]["eta"], waiting["tidegate"]["slack_seconds"]) == (None, None)
        shown = running(web, client)["tidegate"]
        assert (shown["eta"], shown["slack_seconds"], shown["warnings"]) == (None, None, [])
        assert (waiting["tidegate"]["size_class"], shown["size_class"]) == (None, "m")


def test_a_batch_that_ended_says_nothing(start_web: Any) -> None:
    web: WebServer = start_web()
    with web.client() as client:
        measured(web, 100)
        shown = client.get(f"/v1/batches/{stages.completed(web, client)}").json()["tidegate"]
        assert (shown["eta"], shown["slack_seconds"]) == (None, None)


# ---- admission: 500 lines of 1,000 tokens and more are over 500,000 units; at 100 a second that is more than 80 minutes


@pytest.mark.parametrize("admission", ["off", "warn", "refuse"])
def test_a_deadline_that_cannot_be_met(start_web: Any, admission: str) -> None:
    web: WebServer = start_web(scheduler={"admission": admission})
    with web.client() as client:
        measured(web, 100)
        file_id = input_of(client, 500)
        body = {"input_file_id": file_id, **CHAT, "completion_window": "10m"}
        answer = client.post("/v1/batches", json=body)
        if admission == "refuse":
            is_error(
                answer, {"status": 400, "code": "deadline_unreachable", "param": "completion_window", "says": "10m"}
            )
            assert web.statement("select count(*) from jobs") == [(0,)]
        else:
            warnings = answer.json()["tidegate"]["warnings"]
            assert len(warnings) == (admission == "warn")
            assert all("cannot be done within 10m" in warning for warning in warnings)
        in_time = client.post("/v1/batches", json={**body, "completion_window": "24h"})
        assert in_time.status_code == 200
        assert in_time.json()["tidegate"]["warnings"] == []


def test_what_a_key_made_before_is_not_refused_later(start_web: Any) -> None:
    web: WebServer = start_web(scheduler={"admission": "refuse"})
    with web.client() as client:
        body = {"input_file_id": input_of(client, 500), **CHAT, "completion_window": "10m"}
        headers = {"Idempotency-Key": "once"}
        made = client.post("/v1/batches", json=body, headers=headers).json()
        measured(web, 100)
        assert client.post("/v1/batches", json=body, headers=headers).json()["id"] == made["id"]
        is_error(client.post("/v1/batches", json=body), {"status": 400, "code": "deadline_unreachable"})


@pytest.mark.parametrize("data", [b"\n", b"\xff\xfe\n" * 9, b"[" * 10_000, b"{}\n" * 9, b'{"body":{"model":5}}\n'])
def test_an_input_that_cannot_be_read_is_accepted_without_a_forecast(start_web: Any, data: bytes) -> None:
    web: WebServer = start_web(scheduler={"admission": "refuse"})
    with web.client() as client:
        measured(web, 1)
        assert create(client, upload(client, data), completion_window="1m")["tidegate"]["warnings"] == []


def test_an_input_whose_bytes_are_gone_is_ingest_s_to_refuse(start_web: Any) -> None:
    web: WebServer = start_web(scheduler={"admission": "refuse"})
    with web.client() as client:
        file_id = input_of(client, 3)
        for path in web.blobs.root.rglob("blob_*"):
            path.unlink()
        assert create(client, file_id, **CHAT)["status"] == "validating"


def test_a_sample_speaks_for_the_whole() -> None:
    rules = LineRules(endpoint="/v1/chat/completions")
    whole = sampled_units([LINE] * 100, (len(LINE) + 1) * 100, rules)
    part = sampled_units([LINE] * 10, (len(LINE) + 1) * 100, rules)
    assert whole == part
    assert whole["m"] == 100 * 1_001, "what the model may write and read, and not the JSON around it"
    for asked in (b"-999", b"-99999999999"):
        hostile = LINE.replace(b"1000", asked)
        assert sampled_units([hostile], len(hostile), rules)["m"] in range(100), "less than nothing is nothing"
    assert len(sampled_units([LINE.replace(b'"m"', b'"m%d"' % n) for n in range(99)], 10_000, rules)) == 8
    unnamed = [LINE.replace(b'"m"', name) for name in (b'""', b'"\\u0000"', b'"\\n"')]
    assert set(sampled_units([*unnamed, LINE, b"garbage"], 10_000, rules)) == {"m"}


# ---- queued work of a tenant


def test_a_tenant_may_have_so_much_work_queued(start_web: Any) -> None:
    from tidegate.settings.capacity import TenantEntry

    web: WebServer = start_web(tenants={"default": TenantEntry(queued_units_max=60_000)})
    with web.client() as client:
        running(web, client)
        body = {"input_file_id": upload(client), "endpoint": "/v1/embeddings"}
        is_error(
            client.post("/v1/batches", json=body), {"status": 429, "code": "quota_exceeded", "says": "60,000 tokens"}
        )
