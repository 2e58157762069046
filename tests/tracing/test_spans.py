"""Traces: not imported while they are off, hostile contexts, and the header that goes to a model server."""

from __future__ import annotations

import gc
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence

import pytest
import structlog
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.trace import format_span_id

from tests.upstream.raw_server import RawServer
from tests.upstream.world import RouterWorld, deployment
from tidegate import tracing
from tidegate.core.deployments import Hints
from tidegate.core.nouns import Answer, Call, Usage
from tidegate.settings.collector import wants_traces
from tidegate.tracing.spans import ReportedExporter, Spans, _job_context

NOWHERE = "http://127.0.0.1:9"


@pytest.fixture
def spans(monkeypatch: pytest.MonkeyPatch) -> Iterator[Spans]:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", NOWHERE)
    tracing.start("0")
    assert tracing.ACTIVE is not None
    yield tracing.ACTIVE
    tracing.stop(0)


def test_nothing_of_opentelemetry_is_imported_while_traces_are_off() -> None:
    """Neither by the commands nor by a process that serves, also with Redis: everything is imported here that one needs."""
    code = (
        "import sys, tidegate.cli, tidegate.service; from tidegate import tracing; "
        "from tidegate.backends import limits_redis, queue_redis, shared_redis; assert 'redis' in sys.modules; "
        "print([name for name in sys.modules if name.startswith('opentelemetry')], tracing.ACTIVE)"
    )
    made = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, check=True)
    assert made.stdout.split() == ["[]", "None"]


@pytest.mark.parametrize(
    ("variables", "wanted"),
    [
        ({}, False),
        ({"OTEL_SERVICE_NAME": "x"}, False),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": NOWHERE}, True),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": NOWHERE}, True),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": NOWHERE, "OTEL_SDK_DISABLED": "True"}, False),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": NOWHERE, "OTEL_TRACES_EXPORTER": "none"}, False),
    ],
)
def test_traces_are_off_unless_a_collector_is_named(variables: dict[str, str], wanted: bool) -> None:
    assert wants_traces(variables) == (wanted, "")


def test_what_cannot_be_sent_says_why() -> None:
    for name, value in (("OTEL_TRACES_EXPORTER", "zipkin"), ("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc")):
        wanted, why = wants_traces({"OTEL_EXPORTER_OTLP_ENDPOINT": NOWHERE, name: value})
        assert not wanted
        assert name in why
        assert value in why


@pytest.mark.parametrize(
    "sent",
    [
        "",
        "garbage",
        "00-" + "0" * 32 + "-b7ad6b7169203331-01",
        "00-0af7651916cd43dd8448eb211c80319c-" + "0" * 16 + "-01",
        "ff-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
        "00-0AF7651916CD43DD8448EB211C80319C-b7ad6b7169203331-01",
        "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01\r\nx: y",
        "0" * 30_000,
    ],
)
def test_a_bad_context_begins_a_trace_of_its_own(spans: Spans, sent: str) -> None:
    tracing.CALLER.set(sent)
    creation = spans.begin_creation()
    assert creation.caller is None
    assert creation.context.is_valid
    assert len(creation.traceparent) == 55


@pytest.mark.parametrize(("flags", "is_sampled"), [("00", False), ("01", True)])
def test_a_job_is_sampled_as_its_caller_is(spans: Spans, flags: str, is_sampled: bool) -> None:
    tracing.CALLER.set(f"00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-{flags}")
    assert spans.begin_creation().traceparent[-2:] == flags
    assert spans.begin_creation().context.trace_flags.sampled == is_sampled


@pytest.mark.parametrize(("flags", "is_sampled"), [("00", False), ("01", True)])
def test_an_interactive_call_is_sampled_as_its_caller_is(spans: Spans, flags: str, is_sampled: bool) -> None:
    tracing.CALLER.set(f"00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-{flags}")
    span = spans.begin_interactive(RouterWorld().call(), is_stream=False)
    assert (span is not None) == is_sampled


def test_a_collector_that_fails_is_reported_once_and_once_more_when_it_works_again() -> None:
    fails, works = SpanExportResult.FAILURE, SpanExportResult.SUCCESS
    results = [works, fails, fails, works, works, fails]

    class Scripted(SpanExporter):
        def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
            return results.pop(0)

    exporter, two_spans = ReportedExporter(Scripted()), [ReadableSpan("one"), ReadableSpan("two")]
    with structlog.testing.capture_logs() as logged:
        while results:
            exporter.export(two_spans)
    assert [(line["event"], line.get("lost")) for line in logged] == [
        ("traces_lost", None), ("traces_sent_again", 4), ("traces_lost", None),
    ]  # fmt: skip


@pytest.mark.anyio
@pytest.mark.parametrize(("rate", "low", "high"), [("0", 0, 0), ("0.1", 20, 200), ("1", 1000, 1000)])
async def test_calls_are_sampled_one_by_one(monkeypatch: pytest.MonkeyPatch, rate: str, low: int, high: int) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", NOWHERE)
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "parentbased_traceidratio")
    monkeypatch.setenv("OTEL_TRACES_SAMPLER_ARG", rate)
    spans, call, headers = Spans("0"), RouterWorld().call(), []

    async def send(call: Call) -> Answer:
        headers.append(call.trace_header)
        return Answer(200, b"{}", Usage(), "d")

    for _ in range(1000):
        await spans.call(send, call, None)
    spans.close(0)
    traced = [header for header in headers if header]
    assert low <= len(traced) <= high
    assert len(set(traced)) == len(traced)


@pytest.mark.anyio
@pytest.mark.parametrize("hints", [Hints(), Hints(fairness_header="x-owner")])
async def test_the_trace_of_a_call_goes_on_in_the_model_server(hints: Hints) -> None:
    """On both ways of an item: the plain one, and the one of calls that need more than their body."""
    world, line = RouterWorld(), "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    async with RawServer() as server, world.router(deployment(server.url, hints=hints)) as router:
        await router.send(world.call(trace_header=f"traceparent: {line}\r\n".encode()))
        await router.send(world.call())
    assert [request.headers.get("traceparent") for request in server.requests] == [line, None]


@pytest.mark.anyio
async def test_few_spans_are_kept_for_a_collector_that_takes_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also while one of its connections hangs: what is kept does not grow with what is called."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{silent.getsockname()[1]}")
        monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "64")
        monkeypatch.setenv("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "16")
        spans, call, before = Spans("0"), RouterWorld().call(), _spans_alive()

        async def send(call: Call) -> Answer:
            return Answer(200, b"{}", Usage(), "d")

        for _ in range(3_000):
            await spans.call(send, call, None)
        assert _spans_alive() - before <= 64 + 16
        spans.close(0)


def _spans_alive() -> int:
    gc.collect()
    return sum(isinstance(one, ReadableSpan) for one in gc.get_objects())


def test_the_span_of_every_job_has_an_id_that_a_collector_takes(spans: Spans) -> None:
    creator = spans.begin_creation().traceparent
    for number in range(9):
        context = _job_context(f"batch_{number}", creator)
        assert context is not None
        assert context.is_valid
        assert len(format_span_id(context.span_id)) == 16
