"""Background responses on an idle engine: what one adds to the bare call, from the create to its answer."""

import json
import statistics
import tempfile
import time
from http.client import HTTPConnection
from pathlib import Path
from urllib.parse import urlsplit

from bench.machinery import serving, simulated_engine, table

ASK = {"model": "m", "input": "say hello", "max_output_tokens": 8}
WAIT = {"Prefer": "wait=30"}


def _call_ms(connection: HTTPConnection, body: dict[str, object]) -> float:
    began = time.perf_counter()
    connection.request("POST", "/v1/responses", json.dumps(body), {"Content-Type": "application/json", **WAIT})
    answer = json.loads(connection.getresponse().read())
    took_ms = 1_000 * (time.perf_counter() - began)
    assert answer["status"] in ("completed", "incomplete"), answer
    return took_ms


def _taken_ms(url: str, count: int, **more: object) -> list[float]:
    connection = HTTPConnection(urlsplit(url).netloc)
    body = {**ASK, **more}
    for _ in range(count // 10):
        _call_ms(connection, body)
    return sorted(_call_ms(connection, body) for _ in range(count))


def main(quick: bool = False) -> dict[str, float]:
    count = 50 if quick else 500
    with tempfile.TemporaryDirectory() as name, simulated_engine("--mode", "instant") as engine:
        with serving(Path(name) / "d", engine) as (url, _):
            bare, background = _taken_ms(engine, count), _taken_ms(url, count, background=True)
    added_ms = statistics.median(background) - statistics.median(bare)
    table(
        f"Background responses, `tidegate serve`, an idle engine, {count} one after another",
        [
            ("the bare call: median", f"{statistics.median(bare):.1f} ms", ""),
            ("a background response: median", f"{statistics.median(background):.1f} ms", ""),
            ("added: median", f"{added_ms:.1f} ms", "at most 20 ms"),
            ("a background response: p95", f"{background[count * 95 // 100]:.1f} ms", ""),
        ],
    )
    return {"added_ms": added_ms}
