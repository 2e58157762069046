"""Two tenants and two operators for the tests of the admin API."""

from __future__ import annotations

from typing import Any

import pytest

from tests.web.calls import create, upload
from tests.web.server import WebServer


class AdminDesk:
    """Two tenants with a batch each, a key that may look, and one that may change."""

    def __init__(self, web: WebServer) -> None:
        self.web = web
        self.ours, self.theirs = web.client(web.make_key("ours")), web.client(web.make_key("theirs"))
        self.reader = web.client(web.make_key("ops", scopes=["admin:read"]))
        self.writer = web.client(web.make_key("ops", scopes=["admin:write"]))
        self.our_batch = create(self.ours, upload(self.ours))["id"]
        self.their_batch = create(self.theirs, upload(self.theirs))["id"]

    def audit(self, **query: str) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.reader.get("/admin/v1/audit", params=query).json()["data"]
        return found


@pytest.fixture
def desk(start_web: Any) -> AdminDesk:
    return AdminDesk(start_web())
