"""The console while PostgreSQL is away: each page and each action says so in a page of its own, and works again when it is back."""

from __future__ import annotations

from typing import Any

from tests.support.proxy import WiredDatabase
from tests.web.console.world import FORMS, PAGES, Console, csrf_of


def test_pages_and_actions_say_that_the_store_is_gone(start_web: Any, wired_database: WiredDatabase) -> None:
    url, wire = wired_database
    console = Console(start_web(url))
    writer = console.signed_in(console.writer_key)
    token = csrf_of(writer, "/console")
    batch = f"/batches/{console.batch}"
    wire.cut(0)
    shown = {path: writer.get(f"/console{path}") for path in (*PAGES, *FORMS, batch, f"{batch}/items")}
    for path in (f"{batch}/pause", "/deployments/drain", "/playground", "/operations", "/batches/new"):
        shown[f"POST {path}"] = writer.post(f"/console{path}", data={"csrf": token, "name": "x", "action": "pause"})
    shown["sign-in"] = console.web.client().post("/console/sign-in", data={"key": console.writer_key})
    for path, answer in shown.items():
        assert (path, answer.status_code) == (path, 503)
        assert answer.headers["content-type"] == "text/html; charset=utf-8"
        assert "cannot reach its storage" in answer.text
        assert path == "sign-in" or int(answer.headers["Retry-After"]) > 0
        assert "Traceback" not in answer.text
    wire.heal()
    assert writer.get("/console").status_code == 200
    assert console.web.job(console.batch).paused_at is None
