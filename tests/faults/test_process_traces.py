"""Traces as a collector gets them: an OTLP/HTTP receiver on a real socket decodes what processes send."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.collector import Collector, values_of
from tests.support.processes import wait_until
from tests.support.receiver import Got
from tests.support.tidegate import END_S, Site, behaving, requests

CALLER = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.fixture
def collector() -> Iterator[Collector]:
    with Collector() as made:
        yield made


def test_a_job_is_one_span_over_processes_of_which_one_was_killed(cluster: Site, collector: Collector) -> None:
    """The context lies with the job: the worker that ends it has never met the one that created it."""
    cluster.env |= collector.env
    victim = cluster.begin("record_committed=kill")
    lines = requests(16, lambda number: behaving("400") if number % 2 else f"say {number}")
    file_id = cluster.upload(lines).json()["id"]
    asked = {"input_file_id": file_id, "endpoint": "/v1/chat/completions", "completion_window": "24h"}
    response = cluster.client().post("/v1/batches", json=asked, headers={"traceparent": CALLER})
    batch_id = response.json()["id"]
    assert victim.wait() == -9
    cluster.relieve()
    batch = cluster.ended(batch_id).batch
    [created] = collector.until("create-batch")
    [root] = collector.until("process-batch")
    values = values_of(root.attributes)
    assert values["batch.id"] == batch_id
    assert values["file.id"] == file_id
    assert values["tenant.id"]
    assert values["batch.status"] == "completed"
    assert values["batch.output_file.id"] == batch["output_file_id"]
    assert values["batch.error_file.id"] == batch["error_file_id"]
    assert [values[f"batch.request.{name}"] for name in ("total", "completed", "failed")] == [16, 8, 8]
    # The caller's trace goes on: request, creation, job.
    assert {created.trace_id.hex(), root.trace_id.hex()} == {CALLER.split("-")[1]}
    assert created.parent_span_id.hex() == CALLER.split("-")[2]
    assert root.parent_span_id == created.span_id
    assert [link.span_id for link in root.links] == [created.span_id]
    assert [event.name for event in root.events] == ["in_progress", "finalizing"]
    moments = [one // 10**9 for one in (root.start_time_unix_nano, root.end_time_unix_nano)]
    assert moments == [batch["created_at"], batch["completed_at"]]
    for name in ("storage.Retrieve", "storage.Store"):
        assert {span.parent_span_id for span in collector.until(name) if span.trace_id == root.trace_id} == {
            root.span_id
        }
    # Those of the killed worker may be lost; it ended in the first half.
    calls = collector.until("chat m", 8)
    assert all(one.links[0].span_id == root.span_id and one.trace_id != root.trace_id for one in calls)
    answered = values_of(next(one for one in calls if one.status.code == 0).attributes)
    assert answered["gen_ai.operation.name"] == "chat"
    assert answered["gen_ai.request.model"] == "m"
    assert answered["gen_ai.usage.output_tokens"] > 0
    assert answered["http.response.status_code"] == 200
    assert answered["batch.item.number"] in range(16)
    refused = next(one for one in calls if one.status.code == 2)
    assert values_of(refused.attributes)["error.type"] == refused.status.message != ""
    assert b"say 1" not in b"".join(got.body for got in collector.got)


def test_interactive_calls_and_background_responses_go_on_in_the_trace_of_their_caller(
    embedded: Site, collector: Collector
) -> None:
    embedded.serve(more=collector.env)
    _, trace_id, parent_id, _ = CALLER.split("-")
    client, traced = embedded.client(), {"traceparent": CALLER}
    ask: dict[str, Any] = {"model": "m", "max_tokens": 8}

    def say(text: str, **more: Any) -> int:
        body = {**ask, "messages": [{"role": "user", "content": text}], **more}
        return client.post("/v1/chat/completions", json=body, headers=traced).status_code

    assert (say("whole"), say(behaving("400")), say("stream", stream=True)) == (200, 400, 200)
    body = {**ask, "stream": True, "messages": [{"role": "user", "content": behaving("slow=60000")}]}
    with client.stream("POST", "/v1/chat/completions", json=body, headers=traced) as answer:
        next(answer.iter_bytes(1))
    calls = {_call_kind(span): span for span in collector.until("chat m", 4)}
    assert set(calls) == {"whole", "refused", "stream", "left"}
    for span in calls.values():
        assert (span.trace_id.hex(), span.parent_span_id.hex()) == (trace_id, parent_id)
        assert values_of(span.attributes)["tenant.id"]
    for kind in ("whole", "stream"):
        values = values_of(calls[kind].attributes)
        assert values["gen_ai.provider.name"] == "openai"
        assert values["gen_ai.usage.input_tokens"] > 0 < values["gen_ai.usage.output_tokens"]
        assert values["http.response.status_code"] == 200
        assert values["tidegate.deployment"]
    assert values_of(calls["stream"].attributes)["gen_ai.response.time_to_first_chunk"] > 0
    assert values_of(calls["refused"].attributes)["http.response.status_code"] == 400

    response = client.post("/v1/responses", json={"model": "m", "input": "later", "background": True}, headers=traced)
    assert response.status_code == 200, response.text
    [created] = collector.until("create-batch")
    [root] = collector.until("process-batch")
    assert (created.trace_id.hex(), created.parent_span_id.hex()) == (trace_id, parent_id)
    assert (root.trace_id, root.parent_span_id) == (created.trace_id, created.span_id)
    values = values_of(root.attributes)
    assert (values["batch.kind"], values["batch.status"]) == ("response", "completed")
    assert values["batch.id"].removeprefix("batch_") == response.json()["id"].removeprefix("resp_")
    later = [span for span in collector.until("chat m", 5) if span.links]
    assert [span.links[0].span_id for span in later] == [root.span_id]
    assert b"later" not in b"".join(got.body for got in collector.got)


def _call_kind(span: Any) -> str:
    values = values_of(span.attributes)
    if values.get("error.type") == "ReaderLeft":
        return "left"
    if "error.type" in values:
        return "refused"
    return "stream" if values["gen_ai.request.stream"] else "whole"


def test_a_call_that_items_share_has_a_span_with_theirs(embedded: Site, collector: Collector, tmp_path: Path) -> None:
    """Every item is sampled, and they share calls all the same."""
    place = {"url": embedded.engine.url, "max_in_flight": 1, "upstream_max_batch_inputs": 8}
    embedded.configure(models={"m": {"deployments": [place]}})
    embedded.serve(more=collector.env)
    bodies = [{"model": "m", "input": f"say {number}"} for number in range(12)]
    lines = [
        json.dumps({"custom_id": f"c{number}", "method": "POST", "url": "/v1/embeddings", "body": body})
        for number, body in enumerate(bodies)
    ]
    batch = embedded.ended(embedded.submit(lines, endpoint="/v1/embeddings")).batch
    assert batch["status"] == "completed"
    collector.until("process-batch")

    def all_of_them() -> tuple[dict[bytes, Any], list[Any]] | None:
        spans = collector.spans("embeddings m")
        items = {span.span_id: span for span in spans if "batch.item.number" in values_of(span.attributes)}
        return (items, [span for span in spans if span.span_id not in items]) if len(items) == len(lines) else None

    found = wait_until(all_of_them, END_S, "the spans of all items")
    assert found is not None
    items, shared = found
    assert shared, "no call was shared"
    together: list[bytes] = []
    for span in shared:
        members = [span.parent_span_id, *(link.span_id for link in span.links)]
        assert len(members) == values_of(span.attributes)["batch.item.count"] > 1
        assert span.trace_id == items[span.parent_span_id].trace_id
        together += members
    assert len(set(together)) == len(together)
    grouped = {span_id for span_id, span in items.items() if "batch.item.is_grouped" in values_of(span.attributes)}
    assert grouped == set(together)


def test_a_failed_job_says_so_and_a_collector_that_is_gone_costs_nothing(embedded: Site) -> None:
    with Collector() as collector:
        proc = embedded.serve(more=collector.env)
        embedded.until_status(embedded.submit(["not json"]), "failed")
        [root] = collector.until("process-batch")
    assert root.status.code == 2
    assert values_of(root.attributes)["error.type"] == root.status.message != ""
    assert embedded.ended(embedded.submit(requests(3))).batch["status"] == "completed"
    proc.wait_for_line("traces_lost")
    begun_s = time.monotonic()
    proc.terminate()
    assert proc.wait() == 0
    # The SDK alone would wait for 30 s.
    assert time.monotonic() - begun_s < 20
    assert proc.stderr().count("traces_lost") == 1


def test_items_go_on_while_a_collector_refuses_or_hangs_and_that_is_one_line(embedded: Site) -> None:
    """Few spans are kept, so many are lost; when the collector takes spans again, the next ones come."""
    let_go, calm = threading.Event(), {"OTEL_BSP_MAX_QUEUE_SIZE": "32", "OTEL_BSP_MAX_EXPORT_BATCH_SIZE": "8"}

    def refuse(_: Got) -> int:
        return 503

    def refuse_for_good(_: Got) -> int:
        return 400

    def hang(_: Got) -> int:
        let_go.wait(END_S)
        return 200

    with Collector(refuse) as collector:
        proc = embedded.serve(more={**collector.env, **calm, "OTEL_EXPORTER_OTLP_TIMEOUT": "1"})
        for answer in (refuse, refuse_for_good, hang):
            collector.answer = answer
            collector.got.clear()
            lines = requests(60)
            embedded.judge(embedded.submit(lines), lines)
            wait_until(lambda: collector.got, END_S, "spans to be sent")
        proc.wait_for_line("traces_lost")
        collector.answer = lambda _: 200
        let_go.set()
        collector.got.clear()
        batch_id = embedded.submit(requests(3))
        embedded.until_status(batch_id, "completed")
        collector.until("process-batch")
        proc.wait_for_line("traces_sent_again")
    written = proc.stderr()
    assert [written.count(word) for word in ("traces_lost", "traces_sent_again", "opentelemetry")] == [1, 1, 0], written


def test_a_protocol_that_is_not_known_is_logged_and_nothing_else(embedded: Site, collector: Collector) -> None:
    proc = embedded.serve(more={**collector.env, "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"})
    proc.wait_for_line("traces_off")
    assert embedded.ended(embedded.submit(requests(1))).batch["status"] == "completed"
    assert collector.got == []
