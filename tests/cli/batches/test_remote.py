"""The commands of a team: against the server of the data directory, and from another machine with `--server` and a key."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import httpx2
import pytest

from tests.cli.conftest import Desk, Serving
from tests.support.engine import Engine
from tests.support.processes import Processes, wait_until
from tests.support.tidegate import TIDEGATE, behaving, chat_line
from tests.web.upstream import Upstream, answers

NO_FILE = "file-0000000000000000000000"


@pytest.fixture
def office(desk: Desk) -> Desk:
    """A desk with a server beside it; `away` is a directory without one."""
    (desk.here / "away").mkdir()
    desk.write_requests(20)
    (desk.here / "url").write_text(Serving(desk).url)
    return desk


def away(office: Desk, *arguments: str, code: int = 0, **variables: str) -> str:
    """Run a command elsewhere, where the settings name the server; return what it printed."""
    where = {"TIDEGATE_REMOTE_URL": (office.here / "url").read_text() + "/v1", **variables}
    command = [TIDEGATE, *arguments, "--data", str(office.here / "away" / "data")]
    env = {"PATH": "", "HOME": str(office.here / "away"), **where}
    proc = office.processes.start(command, name="away", env=env, cwd=office.here / "away")
    assert proc.wait(60) == code, proc.logs()
    return proc.stdout() + proc.stderr()


def test_a_batch_from_another_machine_with_a_key(office: Desk) -> None:
    made = office.json_of("keys", "create", "--org", "acme", "--json")
    key = {"TIDEGATE_REMOTE_KEY": made["key"]}
    assert "needs an API key. Put a valid one" in away(office, "batches", "list", code=2)
    wrong = away(office, "batches", "list", code=2, TIDEGATE_REMOTE_KEY="tg_live_nonsense")
    assert "refuses this API key. Put a valid one into an environment variable and name it with --api-key" in wrong
    source = str(office.here / "requests.jsonl")
    batch_id = away(office, "batches", "create", source, "--metadata", "team=search", **key).split()[0]
    assert f"{batch_id} completed: 20/20 done, 0 failed" in away(office, "batches", "watch", batch_id, **key)
    [listed] = json.loads(away(office, "batches", "list", "--metadata", "team=search", "--json", **key))
    assert (listed["id"], listed["completed"], listed["metadata"]) == (batch_id, 20, {"team": "search"})
    assert away(office, "batches", "list", "--status", "failed", **key).strip() == "No batch matches."
    assert "completed" in away(office, "batches", "show", batch_id, **key)
    away(office, "batches", "output", batch_id, "-o", "results.jsonl", **key)
    results = (office.here / "away" / "results.jsonl").read_text().splitlines()
    assert {json.loads(line)["custom_id"] for line in results} == {f"c{number}" for number in range(20)}
    assert "Cannot cancel a batch with status" in away(office, "batches", "cancel", batch_id, code=2, **key)
    away(office, "batches", "pause", batch_id, code=2, **key)
    # The same words on the machine of the server, where an operator sees every organization.
    here = office.json_of("batches", "show", batch_id, "--org", "acme", "--json")
    assert {name: here[name] for name in listed if name in here} == listed
    reader = office.json_of("keys", "create", "--org", "other", "--scopes", "admin:read", "--json")
    operator = {"TIDEGATE_REMOTE_KEY": reader["key"]}
    used = json.loads(away(office, "usage", "--by", "organization", **operator))
    assert (used["organization"], used["calls"]) == ("acme", 20)
    assert "Nothing was used" in away(office, "usage", "--org", "other", **operator)
    away(office, "batches", "delete", batch_id, "--yes", **key)
    assert json.loads(away(office, "batches", "list", "--json", **key)) == []


def test_the_next_command_can_be_typed_as_it_is_printed(office: Desk) -> None:
    made = office.json_of("keys", "create", "--org", "acme", "--json")
    url, key = (office.here / "url").read_text(), {"TIDEGATE_MY_KEY": made["key"]}
    there = ("--server", url, "--api-key", "env:TIDEGATE_MY_KEY")
    created = office.done("batches", "create", "requests.jsonl", *there, **key).stderr()
    watch = shlex.split(created.partition("Follow it with: tidegate ")[2])
    assert watch[-4:] == list(there)
    office.done(*watch, **key)
    uploaded = office.done("files", "upload", "requests.jsonl", "--org", "acme").stderr()
    create = shlex.split(uploaded.partition("Run them with: tidegate ")[2])
    assert office.done(*create).stdout().startswith("batch_")


def test_files_beside_the_server_and_elsewhere(office: Desk) -> None:
    file_id = office.done("files", "upload", "requests.jsonl").stdout().strip()
    assert file_id in away(office, "files", "list")
    assert "requests.jsonl" in away(office, "files", "show", file_id)
    content = (office.here / "requests.jsonl").read_text()
    assert away(office, "files", "download", file_id) == content
    batch = office.json_of("batches", "create", file_id, "--endpoint", "/v1/chat/completions", "--json")
    office.done("batches", "watch", batch["id"])
    away(office, "files", "delete", file_id, "--yes")
    assert "No such File object" in away(office, "files", "show", file_id, code=2)
    assert "That is no file id" in away(office, "files", "show", "../../etc", code=2)
    assert "needs --endpoint" in away(office, "batches", "create", NO_FILE, code=2)
    (office.here / "odd.jsonl").write_bytes(b"\xff\x00 nothing")
    assert "is no request with a `url`" in away(office, "batches", "create", str(office.here / "odd.jsonl"), code=2)


def test_a_server_that_is_not_there_is_one_sentence(desk: Desk, processes: Processes, tmp_path: Path) -> None:
    source = str(desk.write_requests(1))
    watch = ["batches", "watch", "batch_0000000000000000000000"]
    for arguments in (["batches", "list"], ["files", "list"], ["batches", "create", source], watch):
        error = desk.done(*arguments, "--server", "http://127.0.0.1:9", code=2).stderr()
        assert "http://127.0.0.1:9 does not answer (Connection refused)." in error
        assert "Traceback" not in error
    assert "No server runs over" in desk.done("files", "list", code=2).stderr()
    # What answers is no Tidegate.
    engine = Engine(processes, tmp_path / "engine")
    assert "tidegate: " in desk.done("batches", "list", "--server", engine.root, code=2).stderr()
    with Upstream(answers(b"no", 501)) as plain:
        there = plain.url.removesuffix("/v1")
        refused = desk.done("batches", "list", "--server", there, code=2).stderr()
        assert f"{there} does not answer as a Tidegate server (status 501). Check --server." in refused
    assert "must be a URL" in desk.done("batches", "list", "--server", "nonsense", code=2).stderr()
    refused = desk.done("batches", "list", "--server", engine.root, "--api-key", "tg_live_x", code=2).stderr()
    assert "holds the key itself" in refused


def test_workers_and_top_here_and_elsewhere(office: Desk) -> None:
    batch_id = office.done("batches", "create", "requests.jsonl").stdout().strip()
    office.done("batches", "watch", batch_id)
    [worker] = office.json_of("workers", "--json")
    assert worker["state"] == "alive"
    assert worker["id"] in office.done("workers").stdout()
    assert "1 worker alive" in office.done("top", "--once").stdout()
    # Elsewhere an operator's key is needed, and sees what every organization has.
    admin = office.json_of("keys", "create", "--org", "ops", "--scopes", "admin:read,admin:write", "--json")
    key = {"TIDEGATE_REMOTE_KEY": admin["key"]}
    assert worker["id"] in away(office, "workers", **key)
    overview = json.loads(away(office, "top", "--json", **key))
    assert overview["workers_alive"] == 1
    assert [one["name"] for one in overview["deployments"]]
    assert [one["id"] for one in json.loads(away(office, "batches", "list", "--all", "--json", **key))] == [batch_id]
    assert "default" in away(office, "batches", "list", "--all", **key)
    tenant = office.json_of("keys", "create", "--org", "acme", "--json")
    for command in (["workers"], ["top", "--once"], ["batches", "list", "--all"]):
        assert "admin:read" in away(office, *command, code=2, TIDEGATE_REMOTE_KEY=tenant["key"])


def test_an_operator_follows_the_batches_of_every_organization(office: Desk) -> None:
    """With an operator's key, which opens nothing of an owner's: list, show, watch, explain, items, pause, resume, cancel, retry."""

    def key_of(org: str, *scopes: str) -> dict[str, Any]:
        made = office.done("keys", "create", "--org", org, *scopes, "--json").stdout()
        return {"TIDEGATE_REMOTE_KEY": json.loads(made)["key"]}

    owner, operator = key_of("acme"), key_of("ops", "--scopes", "admin:read,admin:write")
    looker, reader = key_of("ops", "--scopes", "admin:read"), key_of("acme", "--scopes", "batches:read")
    office.write([chat_line(f"c{number}", behaving("400") if number < 2 else "hi") for number in range(5)])
    source = str(office.here / "requests.jsonl")
    batch_id = away(office, "batches", "create", source, **owner).split()[0]
    watched = away(office, "batches", "watch", batch_id, code=1, **operator)
    assert f"{batch_id} completed: 5/5 done, 2 failed" in watched
    assert "It completed: 3 of 5 requests were answered, 2 failed." in watched
    assert "Why requests failed: 2 x http_400" in watched
    assert f"tidegate batches retry {batch_id} --outcome failed" in watched
    # The first may have seen it run; of what has ended, both see the same.
    by_operator, by_owner = (away(office, "batches", "watch", batch_id, code=1, **key) for key in (operator, owner))
    assert by_operator == by_owner
    events = [
        json.loads(line) for line in away(office, "batches", "watch", batch_id, "--json", code=1, **looker).splitlines()
    ]
    assert (events[-1]["event"], events[-1]["org"]) == ("batch.completed", "acme")
    assert "3 of 5 requests were answered, 2 failed" in away(office, "explain", batch_id, **looker)
    shown = json.loads(away(office, "batches", "show", batch_id, "--json", **looker))
    assert (shown["org"], shown["failed"]) == ("acme", 2)
    for more in ((), ("--org", "acme")):
        assert batch_id in away(office, "batches", "list", *more, **looker)
    assert away(office, "batches", "list", "--org", "nowhere", **looker).strip() == "No batch matches."
    failed = json.loads(away(office, "batches", "items", batch_id, "--outcome", "failed", "--json", **looker))
    assert {one["custom_id"] for one in failed} == {"c0", "c1"}
    again = json.loads(away(office, "batches", "retry", batch_id, "--json", **operator))
    assert (again["retry_of"], again["org"]) == (batch_id, "acme")
    # What is refused says which scope is needed, of which kind of key.
    assert "operator's key lacks the scope `admin:write`" in away(
        office, "batches", "retry", batch_id, code=2, **looker
    )
    assert "lacks the scope `admin:content`" in away(office, "batches", "items", batch_id, "c0", code=2, **operator)
    assert "This key lacks the scope `batches:cancel`" in away(office, "batches", "cancel", batch_id, code=2, **reader)
    for command in (["batches", "output", batch_id], ["files", "list"], ["limits"], ["batches", "create", source]):
        assert "This is an operator's key. Use a key of the organization" in away(office, *command, code=2, **operator)


def test_every_group_of_commands_from_another_machine(office: Desk) -> None:
    office.done("batches", "watch", office.done("batches", "create", "requests.jsonl").stdout().strip())
    made = office.done("keys", "create", "--org", "ops", "--scopes", "admin:read,admin:write", "--json").stdout()
    operator = {"TIDEGATE_REMOTE_KEY": json.loads(made)["key"]}
    limit = ("--limit", "day:requests=5,cost=2.50", "--label", "nightly")
    key = json.loads(away(office, "keys", "create", "--org", "acme", *limit, "--json", **operator))
    tenant = {"TIDEGATE_REMOTE_KEY": key["key"]}
    there = json.loads(away(office, "keys", "list", "--json", **operator))
    here = office.json_of("keys", "list", "--json")
    for one in (*there, *here):
        for changing in ("last_used", "old_secret_until"):
            one.pop(changing, None)
    assert sorted(there, key=str) == sorted(here, key=str)
    assert "nightly" in away(office, "keys", "show", key["id"], **operator)
    left = json.loads(away(office, "limits", "--json", **tenant))
    assert [(one["bound"], one["remaining"]["requests"], one["remaining"]["cost"]) for one in left] == [
        ("key", 5, "2.5")
    ]
    assert "5 of 5" in away(office, "limits", **tenant)
    assert "No limit binds" in office.done("limits").stderr()
    [used] = [json.loads(line) for line in away(office, "usage", "--by", "organization", **operator).splitlines()]
    assert (used["organization"], used["calls"]) == ("default", 20)
    assert "no organization" in away(office, "usage", "--org", "nowhere", code=2, **operator)
    assert "healthy" in away(office, "deployments", "list", **operator)
    assert "set_in_settings" not in away(office, "resources", "list", **operator)
    assert "smart_v1" in away(office, "scheduler", "show", **operator)
    away(office, "scheduler", "set", "fifo_v1", **operator)
    assert "fifo_v1 (switched at run time)" in office.done("scheduler", "show").stdout()
    assert "no webhook endpoints" in away(office, "webhooks", "list", **tenant)
    assert "No delivery has failed" in away(office, "webhooks", "list", "--failed", **tenant)
    for command in (["keys", "list"], ["usage"], ["deployments", "list"], ["scheduler", "show"]):
        assert "admin:read" in away(office, *command, code=2, **tenant)
    away(office, "keys", "revoke", key["id"], **operator)
    assert json.loads(away(office, "keys", "show", key["id"], "--json", **operator))["state"] == "revoked"


def test_a_first_key_lets_a_new_store_listen_everywhere(desk: Desk) -> None:
    text = desk.done("keys", "generate").stdout().strip()
    assert text != desk.done("keys", "generate").stdout().strip()
    everywhere = ["serve", "--upstream", desk.engine.url, "--host", "0.0.0.0", "--port", "0"]
    assert "is no key" in desk.done(*everywhere, code=2, TIDEGATE_AUTH_BOOTSTRAP_KEY="guess").stderr()
    serve = desk.start(*everywhere, TIDEGATE_AUTH_BOOTSTRAP_KEY=text)
    port = serve.wait_for_line(r"listening on http://\S+:(\d+)").group(1)
    url = f"http://127.0.0.1:{port}"
    assert desk.json_of("batches", "list", "--server", url, "--json", TIDEGATE_REMOTE_KEY=text) == []
    desk.done("batches", "list", "--server", url, code=2)
    # A store that has keys takes no other from the settings.
    serve.terminate()
    serve.wait()
    other = desk.done("keys", "generate").stdout().strip()
    serve = desk.start(*everywhere[:-1], port, TIDEGATE_AUTH_BOOTSTRAP_KEY=other)
    serve.wait_for_line("listening on http")
    desk.done("batches", "list", "--server", url, code=2, TIDEGATE_REMOTE_KEY=other)
    desk.done("batches", "list", "--server", url, TIDEGATE_REMOTE_KEY=text)


def test_a_new_store_without_a_key_is_served_but_not_ready(desk: Desk) -> None:
    serving = Serving(desk, "--host", "0.0.0.0")
    url = "http://127.0.0.1:" + serving.url.rpartition(":")[2]
    serving.proc.wait_for_line("key_missing.*auth.bootstrap_key")

    def answered(path: str) -> tuple[int, dict[str, Any]]:
        response = httpx2.get(url + path, timeout=30)
        return response.status_code, response.json()

    status, body = answered("/readyz")
    assert (status, body["checks"]["store"]) == (503, "ok")
    assert "tidegate keys generate" in body["checks"]["keys"]
    # Nothing is open, though this program is on the server's machine: a proxy may be, too.
    for path in ("/v1/files", "/v1/batches", "/v1/models", "/v1/limits"):
        assert answered(path)[0] == 401
    assert answered("/healthz")[0] == 200
    made = desk.json_of("keys", "create", "--org", "acme", "--json")
    wait_until(lambda: answered("/readyz")[0] == 200)
    assert answered("/v1/files")[0] == 401
    # Operators have an address of their own, which the refusal names.
    operator = desk.json_of("keys", "create", "--org", "ops", "--scopes", "admin:read", "--json")
    for command in (["workers"], ["explain", "batch_0000000000000000000000"]):
        refused = desk.done(*command, "--server", url, code=2, TIDEGATE_REMOTE_KEY=operator["key"]).stderr()
        assert "admin.port" in refused
    desk.done("files", "list", "--server", url, TIDEGATE_REMOTE_KEY=made["key"])


def test_the_log_tells_the_life_of_a_batch_in_a_line_each(office: Desk) -> None:
    batch_id = office.done("batches", "create", "requests.jsonl").stdout().strip()
    office.done("batches", "watch", batch_id)
    office.write(["no request"], "bad.jsonl")
    bad_id = office.done("batches", "create", "bad.jsonl", "--endpoint", "/v1/chat/completions").stdout().strip()
    office.done("batches", "watch", bad_id, code=1)
    [serve] = [proc for proc in office.processes.started if proc.name == "serve"]
    lines = [line.split(maxsplit=1)[1] for line in serve.stderr().splitlines()]
    mine = [line for line in lines if batch_id in line]
    assert [line.split()[1] for line in mine] == ["job_created", "job_started", "job_completed"]
    assert "requests=20 models=m" in mine[1]
    assert "completed=20 failed=0 cost=0" in mine[2]
    failed = [line for line in lines if bad_id in line]
    assert [line.split()[:2] for line in failed] == [["info", "job_created"], ["warning", "job_failed"]]
    assert "why=" in failed[1]
