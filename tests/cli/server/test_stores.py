"""The same commands over PostgreSQL, and `migrate` over both stores."""

from __future__ import annotations

import json
from typing import Any

from tests.cli.conftest import Desk
from tidegate.store.database.schema import current_schema


def test_a_run_and_its_verdict_over_postgresql(desk: Desk, postgres_url: str) -> None:
    password = postgres_url.partition("://")[2].partition("@")[0].partition(":")[2]
    env: dict[str, Any] = {"TIDEGATE_STORE_URL": postgres_url}
    assert desk.json_of("migrate", "--json", **env)["ran"]
    assert desk.json_of("migrate", "--json", **env)["ran"] == []
    desk.write_requests(20)
    proc = desk.run("--json", **env)
    assert proc.wait(60) == 0, proc.logs()
    assert len(desk.results()) == 20
    batch = json.loads(proc.stdout())["batch"]
    desk.done("verify", batch, "--witness", str(desk.engine.calls_log), **env)
    examined = desk.done("doctor", "--upstream", desk.engine.url, **env)
    assert "1 completed" in examined.stdout()
    if password:
        assert password not in proc.logs() + examined.logs()


def test_a_database_that_is_not_there_is_one_sentence(desk: Desk) -> None:
    proc = desk.done("batches", "list", code=2, TIDEGATE_STORE_URL="postgresql://u:canary@127.0.0.1:1/d")
    assert proc.stderr().splitlines()[-1].startswith("tidegate: ")
    assert "Traceback" not in proc.stderr()
    assert "canary" not in proc.logs()


def test_migrate_makes_an_embedded_store_ready(desk: Desk) -> None:
    assert f"is now at schema version {current_schema().version}" in desk.done("migrate").stderr()
    assert "needs no migration" in desk.done("migrate").stderr()
    assert desk.json_of("batches", "list", "--json") == []
