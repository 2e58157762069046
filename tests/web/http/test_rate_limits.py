"""What limits have left, as headers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from tests.web.calls import create, upload
from tidegate.core.budgets.budget import NEVER_MS, Budget, BudgetRequest, Limit, LimitBound, LimitRoom, Period, SideRoom
from tidegate.core.budgets.deal import deal
from tidegate.core.budgets.ledger import Ledger
from tidegate.core.errors import StoreUnavailable
from tidegate.core.nouns import Caller
from tidegate.settings import Settings
from tidegate.settings.capacity import LimitEntry, TenantEntry
from tidegate.settings.tenants import Tenants
from tidegate.web.context import WebContext
from tidegate.web.http.rate_limits import limit_headers
from tidegate.web.jobs.limit_rooms import LimitRooms

BUDGET = Budget(LimitBound.KEY, "k", (Limit(Period.MINUTE, requests=10, tokens=1000),))


@pytest.mark.parametrize(
    ("ms", "text"), [(0, "0ms"), (20, "20ms"), (7_660, "7.66s"), (360_000, "6m0s"), (3_600_000, "1h0m0s")]
)
def test_durations_are_written_as_openai_does(ms: int, text: str) -> None:
    room = LimitRoom(BUDGET, Period.MINUTE, SideRoom(10, 1, ms), None)
    assert dict(limit_headers([room]))[b"x-ratelimit-reset-requests"] == text.encode()


@pytest.mark.parametrize(("ms", "rest"), [(0, ";t=0"), (1, ";t=1"), (1_000, ";t=1"), (1_001, ";t=2"), (NEVER_MS, "")])
def test_the_seconds_until_all_is_back_are_never_too_few(ms: int, rest: str) -> None:
    room = LimitRoom(BUDGET, Period.MINUTE, SideRoom(10, 1, ms), None)
    assert dict(limit_headers([room]))[b"ratelimit"].decode() == f'"requests";r=1{rest}'


def test_of_limits_with_as_little_left_the_one_that_is_back_last_is_shown() -> None:
    rooms = [
        LimitRoom(BUDGET, period, SideRoom(10, 0, ms), None)
        for period, ms in ((Period.MINUTE, 30_000), (Period.DAY, 50_000_000), (Period.HOUR, 600_000))
    ]
    assert dict(limit_headers(rooms))[b"ratelimit"] == b'"requests";r=0;t=50000'


def test_there_are_no_headers_for_limits_that_are_not_known() -> None:
    assert limit_headers([]) == []
    assert limit_headers([LimitRoom(BUDGET, Period.MINUTE, None, None)]) == []


def test_a_grant_tells_what_is_left_after_it_and_when_all_of_it_is_back() -> None:
    ledgers = {BUDGET.id: Ledger()}
    [grant] = deal([BudgetRequest((BUDGET,), 4, 300)], ledgers, 1_000_000)
    [room] = grant.rooms
    assert room.requests is not None
    assert room.tokens is not None
    assert (room.requests.left, room.tokens.left) == (6, 700)
    assert 60_000 <= room.requests.resets_ms <= 61_000
    later = room.later(30_000).requests
    assert later is not None
    assert (later.left, later.resets_ms) == (6, room.requests.resets_ms - 30_000)
    assert room.later(90_000).requests == SideRoom(10, 10, 0)
    assert SideRoom(10, 0, NEVER_MS).later(90_000) == SideRoom(10, 0, NEVER_MS)
    # One that took more than there was is paid for before all of the room is back.
    [short] = deal([BudgetRequest((BUDGET,), 1, 5_000)], ledgers, 1_000_000)
    tokens = short.rooms[0].tokens
    assert tokens is not None
    assert tokens.left == 0
    assert 60_000 < tokens.resets_ms < NEVER_MS


@pytest.mark.anyio
async def test_a_store_that_is_away_costs_an_answer_only_these_headers() -> None:
    async def away(*_: object) -> None:
        raise StoreUnavailable("away")

    tenants = Tenants(Settings(tenants={"ours": TenantEntry(limits=(LimitEntry(period="minute", requests=1),))}))
    store = SimpleNamespace(tenant_name=away, budget_rooms=away)
    rooms = LimitRooms(cast(WebContext, SimpleNamespace(store=store, tenants=lambda: tenants)))
    assert await rooms.headers(Caller("tenant_1")) == []


def test_calls_that_make_work_say_what_the_limits_of_their_caller_have_left(start_web: Any) -> None:
    """Batches and their bytes stand beside requests and tokens; a refusal shows what refused it."""
    limits = (
        LimitEntry(period="minute", requests=600, tokens=200_000),
        LimitEntry(period="hour", batches=2, bytes=1_000_000),
    )
    web = start_web(tenants={"ours": TenantEntry(limits=limits)})
    policy = (
        '"requests";q=600;w=60, "tokens";q=200000;w=60;qu="tokens", '
        '"batches";q=2;w=3600, "input-bytes";q=1000000;w=3600;qu="content-bytes"'
    )
    with web.client(web.make_key("ours")) as ours, web.client(web.make_key("theirs")) as theirs:
        file_id = upload(ours)
        uploaded = ours.post("/v1/files", files={"file": ("a.jsonl", b"{}")}, data={"purpose": "batch"})
        assert uploaded.headers["ratelimit-policy"] == policy
        assert uploaded.headers["x-ratelimit-remaining-requests"] == "600"
        assert '"batches";r=2' in uploaded.headers["ratelimit"]
        wanted = {"input_file_id": file_id, "endpoint": "/v1/embeddings"}
        for left in (1, 0):
            assert f'"batches";r={left};t=' in ours.post("/v1/batches", json=wanted).headers["ratelimit"]
        refused = ours.post("/v1/batches", json=wanted)
        assert (refused.status_code, refused.headers["ratelimit-policy"]) == (429, policy)
        assert '"batches";r=0;t=' in refused.headers["ratelimit"]
        assert "x-ratelimit-limit-batches" not in refused.headers
        for wrong in (
            ours.post("/v1/batches", content=b"{"),
            ours.post("/v1/messages/batches", json={}),
            ours.post("/v1/uploads"),
        ):
            assert wrong.status_code in (400, 415)
            assert wrong.headers["ratelimit-policy"] == policy
        assert "ratelimit" not in ours.get("/v1/batches").headers
        create(theirs, upload(theirs))
        assert "ratelimit" not in theirs.post("/v1/batches", json={}).headers
