"""The OpenTelemetry variables that switch traces on. The SDK reads the others itself."""

import os
from collections.abc import Mapping

_PROTOCOL = "http/protobuf"


def wants_traces(environ: Mapping[str, str] | None = None) -> tuple[bool, str]:
    """Return whether traces are sent, and the reason if they are asked for but cannot be sent."""
    environ = os.environ if environ is None else environ

    def given(name: str) -> str:
        return environ.get(name, "").strip()

    is_off = given("OTEL_SDK_DISABLED").lower() == "true" or given("OTEL_TRACES_EXPORTER") == "none"
    if is_off or not (given("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT") or given("OTEL_EXPORTER_OTLP_ENDPOINT")):
        return False, ""
    exporter = given("OTEL_TRACES_EXPORTER") or "otlp"
    if exporter != "otlp":
        return False, f"OTEL_TRACES_EXPORTER is {exporter!r}, and only otlp is known"
    protocol = given("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL") or given("OTEL_EXPORTER_OTLP_PROTOCOL") or _PROTOCOL
    if protocol != _PROTOCOL:
        return (
            False,
            f"OTEL_EXPORTER_OTLP_PROTOCOL is {protocol!r}, and only {_PROTOCOL} is known (port 4318 of a collector)",
        )
    return True, ""
