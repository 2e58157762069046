"""Time lists, searches, pages and actions on a filter over HTTP with 100,000 jobs stored, on both stores; `--items` adds 10 million items.

Ended jobs and their items are written straight into the store. What is acted on runs for real beside them: 500 batches of 100 items, and
one of 50,000 whose items are paged through. Beside each time stands the CPU of the service and of the database, which other work on the
machine changes little.
"""

import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import asyncpg
import httpx2
import uvloop

from bench.backlog import JOB_ZEROS
from bench.inputs import MODEL
from bench.machinery import cpu_seconds, median, serving, simulated_engine, table
from tests.support.postgres import PostgresServer
from tidegate.backends.system import SystemClock
from tidegate.core.ids import RANDOM_BYTES, make
from tidegate.store.database.driver import Tx
from tidegate.store.database.postgres import PostgresDriver
from tidegate.store.database.rows import searched_text
from tidegate.store.database.sqlite import SqliteDriver
from tidegate.store.store import Store

ENDPOINT = "/v1/chat/completions"
ORGS = 20
ITEMS_EACH = 100
OPEN_SHARE, FAILED_SHARE = 100, 20
CHUNK = 1_000
LISTED_MS, ACCEPTED_MS, DONE_MS, SCRAPED_MS = 100, 200, 10_000, 50
ROUNDS = 15
ACTED_BATCHES, PAGED_ITEMS = 500, 50_000
WAIT_S = 600
_DAY_MS = 24 * 3600 * 1000
_JOB = (
    "id", "tenant_id", "kind", "words", "endpoint", "input_file_id", "window_text", "state", "closing", "created_at", "expires_at",
    "completed_at", "failed_at", "paused_at", "metadata", "invalid_lines", "errors", "model", "item_count", "output_file_id",
    "error_file_id", "share_owner", "queue", "cost_nano", "final_cost_nano", "final_failed_ppm", *JOB_ZEROS,
)  # fmt: skip
_JOB_MODEL = (
    "job_id", "model", "item_count", "slice_count", "work_units", "state", "share_owner", "created_at", "expires_at", "due_at", "queue",
)  # fmt: skip
_FILE = (
    "id", "tenant_id", "purpose", "filename", "state", "size_bytes", "line_count", "sha256", "created_at",
)  # fmt: skip
_OUTCOME = ("job_id", "number", "outcome", "at", "size_bytes", "crc32")


@dataclass(frozen=True, slots=True)
class Stored:
    """One of the jobs that are written into the store: one in a hundred is open and paused, one in twenty has failures."""

    number: int
    tenant_id: str
    created_at: int

    @property
    def id(self) -> str:
        return make("batch", random.Random(self.number).randbytes(RANDOM_BYTES))

    @property
    def is_open(self) -> bool:
        return self.number % OPEN_SHARE == 0

    @property
    def failed_count(self) -> int:
        return 7 if self.number % FAILED_SHARE == 1 else 0

    @property
    def is_refused(self) -> bool:
        return self.number % FAILED_SHARE == 2

    def job(self) -> tuple[Any, ...]:
        metadata = {"team": f"team-{self.number % 40}", "run": f"nightly-{self.number}", "owner": "someone@example.com"}
        pairs = (text for pair in metadata.items() for text in pair)
        words = "\n" + searched_text((self.id, ENDPOINT, self.filename, *pairs, MODEL))
        state = "in_progress" if self.is_open else "failed" if self.is_refused else "completed"
        ended_at = self.created_at + 60_000
        errors = '[{"code":"invalid_json_line","message":"no JSON","line":1}]' if self.is_refused else "[]"
        cost = 1_000_000 * (self.number % 1_000)
        zeros = {"failed_count": self.failed_count, "answered_count": 0 if self.is_open else ITEMS_EACH}
        return (
            self.id, self.tenant_id, "batch", words, ENDPOINT, f"file_{self.number}", "24h", state, None if self.is_open else state,
            self.created_at, self.created_at + 100 * _DAY_MS, ended_at if state == "completed" else None,
            ended_at if state == "failed" else None, ended_at if self.is_open else None, json.dumps(metadata, separators=(",", ":")),
            "fail", errors, MODEL, ITEMS_EACH, f"out_{self.number}", f"err_{self.number}" if self.failed_count else None,
            f"tenant:{self.tenant_id}", "default", cost, None if self.is_open else cost,
            None if self.is_open else 1_000_000 * self.failed_count // ITEMS_EACH, *(zeros.get(name, 0) for name in JOB_ZEROS),
        )  # fmt: skip

    @property
    def filename(self) -> str:
        return f"input-{self.number}.jsonl"

    def job_model(self) -> tuple[Any, ...]:
        due = self.created_at + 100 * _DAY_MS
        state = "held" if self.is_open else "closed"
        counts = (ITEMS_EACH, 1, 500 * ITEMS_EACH)
        return (self.id, MODEL, *counts, state, f"tenant:{self.tenant_id}", self.created_at, due, due, "default")

    def file(self) -> tuple[Any, ...]:
        size = (100_000, ITEMS_EACH, "")
        return (f"file_{self.number}", self.tenant_id, "batch", self.filename, "ready", *size, self.created_at)

    def outcomes(self) -> Iterator[tuple[Any, ...]]:
        for number in range(0 if self.is_open else ITEMS_EACH):
            yield (self.id, number, "answered", 500 * number, 500, number)


async def fill(store: Store, job_count: int, *, with_items: bool) -> None:
    """Write jobs of twenty organizations into an empty store; most are of the first one."""
    await store.migrate()
    now = await store.now_ms()
    tenants = [await store.put_tenant(make("tenant", bytes([n] * RANDOM_BYTES)), f"org-{n}") for n in range(ORGS)]
    for first in range(0, job_count, CHUNK):
        numbers = range(first, min(first + CHUNK, job_count))
        jobs = [
            Stored(number, tenants[number % ORGS if number % 5 == 0 else 0], now - (job_count - number) * 1_000)
            for number in numbers
        ]

        async def body(tx: Tx, jobs: list[Stored] = jobs) -> None:
            await tx.copy("files", _FILE, [one.file() for one in jobs])
            await tx.copy("jobs", _JOB, [one.job() for one in jobs])
            await tx.copy("job_models", _JOB_MODEL, [one.job_model() for one in jobs])
            if with_items:
                await tx.copy("outcomes", _OUTCOME, (row for one in jobs for row in one.outcomes()))

        await store._driver.write(body)


@dataclass(frozen=True, slots=True)
class Took:
    """How long something took, and how much CPU of the service and the database, where that was measured."""

    ms: float
    cpu_ms: float | None = None

    def __str__(self) -> str:
        return f"{self.ms:.0f} ms" + ("" if self.cpu_ms is None else f", {self.cpu_ms:.0f} ms of CPU")


@dataclass(frozen=True, slots=True)
class _Size:
    """How many jobs are stored, how many batches are acted on, and how many items one has whose pages are asked for."""

    jobs: int
    acted: int
    paged: int
    with_items: bool


class _Desk:
    """The requests that are timed: of an operator through the API and in the console, of the first organization, and of a scraper."""

    def __init__(self, url: str, operator: str, caller: str, pids: Sequence[int]) -> None:
        """`pids` are the processes that answer."""
        self._pids = pids
        self._clients = {
            name: httpx2.Client(base_url=url, timeout=WAIT_S, headers=headers)
            for name, headers in {
                "admin": {"Authorization": f"Bearer {operator}"},
                "v1": {"Authorization": f"Bearer {caller}"},
                "console": {"Origin": url},
                "metrics": {},
            }.items()
        }
        signed_in = self._clients["console"].post("/console/sign-in", data={"key": operator})
        if signed_in.status_code != 303:
            raise RuntimeError(f"/console/sign-in: {signed_in.text}")
        # A cookie that is marked as secure; a browser sends it on this machine.
        self._clients["console"].headers["Cookie"] = signed_in.headers["set-cookie"].partition(";")[0]

    def ask(self, path: str, body: dict[str, Any] | None = None) -> tuple[dict[str, Any], float]:
        """Return the answer, if that is JSON, and after how many milliseconds it came."""
        client = self._clients[path.split("?")[0].split("/")[1]]
        begun = time.perf_counter()
        answer = client.get(path) if body is None else client.post(path, json=body)
        took_ms = 1_000 * (time.perf_counter() - begun)
        if answer.status_code != 200:
            raise RuntimeError(f"{path}: {answer.text}")
        return answer.json() if "json" in answer.headers["content-type"] else {}, took_ms

    def cpu_ms(self) -> float:
        """Return the CPU that answered so far."""
        return 1_000 * (cpu_seconds(*self._pids) - cpu_seconds())

    def upload(self, count: int) -> str:
        lines = "\n".join(
            json.dumps(
                {
                    "custom_id": f"c{number}",
                    "method": "POST",
                    "url": ENDPOINT,
                    "body": {"model": MODEL, "messages": [{"role": "user", "content": f"Question {number}?"}]},
                }
            )
            for number in range(count)
        )
        sent = self._clients["v1"].post(
            "/v1/files", files={"file": ("in.jsonl", lines.encode())}, data={"purpose": "batch"}
        )
        return str(sent.raise_for_status().json()["id"])

    def until(self, path: str, is_there: Callable[[dict[str, Any]], bool]) -> float:
        begun = time.perf_counter()
        while time.perf_counter() < begun + WAIT_S:
            if is_there(self.ask(path)[0]):
                return 1_000 * (time.perf_counter() - begun)
            time.sleep(0.05)
        raise RuntimeError(f"{path} did not get there")


_LOOKS: dict[str, tuple[str, dict[str, Any] | None]] = {
    "overview": ("/admin/v1/overview", None),
    "overview, the console's page": ("/console", None),
    "list, the console's page": ("/console/batches", None),
    "queues, the console's page": ("/console/queues", None),
    "metrics scrape": ("/metrics", None),
    "list": ("/admin/v1/batches?limit=50", None),
    "list of one organization": ("/v1/batches?limit=50", None),
    "search, many match": ("/admin/v1/batches?limit=50&q=nightly", None),
    "search, one matches": ("/admin/v1/batches?limit=50&q=nightly-77", None),
    "search, none matches": ("/admin/v1/batches?limit=50&q=nowhere", None),
    "search of one organization, none matches": ("/v1/batches?limit=50&q=nowhere", None),
    "search of one organization by status, none matches": ("/v1/batches?limit=50&q=nowhere&status=completed", None),
    "status, none matches": ("/admin/v1/batches?limit=50&status=expired", None),
    "open status, none matches": ("/admin/v1/batches?limit=50&status=validating", None),
    "model, none matches": ("/admin/v1/batches?limit=50&model=nothing", None),
    "error code, none matches": ("/admin/v1/batches?limit=50&error_code=nothing", None),
    "metadata, one matches": ("/admin/v1/batches?limit=50&metadata[run]=nightly-77&metadata[team]=team-37", None),
    "by deadline": ("/admin/v1/batches?limit=50&sort=deadline", None),
    "by size": ("/admin/v1/batches?limit=50&sort=size", None),
    "by failures": ("/admin/v1/batches?limit=50&sort=failed", None),
    "by cost": ("/admin/v1/batches?limit=50&sort=cost", None),
    "by size, of one organization": ("/admin/v1/batches?limit=50&sort=size&org=org-7", None),
    "by size, none matches": ("/admin/v1/batches?limit=50&sort=size&q=nowhere", None),
    "by cost, none matches": ("/admin/v1/batches?limit=50&sort=cost&q=nowhere", None),
    "impact of a pause": ("/admin/v1/operations", {"action": "pause", "filter": {}, "dry_run": True}),
    "impact of a cancel": ("/admin/v1/operations", {"action": "cancel", "filter": {}, "dry_run": True}),
    "impact of a retry": ("/admin/v1/operations", {"action": "retry", "filter": {}, "dry_run": True}),
    "impact of a retry of what matches": (
        "/admin/v1/operations",
        {"action": "retry", "filter": {"q": "team-1"}, "dry_run": True},
    ),
}


def _repeated(desk: _Desk, path: str, body: dict[str, Any] | None, rounds: int) -> Took:
    """Ask the same question again and again."""
    before_ms = desk.cpu_ms()
    times = [desk.ask(path, body)[1] for _ in range(rounds)]
    return Took(median(times), (desk.cpu_ms() - before_ms) / rounds)


def _look(desk: _Desk, rounds: int) -> dict[str, Took]:
    """Ask each question in turn, so that each meets what the others left in the caches; its CPU is counted when it is asked repeatedly."""
    took: dict[str, list[float]] = {name: [] for name in _LOOKS}
    found = {"first metrics scrape": Took(desk.ask("/metrics")[1])}
    for _ in range(rounds):
        for name, (path, body) in _LOOKS.items():
            took[name].append(desk.ask(path, body)[1])
    for name, values in took.items():
        found[name] = Took(median(values), _repeated(desk, *_LOOKS[name], rounds).cpu_ms)
    return found


def _page(desk: _Desk, count: int, rounds: int) -> dict[str, Took]:
    """Page through the items of one batch: what its first and its last page take. Then compare two runs of its file."""
    wanted = {"input_file_id": desk.upload(count), "endpoint": ENDPOINT, "completion_window": "24h"}
    first, second = (desk.ask("/v1/batches", wanted)[0]["id"] for _ in range(2))
    path = f"/v1/batches/{first}"
    for batch_id in (first, second):
        desk.until(f"/v1/batches/{batch_id}", lambda batch: batch["status"] == "completed")
    after, last = "", ""
    while True:
        page = desk.ask(f"{path}/items?limit=100{after}")[0]
        if not page["has_more"]:
            break
        last, after = after, f"&after={page['last_id']}"
    return {
        "first page of items": _repeated(desk, f"{path}/items?limit=100", None, rounds),
        "last page of items": _repeated(desk, f"{path}/items?limit=100{last}", None, rounds),
        "two runs compared, the console's page": _repeated(
            desk, f"/console/batches/{first}/compare?with={second}", None, rounds
        ),
        "one batch, the console's page": _repeated(desk, f"/console/batches/{first}", None, rounds),
    }


def _act(desk: _Desk, count: int) -> dict[str, Took]:
    """Pause, resume and cancel batches that wait: what accepting takes, and when all of them are changed."""
    file_id = desk.upload(ITEMS_EACH)
    wanted = {
        "input_file_id": file_id,
        "endpoint": ENDPOINT,
        "completion_window": "24h",
        "metadata": {"acted": "yes"},
        "not_before": int(time.time()) + 3600,
    }
    for _ in range(count):
        desk.ask("/v1/batches", wanted)
    waiting = "/admin/v1/batches?limit=1&metadata[acted]=yes&status=validating"
    desk.until(waiting, lambda page: not page["data"])
    found: dict[str, Took] = {}
    for action in ("pause", "resume", "cancel"):
        found |= _operate(desk, action, {"metadata": {"acted": "yes"}}, count * ITEMS_EACH)
    return found


def _operate(desk: _Desk, action: str, wanted: dict[str, Any], items: int) -> dict[str, Took]:
    before_ms = desk.cpu_ms()
    made, accepted_ms = desk.ask("/admin/v1/operations", {"action": action, "filter": wanted})
    if made["matched"]["items"] != items:
        raise RuntimeError(f"{action} matched {made['matched']}")
    took_ms = desk.until(f"/admin/v1/operations/{made['id']}", lambda one: one["status"] == "completed")
    return {
        f"{action} is accepted": Took(accepted_ms),
        f"{action} is done": Took(accepted_ms + took_ms, desk.cpu_ms() - before_ms),
    }


def _key(data: Path, variables: dict[str, str], org: str, *scopes: str) -> str:
    command = [sys.executable, "-m", "tidegate", "keys", "create", "--org", org, "--json", "--data", str(data)]
    env = {**os.environ, **variables}
    made = subprocess.run([*command, *scopes], env=env, check=True, stdout=subprocess.PIPE)
    return str(json.loads(made.stdout)["key"])


def _measure(data: Path, server: PostgresServer | None, size: _Size) -> dict[str, Took]:
    store_url = "" if server is None else server.create_database()
    if store_url:
        store = Store(PostgresDriver(store_url, pool_size=2, statement_timeout_ms=600_000, pooler="none"))
    else:
        store = Store(SqliteDriver(data / "tidegate.db", SystemClock().now_ms))

    async def prepare() -> None:
        try:
            await fill(store, size.jobs, with_items=size.with_items)
        finally:
            await store.close()
        if store_url:
            # So many rows at once are counted by the database itself, but within a minute.
            connection = await asyncpg.connect(store_url)
            await connection.execute("analyze")
            await connection.close()

    uvloop.run(prepare())
    found: dict[str, Took] = {}
    variables = {"TIDEGATE_LIMITS_PENDING_JOBS_MAX": "0"}
    if store_url:
        variables["TIDEGATE_STORE_URL"] = store_url
    operator = _key(data, variables, "ops", "--scopes", "admin:write")
    caller = _key(data, variables, "org-0")
    with simulated_engine("--mode", "instant") as engine, serving(data, engine, **variables) as (url, pid):
        desk = _Desk(url, operator, caller, [pid] if server is None else [pid, server.pid()])
        rounds = max(3, min(ROUNDS, size.jobs // 2_000))
        found |= _look(desk, rounds)
        found |= _act(desk, size.acted)
        found |= _page(desk, size.paged, rounds)
    return found


def _budget(name: str) -> str:
    if name.endswith("is done"):
        return f"under {DONE_MS:,} ms"
    if name.endswith("is accepted"):
        return f"under {ACCEPTED_MS} ms"
    if name.endswith("scrape"):
        return f"under {SCRAPED_MS} ms"
    return f"under {LISTED_MS} ms"


def main(quick: bool = False, items: bool = False) -> dict[str, float]:
    size = _Size(5_000, 20, 2_000, items) if quick else _Size(100_000, ACTED_BATCHES, PAGED_ITEMS, items)
    found: dict[str, float] = {}
    rows = []
    with tempfile.TemporaryDirectory() as name:
        # PostgreSQL does not run as root, so its own user must get into the directory.
        Path(name).chmod(0o755)
        server = PostgresServer(Path(name) / "postgres")
        server.start()
        try:
            for kind in ("SQLite", "PostgreSQL"):
                took = _measure(Path(name) / kind, server if kind == "PostgreSQL" else None, size)
                found |= {f"{act}, {kind}": one.ms for act, one in took.items()}
                rows += [(f"{act}, {kind}", str(one), _budget(act)) for act, one in took.items()]
        finally:
            server.stop()
    stored = f"{size.jobs:,} jobs" + (f" and {size.jobs * ITEMS_EACH:,} items" if items else "")
    table(
        f"Lists, searches and actions with {stored} stored; {size.acted * ITEMS_EACH:,} items acted on (medians)", rows
    )
    return found


if __name__ == "__main__":
    main(quick="--quick" in sys.argv, items="--items" in sys.argv)
