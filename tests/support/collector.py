"""A collector of traces on a real socket: it decodes the spans that processes send over OTLP/HTTP."""

from __future__ import annotations

from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from tests.support.processes import wait_until
from tests.support.receiver import Receiver
from tests.support.tidegate import END_S


class Collector(Receiver):
    @property
    def env(self) -> dict[str, str]:
        return {
            "OTEL_EXPORTER_OTLP_ENDPOINT": self.url.removesuffix("/hook"),
            "OTEL_EXPORTER_OTLP_HEADERS": "x-own=value",
            "OTEL_SERVICE_NAME": "tidegate-test",
            "OTEL_BSP_SCHEDULE_DELAY": "100",
        }

    def spans(self, name: str | None = None) -> list[Any]:
        """The spans that have come so far, in any order; with a name, only those."""
        found = []
        for got in list(self.got):
            assert got.path == "/v1/traces"
            assert got.headers["x-own"] == "value"
            for resource in ExportTraceServiceRequest.FromString(got.body).resource_spans:
                assert values_of(resource.resource.attributes)["service.name"] == "tidegate-test"
                found += [
                    span for scope in resource.scope_spans for span in scope.spans if name is None or span.name == name
                ]
        return found

    def until(self, name: str, count: int = 1) -> list[Any]:
        wait_until(lambda: len(self.spans(name)) >= count, END_S, f"{count} spans {name}")
        return self.spans(name)


def values_of(attributes: Any) -> dict[str, Any]:
    """The attributes of a span or a resource as a dictionary."""
    return {one.key: getattr(one.value, one.value.WhichOneof("value")) for one in attributes}
