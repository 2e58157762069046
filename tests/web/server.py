"""The web app behind a real socket, with a store and blobs of its own, in a thread with its own loop."""

from __future__ import annotations

import asyncio
import secrets
import threading
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, TypeVar

import httpx2
import msgspec
import uvloop

from tests.support.ports import FairDice, PushedClock
from tidegate.backends.blobs_local import LocalBlobs
from tidegate.backends.callback_sender import CallbackSender
from tidegate.backends.queue_redis import RedisQueue
from tidegate.core import ids, keys
from tidegate.core.deployments import Secret
from tidegate.core.nouns import Caller, Job
from tidegate.core.ports import Wakes
from tidegate.interactive_usage import InteractiveUsageBook
from tidegate.settings import deployments, resources
from tidegate.settings.capacity import ModelDeployment, ModelSettings
from tidegate.settings.groups import Group, Settings
from tidegate.store.database.postgres import PostgresDriver
from tidegate.store.database.sqlite import SqliteDriver
from tidegate.store.limits import StoreLimits
from tidegate.store.store import Store
from tidegate.store.tenants.keys import KeyRights
from tidegate.upstream.calls.open_router import open_router
from tidegate.upstream.routing.slots import Capacity
from tidegate.web.app import build_app
from tidegate.web.context import WebContext
from tidegate.web.doors import SCOPES
from tidegate.web.http.serving import ListenLimits, listening

T = TypeVar("T")

PEPPER = b"p" * 32
CONTROL_TOKEN = "control-token-of-the-tests"
OPERATOR = {"X-Tidegate-Control": CONTROL_TOKEN}
# Nothing listens there.
NOWHERE = "http://127.0.0.1:9/v1"


class Bell:
    def __init__(self) -> None:
        self.rung = 0

    def notify(self) -> None:
        self.rung += 1

    def listen(self) -> Bell:
        return self

    async def wait(self, timeout_s: float) -> None:
        await asyncio.sleep(timeout_s)


class WebServer:
    """`url` is where it listens; `run` does something in its loop, beside it."""

    def __init__(self, directory: Path, settings: Settings, postgres_url: str | None = None) -> None:
        self.clock = PushedClock()
        self.bell = Bell()
        self.settings = settings
        self.port = 0
        self.url = ""
        self.problems: dict[str, str | None] = {"worker": None}
        self._directory = directory
        self._postgres_url = postgres_url
        self._loop = uvloop.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="web-server", daemon=True)
        self.store: Store
        self.blobs: LocalBlobs
        self.app: Any

    def start(self) -> None:
        self._thread.start()
        self.run(self._open())

    def stop(self) -> None:
        # Streams end first, as they do in a process that gets its signal: a page in a browser would keep its own open.
        self.stop_asked()
        self.run(self._close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()

    def stop_asked(self) -> None:
        """As when the process gets its signal: what is open may end by itself."""
        self._loop.call_soon_threadsafe(self._stop_asked.set)

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(60)

    async def _open(self) -> None:
        if self._postgres_url is None:
            driver: Any = SqliteDriver(self._directory / "tidegate.db", self.clock.now_ms)
        else:
            driver = PostgresDriver(self._postgres_url, pool_size=4, statement_timeout_ms=30_000, pooler="none")
        self.store = Store(driver)
        await self.store.migrate()
        self.blobs = LocalBlobs(self._directory / "blobs")
        self.scratch = self._directory / "scratch"
        self.scratch.mkdir(exist_ok=True)
        self.worker_id = fresh_id("worker")
        await self.store.enlist_worker(self.worker_id, "here", "test", 3_600_000)
        self.router = open_router(
            self.settings.http.limits(takes_interactive=True),
            self.clock,
            FairDice(),
            capacity=Capacity(limits=StoreLimits(self.store, self.worker_id)),
            open_queue=lambda queue: RedisQueue(queue, self.worker_id),
        )
        self.router.serve(deployments(self.settings), resources(self.settings))
        self.callbacks = CallbackSender(self.settings.callbacks.rules(), "Tidegate/test")
        self.book = InteractiveUsageBook(self.store, FairDice())
        self._stop_asked = asyncio.Event()
        self.context = WebContext(
            store=self.store,
            blobs=self.blobs,
            settings=self.settings,
            clock=self.clock,
            entropy=FairDice(),
            wakes=Wakes(self.bell, self.bell, self.bell),
            worker_id=lambda: self.worker_id,
            pepper=PEPPER,
            router=self.router,
            callbacks=self.callbacks,
            scratch=self.scratch,
            scopes=SCOPES,
            readiness=lambda: self.problems,
            control_token=Secret(CONTROL_TOKEN),
            book=self.book,
            stop=self._stop_asked,
        )
        self.app = build_app(self.context)
        await self.listen()

    async def listen(self, port: int = 0) -> None:
        http, server = self.settings.http, self.settings.server
        limits = ListenLimits(server.connections_max, http.client_timeout_s, self.settings.worker.grace_ms / 1000)
        self._listening = listening(self.app, "127.0.0.1", port, limits)
        self.url = await self._listening.__aenter__()
        self.port = int(self.url.rpartition(":")[2])

    async def stop_listening(self) -> None:
        await self._listening.__aexit__(None, None, None)

    async def _close(self) -> None:
        await self.stop_listening()
        await self.router.close()
        await self.callbacks.close()
        await self.book.close()
        await self.blobs.close()
        await self.store.close()
        left = asyncio.all_tasks() - {asyncio.current_task()}
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)

    def client(self, key: str | None = None) -> httpx2.Client:
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        return httpx2.Client(base_url=self.url, headers=headers, timeout=30)

    def make_key(self, tenant: str, **options: Any) -> str:
        """A key for a tenant of this name; the web app notices within two seconds, so its clock is pushed that far."""
        key = keys.make(secrets.token_bytes(keys.RANDOM_BYTES))

        async def put() -> None:
            tenant_id = await self.store.put_tenant(fresh_id("tenant"), tenant)
            await self.store.put_key(
                Caller(tenant_id, key.public_id, options.get("team"), options.get("user")),
                keys.keyed_hash(PEPPER, key.text.reveal()),
                "test",
                KeyRights(
                    scopes=SCOPES.text(options.get("scopes", ())),
                    models=keys.models_text(options.get("models", ())),
                    resources=keys.models_text(options.get("resources", ())),
                    limits=options.get("limits", ()),
                    expires_at=options.get("expires_at"),
                    parallel_max=options.get("parallel_max", 0),
                    addresses=keys.addresses_text(options.get("addresses", ())),
                    environments=keys.models_text(options.get("environments", ())),
                ),
            )

        self.run(put())
        self.clock.ahead_ms += 2_001
        return key.text.reveal()

    def statement(self, sql: str, *values: object) -> list[Any]:
        """Ask the database directly, past the Store (SQLite only)."""

        async def ask() -> list[Any]:
            async def body(tx: Any) -> list[Any]:
                return list(tx._connection.execute(sql, values))

            return await self.store._driver.read(body)

        return self.run(ask())

    def rewrite(self, sql: str) -> None:
        """Bend a row to a shape that only a long run would give it (SQLite only)."""

        async def bend() -> None:
            async def body(tx: Any) -> None:
                tx._connection.execute(sql).fetchall()

            await self.store._driver.write(body)

        self.run(bend())

    def job(self, job_id: str) -> Job:
        job = self.run(self.store.any_job(job_id))
        assert job is not None
        return job


def fresh_id(kind: str) -> str:
    return ids.make(kind, secrets.token_bytes(ids.RANDOM_BYTES))


def model_at(url: str = NOWHERE, **options: Any) -> ModelSettings:
    """A model at one server."""
    return ModelSettings((ModelDeployment(url, **options),))


def settings_with(**groups: Any) -> Settings:
    """The default settings, but for these: `limits={"uploads_max": 1}`."""
    base = Settings()
    changed = {
        name: msgspec.structs.replace(group, **values) if isinstance(group, Group) else values
        for name, values in groups.items()
        for group in [getattr(base, name)]
    }
    return msgspec.structs.replace(base, **changed)
