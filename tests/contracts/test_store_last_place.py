"""What every store does when several processes take the last place of a limit at once: one of them gets it, and the others are refused."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import pytest
from msgspec.structs import replace

from tests.contracts.store_world import StoreWorld
from tests.contracts.test_store_responses import Ask
from tests.contracts.test_store_uploads import part_of
from tidegate.core.budgets.budget import Budget, Limit, LimitBound, Period, creation_budgets
from tidegate.core.errors import ApiProblem
from tidegate.core.files import PartedUpload, UploadRequest
from tidegate.core.nouns import Caller, Quotas
from tidegate.core.webhooks import EVENT_TYPES, EndpointShape
from tidegate.store.store import Store
from tidegate.store.tenants import uploads, webhooks

pytestmark = pytest.mark.anyio

ROUNDS = 6
AT_ONCE = 6


@dataclass
class Place:
    """A tenant that may make two things of a kind, over one of several stores."""

    world: StoreWorld
    caller: Caller
    store: Store
    worker_id: str
    upload: PartedUpload

    def through(self, store: Store) -> Place:
        return Place(replace_store(self.world, store), self.caller, store, self.worker_id, self.upload)

    async def job(self, quotas: Quotas) -> object:
        file = await self.world.file(self.caller, line_count=5, size_bytes=50)
        return await self.world.job(self.caller, file, quotas=quotas)

    async def create_upload(self, quotas: Quotas | None = None) -> object:
        request = UploadRequest(30, "batch", "in.jsonl", "application/jsonl", 5_000)
        return await self.store.create_upload(self.caller, self.world.id("upload"), request, quotas=quotas)

    async def add_part(self, size_bytes: int, quotas: Quotas | None = None) -> object:
        return await self.store.add_upload_part(
            self.caller, await part_of(self.world, self.upload, size_bytes), quotas=quotas
        )

    async def endpoint(self) -> object:
        shape = EndpointShape("n", "https://a.example", EVENT_TYPES)
        return await self.store.create_webhook_endpoint(self.caller.tenant_id, self.world.id("whk"), shape, b"1" * 32)


def hourly(caller: Caller) -> tuple[Budget, ...]:
    return creation_budgets(LimitBound.TENANT, caller.tenant_id, [Limit(Period.HOUR, jobs=2)])


def replace_store(world: StoreWorld, store: Store) -> StoreWorld:
    return StoreWorld(store, world.clock, world.open_another, world.blobs, world._numbers)


KINDS: dict[str, Callable[[Place], Awaitable[object]]] = {
    "batches of a tenant": lambda place: place.job(Quotas(pending_jobs_max=2)),
    "batches of a key": lambda place: place.job(Quotas(pending_jobs_per_key_max=2)),
    "queued requests": lambda place: place.job(Quotas(queued_items_max=14)),
    "batches in an hour": lambda place: place.job(Quotas(jobs_per_hour_max=2)),
    "bytes in a day": lambda place: place.job(Quotas(bytes_per_day_max=149)),
    "batches in a period": lambda place: place.job(Quotas(creation=hourly(place.caller))),
    "stored bytes": lambda place: place.world.file(
        place.caller, size_bytes=50, quotas=Quotas(stored_bytes_max=149), store=place.store
    ),
    "pending uploads": lambda place: place.create_upload(),
    "parts of an upload": lambda place: place.add_part(5),
    "bytes of an upload": lambda place: place.add_part(29),
    "stored bytes of parts": lambda place: place.add_part(10, Quotas(stored_bytes_max=29)),
    "responses": lambda place: Ask(place.world, pending_responses_max=2).accept(
        place.world, place.caller, place.worker_id
    ),
    "endpoints": lambda place: place.endpoint(),
}


@pytest.mark.parametrize("kind", list(KINDS))
async def test_the_last_place_goes_to_one_of_many(
    world: StoreWorld, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The upload that parts are sent to takes one place.
    monkeypatch.setattr(uploads, "PENDING_MAX", 3)
    monkeypatch.setattr(uploads, "PARTS_MAX", 2)
    monkeypatch.setattr(webhooks, "ENDPOINTS_MAX", 2)
    make, stores = KINDS[kind], [await world.open_another() for _ in range(3)]
    await asyncio.gather(*(store.now_ms() for store in stores))
    worker_id = await world.worker()
    for number in range(ROUNDS):
        caller = replace(await world.caller(f"tenant-{number}"), key_id=f"key-{number}")
        request = UploadRequest(30, "batch", "in.jsonl", "application/jsonl", 5_000)
        upload = await world.store.create_upload(caller, world.id("upload"), request)
        place = Place(world, caller, world.store, worker_id, upload)
        await make(place)
        places = [place.through(stores[n % len(stores)]) for n in range(AT_ONCE)]
        done = await asyncio.gather(*(make(one) for one in places), return_exceptions=True)
        refused = [one for one in done if isinstance(one, BaseException)]
        assert all(isinstance(one, ApiProblem) for one in refused), refused
        assert len(refused) == AT_ONCE - 1
