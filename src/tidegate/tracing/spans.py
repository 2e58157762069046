"""All spans. Only this module knows OpenTelemetry. Its SDK reads the other OTEL_* variables.

- A job passes through several processes, and each of them may be killed. So a job's span is made
  when the job ends, from its row. Its id is made from the job's id, so every process knows it.
- Each call of an item has its own trace, linked to its job's span. Calls are sampled one by one, so
  a trace does not grow with the size of a job.
- A call that items share continues the trace of its first sampled item, linked to the others.
- An interactive call continues the trace of its caller.
- Spans hold ids and counts, never prompts or answers.
"""

import logging
import re
import threading
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from hashlib import blake2b
from random import getrandbits
from typing import NamedTuple

import msgspec
import structlog
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_NAME, Resource
from opentelemetry.sdk.trace import Event, ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.sampling import Decision, Sampler, TraceIdRatioBased
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import (
    Link,
    NonRecordingSpan,
    SpanContext,
    SpanKind,
    Status,
    StatusCode,
    TraceFlags,
    set_span_in_context,
)

from tidegate.core.errors import UpstreamError
from tidegate.core.nouns import Answer, Call, Job, Usage
from tidegate.core.states import JOB_ENDED, JobState
from tidegate.tracing import CALLER, JOB

log = structlog.get_logger()

# The loggers of the SDK for spans that it could not send, or has no room for.
_SENDING_LOGGERS = ("opentelemetry.exporter", "opentelemetry.sdk._shared_internal")
_TRACEPARENT = re.compile(r"(?!ff)[0-9a-f]{2}-(?!0{32})([0-9a-f]{32})-(?!0{16})([0-9a-f]{16})-([0-9a-f]{2})(?:-.*)?")
_RATE = re.compile(r"(?:ParentBased\{root:)?TraceIdRatioBased\{([0-9.e-]+)\}")
_TEXT_MAX = 256
_ROOT = Context()
_STORAGE = {"store": "storage.Store", "retrieve": "storage.Retrieve", "delete": "storage.Delete"}
_OPERATIONS = {
    "/v1/chat/completions": "chat",
    "/v1/messages": "chat",
    "/v1/responses": "chat",
    "/v1/completions": "text_completion",
    "/v1/embeddings": "embeddings",
}
_ATTRIBUTES = Mapping[str, str | int | float]


class _SpanShape(NamedTuple):
    """The contents of a span beside its ids and times."""

    name: str
    attributes: _ATTRIBUTES
    parent: SpanContext | None = None
    links: tuple[Link, ...] = ()
    kind: SpanKind = SpanKind.INTERNAL
    events: tuple[Event, ...] = ()


class Creation(msgspec.Struct, frozen=True):
    """The trace of a job that is being created. `traceparent` is stored with the job."""

    traceparent: str
    context: SpanContext
    caller: SpanContext | None
    begun_ns: int


class _LastWord(logging.Handler):
    """A log handler that keeps the SDK's last message about sending, and prints none.

    The SDK logs one for each group of spans.
    """

    def __init__(self) -> None:
        super().__init__()
        self.text = ""
        for name in _SENDING_LOGGERS:
            logger = logging.getLogger(name)
            logger.handlers[:] = [self]
            logger.propagate = False

    def emit(self, record: logging.LogRecord) -> None:
        self.text = record.getMessage()


class ReportedExporter(SpanExporter):
    """An exporter that logs once when a collector fails, and once when it works again.

    Spans that could not be sent are dropped.
    """

    def __init__(self, exporter: SpanExporter) -> None:
        self._exporter = exporter
        self._last_word = _LastWord()
        self._lost = 0

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        result = self._exporter.export(spans)
        if result is not SpanExportResult.SUCCESS:
            if not self._lost:
                log.warning("traces_lost", why=self._last_word.text)
            self._lost += len(spans)
        elif self._lost:
            log.info("traces_sent_again", lost=self._lost)
            self._lost = 0
        return result

    def shutdown(self) -> None:
        self._exporter.shutdown()


class SpanSender:
    """A sender that passes ended spans to the exporter."""

    def __init__(self, resource: Resource, version: str) -> None:
        self._resource = resource
        self._scope = InstrumentationScope("tidegate", version)
        self._processor = BatchSpanProcessor(ReportedExporter(OTLPSpanExporter()))

    def close(self, timeout_s: float) -> None:
        # The SDK waits longer for a collector that does not answer than a process may take to stop.
        closing = threading.Thread(target=self._processor.shutdown, daemon=True)
        closing.start()
        closing.join(timeout_s)

    def send(self, shape: _SpanShape, context: SpanContext, begun_ns: int, ended_ns: int, failure: str = "") -> None:
        # The SDK drops a span that is not sampled.
        self._processor.on_end(
            ReadableSpan(
                name=shape.name,
                context=context,
                parent=shape.parent,
                resource=self._resource,
                attributes=shape.attributes,
                events=shape.events,
                links=shape.links,
                kind=shape.kind,
                status=Status(StatusCode.ERROR, failure) if failure else Status(),
                start_time=begun_ns,
                end_time=max(begun_ns, ended_ns),
                instrumentation_scope=self._scope,
            )
        )


class CallSpan:
    """The span of one call to a model server, named by the conventions for generative AI.

    It begins when the object is made, and `end_span` sends it once.
    """

    def __init__(
        self,
        sender: SpanSender,
        call: Call,
        context: SpanContext,
        parent: SpanContext | None,
        links: tuple[Link, ...],
        attributes: _ATTRIBUTES,
    ) -> None:
        self._sender = sender
        self._context = context
        self._parent = parent
        self._links = links
        operation = _OPERATIONS.get(call.endpoint, call.endpoint.removeprefix("/v1/").replace("/", "_"))
        self._name = f"{operation} {call.model[:_TEXT_MAX]}"
        self._begun_ns = time.time_ns()
        header = f"traceparent: 00-{context.trace_id:032x}-{context.span_id:016x}-01\r\n".encode()
        self.call = msgspec.structs.replace(call, trace_header=header)
        self._attributes: dict[str, str | int | float] = {
            "gen_ai.operation.name": operation,
            "gen_ai.provider.name": "anthropic" if call.endpoint == "/v1/messages" else "openai",
            "gen_ai.request.model": call.model[:_TEXT_MAX],
            **attributes,
        }

    async def around(self, send: Callable[[Call], Awaitable[Answer]]) -> Answer:
        """Send a call of items and end the span with the answer or the error."""
        try:
            answer = await send(self.call)
        except BaseException as error:
            self.end_span(error)
            raise
        self.note_usage(answer.deployment, answer.usage)
        if answer.is_grouped:
            self._attributes["batch.item.is_grouped"] = True
        self.end_span(None, answer.status)
        return answer

    def note_usage(self, deployment: str, usage: Usage) -> None:
        self._attributes |= {
            "gen_ai.usage.input_tokens": usage.input_tokens,
            "gen_ai.usage.output_tokens": usage.output_tokens,
            "gen_ai.usage.cache_read.input_tokens": usage.cached_tokens,
            "tidegate.deployment": deployment,
        }

    def note_first_chunk(self) -> None:
        self._attributes["gen_ai.response.time_to_first_chunk"] = (time.time_ns() - self._begun_ns) / 1e9

    def end_span(self, error: BaseException | None, status: int = 0) -> None:
        failure = ""
        if error is not None:
            failure = error.code if isinstance(error, UpstreamError) else type(error).__name__
            status = error.status if isinstance(error, UpstreamError) else 0
            self._attributes["error.type"] = failure
        if status:
            self._attributes["http.response.status_code"] = status
        shape = _SpanShape(self._name, self._attributes, self._parent, self._links, SpanKind.CLIENT)
        self._sender.send(shape, self._context, self._begun_ns, time.time_ns(), failure)


class Spans:
    def __init__(self, version: str) -> None:
        resource = Resource.create()
        if str(resource.attributes.get(SERVICE_NAME, "")).startswith("unknown_service"):
            resource = resource.merge(Resource({SERVICE_NAME: "tidegate"}))
        # The provider reads the sampler from OTEL_TRACES_SAMPLER.
        provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._sampler = provider.sampler
        self._call_bound = TraceIdRatioBased.get_bound_for_rate(_root_rate(provider.sampler))
        self._sender = SpanSender(resource, version)

    def close(self, timeout_s: float) -> None:
        self._sender.close(timeout_s)

    def begin_creation(self) -> Creation:
        """Begin the trace of a new job, sampled if its caller's trace is, or by the sampler."""
        caller = _context_of(CALLER.get())
        context = self._new_context("create-batch", caller)
        text = f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"
        return Creation(text, context, caller, time.time_ns())

    def end_creation(self, creation: Creation, job: Job) -> None:
        attributes = {**_ids_of(job), "file.id": job.input_file_id, "batch.kind": job.kind}
        shape = _SpanShape("create-batch", attributes, creation.caller, kind=SpanKind.SERVER)
        self._sender.send(shape, creation.context, creation.begun_ns, time.time_ns())

    def end_job(self, job: Job) -> None:
        """Send `process-batch`: the whole life of a job, from the moments in its row."""
        context = _job_context(job.id, job.traceparent)
        if context is None or job.state not in JOB_ENDED:
            return
        attributes: dict[str, str | int | float] = {
            **_ids_of(job),
            "file.id": job.input_file_id,
            "batch.kind": job.kind,
        }
        attributes["batch.status"] = job.state
        if job.in_progress_at is not None:
            attributes["batch.request.total"] = job.item_count
            attributes["batch.request.completed"] = job.answered_count
            attributes["batch.request.failed"] = job.item_count - job.answered_count
        for name, file_id in (("batch.output_file.id", job.output_file_id), ("batch.error_file.id", job.error_file_id)):
            if file_id is not None:
                attributes[name] = file_id
        failure = ""
        if job.state is JobState.FAILED:
            attributes["error.type"] = failure = job.errors[0].code if job.errors else "batch_failed"
        moments = (
            ("in_progress", job.in_progress_at),
            ("cancelling", job.cancelling_at),
            ("finalizing", job.finalizing_at),
        )
        events = tuple(Event(name, timestamp=_ns(at)) for name, at in moments if at is not None)
        ended_at = job.completed_at or job.failed_at or job.expired_at or job.cancelled_at or job.created_at
        creator = _context_of(job.traceparent or "")
        links = () if creator is None else (Link(creator),)
        shape = _SpanShape("process-batch", attributes, creator, links, SpanKind.CONSUMER, events)
        self._sender.send(shape, context, _ns(job.created_at), _ns(ended_at), failure)

    def postpone(self, job: Job, error: Exception) -> None:
        now_ns, failure = time.time_ns(), type(error).__name__
        links = _links_to(job.id, job.traceparent)
        shape = _SpanShape("re-enqueue", {**_ids_of(job), "error.type": failure}, links=links, kind=SpanKind.PRODUCER)
        self._sender.send(shape, self._new_context(shape.name, None), now_ns, now_ns, failure)

    @contextmanager
    def storage(self, operation: str) -> Iterator[None]:
        """Time an operation on a blob of the current job.

        A deletion has none, and its own trace.
        """
        job = JOB.get()
        parent = None if job is None else _job_context(job.id, job.traceparent)
        is_sampled = operation == "delete" if parent is None else parent.trace_flags.sampled
        if not is_sampled:
            yield
            return
        shape = _SpanShape(_STORAGE[operation], {} if job is None else _ids_of(job), parent, kind=SpanKind.CLIENT)
        context = self._new_context(shape.name, parent)
        begun_ns, failure = time.time_ns(), ""
        try:
            yield
        except BaseException as error:
            failure = type(error).__name__
            raise
        finally:
            self._sender.send(shape, context, begun_ns, time.time_ns(), failure)

    def call(self, send: Callable[[Call], Awaitable[Answer]], call: Call, traceparent: str | None) -> Awaitable[Answer]:
        """Send the call of an item. If it is sampled, its trace continues in the model server."""
        # A busy server samples few calls. The others must cost next to nothing, so no coroutine.
        low_bits = getrandbits(64)
        if low_bits >= self._call_bound:
            return send(call)
        context = self._context(getrandbits(64) << 64 | low_bits, is_sampled=True)
        links = _links_to(call.job_id, traceparent)
        item = {"batch.item.number": call.number, "batch.item.attempt": call.attempt_count + 1}
        span = CallSpan(self._sender, call, context, None, links, {"batch.id": call.job_id, **item})
        return span.around(send)

    async def shared_call(
        self, send: Callable[[Call], Awaitable[Answer]], call: Call, trace_headers: Iterable[bytes]
    ) -> Answer:
        """Send a call that several items share. It has a span if one of the items is sampled."""
        sampled = [context for header in trace_headers if (context := _context_of(_traceparent_in(header)))]
        if not sampled:
            return await send(call)
        context, links = self._context(sampled[0].trace_id, is_sampled=True), tuple(map(Link, sampled[1:]))
        items: _ATTRIBUTES = {"batch.id": call.job_id, "batch.item.count": call.items}
        return await CallSpan(self._sender, call, context, sampled[0], links, items).around(send)

    def begin_interactive(self, call: Call, *, is_stream: bool) -> CallSpan | None:
        """Begin the span of an interactive call; return None if the call is not sampled.

        It is sampled if its caller's trace is; without one, the sampler's rate decides.
        """
        caller = _context_of(CALLER.get())
        if caller is None:
            trace_id = getrandbits(128)
            if trace_id & TraceIdRatioBased.TRACE_ID_LIMIT >= self._call_bound:
                return None
            context = self._context(trace_id, is_sampled=True)
        else:
            context = self._new_context("call", caller)
            if not context.trace_flags.sampled:
                return None
        wanted: _ATTRIBUTES = {
            "tenant.id": call.share_owner.removeprefix("tenant:"),
            "gen_ai.request.stream": is_stream,
        }
        return CallSpan(self._sender, call, context, caller, (), wanted)

    def _new_context(self, name: str, parent: SpanContext | None) -> SpanContext:
        """Return the context of a new span. It is sampled if its parent is, or by the sampler."""
        trace_id = getrandbits(128) if parent is None else parent.trace_id
        around = _ROOT if parent is None else set_span_in_context(NonRecordingSpan(parent), _ROOT)
        decision = self._sampler.should_sample(around, trace_id, name).decision
        return self._context(trace_id, is_sampled=decision is Decision.RECORD_AND_SAMPLE)

    def _context(self, trace_id: int, *, is_sampled: bool) -> SpanContext:
        flags = TraceFlags(TraceFlags.SAMPLED if is_sampled else TraceFlags.DEFAULT)
        return SpanContext(trace_id, getrandbits(64), is_remote=False, trace_flags=flags)


def _root_rate(sampler: Sampler) -> float:
    """Return the share of new traces that a sampler takes.

    To ask the sampler for each call would cost more than the rest of an unsampled call.
    """
    found = _RATE.match(sampler.get_description())
    if found is not None:
        return float(found[1])
    return float(sampler.should_sample(_ROOT, getrandbits(128), "call").decision is Decision.RECORD_AND_SAMPLE)


def _context_of(traceparent: str) -> SpanContext | None:
    """Return the context in a W3C `traceparent`; None if it is empty or invalid."""
    found = _TRACEPARENT.fullmatch(traceparent)
    if found is None:
        return None
    trace_id, span_id, flags = (int(part, 16) for part in found.groups())
    return SpanContext(trace_id, span_id, is_remote=True, trace_flags=TraceFlags(flags & TraceFlags.SAMPLED))


def _traceparent_in(trace_header: bytes) -> str:
    return trace_header.decode("ascii").partition(": ")[2].rstrip()


def _job_context(job_id: str, traceparent: str | None) -> SpanContext | None:
    """Return the context of a job's span: its creation's trace, and an id made from the job's."""
    creator = _context_of(traceparent or "")
    if creator is None:
        return None
    span_id = int.from_bytes(blake2b(job_id.encode(), digest_size=8).digest(), "big")
    return SpanContext(creator.trace_id, span_id, is_remote=True, trace_flags=creator.trace_flags)


def _links_to(job_id: str, traceparent: str | None) -> tuple[Link, ...]:
    context = _job_context(job_id, traceparent)
    return () if context is None else (Link(context),)


def _ids_of(job: Job) -> dict[str, str | int | float]:
    return {"batch.id": job.id, "tenant.id": job.tenant_id}


def _ns(ms: int) -> int:
    return ms * 1_000_000
