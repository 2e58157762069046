"""Traces as a collector gets them: an OTLP/HTTP receiver on a real socket decodes what processes send."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from tests.support.processes import wait_until
from tests.support.receiver import Receiver
from tests.support.tidegate import END_S, Site, behaving, requests

CALLER = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


class Collector(Receiver):
    @property
    def env(self) -> dict[str, str]:
        return {
            "OTEL_EXPORTER_OTLP_ENDPOINT": self.url.removesuffix("/hook"),
            "OTEL_EXPORTER_OTLP_HEADERS": "x-own=value",
            "OTEL_SERVICE_NAME": "tidegate-test",
            "OTEL_BSP_SCHEDULE_DELAY": "100",
        }

    def spans(self, name: str) -> list[Any]:
        """The spans with this name that have come so far, in any order."""
        found = []
        for got in list(self.got):
            assert got.path == "/v1/traces"
            assert got.headers["x-own"] == "value"
            for resource in ExportTraceServiceRequest.FromString(got.body).resource_spans:
                assert _values(resource.resource.attributes)["service.name"] == "tidegate-test"
                found += [span for scope in resource.scope_spans for span in scope.spans if span.name == name]
        return found

    def until(self, name: str, count: int = 1) -> list[Any]:
        wait_until(lambda: len(self.spans(name)) >= count, END_S, f"{count} spans {name}")
        return self.spans(name)


@pytest.fixture
def collector() -> Iterator[Collector]:
    with Collector() as made:
        yield made


def _values(attributes: Any) -> dict[str, Any]:
    return {one.key: getattr(one.value, one.value.WhichOneof("value")) for one in attributes}


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
    values = _values(root.attributes)
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
    assert root.end_time_unix_nano > root.start_time_unix_nano
    for name in ("storage.Retrieve", "storage.Store"):
        assert {span.parent_span_id for span in collector.until(name) if span.trace_id == root.trace_id} == {
            root.span_id
        }
    # Those of the killed worker may be lost; it ended in the first half.
    calls = collector.until("chat m", 8)
    assert all(one.links[0].span_id == root.span_id and one.trace_id != root.trace_id for one in calls)
    answered = _values(next(one for one in calls if one.status.code == 0).attributes)
    assert answered["gen_ai.operation.name"] == "chat"
    assert answered["gen_ai.request.model"] == "m"
    assert answered["gen_ai.usage.output_tokens"] > 0
    assert answered["http.response.status_code"] == 200
    assert answered["batch.item.number"] in range(16)
    refused = next(one for one in calls if one.status.code == 2)
    assert _values(refused.attributes)["error.type"] == refused.status.message != ""
    assert b"say 1" not in b"".join(got.body for got in collector.got)


def test_a_failed_job_says_so_and_a_collector_that_is_gone_costs_nothing(embedded: Site) -> None:
    with Collector() as collector:
        proc = embedded.serve(more=collector.env)
        embedded.until_status(embedded.submit(["not json"]), "failed")
        [root] = collector.until("process-batch")
    assert root.status.code == 2
    assert _values(root.attributes)["error.type"] == root.status.message != ""
    assert embedded.ended(embedded.submit(requests(3))).batch["status"] == "completed"
    begun_s = time.monotonic()
    proc.terminate()
    assert proc.wait() == 0
    # The SDK alone would wait for 30 s.
    assert time.monotonic() - begun_s < 20


def test_a_protocol_that_is_not_known_is_logged_and_nothing_else(embedded: Site, collector: Collector) -> None:
    proc = embedded.serve(more={**collector.env, "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"})
    proc.wait_for_line("traces_off")
    assert embedded.ended(embedded.submit(requests(1))).batch["status"] == "completed"
    assert collector.got == []
