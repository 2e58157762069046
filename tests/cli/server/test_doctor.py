"""The doctor over what was added while everything ran, over limits of the system, and over queues and servers that are away."""

from __future__ import annotations

import contextlib
import json
import re
import sqlite3
from typing import Any

import pytest

from tests.cli.conftest import Desk, Serving
from tests.support.processes import free_port
from tests.support.s3 import S3Server
from tests.support.tidegate import TIDEGATE, chat_line, s3_env

CONFIG = "models: {{fixed: {{deployments: [{{url: '{url}', name: steady}}]}}}}"


@pytest.fixture
def prepared(desk: Desk) -> Desk:
    may_read = f"\nadded: {{env_names: [K], folders: ['{desk.here}']}}\n"
    (desk.here / "c.yaml").write_text(CONFIG.format(url=desk.engine.url) + may_read)
    return desk


def added(desk: Desk, *words: str) -> None:
    desk.done(*words, "--config", "c.yaml")


def found(desk: Desk, *about: str, code: int = 0, **variables: str) -> list[tuple[str, str]]:
    listed = desk.json_of("doctor", "--config", "c.yaml", "--json", code=code, **variables)
    return [(one["grade"], f"{one['text']} -> {one['to_do']}") for one in listed if one["about"] in about]


def only(findings: list[tuple[str, str]], text: str) -> tuple[str, str]:
    (one,) = [one for one in findings if text in one[1]]
    return one


def test_what_was_added_is_tried_and_reported(prepared: Desk) -> None:
    added(prepared, "deployments", "add", "well", "--model", "simulated", "--url", prepared.engine.url)
    added(prepared, "deployments", "add", "gone", "--model", "m", "--url", "http://127.0.0.1:1/v1")
    added(prepared, "deployments", "add", "keyless", "--model", "k", "--url", prepared.engine.url, "--api-key", "env:K")
    added(prepared, "resources", "add", "chat", "--model", "m", "--set", "fallbacks=[fixed]")
    added(prepared, "resources", "add", "lonely", "--model", "m")
    upstreams = found(prepared, "upstream", code=1)
    grade, text = only(upstreams, "steady at ")
    assert (grade, "is `tidegate simulate`: it serves every model" in text) == ("warning", True)
    assert only(upstreams, "well (added) at ")[0] in ("ok", "warning")
    grade, text = only(upstreams, "gone (added) at http://127.0.0.1:1/v1 does not answer")
    assert (grade, "tidegate deployments change gone" in text) == ("wrong", True)
    grade, text = only(upstreams, "the added deployment keyless cannot be used here")
    assert (grade, "export it first" in text) == ("wrong", True)
    assert only(found(prepared, "upstream", code=1, K="key"), "keyless (added) at ")[0] == "warning"
    routes = found(prepared, "resource", code=1)
    assert only(routes, "chat (added) leads to m, then fixed")[0] == "ok"
    assert only(routes, "lonely (added) leads to 'm', and none of the 1 deployments behind it answers")[0] == "wrong"


def test_beside_a_running_server_it_finds_the_same(prepared: Desk) -> None:
    serving = Serving(prepared, "--config", "c.yaml")
    added(prepared, "deployments", "add", "gone", "--model", "m", "--url", "http://127.0.0.1:1/v1")
    assert only(found(prepared, "upstream", code=1), "gone (added)")[0] == "wrong"
    assert serving.proc.running


def test_beside_a_server_whose_upstream_is_an_option_it_asks_the_server(desk: Desk) -> None:
    serving = Serving(desk)
    report = desk.done("doctor").stdout()
    assert f"the server that runs here uses {desk.engine.url}: healthy" in report
    assert "healthy" in desk.done("deployments", "list").stdout()
    assert serving.proc.running
    # None of its calls has met that yet, so to the server it is still healthy.
    desk.engine.proc.kill()
    desk.engine.proc.wait()
    report = desk.done("doctor").stdout()
    assert f"the server that runs here uses {desk.engine.url}, which does not answer us" in report


def test_a_route_that_leads_nowhere_any_more_is_found(prepared: Desk) -> None:
    added(prepared, "deployments", "add", "gone", "--model", "m", "--url", "http://127.0.0.1:1/v1")
    added(prepared, "resources", "add", "chat", "--model", "m")
    added(prepared, "resources", "add", "spare", "--model", "fixed", "--set", "fallbacks=[m]")
    added(prepared, "deployments", "remove", "gone", "--force")
    routes = found(prepared, "resource", code=1)
    assert only(routes, "chat (added) leads to 'm', which no deployment serves")[0] == "wrong"
    assert only(routes, "spare (added) falls back to 'm', which no deployment serves")[0] == "warning"
    assert only(routes, "spare (added) leads to fixed, then m")[0] == "ok"


def test_limits_and_metrics_of_what_was_added_are_looked_at(prepared: Desk) -> None:
    never = "limits=[{period: minute, requests: 100}, {period: day, requests: 90}]"
    added(prepared, "deployments", "add", "odd", "--model", "m", "--url", prepared.engine.url, "--set", never)
    added(prepared, "deployments", "change", "odd", "--set", "metrics_url=http://127.0.0.1:1/metrics")
    assert only(found(prepared, "limits"), "deployment odd: 100 requests a minute")[0] == "warning"
    assert (
        only(found(prepared, "tide"), "odd: no metrics at http://127.0.0.1:1/metrics (nothing answers there)")[0]
        == "warning"
    )


def test_a_queue_that_was_added_is_tried_also_where_its_redis_is_away(prepared: Desk, redis_url: str) -> None:
    for name, url in (("there", redis_url), ("away", f"redis://:canary@127.0.0.1:{free_port()}/0")):
        (prepared.here / name).write_text(url)
        queue = f"queue={{url: 'file:{prepared.here / name}', pool: {name}}}"
        words = ("--model", name, "--url", prepared.engine.url, "--set", queue, "--set", "serves=batch")
        added(prepared, "deployments", "add", name, *words)
    queues = found(prepared, "queue", code=1)
    assert [grade for grade, text in queues if text.startswith("there:")][-1] == "ok"
    grade, text = only(queues, "away: llm-d-async:requests:away at ")
    assert (grade, "cannot be reached" in text, "start it or fix queue.url" in text) == ("wrong", True, True)
    assert "canary" not in text


def test_a_store_of_a_later_version_is_not_taken_for_one_of_this_program(prepared: Desk) -> None:
    prepared.done("migrate", "--config", "c.yaml")
    assert "is there, at this program's version" in only(found(prepared, "store"), "is there")[1]
    with contextlib.closing(sqlite3.connect(prepared.here / ".tidegate" / "tidegate.db")) as database, database:
        database.execute("update meta set value = '99' where name = 'schema_version'")
    text = only(found(prepared, "store"), "is there")[1]
    assert re.search(r"is there, at version 99; this program, of \d+, can use it", text)


def test_only_bytes_that_something_needs_are_counted(prepared: Desk) -> None:
    """A batch that ended needs its input and its answers, not what it worked with."""
    prepared.write([chat_line("one", "say")])
    prepared.done("run", "requests.jsonl", "--upstream", prepared.engine.url, "-o", "results.jsonl")
    assert only(found(prepared, "blobs"), "blobs that")[1].startswith(
        "all 2 blobs that the store needs have their bytes"
    )


def test_too_few_open_files_for_the_connections_are_found(prepared: Desk) -> None:
    def examined(allowed: int, connections: int) -> list[dict[str, Any]]:
        env = {"PATH": "/usr/bin:/bin", "HOME": str(prepared.here), "TIDEGATE_HTTP_CONNECTIONS_MAX": str(connections)}
        words = [
            "sh",
            "-c",
            f'ulimit -n {allowed} && exec "$@"',
            "sh",
            TIDEGATE,
            "doctor",
            "--config",
            "c.yaml",
            "--json",
        ]
        proc = prepared.processes.start(words, name="doctor", env=env, cwd=prepared.here)
        assert proc.wait(60) == (0 if allowed >= connections + 256 else 1), proc.logs()
        return [one for one in json.loads(proc.stdout()) if one["about"] == "system"]

    (fine,) = examined(800, 500)
    assert (fine["grade"], fine["text"]) == ("ok", "enough open files are allowed for 500 connections")
    (wrong,) = examined(700, 500)
    assert (wrong["grade"], wrong["text"]) == ("wrong", "700 open files are allowed, 756 are needed")
    assert "ulimit -n 756" in wrong["to_do"]
    assert "http.connections_max" in wrong["to_do"]


def test_an_empty_database_keys_of_another_pepper_and_wrong_keys_of_an_object_store(
    desk: Desk, postgres_url: str, s3_server: S3Server, s3_bucket: str
) -> None:
    place: dict[str, Any] = {"TIDEGATE_STORE_URL": postgres_url, **s3_env(s3_server, s3_bucket)}
    (desk.here / "c.yaml").write_text("")

    def looked(*about: str, code: int = 0, data: str = "data", **more: str) -> list[tuple[str, str]]:
        return found(desk, *about, code=code, **place | {"TIDEGATE_DATA": data} | more)

    assert only(looked("store"), "is an empty database")[0] == "ok"
    grade, text = only(looked("keys", code=1, TIDEGATE_SERVER_HOST="0.0.0.0"), "refuses every call (401)")
    assert (grade, "tidegate keys generate" in text) == ("wrong", True)
    wrong = {"TIDEGATE_BLOBS_SECRET_ACCESS_KEY": "wrong"}
    grade, text = only(looked("blobs", code=1, **wrong), f"s3://{s3_bucket}")
    assert (grade, "blobs.secret_access_key" in text) == ("wrong", True)
    desk.done("keys", "create", "--org", "acme", "--data", "data", **place)
    assert only(looked("keys"), "every call needs one")[0] == "ok"
    assert only(looked("keys", data="elsewhere"), "can run workers only")[0] == "warning"
    other = {"TIDEGATE_AUTH_PEPPER": "another pepper of thirty-two letters"}
    grade, text = only(looked("keys", code=1, **other), "hashed with another pepper")
    assert (grade, "auth.pepper" in text) == ("wrong", True)
    assert not (desk.here / "elsewhere" / "pepper").exists(), "looking makes none"
    refused = desk.done("api", "--port", "0", "--data", "data", code=2, **place | other)
    assert "hashed with another pepper" in refused.stderr()
