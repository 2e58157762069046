"""What traces cost: CPU per item with one call in a hundred sampled, beside none, pair by pair.

`tidegate run` sends its spans to a collector that only answers, in a process whose CPU is not counted. An item's cost is the difference
between a run and one of a quarter of its items (`bench/costs.py`), so that importing OpenTelemetry is left out.
"""

import contextlib
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from bench.costs import PAIRS, Items, take_turns
from bench.machinery import median, repository, simulated_engine, table

MORE_MAX = 1.02
SAMPLED = {"OTEL_TRACES_SAMPLER": "parentbased_traceidratio", "OTEL_TRACES_SAMPLER_ARG": "0.01"}
COLLECT = "collect"


class _Collecting(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        self.send_response(200)
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""


def _collect() -> None:
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Collecting)
    print(f"http://127.0.0.1:{server.server_port}", flush=True)
    server.serve_forever()


@contextlib.contextmanager
def _collector() -> Iterator[str]:
    """The address of a collector, while it runs."""
    command = [sys.executable, "-m", "bench.traces", COLLECT]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=repository()) as process:
        assert process.stdout is not None
        try:
            yield process.stdout.readline().strip()
        finally:
            process.terminate()


def main(quick: bool = False) -> dict[str, float]:
    pairs, count = (2, 8_000) if quick else (PAIRS, 20_000)
    with tempfile.TemporaryDirectory() as name, simulated_engine("--mode", "instant") as engine, _collector() as url:
        items = Items(engine, Path(name), count)
        sides = ({**SAMPLED, "OTEL_EXPORTER_OTLP_ENDPOINT": url}, {"OTEL_SDK_DISABLED": "true"})
        on, off = take_turns(sides, pairs, lambda side: items.sample(repository(), {}, variables=side))
    ratios = sorted(one / other for one, other in zip(on, off, strict=True))
    found = f"{median(on):.1f} µs; without {median(off):.1f} µs; times that {median(ratios):.3f} (medians {median(on) / median(off):.3f}; "
    found += ", ".join(f"{ratio:.2f}" for ratio in ratios) + ")"
    table(f"CPU of traces, {pairs} pairs in turns", [("an item, sampled at 1 %", found, f"at most {MORE_MAX}")])
    return {"on": median(on), "off": median(off), "ratio": median(ratios)}


if __name__ == "__main__":
    if COLLECT in sys.argv:
        _collect()
    else:
        main("--quick" in sys.argv)
