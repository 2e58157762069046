"""Where the server may listen: an address, or a name that has one."""

from __future__ import annotations

import httpx2
import pytest
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from tidegate.core.errors import SettingsError
from tidegate.web.http.serving import listening

pytestmark = pytest.mark.anyio


async def hello(request: object) -> PlainTextResponse:
    return PlainTextResponse("hello")


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "::1"])
async def test_a_name_or_an_address(host: str) -> None:
    async with listening(Starlette(routes=[Route("/", hello)]), host, 0) as address:
        async with httpx2.AsyncClient(base_url=address) as client:
            assert (await client.get("/")).text == "hello"


@pytest.mark.parametrize("host", ["no-such-host.invalid", "a..b", "x" * 300])
async def test_a_name_without_an_address_is_a_mistake_in_the_settings(host: str) -> None:
    with pytest.raises(SettingsError, match=r"server\.host"):
        async with listening(Starlette(), host, 0):
            pass
