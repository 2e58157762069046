"""One server for every test of a module that does not bend it, and a maker of servers for those that do."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

from tests.web.server import WebServer, settings_with


@pytest.fixture(scope="module")
def web(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WebServer]:
    """A server without keys: everyone on this machine is the tenant `default`."""
    server = WebServer(tmp_path_factory.mktemp("web"), settings_with())
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
