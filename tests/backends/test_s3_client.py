"""Requests to an object store: what is given up, and in which words."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from typing import Any

import obstore
import pytest
from obstore.exceptions import GenericError

from tests.contracts.blobs_places import s3_settings
from tests.support.s3 import S3Server
from tidegate.backends.blobs_s3_client import BACKOFF_FIRST_MS, BACKOFF_MAX_MS, Objects, S3Settings
from tidegate.core.errors import BlobMissing, BlobUnavailable

pytestmark = pytest.mark.anyio


async def test_a_small_request_to_a_silent_store_is_given_up_after_its_time() -> None:
    left = asyncio.Event()

    async def say_nothing(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await left.wait()
        writer.close()

    server = await asyncio.start_server(say_nothing, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    settings = S3Settings(
        "bucket",
        endpoint=f"http://127.0.0.1:{port}",
        access_key_id="k",
        secret_access_key="s",
        allow_http=True,
        small_timeout_ms=40,
        retry_for_ms=1,
    )
    with pytest.raises(BlobUnavailable) as failed:
        await Objects(settings).head("key")
    assert "failed (no answer within 0.04 s): check that the store is up" in str(failed.value).lower()
    left.set()
    server.close()


async def test_an_object_of_the_same_size_but_of_other_bytes_is_written_again(
    s3_server: S3Server, s3_bucket: str
) -> None:
    objects = Objects(s3_settings(s3_server, s3_bucket))
    assert await objects.grow("log", b"torn") == 4
    assert await objects.grow("log", b"line") == 4
    assert await objects.read("log", 0, 4) == b"line"


async def test_a_range_behind_the_end_is_missing_also_where_only_the_words_of_the_client_say_so() -> None:
    """Some stores answer with what there is instead of a 416, and the client compares."""

    async def attempt() -> bytes:
        raise GenericError("Requested range 5..9, but object was only 3 bytes long")

    with pytest.raises(BlobMissing, match="it ends before that range"):
        await Objects(S3Settings("bucket", retry_for_ms=1)).persist("reading an object", attempt)


async def test_each_pause_before_another_try_may_be_twice_as_long_up_to_a_bound(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    longest_ms, tries = list[float](), iter(range(20))

    def noted(low: float, high: float) -> float:
        assert low == 0
        longest_ms.append(high)
        return 0.0

    async def attempt() -> bytes:
        if next(tries) < 16:
            raise GenericError("the store is away")
        return b"done"

    monkeypatch.setattr(random, "uniform", noted)
    assert await Objects(S3Settings("bucket", retry_for_ms=600_000)).persist("reading", attempt) == b"done"
    assert longest_ms == [min(BACKOFF_FIRST_MS * 2**number, BACKOFF_MAX_MS) for number in range(16)]
    assert longest_ms[-1] == BACKOFF_MAX_MS


@pytest.mark.parametrize(("status", "tries_count"), [("429", 2), ("408", 2), ("503", 2), ("403", 1), ("400", 1)])
async def test_a_request_is_tried_again_unless_the_store_understood_and_refused_it(
    monkeypatch: pytest.MonkeyPatch, status: str, tries_count: int
) -> None:
    count = 0

    async def attempt() -> bytes:
        nonlocal count
        count += 1
        if count == 1:
            raise GenericError(f"Server returned non-2xx status code: {status}")
        return b"done"

    monkeypatch.setattr(random, "uniform", lambda low, high: 0.0)
    trying = Objects(S3Settings("bucket", retry_for_ms=600_000)).persist("reading", attempt)
    if tries_count == 1:
        with pytest.raises(BlobUnavailable):
            await trying
    else:
        assert await trying == b"done"
    assert count == tries_count


async def test_pages_of_keys_follow_one_another_also_where_a_server_lists_from_the_first_key_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def from_the_first_on(store: object, *, offset: str | None, chunk_size: int) -> AsyncIterator[list[Any]]:
        for key in "abcd":
            yield [{"path": key}]

    monkeypatch.setattr(obstore, "list", from_the_first_on)
    objects = Objects(S3Settings("bucket"))
    assert await objects.keys_after("", 2) == (["a", "b"], True)
    assert await objects.keys_after("b", 2) == (["c", "d"], True)
    assert await objects.keys_after("d", 2) == ([], False)
