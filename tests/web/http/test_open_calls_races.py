"""Open calls are judged by what the store answered about their keys, and only those that were open when it was asked."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tests.support.ports import HandClock
from tests.web.gateway_world import CHAT
from tidegate.core.errors import ApiProblem
from tidegate.store.store import Store
from tidegate.web.gateway.dialects import Dialect
from tidegate.web.gateway.proxy_response import ProxyResponse
from tidegate.web.http.intake import OpenCalls

KEY, OTHER, SECRET, NEW_SECRET = "k" * 8, "o" * 8, bytes([1]) * 32, bytes([2]) * 32


class Keys:
    """Answers like the store; `meanwhile` runs after the answer was made and before it arrives."""

    def __init__(self, *rows: dict[str, Any]) -> None:
        self.rows = {row["id"]: row for row in rows}
        self.meanwhile: Callable[[], object] = lambda: None

    async def key_facts(self, key_ids: Sequence[str]) -> dict[str, dict[str, Any]]:
        found = {key_id: dict(self.rows[key_id]) for key_id in key_ids if key_id in self.rows}
        self.meanwhile()
        return found


def row(key_id: str = KEY, secret: bytes = SECRET, revoked_at: int | None = None) -> dict[str, Any]:
    old = {"old_hash": None, "old_until": None, "expires_at": None}
    return {"id": key_id, "secret_hash": secret, "revoked_at": revoked_at, "now": 1_000, **old}


def opened(keys: Keys) -> OpenCalls:
    return OpenCalls(cast(Store, keys))


@pytest.mark.anyio
@pytest.mark.parametrize("others", [0, 1])
async def test_a_call_that_begins_while_the_store_is_asked_is_not_cut(others: int) -> None:
    keys = Keys(row(), row(OTHER))
    calls = opened(keys)
    for _ in range(others):
        calls.add(OTHER, SECRET)
    begun: list[Any] = []
    keys.meanwhile = lambda: begun.append(calls.add(KEY, SECRET))
    await calls.look()
    assert [call.is_cut for call in begun] == [False]


@pytest.mark.anyio
async def test_a_call_with_a_secret_newer_than_the_answer_is_not_cut() -> None:
    keys = Keys(row())
    calls = opened(keys)
    old = calls.add(KEY, SECRET)
    begun: list[Any] = []

    def rotate() -> None:
        keys.rows[KEY] = row(secret=NEW_SECRET)
        begun.append(calls.add(KEY, NEW_SECRET))

    keys.meanwhile = rotate
    await calls.look()
    keys.meanwhile = lambda: None
    assert [call.is_cut for call in (old, *begun)] == [False, False]
    await calls.look()
    assert [call.is_cut for call in (old, *begun)] == [True, False]


@pytest.mark.anyio
async def test_a_call_that_ended_while_the_store_is_asked_is_left_alone() -> None:
    keys = Keys(row(revoked_at=900))
    calls = opened(keys)
    call = calls.add(KEY, SECRET)
    call.when_cut(lambda: pytest.fail("a call that is over was cut"))
    keys.meanwhile = call.leave
    await calls.look()
    assert not call.is_cut


@pytest.mark.anyio
async def test_a_call_whose_key_stopped_working_before_it_is_sent_is_not_sent() -> None:
    """A hook may take a while between the check of the key and the call."""
    keys = Keys(row())
    calls = opened(keys)
    call = calls.add(KEY, SECRET)
    keys.rows[KEY] = row(revoked_at=900)
    await calls.look()

    async def open_upstream() -> Any:
        pytest.fail("it was sent")

    async def nothing(*_: object) -> Any:
        pytest.fail("nothing is read or sent")

    response = ProxyResponse(open_upstream, Dialect(CHAT, b"{}", 0, ""), HandClock(), "m", "req_1")
    with pytest.raises(ApiProblem) as refused:
        await response({"tidegate.intake": SimpleNamespace(open_call=call)}, nothing, nothing)
    assert (refused.value.status, refused.value.code) == (401, "invalid_api_key")
