"""Tidegate as its users run it: processes of the command line over one store, asked through HTTP, judged from outside.

A `Site` is one installation. Embedded: SQLite and local files, one `tidegate serve`. Cluster: PostgreSQL and S3, one `tidegate api`
and as many `tidegate worker` processes as a test starts. Leases and polls are short, so that a lost process is missed within seconds.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx2
import msgspec
import psutil
from msgspec.structs import replace

from tests.support.engine import Engine
from tests.support.processes import Proc, Processes, wait_until
from tests.support.s3 import S3Server
from tidegate.core.errors import BlobMissing
from tidegate.core.ids import job_part
from tidegate.core.nouns import KeepTimes
from tidegate.judge import Allowance, Report, judge, postgres_records, sqlite_records
from tidegate.settings import Settings, load, local_path
from tidegate.stages.tend.garbage import Garbage
from tidegate.stages.tend.lost_workers import LostWorkers
from tidegate.storage import opened

LEASE_MS = 2_400
IN_FLIGHT = 4
# Calls in flight, and answers that came in while the last flush was on its way to the disk or, longer, to the object store.
UNRECORDED_MAX = 4 * IN_FLIGHT
TIDEGATE = str(Path(sys.executable).with_name("tidegate"))
QUICK = {
    "TIDEGATE_WORKER_LEASE_MS": str(LEASE_MS),
    "TIDEGATE_WORKER_HEARTBEAT_MS": "400",
    "TIDEGATE_WORKER_SWEEP_MS": "400",
    "TIDEGATE_WORKER_POLL_MS": "200",
    "TIDEGATE_WORKER_GRACE_MS": "5000",
    "TIDEGATE_WORKER_IN_FLIGHT_MAX": str(IN_FLIGHT),
    "TIDEGATE_WORKER_RECORD_FLUSH_MS": "10",
    "TIDEGATE_INGEST_SLICE_COUNT_MAX": "4",
    "TIDEGATE_STORE_STATEMENT_TIMEOUT_MS": "5000",
    # A backend costs PostgreSQL 20 ms of CPU from start to end.
    "TIDEGATE_STORE_POOL_SIZE": "4",
    "TIDEGATE_SERVER_PORT": "0",
}
# One item may hold a whole call of the slowest test, and a lost worker is missed only after its lease.
END_S = 60.0
ASK_S = 0.05
ENDED = ("completed", "failed", "expired", "cancelled")
UNBILLED = (401, 403, 429)


def chat_line(custom_id: str, text: str, model: str = "m") -> str:
    body = {"model": model, "messages": [{"role": "user", "content": text}], "max_tokens": 8}
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": "/v1/chat/completions", "body": body})


def behaving(behaviour: str) -> str:
    """A prompt that scripts how the simulated engine treats its call."""
    return json.dumps({"behave": behaviour})


def requests(count: int, text: Callable[[int], str] = lambda number: f"say {number}", model: str = "m") -> list[str]:
    """Lines with custom ids c0, c1, …"""
    return [chat_line(f"c{number}", text(number), model) for number in range(count)]


def write_config(directory: Path, config: Mapping[str, Any]) -> str:
    """Write a file of settings and return its path. YAML reads JSON."""
    path = directory / "tidegate.yaml"
    path.write_text(json.dumps(config))
    return str(path)


def operator_headers(data: Path) -> dict[str, str]:
    """What the server over this data directory takes as its operator's word."""
    return {"X-Tidegate-Control": json.loads((data / "control.json").read_text())["token"]}


class Results(msgspec.Struct, frozen=True):
    """A batch that ended, and the lines of its two files."""

    batch: dict[str, Any]
    output: list[dict[str, Any]]
    errors: list[dict[str, Any]]

    def error_codes(self) -> Counter[str]:
        return Counter(_code(line) for line in self.errors)


class Loss(msgspec.Struct, frozen=True):
    """What a worker that died left behind: how often it called each item, and the items whose answers are durable."""

    calls: Counter[str]
    durable: frozenset[str]

    def calls_max(self, item: str) -> int:
        """How many calls of an item there may be when another worker has gone on."""
        return self.calls[item] + (item not in self.durable)


class Site(msgspec.Struct):
    """One installation; `env` is what all its processes share."""

    kind: str
    processes: Processes
    directory: Path
    engine: Engine
    env: dict[str, str] = msgspec.field(default_factory=dict)
    url: str = ""
    front: Proc | None = None
    workers: list[Proc] = msgspec.field(default_factory=list)
    api_key: str = ""
    _client: httpx2.Client | None = None

    @property
    def embedded(self) -> bool:
        return self.kind == "embedded"

    @property
    def data(self) -> Path:
        """The data directory of the front, and of every worker that was given no other."""
        return self.directory / "data"

    def command(self, *args: str, data: Path | None = None) -> list[str]:
        return [TIDEGATE, *args, "--data", str(data or self.data)]

    def configure(self, **config: Any) -> None:
        """Give it a file of settings."""
        self.env["TIDEGATE_CONFIG"] = write_config(self.directory, config)

    def environment(self, failpoints: str = "", more: Mapping[str, str] | None = None) -> dict[str, str]:
        armed = {"TIDEGATE_FAILPOINTS": failpoints} if failpoints else {}
        given = {**self.env, **armed, **(more or {})}
        config = given.get("TIDEGATE_CONFIG")
        # One gateway for every model, unless the settings name deployments by model.
        by_model = config is not None and '"models"' in Path(config).read_text()
        upstream = {} if by_model else {"TIDEGATE_UPSTREAM_URL": self.engine.url}
        return {**os.environ, **QUICK, **upstream, **given}

    # ---- processes

    def serve(self, failpoints: str = "", more: Mapping[str, str] | None = None) -> Proc:
        """The one process of an embedded site."""
        proc = self.processes.start(self.command("serve"), name="serve", env=self.environment(failpoints, more))
        self._listens(proc)
        self.workers.append(proc)
        return proc

    def api(self, failpoints: str = "", more: Mapping[str, str] | None = None) -> Proc:
        proc = self.processes.start(self.command("api"), name="api", env=self.environment(failpoints, more))
        self._listens(proc)
        return proc

    def worker(
        self,
        failpoints: str = "",
        more: Mapping[str, str] | None = None,
        data: Path | None = None,
        name: str = "worker",
    ) -> Proc:
        proc = self.processes.start(
            self.command("worker", data=data), name=name, env=self.environment(failpoints, more)
        )
        proc.wait_for_line(r"tidegate worker_\w+ running")
        self.workers.append(proc)
        return proc

    def begin(self, failpoints: str = "", more: Mapping[str, str] | None = None) -> Proc:
        """Start everything with one process that runs items, which is returned: the one that a fault will meet."""
        if self.embedded:
            return self.serve(failpoints, more)
        self.api()
        return self.worker(failpoints, more)

    def relieve(self, more: Mapping[str, str] | None = None) -> Proc:
        """Start who goes on where the first one was lost: the same again, or another worker."""
        return self.serve(more=more) if self.embedded else self.worker(more=more, name="relief")

    def _listens(self, proc: Proc) -> None:
        self.url = proc.wait_for_line(r"tidegate listening on (http://\S+)").group(1)
        self.front = proc

    # ---- what a caller does

    def client(self) -> httpx2.Client:
        """One for each address: making a client costs more than all its calls."""
        if self._client is None or str(self._client.base_url).rstrip("/") != self.url:
            headers = {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}
            self._client = httpx2.Client(base_url=self.url, headers=headers, timeout=30, verify=False, trust_env=False)
        return self._client

    def as_caller(self, api_key: str) -> Site:
        """The same site, asked with a key."""
        return replace(self, api_key=api_key, _client=None)

    def operate(self, path: str, **body: Any) -> Any:
        """Ask as the operator who runs it."""
        answer = self.client().post(f"/admin/v1/{path}", json=body, headers=operator_headers(self.data))
        assert answer.status_code == 200, answer.text
        return answer.json()

    def keyed(self, org: str = "acme", **wanted: Any) -> Site:
        """The same site, asked with a new key of an organization."""
        return self.as_caller(self.operate("keys", org=org, **wanted)["key"])

    def upload(self, lines: Sequence[str], key: str | None = None) -> httpx2.Response:
        headers = {"Idempotency-Key": key} if key else {}
        data = "\n".join(lines).encode() + b"\n"
        files = {"file": ("in.jsonl", data)}
        return self.client().post("/v1/files", files=files, data={"purpose": "batch"}, headers=headers)

    def create(self, file_id: str, key: str | None = None, **more: Any) -> httpx2.Response:
        headers = {"Idempotency-Key": key} if key else {}
        body = {"input_file_id": file_id, "endpoint": "/v1/chat/completions", "completion_window": "24h", **more}
        return self.client().post("/v1/batches", json=body, headers=headers)

    def submit(self, lines: Sequence[str], **more: Any) -> str:
        """Upload and create; returns the batch's id."""
        file = self.upload(lines)
        assert file.status_code == 200, file.text
        batch = self.create(file.json()["id"], **more)
        assert batch.status_code == 200, batch.text
        return str(batch.json()["id"])

    def get(self, path: str) -> Any:
        answer = self.client().get(path)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def batch(self, batch_id: str) -> dict[str, Any]:
        return dict(self.get(f"/v1/batches/{batch_id}"))

    def batch_if_answered(self, batch_id: str) -> dict[str, Any] | None:
        """The same while the store may be away."""
        try:
            answer = self.client().get(f"/v1/batches/{batch_id}")
        except httpx2.TransportError:
            return None
        assert answer.status_code in (200, 503), answer.text
        return dict(answer.json()) if answer.status_code == 200 else None

    def until_done(self, batch_id: str, count: int) -> None:
        """Wait until so many items have an outcome."""

        def there() -> bool:
            counts = self.batch(batch_id)["request_counts"]
            return int(counts["completed"] + counts["failed"]) >= count

        wait_until(there, END_S, f"{count} items of {batch_id} to be done", poll_s=ASK_S)

    def until_called(self, count: int) -> None:
        """Wait until the engine has seen so many calls."""
        wait_until(lambda: len(self.calls()) >= count, END_S, f"{count} calls", poll_s=ASK_S)

    def cancel(self, batch_id: str) -> httpx2.Response:
        """Tell it to stop. A worker that was stopped in a transaction holds the row for a while, so a 503 is asked again."""
        answer = wait_until(lambda: self._cancel_once(batch_id), END_S, f"{batch_id} to be cancelled", poll_s=ASK_S)
        assert answer is not None
        return answer

    def _cancel_once(self, batch_id: str) -> httpx2.Response | None:
        answer = self.client().post(f"/v1/batches/{batch_id}/cancel")
        return answer if answer.status_code != 503 else None

    def content(self, file_id: str | None) -> list[dict[str, Any]]:
        if file_id is None:
            return []
        answer = self.client().get(f"/v1/files/{file_id}/content")
        assert answer.status_code == 200, answer.text
        return [json.loads(line) for line in answer.text.splitlines()]

    def until_status(self, batch_id: str, *statuses: str, timeout_s: float = END_S) -> dict[str, Any]:
        def there() -> dict[str, Any] | None:
            found = self.batch_if_answered(batch_id)
            return found if found is not None and found["status"] in statuses else None

        found = wait_until(there, timeout_s, f"{batch_id} to be {' or '.join(statuses)}", poll_s=ASK_S)
        assert found is not None
        return found

    def ended(self, batch_id: str, timeout_s: float = END_S) -> Results:
        batch = self.until_status(batch_id, *ENDED, timeout_s=timeout_s)
        return Results(batch, self.content(batch["output_file_id"]), self.content(batch["error_file_id"]))

    # ---- what was really called

    def calls(self) -> list[dict[str, Any]]:
        return [call for call in self.engine.calls() if call["path"].endswith("/chat/completions")]

    def calls_of(self, batch_id: str) -> list[dict[str, Any]]:
        """Those that were made for the items of one batch."""
        mine = (f"batch_req_{job_part(batch_id)}", f"batch_grp_{job_part(batch_id)}")
        return [call for call in self.engine.calls() if str(call["idempotency_key"]).startswith(mine)]

    def item_calls(self) -> Counter[str]:
        """Items by how often they were called in a way that may have been billed."""
        return Counter(
            call["idempotency_key"].partition("-")[0] for call in self.calls() if call["status"] not in UNBILLED
        )

    def loss(self) -> Loss:
        """Look at what a worker left that died just now. Ask before another worker starts."""
        self.engine.settle()
        stored = [] if self.embedded else asyncio.run(self._stored_blobs())
        return Loss(self.item_calls(), self.items_on_disk() | _items_in(stored))

    def items_on_disk(self) -> frozenset[str]:
        """Ids of the items whose answers lie, whole, in a log or a spool of this host, recorded or not."""
        places = ("blobs", "spool")
        return _items_in([path.read_bytes() for place in places for path in (self.data / place).rglob("blob_*")])

    async def _stored_blobs(self) -> list[bytes]:
        async with opened(self.settings, read_only=True) as parts:
            found = []
            for blob_id in await parts.blobs.list_ids("", 1_000):
                # A log that its dead worker did not end has bytes in the spool alone.
                with contextlib.suppress(BlobMissing):
                    found.append(await parts.blobs.read(blob_id, 0, await parts.blobs.size(blob_id) or 0))
            return found

    # ---- the store, seen from outside

    @property
    def settings(self) -> Settings:
        return load(None, self.data, {}, self.environment()).settings

    def rows(self, sql: str) -> list[dict[str, Any]]:
        """Ask the database itself, read-only, also while other processes use it."""

        async def ask() -> list[dict[str, Any]]:
            location = self.settings.store.location
            if self.embedded:
                async with sqlite_records(local_path(location)) as embedded_records:
                    return await embedded_records.rows(sql)
            async with postgres_records(location) as records:
                return await records.rows(sql)

        return asyncio.run(ask())

    def living(self) -> int:
        """How many incarnations beat within their leases: every worker, and the API."""
        rows = self.rows("select alive_until from workers where state = 'alive'")
        return len([row for row in rows if row["alive_until"] > time.time() * 1000])

    def is_gone(self, worker: Proc) -> bool:
        """Whether the first life of this worker was declared gone."""
        found = re.search(r"worker_\w{22}", worker.stdout())
        assert found is not None, worker.logs()
        return {"id": found[0]} in self.rows("select id from workers where state = 'gone'")

    def lease_ran_out(self) -> bool:
        """Whether no worker that is enlisted has sent a heartbeat within its lease."""
        return not [
            row for row in self.rows("select alive_until from workers") if row["alive_until"] > time.time() * 1000
        ]

    def blobs(self) -> set[str]:
        """Every blob that has bytes."""

        async def ask() -> set[str]:
            async with opened(self.settings, read_only=True) as parts:
                return set(await parts.blobs.list_ids("", 1_000))

        return asyncio.run(ask())

    def named_blobs(self) -> set[str]:
        """Every blob that a file is made of."""
        return {str(row["blob_id"]) for row in self.rows("select distinct blob_id from extents")}

    def end_all(self) -> None:
        """Stop every process that still runs, in the orderly way."""
        for proc in [*self.workers, *([self.front] if self.front else [])]:
            if proc.running:
                proc.terminate()
                assert proc.wait() == 0, proc.logs()

    def collect_garbage(self) -> None:
        """What the sweeps do, without the day that they let pass."""

        async def collect() -> None:
            async with opened(self.settings) as parts:
                garbage = Garbage(parts.store, parts.blobs, parts.clock, KeepTimes(orphan_ms=-1))
                for _ in range(4):
                    await LostWorkers(parts.store, parts.blobs).tend()
                    await garbage.tend()

        asyncio.run(collect())

    # ---- the judge

    def judge(
        self,
        batch_id: str,
        lines: Sequence[str],
        status: str = "completed",
        repeats_max: int | None = 0,
        loss: Loss | None = None,
        *,
        witnessed: bool = True,
    ) -> Results:
        """Wait for the end; then nothing may be lost or twice, the counts must be right and the repeats within bounds.

        After a `loss`, only items that had been called and are not durable may be called again, each of them once. With None instead of
        `repeats_max` that alone bounds them: how many answers a flush is behind depends on the machine."""
        results = self.ended(batch_id)
        batch = results.batch
        assert batch["status"] == status, batch
        wanted = Counter(json.loads(line)["custom_id"] for line in lines)
        got = Counter(line["custom_id"] for line in results.output + results.errors)
        assert got == wanted, f"lost {wanted - got}, twice or foreign {got - wanted}"
        counts = batch["request_counts"]
        assert counts["total"] == len(lines)
        assert counts["completed"] == len(results.output)
        assert all(line["response"]["status_code"] == 200 for line in results.output)
        if status == "completed":
            assert counts["failed"] == len(results.errors), results.errors[:3]
        calls = self.item_calls()
        mine = {item: calls[item] - 1 for item in calls if item.startswith(f"batch_req_{job_part(batch_id)}")}
        again = {item: count for item, count in mine.items() if count}
        assert repeats_max is not None or loss is not None, "something must bound the repeats"
        assert repeats_max is None or sum(again.values()) <= repeats_max, (
            f"{again} were called again, at most {repeats_max} calls may be"
        )
        if loss is not None:
            needless = {item for item, count in calls.items() if count > loss.calls_max(item)}
            assert not needless, f"{needless} were called again although their answers were durable, or more than once"
        self.verify(batch_id, witnessed=witnessed)
        return results

    def verify(self, batch_id: str, *, witnessed: bool = True) -> None:
        """What `tidegate verify` says, with the witness unless calls went elsewhere; asked without a process of its own, which would cost a
        second of CPU."""
        report = asyncio.run(self._verdict(batch_id, self.engine.calls_log if witnessed else None))
        assert report.ok, report.to_text()

    async def _verdict(self, batch_id: str, witness: Path | None) -> Report:
        settings = self.settings
        worker = settings.worker
        allowance = Allowance(attempts_max=settings.retry.attempts_max, grace_ms=worker.grace_ms + worker.lease_ms)
        async with opened(settings, read_only=True) as parts:
            if settings.store.is_postgresql:
                async with postgres_records(settings.store.location) as records:
                    return await judge(records, parts.blobs, batch_id, witness, allowance)
            async with sqlite_records(local_path(settings.store.location)) as embedded_records:
                return await judge(embedded_records, parts.blobs, batch_id, witness, allowance)


def until_stopped(proc: Proc) -> None:
    """Wait until a process has stopped itself at a failpoint."""

    def stopped() -> bool:
        assert proc.running, proc.logs()
        return str(psutil.Process(proc.pid).status()) == str(psutil.STATUS_STOPPED)

    wait_until(stopped, END_S, f"{proc.name} to stop")


def s3_env(server: S3Server, bucket: str, endpoint: str | None = None) -> dict[str, str]:
    return {
        "TIDEGATE_BLOBS_URL": f"s3://{bucket}/tg",
        "TIDEGATE_BLOBS_ENDPOINT": endpoint or server.endpoint,
        "TIDEGATE_BLOBS_REGION": server.region,
        "TIDEGATE_BLOBS_ACCESS_KEY_ID": server.access_key,
        "TIDEGATE_BLOBS_SECRET_ACCESS_KEY": server.secret_key,
        "TIDEGATE_BLOBS_ALLOW_HTTP": "true",
    }


def _code(line: dict[str, Any]) -> str:
    if line.get("error"):
        return str(line["error"]["code"])
    return str(line["response"]["status_code"])


def _items_in(logs: list[bytes]) -> frozenset[str]:
    whole = (line for data in logs for line in data.rpartition(b"\n")[0].splitlines())
    return frozenset(str(json.loads(line)["id"]) for line in whole if line.startswith(b'{"id":"batch_req_'))
