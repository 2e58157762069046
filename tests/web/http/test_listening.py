"""Where the server may listen: an address, or a name that has one."""

from __future__ import annotations

import resource

import httpx2
import pytest
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from tidegate.core.errors import SettingsError
from tidegate.settings import Settings
from tidegate.settings.groups import Http, ServerSettings, WorkerSettings
from tidegate.web.http.door import PlainDoor
from tidegate.web.http.serving import listen_limits, listening

pytestmark = pytest.mark.anyio


async def hello(request: object) -> PlainTextResponse:
    return PlainTextResponse("hello")


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "::1"])
async def test_a_name_or_an_address(host: str) -> None:
    async with listening(PlainDoor(Starlette(routes=[Route("/", hello)])), host, 0) as address:
        async with httpx2.AsyncClient(base_url=address) as client:
            assert (await client.get("/")).text == "hello"


@pytest.mark.parametrize("host", ["no-such-host.invalid", "a..b", "x" * 300])
async def test_a_name_without_an_address_is_a_mistake_in_the_settings(host: str) -> None:
    with pytest.raises(SettingsError, match=r"server\.host"):
        async with listening(PlainDoor(Starlette()), host, 0):
            pass


@pytest.mark.parametrize(("files", "count"), [(4_096, 2_100), (3_000, None), (1_024, None)])
def test_streams_of_events_fit_into_the_usual_limit_of_open_files(
    monkeypatch: pytest.MonkeyPatch, files: int, count: int | None
) -> None:
    """Only connections that send or take a file need a second descriptor."""
    monkeypatch.setattr(resource, "getrlimit", lambda which: (256, files))
    asked: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "setrlimit", lambda which, limits: asked.append(limits))
    allowed = listen_limits(Settings(server=ServerSettings(connections_max=2_100))).connections_max
    assert asked[0][0] <= files
    assert allowed == count if count is not None else 32 <= allowed < 2_100


def test_descriptors_are_kept_for_as_many_calls_as_can_be_out(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr(resource, "getrlimit", lambda which: (256, resource.RLIM_INFINITY))
    monkeypatch.setattr(resource, "setrlimit", lambda which, limits: asked.append(limits[0]))

    def needed(in_flight_max: int, kept_alive_max: int) -> int:
        worker, http = WorkerSettings(in_flight_max=in_flight_max), Http(kept_alive_max=kept_alive_max)
        listen_limits(Settings(worker=worker, http=http))
        return asked[-1]

    calls_max = Http().connections_max
    assert needed(11, 20) - needed(10, 20) == needed(10, 21) - needed(10, 20) == 1
    assert needed(calls_max, 20) == needed(calls_max - 20, 20), "connections are bounded"
