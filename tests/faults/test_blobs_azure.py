"""Blobs on an Azure store that resets, hangs, goes away, answers too little, is busy or is slow: held to what an S3 store is held to."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest
from obstore.store import AzureStore

from tests.contracts.blobs_places import azure_settings, put
from tests.faults import test_blobs_s3 as s3
from tests.support.azure import AzureServer
from tests.support.proxy import Proxies, Proxy
from tidegate.backends.blobs_s3 import S3Blobs
from tidegate.backends.blobs_s3_client import S3Settings
from tidegate.core.errors import BlobUnavailable

# The server comes from npm and takes a while to start.
pytestmark = [pytest.mark.anyio, pytest.mark.soak]

BUSY = (
    b"HTTP/1.1 503 Service Unavailable\r\nx-ms-error-code: ServerBusy\r\nContent-Type: application/xml\r\n"
    b"Content-Length: 49\r\nConnection: close\r\n\r\n<Error><Code>ServerBusy</Code><Message/></Error>\n"
)

patient, hasty = s3.patient, s3.hasty
test_a_put_that_keeps_breaking_leaves_nothing = s3.test_a_put_that_keeps_breaking_leaves_nothing
test_a_put_that_breaks_for_a_while_succeeds = s3.test_a_put_that_breaks_for_a_while_succeeds
test_a_put_whose_answer_was_lost_is_not_refused_as_a_double = (
    s3.test_a_put_whose_answer_was_lost_is_not_refused_as_a_double
)
test_a_store_that_is_away_loses_no_line = s3.test_a_store_that_is_away_loses_no_line
test_a_hanging_store_ends_in_a_time_out = s3.test_a_hanging_store_ends_in_a_time_out
test_a_truncated_answer_is_never_taken_for_the_whole = s3.test_a_truncated_answer_is_never_taken_for_the_whole
test_an_object_that_shrank_or_was_removed_is_missing = s3.test_an_object_that_shrank_or_was_removed_is_missing


@pytest.fixture
def container(azure: AzureServer) -> str:
    return azure.create_container()


@pytest.fixture
def proxy(azure: AzureServer, proxies: Proxies) -> Proxy:
    return proxies.open(azure.port)


@pytest.fixture
def direct(azure: AzureServer, container: str) -> AzureStore:
    """The store without the proxy, to see what is really there."""
    return AzureStore(
        container,
        prefix="some/prefix",
        endpoint=azure.endpoint,
        account_name=azure.account,
        account_key=azure.key,
        client_options={"allow_http": True},
    )


@pytest.fixture
def settings(azure: AzureServer, container: str, proxy: Proxy) -> S3Settings:
    endpoint = f"http://127.0.0.1:{proxy.port}/{azure.account}"
    return msgspec.structs.replace(azure_settings(azure, container), endpoint=endpoint)


class Busy:
    """Answers as Azure does when an account is over its rate, until it has refused so many requests; then it passes bytes on."""

    def __init__(self, target_port: int, refusals: int) -> None:
        self._target_port = target_port
        self.refusals_left = refusals
        self.port = 0

    async def serve(self) -> asyncio.Server:
        server = await asyncio.start_server(self._answer, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]
        return server

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self.refusals_left > 0:
            self.refusals_left -= 1
            await reader.readuntil(b"\r\n\r\n")
            writer.write(BUSY)
            await writer.drain()
            writer.close()
            return
        onward_reader, onward_writer = await asyncio.open_connection("127.0.0.1", self._target_port)
        await asyncio.gather(_pass_on(reader, onward_writer), _pass_on(onward_reader, writer), return_exceptions=True)


async def _pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(65_536):
        writer.write(data)
        await writer.drain()
    writer.close()


@pytest.fixture
async def busy(azure: AzureServer) -> AsyncIterator[Busy]:
    one = Busy(azure.port, 3)
    server = await one.serve()
    yield one
    server.close()


async def test_a_store_that_is_busy_for_a_while_is_asked_again(
    busy: Busy, settings: S3Settings, azure: AzureServer, tmp_path: Path
) -> None:
    there = msgspec.structs.replace(settings, endpoint=f"http://127.0.0.1:{busy.port}/{azure.account}")
    blobs = S3Blobs(there, tmp_path / "spool")
    blob_id = await put(blobs, b"0123456789")
    assert busy.refusals_left == 0
    assert await blobs.read(blob_id, 0, 10) == b"0123456789"
    busy.refusals_left = 10_000
    await blobs.close()
    hasty = S3Blobs(msgspec.structs.replace(there, retry_for_ms=500), tmp_path / "spool")
    for asked in (hasty.read(blob_id, 0, 10), hasty.size(blob_id), put(hasty, b"more")):
        with pytest.raises(BlobUnavailable):
            await asked
    busy.refusals_left = 0
    assert await hasty.read(blob_id, 0, 10) == b"0123456789"
    await hasty.close()


async def test_a_slow_store_is_waited_for(patient: S3Blobs, proxy: Proxy) -> None:
    data = os.urandom(200_000)
    proxy.latency(0.2)
    proxy.rate(400_000)
    blob_id = await put(patient, data)
    assert await patient.read(blob_id, 0, len(data)) == data
    assert await patient.size(blob_id) == len(data)
    await patient.delete(blob_id)
