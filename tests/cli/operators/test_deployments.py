"""Deployments and resources that come, change and go while a server runs, as their operator does it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import Desk, Serving
from tests.support.engine import Engine
from tests.support.processes import Processes, wait_until
from tests.support.tidegate import chat_line

CANARY = "sk-canary-0f3kQ2mZ8s1xW7vB4nD9Lc"


def serving_one_model(desk: Desk) -> Serving:
    """A server that knows no model server yet, but one setting by name."""
    (desk.here / "c.yaml").write_text(
        f"models: {{fixed: {{deployments: [{{url: '{desk.engine.url}', name: steady}}]}}}}"
    )
    return Serving(desk, "--config", "c.yaml")


@pytest.fixture
def serving(desk: Desk) -> Serving:
    return serving_one_model(desk)


def did(serving: Serving, *words: str, code: int = 0, **variables: str) -> str:
    proc = serving.desk.done(*words, "--config", "c.yaml", code=code, **variables)
    return proc.stdout() if code == 0 else proc.stderr()


def listed(serving: Serving, kind: str = "deployments") -> dict[str, dict[str, Any]]:
    return {one["name"]: one for one in json.loads(did(serving, kind, "list", "--json"))}


def asked(serving: Serving, model: str) -> tuple[int, Any]:
    body = {"model": model, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
    return serving.call("POST", "/v1/chat/completions", body)


def models(serving: Serving) -> set[str]:
    return {one["id"] for one in serving.call("GET", "/v1/models")[1]["data"]}


def test_a_model_server_comes_changes_and_goes(serving: Serving, processes: Processes) -> None:
    desk = serving.desk
    assert asked(serving, "m")[0] == 404
    did(serving, "deployments", "add", "gpu", "--model", "m", "--url", desk.engine.url, "--set", "max_in_flight=4")
    assert asked(serving, "m")[0] == 200
    assert models(serving) == {"fixed", "m"}
    found = listed(serving)
    assert {name: (one["origin"], one["model"], one["state"]) for name, one in found.items()} == {
        "steady": ("settings", "fixed", "closed"),
        "gpu": ("added", "m", "closed"),
    }
    assert found["gpu"]["document"] == {"max_in_flight": 4, "model": "m", "url": desk.engine.url}
    batch = serving.submit([chat_line(f"c{number}", "hi") for number in range(12)])
    desk.done("batches", "watch", batch)
    desk.verified(batch)

    other = Engine(processes, desk.here / "other")
    did(serving, "deployments", "change", "gpu", "--set", f"url={other.url}", "--set", "max_in_flight=")
    assert asked(serving, "m")[0] == 200
    assert [call["path"] for call in other.calls()] == ["/v1/chat/completions"]
    assert listed(serving)["gpu"]["document"] == {"model": "m", "url": other.url}

    did(serving, "deployments", "remove", "gpu")
    assert asked(serving, "m")[0] == 404
    assert models(serving) == {"fixed"}
    again = serving.submit([chat_line("c0", "hi")])
    desk.done("batches", "watch", again, code=1)
    failed = desk.json_of("batches", "output", again, "--errors")
    assert failed["error"]["code"] == "model_not_found"


def test_a_deployment_is_drained_and_resumed_by_command_with_and_without_a_server(serving: Serving) -> None:
    assert "There is no deployment 'none'" in did(serving, "deployments", "drain", "none", code=2)
    assert json.loads(did(serving, "deployments", "drain", "steady", "--json"))["name"] == "steady"
    assert listed(serving)["steady"]["is_drained"]
    assert "steady  drained  0" in did(serving, "deployments", "list")
    did(serving, "deployments", "resume", "steady")
    assert asked(serving, "fixed")[0] == 200
    serving.proc.kill()
    serving.proc.wait(30)
    did(serving, "deployments", "drain", "steady")
    assert listed(serving)["steady"]["is_drained"]
    assert "drained" in did(serving, "deployments", "list")
    did(serving, "deployments", "resume", "steady")
    assert "drained" not in did(serving, "deployments", "list")
    assert not listed(serving)["steady"]["is_drained"]


def test_what_was_added_is_there_after_a_restart(serving: Serving) -> None:
    desk = serving.desk
    did(serving, "deployments", "add", "gpu", "--model", "m", "--url", desk.engine.url)
    did(serving, "resources", "add", "chat", "--model", "m")
    serving.proc.kill()
    serving.proc.wait(30)
    back = Serving(desk, "--config", "c.yaml")
    assert asked(back, "chat")[0] == 200
    assert models(back) == {"chat", "fixed", "m"}


def test_a_resource_falls_back_when_its_own_model_server_is_away(serving: Serving) -> None:
    desk = serving.desk
    did(serving, "deployments", "add", "gone", "--model", "m", "--url", "http://127.0.0.1:1/v1")
    did(serving, "resources", "add", "chat", "--model", "m", "--set", "fallbacks=[fixed]")
    status, answer = asked(serving, "chat")
    assert status == 200, answer
    batch = serving.submit([chat_line(f"c{number}", "hi").replace('"m"', '"chat"') for number in range(8)])
    desk.done("batches", "watch", batch)
    sent = {
        json.loads(call["body"])["model"] if isinstance(call.get("body"), str) else call.get("model")
        for call in desk.called()
    }
    assert sent <= {"fixed", None}
    assert listed(serving, "resources")["chat"]["fallbacks"] == ["fixed"]


def test_what_is_in_use_is_not_taken_away(serving: Serving) -> None:
    desk = serving.desk
    did(serving, "deployments", "add", "gpu", "--model", "m", "--url", "http://127.0.0.1:1/v1")
    did(serving, "resources", "add", "chat", "--model", "m")
    refused = did(serving, "deployments", "remove", "gpu", code=2)
    assert "The resource 'chat' leads to 'm', which nothing would serve" in refused
    did(serving, "resources", "remove", "chat")
    batch = serving.submit([chat_line("c0", "hi")])
    wait_until(lambda: serving.call("GET", f"/v1/batches/{batch}")[1]["status"] == "in_progress", 60, "it to begin")
    refused = did(serving, "deployments", "remove", "gpu", code=2)
    assert "Batches that have not ended ask for 'm'" in refused
    # With another one beside it, no batch needs it; the batch ends there.
    did(serving, "deployments", "add", "well", "--model", "m", "--url", desk.engine.url)
    did(serving, "deployments", "remove", "gpu")
    desk.done("batches", "watch", batch)


PLACE = {"model": "m", "url": "http://h/v1"}
GARBAGE: list[tuple[str, Any, int, str]] = [
    ("deployments/add", b"{", 400, "not valid JSON"),
    ("deployments/add", {}, 400, "name"),
    ("deployments/add", {"name": "x", "surprise": 1}, 400, "surprise"),
    ("deployments/add", {"name": "", "set": PLACE}, 400, "`name` needs 1 to 255"),
    ("deployments/add", {"name": "x", "set": {"model": "m"}}, 400, "url is missing"),
    ("deployments/add", {"name": "x", "set": {"url": "http://h/v1"}}, 400, "model is missing"),
    (
        "deployments/add",
        {"name": "x", "set": {"model": "m", "url": "h"}},
        400,
        "This deployment cannot be used: deployment 'x': url 'h' is not an http(s) address",
    ),
    ("deployments/add", {"name": "x", "set": {**PLACE, "wieght": 2}}, 400, "did you mean `weight`"),
    ("deployments/add", {"name": "x", "set": {**PLACE, "weight": "big"}}, 400, "weight is 'big'"),
    ("deployments/add", {"name": "x", "set": {**PLACE, "tls": {"key_file": "k"}}}, 400, "without tls.cert_file"),
    ("deployments/add", {"name": "x", "set": {**PLACE, "limits": [{"period": "minute"}]}}, 400, "limits nothing"),
    ("deployments/add", {"name": "global", "set": PLACE}, 400, "counts calls of all deployments"),
    ("deployments/add", {"name": "x", "set": {**PLACE, "api_key": CANARY}}, 400, "holds the secret itself"),
    (
        "deployments/add",
        {"name": "x", "set": {**PLACE, "api_key": "env:NOT_ALLOWED"}},
        400,
        "NOT_ALLOWED, which deployments added at run time may not read",
    ),
    (
        "deployments/add",
        {"name": "x", "set": {**PLACE, "tls": {"ca_file": "/etc/passwd"}}},
        400,
        "/etc/passwd, which lies outside of the folders",
    ),
    ("deployments/add", {"name": "steady", "set": PLACE}, 409, "is in the settings"),
    ("deployments/change", {"name": "steady", "set": {"weight": 2}}, 409, "is in the settings"),
    ("deployments/remove", {"name": "steady"}, 409, "is in the settings"),
    ("deployments/change", {"name": "x", "set": {"weight": 2}}, 404, "`tidegate deployments list` shows what there is"),
    ("deployments/remove", {"name": "x"}, 404, "was added at run time"),
    ("models/add", {"name": "fixed", "set": {"in_flight_max": 2}}, 409, "is in the settings"),
    ("models/add", {"name": "x", "set": {"in_flight_max": 2}}, 400, "No deployment serves the model 'x'"),
    ("models/add", {"name": "x", "set": {"in_flight_max": "two"}}, 400, "in_flight_max is 'two'"),
    ("models/add", {"name": "x", "set": {"deployments": []}}, 400, "deployments"),
    ("models/change", {"name": "x", "set": {}}, 404, "`tidegate models list` shows what there is"),
    ("resources/add", {"name": "x", "set": {"model": "it's unknown"}}, 400, 'No deployment serves "it\'s unknown"'),
    ("resources/add", {"name": "fixed", "set": {"model": "m"}}, 400, "is itself a model"),
    ("resources/add", {"name": "x", "set": {"model": "fixed", "fallbacks": ["x"]}}, 400, "lead back to it: x -> x"),
    (
        "resources/add",
        {"name": "x", "set": {"model": "fixed", "fallbacks": ["lost"]}},
        400,
        "No deployment serves 'lost'",
    ),
]


def test_what_cannot_be_meant_is_refused_in_words(shared_serving: Serving) -> None:
    for path, body, status, message in GARBAGE:
        got, answer = shared_serving.operate(path, body)
        assert (got, message in answer["error"]["message"]) == (status, True), (path, body, answer)
        assert not answer["error"]["message"].endswith(("?.", ".."))
        assert CANARY not in json.dumps(answer)
    _, shown = shared_serving.operate("deployments", method="GET")
    assert {one["name"] for one in shown["data"]} == {"steady"}


@pytest.fixture(scope="module")
def shared_serving(module_processes: Processes, module_directory: Path) -> Serving:
    engine = Engine(module_processes, module_directory / "engine")
    return serving_one_model(Desk(module_processes, engine, module_directory))


def test_of_two_operators_the_second_gets_an_error(shared_serving: Serving) -> None:
    wanted = {"name": "two", "set": {"model": "m2", "url": "http://h/v1"}}
    status, first = shared_serving.operate("deployments/add", wanted)
    assert status == 200
    again = shared_serving.operate("deployments/add", {**wanted, "set": {"model": "m2", "url": "http://i/v1"}})
    assert (again[0], again[1]["error"]["code"]) == (409, "already_exists")
    change = {"name": "two", "set": {"weight": 2}, "revision": first["revision"]}
    status, second = shared_serving.operate("deployments/change", change)
    assert (status, second["revision"] > first["revision"]) == (200, True)
    late = shared_serving.operate("deployments/change", {**change, "set": {"weight": 3}})
    assert (late[0], late[1]["error"]["code"]) == (409, "changed_meanwhile")
    late = shared_serving.operate("deployments/remove", {"name": "two", "revision": first["revision"]})
    assert (late[0], late[1]["error"]["code"]) == (409, "changed_meanwhile")
    assert shared_serving.operate("deployments/remove", {"name": "two"})[0] == 200


def test_only_the_operator_may_change_these(shared_serving: Serving) -> None:
    wanted = json.dumps({"name": "x", "set": {"model": "m", "url": "http://h/v1"}}).encode()
    assert shared_serving.call("POST", "/admin/v1/deployments/add", wanted)[0] == 403
    assert shared_serving.call("GET", "/admin/v1/routing")[0] == 404


def test_with_one_gateway_for_every_model_nothing_is_added(desk: Desk) -> None:
    serving = Serving(desk)
    wanted = {"name": "x", "set": {"model": "m", "url": "http://h/v1"}}
    status, answer = serving.operate("deployments/add", wanted)
    assert (status, answer["error"]["code"]) == (409, "set_in_settings")
    assert "upstream.url" in answer["error"]["message"]


def test_settings_of_a_model_are_added_while_everything_runs(serving: Serving) -> None:
    """How often its items are tried, and how many calls there may be: what the settings say of a model."""
    desk = serving.desk
    refused = did(serving, "models", "add", "m", "--set", "in_flight_max=2", code=2)
    assert "No deployment serves the model 'm'" in refused
    refused = did(serving, "models", "add", "fixed", "--set", "in_flight_max=2", code=2)
    assert "is in the settings" in refused
    did(serving, "deployments", "add", "gpu", "--model", "m", "--url", desk.engine.url)
    for wrong, says in (
        ("in_flight_max=-1", "in_flight_max"),
        ("retry={attempts: 3}", "attempts_max"),
        ("weight=2", "weight"),
    ):
        assert says in did(serving, "models", "add", "m", "--set", wrong, code=2)
    did(serving, "models", "add", "m", "--set", "in_flight_max=2", "--set", "retry={attempts_max: 1}")
    desk.engine.set_faults({"500": 1.0})
    batch = serving.submit([chat_line(f"c{number}", "hi") for number in range(4)])
    desk.done("batches", "watch", batch, code=1)
    assert len(desk.called()) == 4, "each was tried once"
    desk.engine.set_faults()
    found = listed(serving, "models")
    assert found["m"]["document"] == {"in_flight_max": 2, "retry": {"attempts_max": 1}}
    assert (found["m"]["origin"], found["fixed"]["origin"]) == ("added", "settings")
    did(serving, "models", "change", "m", "--set", "retry=", "--revision", str(found["m"]["revision"]))
    assert listed(serving, "models")["m"]["document"] == {"in_flight_max": 2}
    assert "m" in did(serving, "models", "list")
    did(serving, "models", "remove", "m")
    assert set(listed(serving, "models")) == {"fixed"}
    did(serving, "deployments", "remove", "gpu")


def test_settings_without_effect_and_names_that_nothing_serves_are_warned_of(serving: Serving) -> None:
    """Through the server, whose models the command's own settings need not know, and then in the store alone."""
    desk = serving.desk
    batching = ("--set", "chat_batching={mode: sync_microbatch, upstream_max_batch_size: 8}")
    add = ("deployments", "add", "two", "--model", "m2", "--url", desk.engine.url, *batching, "--config", "c.yaml")
    assert "no adapter is named" in desk.done(*add).stderr()
    # A key that allows what is served, and the options of resources, which a model's name is too.
    create = (
        "keys",
        "create",
        "--org",
        "acme",
        "--models",
        "fixed,m2,nosuch",
        "--resources",
        "fixed,nowhere",
        "--json",
    )
    made = desk.done(*create)
    assert set(json.loads(made.stdout())) == {"id", "key", "org"}
    warnings = [line for line in made.stderr().splitlines() if line.startswith("warning:")]
    assert len(warnings) == 2, made.stderr()
    assert "'nosuch'" in warnings[0]
    assert "'nowhere'" in warnings[1]
    changed = desk.done("keys", "change", json.loads(made.stdout())["id"], "--models", "fixed,nosuch2")
    assert "'nosuch2'" in changed.stderr()
    serving.proc.terminate()
    assert serving.proc.wait() == 0, serving.proc.logs()
    alone = desk.done("keys", "create", "--org", "acme", "--models", "fixed,m2,nosuch", "--config", "c.yaml")
    assert [line.count("'nosuch'") for line in alone.stderr().splitlines() if line.startswith("warning:")] == [1]
    found = desk.json_of("doctor", "--config", "c.yaml", "--json")
    assert [one["grade"] for one in found if "no adapter is named" in one["text"]] == ["warning"]
    (desk.here / "d.yaml").write_text(
        f"models: {{m: {{deployments: [{{url: '{desk.engine.url}', chat_batching: {{mode: sync_microbatch}}}}]}}}}"
    )
    assert "no adapter is named" in desk.done("config", "--config", "d.yaml", "--changed").stderr()
