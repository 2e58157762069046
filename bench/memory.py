"""Memory of real processes: what a 200 MB upload adds to the API process, what its ingest and run add to any process; and how
quickly `create` answers whatever the input's size.

Two processes over PostgreSQL would hide nothing that one process shows, so `tidegate serve` with its ingest child is measured.
"""

import json
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from pathlib import Path
from typing import Any

import psutil

from bench.inputs import chat_line
from bench.machinery import serving, simulated_engine, table

MIB = 1 << 20


class Watch:
    """The peak resident memory of a process, and of each of its children, sampled often."""

    def __init__(self, pid: int) -> None:
        self._process = psutil.Process(pid)
        self._ended = threading.Event()
        self.base = self._anonymous(self._process)
        self.peak = self.base
        self.child_peak = 0
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()

    @staticmethod
    def _anonymous(process: psutil.Process) -> int:
        return int(process.memory_info().rss)

    def _look(self) -> None:
        while not self._ended.wait(0.01):
            try:
                self.peak = max(self.peak, self._anonymous(self._process))
                for child in self._process.children(recursive=True):
                    self.child_peak = max(self.child_peak, self._anonymous(child))
            except psutil.Error:
                continue

    def grown(self) -> float:
        self._ended.set()
        self._thread.join()
        return (self.peak - self.base) / MIB


def call(url: str, method: str = "GET", body: dict[str, Any] | None = None) -> dict[str, Any]:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"}, method=method)
    with urllib.request.urlopen(request) as answer:
        return json.loads(answer.read())  # type: ignore[no-any-return]


def upload(url: str, path: Path) -> str:
    """Through curl, so that this process's own memory and speed do not matter."""
    done = subprocess.run(
        ["curl", "-sS", "-F", "purpose=batch", "-F", f"file=@{path}", f"{url}/v1/files"],
        capture_output=True,
        check=True,
    )
    return str(json.loads(done.stdout)["id"])


def create(url: str, file_id: str) -> tuple[str, float]:
    began = time.perf_counter()
    job = call(
        f"{url}/v1/batches",
        "POST",
        {"input_file_id": file_id, "endpoint": "/v1/chat/completions", "completion_window": "24h"},
    )
    return job["id"], (time.perf_counter() - began) * 1000


def until_ended(url: str, job_id: str) -> dict[str, Any]:
    while True:
        job = call(f"{url}/v1/batches/{job_id}")
        if job["status"] in ("completed", "failed", "expired", "cancelled"):
            return job
        time.sleep(0.1)


def _child_base() -> int:
    """What a bare Python with the ingest module loaded weighs: an ingest child's growth is counted from there."""
    code = "import tidegate.stages.ingest.ingest_file, psutil, os; print(psutil.Process(os.getpid()).memory_info().rss)"
    return int(subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, text=True).stdout)


def main(quick: bool = False) -> dict[str, float]:
    count, line_bytes = (5_000, 4_194) if quick else (50_000, 4_190)
    with tempfile.TemporaryDirectory() as name, simulated_engine("--mode", "instant") as engine:
        data = Path(name)
        small, large = data / "small.jsonl", data / "large.jsonl"
        small.write_bytes(b"".join(chat_line(number) for number in range(10)))
        with large.open("wb") as stream:
            for number in range(count):
                stream.write(chat_line(number, line_bytes))
        with serving(data / "d", engine) as (url, pid):
            job_id, _ = create(url, upload(url, small))
            until_ended(url, job_id)
            watch = Watch(pid)
            large_id = upload(url, large)
            upload_mib = watch.grown()
            watch = Watch(pid)
            job_id, create_ms = create(url, large_id)
            job = until_ended(url, job_id)
            run_mib = watch.grown()
            child_mib = (watch.child_peak - _child_base()) / MIB
            if job["request_counts"]["completed"] != count:
                raise RuntimeError(f"the job ended as {job['status']}: {job['request_counts']} {job['errors']}")
        size_mib = large.stat().st_size / MIB
    figures = {"upload_mib": upload_mib, "run_mib": run_mib, "ingest_mib": child_mib, "create_ms": create_ms}
    table(
        f"Memory and create, {size_mib:.0f} MiB and {count:,} lines, `tidegate serve`",
        [
            ("upload adds to the API process", f"{upload_mib:.1f} MiB", "under 32 MB"),
            ("run adds to the serving process", f"{run_mib:.1f} MiB", "under 64 MB"),
            ("ingest's own process grows by", f"{child_mib:.1f} MiB", "under 64 MB"),
            ("create answers in", f"{create_ms:.1f} ms", "under 50 ms"),
        ],
    )
    return figures


if __name__ == "__main__":
    main()
