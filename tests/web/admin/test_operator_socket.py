"""The socket for commands on this machine: whom it answers."""

from __future__ import annotations

from pathlib import Path

import aiohttp
import pytest
from starlette.types import Receive, Scope, Send

from tidegate.control import socket_address
from tidegate.web.admin import operator_socket


@pytest.mark.anyio
@pytest.mark.parametrize(("is_owner", "status"), [(True, 204), (False, 403)])
async def test_only_the_user_who_runs_the_server_is_answered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_owner: bool, status: int
) -> None:
    """Also where the mode of the socket protects nothing."""
    monkeypatch.setattr(operator_socket, "is_peer_owner", lambda peer: is_owner)
    asked: list[str] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        asked.append(scope["path"])
        await send({"type": "http.response.start", "status": 204, "headers": []})

    async with operator_socket.operator_socket(app, tmp_path):
        with socket_address(tmp_path) as address:
            connector = aiohttp.UnixConnector(address)
            async with aiohttp.ClientSession("http://localhost", connector=connector) as client:
                async with client.get("/admin/v1/keys") as answer:
                    assert answer.status == status
    assert asked == ["/admin/v1/keys"] * is_owner
