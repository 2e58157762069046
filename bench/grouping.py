"""Embeddings in groups beside embeddings one by one: the whole durable road twice, turn by turn, at three latencies of the upstream.

Both sides have the same deployment with the same number of calls in flight; one of them may put several inputs into a call. Their results
must be the same, vector by vector, and the usage of their items must add up to what the engine billed.
"""

import json
import sys
import tempfile
import time
from pathlib import Path

import uvloop

from bench.machinery import median, simulated_engine, table
from bench.throughput import submit, until_ended
from tidegate.service import working
from tidegate.settings import load

LATENCIES_MS = (0, 20, 200)
IN_FLIGHT = 64
GROUP_INPUTS = 8
ENDPOINT = "/v1/embeddings"

# Seconds, tokens, and each item's vector and usage by its custom id.
Took = tuple[float, int, dict[str, tuple[object, int]]]


def _lines(count: int) -> list[bytes]:
    return [
        json.dumps(
            {
                "custom_id": f"doc-{number}",
                "method": "POST",
                "url": ENDPOINT,
                "body": {"model": "m", "input": f"Document {number}: " + "the sea and its tides, " * (1 + number % 7)},
            }
        ).encode()
        + b"\n"
        for number in range(count)
    ]


async def _road(url: str, lines: list[bytes], inputs: int) -> Took:
    """The job from create to completed, with at most so many inputs in a call."""
    with tempfile.TemporaryDirectory() as directory:
        place = {"url": url, "max_in_flight": IN_FLIGHT, "tide": "off", "upstream_max_batch_inputs": inputs}
        config = Path(directory) / "tidegate.yaml"
        # YAML reads JSON.
        config.write_text(json.dumps({"models": {"m": {"deployments": [place]}}}))
        settings = load(config, Path(directory) / "data", {"worker.in_flight_max": IN_FLIGHT}, {}).settings
        async with working(settings) as process, process.running():
            job_id = await submit(process, lines, ENDPOINT)
            began = time.perf_counter()
            process.parts.wakes.inputs.notify()
            await until_ended(process, job_id)
            seconds = time.perf_counter() - began
            parts = process.parts
            job = await parts.store.any_job(job_id)
            assert job is not None
            assert job.output_file_id is not None
            found: dict[str, tuple[object, int]] = {}
            left = b""
            for extent in await parts.store.list_extents(job.output_file_id, 0, 1_000_000):
                async for piece in parts.blobs.stream(extent.blob_id, extent.blob_at, extent.size_bytes):
                    left += piece
            for line in left.splitlines():
                result = json.loads(line)
                body = result["response"]["body"]
                found[result["custom_id"]] = (body["data"][0]["embedding"], body["usage"]["prompt_tokens"])
            return seconds, job.usage.input_tokens, found


def _check(alone: Took, grouped: Took) -> None:
    """Equal results, exact usage."""
    if {name: vector for name, (vector, _) in alone[2].items()} != {
        name: vector for name, (vector, _) in grouped[2].items()
    }:
        raise RuntimeError("items in groups have other vectors than items alone")
    for _, tokens, found in (alone, grouped):
        if tokens != alone[1] or sum(used for _, used in found.values()) != tokens:
            raise RuntimeError("the usage of the items does not add up to what the engine billed")


def main(quick: bool = False) -> dict[str, float]:
    rounds = 1 if quick else 5
    # Enough that the time before the first call and after the last, which is the same for both, is a small part.
    counts = {0: 3_000, 20: 3_000, 200: 800} if quick else {0: 20_000, 20: 6_000, 200: 1_500}
    found: dict[str, float] = {}
    rows = []
    for latency_ms in LATENCIES_MS:
        lines = _lines(counts[latency_ms])
        mode = ("--mode", "fixed", "--latency-ms", str(latency_ms)) if latency_ms else ("--mode", "instant")
        alone_s, grouped_s, ratios = [], [], []
        with simulated_engine(*mode) as url:
            for _ in range(rounds):
                alone = uvloop.run(_road(url, lines, 1))
                grouped = uvloop.run(_road(url, lines, GROUP_INPUTS))
                _check(alone, grouped)
                alone_s.append(alone[0])
                grouped_s.append(grouped[0])
                ratios.append(alone[0] / grouped[0])
        found[f"{latency_ms} ms"] = median(ratios)
        rates = f"{len(lines) / median(grouped_s):,.0f} items/s beside {len(lines) / median(alone_s):,.0f} alone"
        rows.append((f"{latency_ms} ms: {rates}", f"{median(ratios):.2f} times", "above 1"))
    table(
        f"Embeddings in groups of up to {GROUP_INPUTS}, {IN_FLIGHT} calls in flight, equal results, exact usage, {rounds} rounds (medians)",
        rows,
    )
    return found


if __name__ == "__main__":
    main("--quick" in sys.argv)
