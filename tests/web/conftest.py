"""One server for every test of a module that does not bend it, makers of servers for those that do, and the gateway's world."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

from tests.web.gateway_world import GatewayWorld
from tests.web.server import WebServer, settings_with


@pytest.fixture(scope="module")
def web_settings() -> dict[str, Any]:
    """The settings of `web` that are not the default ones. A module that needs others has a fixture of this name."""
    return {}


@pytest.fixture(scope="module")
def web(tmp_path_factory: pytest.TempPathFactory, web_settings: dict[str, Any]) -> Iterator[WebServer]:
    """A server without keys: everyone on this machine is the tenant `default`."""
    server = WebServer(tmp_path_factory.mktemp("web"), settings_with(**web_settings))
    server.start()
    yield server
    server.stop()


@pytest.fixture(scope="module")
def client(web: WebServer) -> Iterator[httpx2.Client]:
    with web.client() as opened:
        yield opened


@pytest.fixture
def start_web(tmp_path: Path) -> Iterator[Any]:
    """Starts servers with settings of the test's own; they stop with the test."""
    started: list[WebServer] = []

    def start(postgres_url: str | None = None, **groups: Any) -> WebServer:
        server = WebServer(tmp_path / f"web-{len(started)}", settings_with(**groups), postgres_url)
        server.start()
        started.append(server)
        return server

    yield start
    for server in started:
        server.stop()


@pytest.fixture(params=["sqlite", "postgresql"])
def web_on_both(request: pytest.FixtureRequest, start_web: Any, web_settings: dict[str, Any]) -> WebServer:
    """The same test on both stores, each time with a server of its own."""
    url = request.getfixturevalue("migrated_postgres_url") if request.param == "postgresql" else None
    server: WebServer = start_web(url, **web_settings)
    return server


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[GatewayWorld]:
    """A gateway that is not started yet."""
    # Most tests look for a call in the books as soon as it has ended.
    monkeypatch.setattr("tidegate.interactive_usage.FLUSH_S", 0.05)
    made = GatewayWorld(tmp_path / "web")
    yield made
    made.close()
