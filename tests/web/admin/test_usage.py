"""The operator's export of usage: refused to other callers, and bad questions are refused with what to ask instead."""

from __future__ import annotations

from typing import Any

from tests.web.calls import is_error
from tests.web.server import OPERATOR, WebServer


def test_usage_is_the_operators_to_export(start_web: Any) -> None:
    web: WebServer = start_web()
    key = web.make_key("acme")
    with web.client(key) as client:
        assert client.get("/admin/v1/usage").status_code == 403
        export = client.get("/admin/v1/usage?format=csv&by=key,job", headers=OPERATOR)
        assert export.status_code == 200
        assert export.headers["content-type"].startswith("text/csv")
        assert export.text.startswith("key,job,calls,input_tokens")
        mine = client.get("/admin/v1/usage?org=acme", headers=OPERATOR)
        assert (mine.status_code, mine.content) == (200, b"")
        for query in (
            "by=mood",
            "by=,",
            "format=xml",
            "from=soon",
            "to=2026-13-01",
            "to=0001-01-01",
            "from=1969-12-31",
            "org=",
        ):
            is_error(client.get(f"/admin/v1/usage?{query}", headers=OPERATOR), {"status": 400})
