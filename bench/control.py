"""How soon a running server does what a caller asks of a job of 50,000 items: validate, pause, resume, cancel, retry; on both stores.

Each act is one HTTP request to `tidegate serve`, made while its worker is busy with the job. A follow-up run of 5,000 failed items is
measured from the request until its first items are done.
"""

import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx2

from bench.inputs import MODEL
from bench.machinery import median, serving, simulated_engine, table
from tests.support.postgres import PostgresServer

ENDPOINT = "/v1/chat/completions"
FAILS_EVERY = 10
WAIT_S = 600
# Acts that are asked for while the job runs, and as often as this in turn.
TURNS = 5
ACCEPTED_MS, STARTED_MS, VALIDATED_MS = 200, 2_000, 2_000


def _lines(count: int) -> Iterator[str]:
    """Every tenth request is refused by the engine."""
    for number in range(count):
        text = f"Question {number}: what is the capital of the {number}th country?"
        content = json.dumps({"behave": "400"}) + text if number % FAILS_EVERY == 0 else text
        body = {"model": MODEL, "messages": [{"role": "user", "content": content}], "max_tokens": 16}
        yield json.dumps({"custom_id": f"c{number}", "method": "POST", "url": ENDPOINT, "body": body})


class _Caller:
    def __init__(self, url: str) -> None:
        self._client = httpx2.Client(base_url=url, timeout=WAIT_S)

    def post(self, path: str, **body: Any) -> tuple[dict[str, Any], float]:
        """Return the answer, and after how many milliseconds it came."""
        begun = time.perf_counter()
        answer = self._client.post(path, json=body)
        took_ms = 1_000 * (time.perf_counter() - begun)
        if answer.status_code != 200:
            raise RuntimeError(f"{path}: {answer.text}")
        return answer.json(), took_ms

    def upload(self, count: int) -> str:
        lines = "\n".join(_lines(count)).encode()
        files = {"file": ("in.jsonl", lines)}
        return str(
            self._client.post("/v1/files", files=files, data={"purpose": "batch"}).raise_for_status().json()["id"]
        )

    def create(self, file_id: str, **more: Any) -> tuple[dict[str, Any], float]:
        asked = {"input_file_id": file_id, "endpoint": ENDPOINT, "completion_window": "24h", **more}
        return self.post("/v1/batches", **asked)

    def until(self, batch_id: str, is_there: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        deadline = time.perf_counter() + WAIT_S
        while time.perf_counter() < deadline:
            batch = self._client.get(f"/v1/batches/{batch_id}").raise_for_status().json()
            if is_there(batch):
                return dict(batch)
            time.sleep(0.02)
        raise RuntimeError(f"{batch_id} did not get there")


def _done(batch: dict[str, Any]) -> int:
    return int(batch["request_counts"]["completed"]) + int(batch["request_counts"]["failed"])


def _has_ended(batch: dict[str, Any]) -> bool:
    return batch["status"] in ("completed", "failed", "expired", "cancelled")


def _acts(caller: _Caller, count: int) -> dict[str, float]:
    found: dict[str, float] = {}
    file_id = caller.upload(count)
    report, found["validate_only"] = caller.create(file_id, validate_only=True)
    if not report["valid"]:
        raise RuntimeError(f"the input is refused: {report}")
    whole = caller.create(file_id)[0]["id"]
    caller.until(whole, lambda batch: _done(batch) > 0)
    turns = [
        (caller.post(f"/v1/batches/{whole}/pause")[1], caller.post(f"/v1/batches/{whole}/resume")[1])
        for _ in range(TURNS)
    ]
    found["pause"], found["resume"] = (max(took) for took in zip(*turns, strict=True))
    stopped = caller.create(file_id)[0]["id"]
    caller.until(stopped, lambda batch: _done(batch) > 0)
    found["cancel"] = caller.post(f"/v1/batches/{stopped}/cancel")[1]
    caller.until(stopped, _has_ended)
    again, found["retry"] = caller.post(f"/v1/batches/{stopped}/retry", outcomes=["cancelled"])
    caller.post(f"/v1/batches/{again['id']}/cancel")
    caller.until(whole, _has_ended)
    begun = time.perf_counter()
    failed = caller.post(f"/v1/batches/{whole}/retry", outcomes=["failed"])[0]["id"]
    followed = caller.until(failed, lambda batch: _done(batch) > 0)
    found["follow-up"] = 1_000 * (time.perf_counter() - begun)
    if followed["request_counts"]["total"] != count // FAILS_EVERY:
        raise RuntimeError(f"the follow-up runs {followed['request_counts']}")
    return found


def _measure(directory: Path, engine: str, count: int, store_url: str = "") -> dict[str, float]:
    variables = {"TIDEGATE_STORE_URL": store_url} if store_url else {}
    with serving(directory, engine, **variables) as (url, _):
        return _acts(_Caller(url), count)


def main(quick: bool = False) -> dict[str, float]:
    count, rounds = (5_000, 1) if quick else (50_000, 3)
    goals = {"validate_only": VALIDATED_MS, "follow-up": STARTED_MS}
    found: dict[str, float] = {}
    rows = []
    with tempfile.TemporaryDirectory() as name, simulated_engine("--mode", "instant") as engine:
        # PostgreSQL does not run as root, so its own user must get into the directory.
        Path(name).chmod(0o755)
        server = PostgresServer(Path(name) / "postgres")
        server.start()
        try:
            for kind in ("SQLite", "PostgreSQL"):
                runs = []
                for turn in range(rounds):
                    url = server.create_database() if kind == "PostgreSQL" else ""
                    runs.append(_measure(Path(name) / f"{kind}-{turn}", engine, count, url))
                for act in runs[0]:
                    took_ms = found[f"{act}, {kind}"] = median([run[act] for run in runs])
                    rows.append((f"{act}, {kind}", f"{took_ms:.0f} ms", f"under {goals.get(act, ACCEPTED_MS):,} ms"))
        finally:
            server.stop()
    title = (
        f"Control of a job of {count:,} items while it runs; follow-up: {count // FAILS_EVERY:,} failed items run again"
    )
    table(f"{title}; {rounds} rounds (medians)", rows)
    return found


if __name__ == "__main__":
    main(quick="--quick" in sys.argv)
