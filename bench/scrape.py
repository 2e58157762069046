"""How long a scrape of `tidegate serve` takes, beside the cheapest answer of the same listener, after it has run items of many models."""

import json
import statistics
import sys
import time
import urllib.request

from bench.gateway import gateway
from bench.inputs import chat_lines
from bench.machinery import simulated_engine, table
from tests.support.processes import free_port

BUDGET_MS = 50
ROUNDS = 30


def _ms(url: str) -> tuple[float, int]:
    began = time.perf_counter()
    with urllib.request.urlopen(url) as answer:
        size_bytes = len(answer.read())
    return (time.perf_counter() - began) * 1000, size_bytes


def asked(url: str, headers: dict[str, str], body: bytes, kind: str) -> dict[str, str]:
    request = urllib.request.Request(url, body or None, {**headers, "Content-Type": kind})
    with urllib.request.urlopen(request) as answer:
        found: dict[str, str] = json.load(answer)
    return found


def run_items(url: str, headers: dict[str, str], count: int) -> str:
    """Run a batch of so many items to its end, and return its id."""
    boundary = "scrape"
    parts = [
        f'--{boundary}\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'.encode(),
        f'--{boundary}\r\nContent-Disposition: form-data; name="file"; filename="a.jsonl"\r\n\r\n'.encode(),
        *chat_lines(count),
        f"\r\n--{boundary}--\r\n".encode(),
    ]
    file = asked(f"{url}/files", headers, b"".join(parts), f"multipart/form-data; boundary={boundary}")
    wanted = {"input_file_id": file["id"], "endpoint": "/v1/chat/completions", "completion_window": "24h"}
    batch = asked(f"{url}/batches", headers, json.dumps(wanted).encode(), "application/json")
    while asked(f"{url}/batches/{batch['id']}", headers, b"", "application/json")["status"] != "completed":
        time.sleep(0.1)
    return batch["id"]


def main(quick: bool = False) -> dict[str, float]:
    port = free_port()
    with (
        simulated_engine("--mode", "instant") as engine,
        gateway(engine, settings={"metrics": {"port": port}}) as place,
    ):
        run_items(place.url, place.headers, 200 if quick else 5_000)
        scrapes, others, size_bytes = [], [], 0
        for _ in range(5 if quick else ROUNDS):
            took_ms, size_bytes = _ms(f"http://127.0.0.1:{port}/metrics")
            scrapes.append(took_ms)
            others.append(_ms(f"http://127.0.0.1:{port}/healthz")[0])
    scrape_ms, other_ms = statistics.median(scrapes), statistics.median(others)
    shown = f"{scrape_ms:.1f} ms for {size_bytes:,} bytes; /healthz {other_ms:.1f} ms; {scrape_ms / other_ms:.1f} times that"
    table("One scrape, medians", [("/metrics", shown, f"at most {BUDGET_MS} ms")])
    return {"scrape_ms": scrape_ms}


if __name__ == "__main__":
    main("--quick" in sys.argv)
