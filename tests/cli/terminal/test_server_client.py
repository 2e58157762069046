"""Commands beside a running server: they read the store, write through its API, and only a second writer is refused."""

from __future__ import annotations

import asyncio
import json
import os
import re
import stat
from typing import Any

import aiohttp
import pytest

from tests.cli.conftest import Desk, Serving
from tests.support.processes import wait_until
from tests.support.tidegate import behaving, chat_line, requests
from tidegate.cli.batches import files
from tidegate.cli.terminal.server_client import RemoteServer
from tidegate.core.errors import SettingsError


def test_looking_at_batches_while_a_server_runs_them(serving: Serving) -> None:
    desk = serving.desk
    batch = serving.submit(
        [chat_line(f"c{number}", "hi") for number in range(12)] + [chat_line("bad", behaving("400"))]
    )
    followed = desk.done("batches", "watch", batch, "--json", code=1)
    assert [json.loads(line)["status"] for line in followed.stdout().splitlines()][-1] == "completed"
    listed = desk.json_of("batches", "list", "--json")
    assert [(one["id"], one["completed"], one["failed"]) for one in listed] == [(batch, 12, 1)]
    desk.done("batches", "output", batch, "-o", "got.jsonl")
    assert {line["custom_id"] for line in desk.results("got.jsonl")} == {f"c{number}" for number in range(12)}
    failed = desk.done("batches", "output", batch, "--errors").stdout()
    assert json.loads(failed)["custom_id"] == "bad"
    shown = desk.done("batches", "show", batch).stdout()
    assert "completed" in shown
    desk.verified(batch)


def test_behind_the_last_byte_of_a_file_there_is_nothing_yet(serving: Serving) -> None:
    """A command that follows a growing file asks for what comes next, and mostly nothing has come."""
    line = chat_line("c0", "hi") + "\n"
    _, batch = serving.call("GET", f"/v1/batches/{serving.submit([line.rstrip()])}")
    server = RemoteServer(serving.url, None)

    async def bytes_from(start: int) -> bytes:
        path = f"/v1/files/{batch['input_file_id']}/content"
        return b"".join([piece async for piece in server.content(path, start)])

    assert asyncio.run(bytes_from(len(line) - 2)) == b"}\n"
    assert asyncio.run(bytes_from(len(line))) == b""


def test_controlling_a_batch_through_the_server_that_runs_it(serving: Serving) -> None:
    desk = serving.desk
    batch = serving.submit([chat_line(f"c{number}", behaving("latency=200")) for number in range(60)])
    assert "is paused" in desk.done("batches", "pause", batch).stderr()
    assert "It is paused" in desk.done("explain", batch).stdout()
    changed = desk.done("batches", "set", batch, "--priority", "7", "--max-errors", "5%", "--max-cost", "2", "--json")
    controls = json.loads(changed.stdout())
    assert (controls["priority"], controls["max_cost"], controls["max_errors"]) == (
        7, "2", {"count": None, "share": 0.05, "after": 100},
    )  # fmt: skip
    assert controls["paused_at"] is not None
    assert "neither a count" in desk.done("batches", "set", batch, "--max-errors", "x", code=2).stderr()
    assert "has not ended" in desk.done("batches", "delete", batch, "--yes", code=2).stderr()
    assert "goes on" in desk.done("batches", "resume", batch).stderr()
    desk.done("batches", "watch", batch)
    desk.verified(batch)
    listed = desk.json_of("batches", "list", "--status", "completed", "--search", batch[6:], "--json")
    assert [one["id"] for one in listed] == [batch]
    assert [one["id"] for one in desk.json_of("batches", "list", "--sort", "size", "--json")] == [batch]
    assert "No batch matches" in desk.done("batches", "list", "--sort", "failed").stderr()
    assert "No batch matches" in desk.done("batches", "list", "--metadata", "team=x").stderr()
    desk.done("batches", "delete", batch, "--yes")
    assert "There is no batch" in desk.done("batches", "show", batch, code=2).stderr()


def test_stopping_a_batch_through_the_server_that_runs_it(serving: Serving) -> None:
    desk = serving.desk
    batch = serving.submit([chat_line(f"c{number}", behaving("latency=300")) for number in range(200)])
    wait_until(lambda: len(desk.called()) >= 8, what="some calls")
    assert "cancelling" in desk.done("batches", "cancel", batch).stderr()
    assert desk.done("batches", "output", batch, "--follow").stdout().count("\n") >= 8
    known = desk.json_of("batches", "show", batch, "--json")
    assert known["status"] == "cancelled"
    assert known["completed"] + known["failed"] == 200
    assert "is cancelled" in desk.done("batches", "cancel", batch).stderr()


def test_a_batch_of_an_organization_with_an_odd_name_is_stopped_beside_the_server(serving: Serving) -> None:
    desk, org = serving.desk, "ünï 100% 🎉"
    made = desk.json_of("keys", "create", "--org", org, "--json")
    batch = serving.submit([chat_line(f"c{number}", behaving("latency=300")) for number in range(200)], made["key"])
    assert "There is no organization 'ünï'" in desk.done("batches", "cancel", batch, "--org", "ünï", code=2).stderr()
    assert "cancelling" in desk.done("batches", "cancel", batch, "--org", org).stderr()


def test_a_batch_of_any_organization_is_found_by_its_id(serving: Serving) -> None:
    """On the server's machine the operator need not know whose batch or file it is, with the server and without it."""
    desk = serving.desk
    made = desk.json_of("keys", "create", "--org", "acme", "--json")
    lines = [chat_line(f"c{number}", behaving("latency=300")) for number in range(199)]
    batch = serving.submit([*lines, chat_line("other", "hi").replace('"m"', '"m2"')], made["key"])
    assert "Only other organizations have batches: --org NAME" in desk.done("batches", "list").stderr()
    assert "--org NAME lists those of another" in desk.done("files", "list").stderr()
    shown = desk.json_of("batches", "show", batch, "--json")
    assert (shown["model"], shown["models"]) == ("m", ["m", "m2"])
    file = shown["input_file_id"]
    assert "in.jsonl" in desk.done("files", "show", file).stdout()
    assert desk.done("files", "download", file).stdout().count("\n") == 200
    absent = f"There is no file {file[:-1]}"
    assert absent in desk.done("files", "show", f"{file[:-1]}{'a' if file[-1] != 'a' else 'b'}", code=2).stderr()
    assert "is paused" in desk.done("batches", "pause", batch).stderr()
    assert "It is paused" in desk.done("explain", batch).stdout()
    assert "is changed" in desk.done("batches", "set", batch, "--priority", "3", "--max-errors", "5%").stderr()
    serving.proc.terminate()
    serving.proc.wait()
    assert "goes on" in desk.done("batches", "resume", batch).stderr()
    shown = desk.json_of("batches", "show", batch, "--json")
    assert (shown["priority"], shown["max_errors"]) == (3, {"count": None, "share": 0.05, "after": 100})
    assert "cancel" in desk.done("batches", "cancel", batch).stderr()


def test_keys_shown_changed_and_rotated_beside_the_server(serving: Serving) -> None:
    desk = serving.desk
    wanted = (
        "--models",
        "m",
        "--resources",
        "r",
        "--limit",
        "minute:requests=60,tokens=500",
        "--limit",
        "day:tokens=9",
    )
    made = desk.json_of("keys", "create", "--org", "acme", *wanted, "--json")
    shown = desk.json_of("keys", "show", made["id"], "--json")
    assert (shown["models"], shown["resources"]) == ("m", "r")
    assert shown["limits"] == "minute:requests=60,tokens=500 day:tokens=9"
    desk.done("keys", "change", made["id"], "--models", "", "--limit", "")
    shown = desk.json_of("keys", "show", made["id"], "--json")
    assert (shown["models"], shown["resources"], shown["limits"]) == ("any", "r", "none")
    assert "Nothing is to be changed" in desk.done("keys", "change", made["id"], code=2).stderr()
    assert "no key" in desk.done("keys", "change", "00000000", "--models", "m", code=2).stderr()
    assert "minute:requests=10" in desk.done("keys", "change", made["id"], "--limit", "minute", code=2).stderr()
    turned = desk.json_of("keys", "rotate", made["id"], "--grace", "1h", "--json")
    assert (turned["id"], turned["key"] != made["key"]) == (made["id"], True)
    for key in (turned["key"], made["key"]):
        assert serving.call("GET", "/v1/batches", key=key)[0] == 200
    again = desk.json_of("keys", "rotate", made["id"], "--grace", "0s", "--json")
    assert serving.call("GET", "/v1/batches", key=again["key"])[0] == 200
    wait_until(lambda: serving.call("GET", "/v1/batches", key=turned["key"])[0] == 401, what="the old secret to end")
    assert "no key" in desk.done("keys", "rotate", "00000000", code=2).stderr()
    assert "90d at most" in desk.done("keys", "rotate", made["id"], "--grace", "91d", code=2).stderr()
    text = desk.done("keys", "show", made["id"]).stdout()
    assert "acme" in text
    assert all(secret["key"] not in text for secret in (made, turned, again))


def test_limits_in_money_and_parallel_calls_are_a_keys_own_from_the_command_line(serving: Serving) -> None:
    """They are set, shown, changed one without the other, and hold for the next call."""
    desk = serving.desk
    wanted = ("--limit", "day:requests=2,batches=5,bytes=100000", "--limit", "Month:cost=20.50", "--parallel", "3")
    made = desk.json_of("keys", "create", "--org", "acme", *wanted, "--json")

    def shown() -> tuple[str, object]:
        key = desk.json_of("keys", "show", made["id"], "--json")
        return key["limits"], key["parallel"]

    assert shown() == ("day:requests=2,batches=5,bytes=100000 month:cost=20.5", 3)
    text = desk.done("keys", "show", made["id"]).stdout()
    assert "month:cost=20.5" in text
    assert "None" not in text
    desk.done("keys", "change", made["id"], "--parallel", "0")
    assert shown() == ("day:requests=2,batches=5,bytes=100000 month:cost=20.5", "any")
    body = json.dumps({"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}).encode()
    asked = [serving.call("POST", "/v1/chat/completions", body, made["key"])[0] for _ in range(3)]
    assert asked == [200, 200, 429]
    desk.done("keys", "change", made["id"], "--limit", "lifetime:cost=0.000000001")
    assert shown() == ("lifetime:cost=0.000000001", "any")
    wait_until(
        lambda: serving.call("POST", "/v1/chat/completions", body, made["key"])[0] == 200,
        what="the daily limit to be gone: what costs nothing passes a budget in money",
    )


def test_keys_deleted_beside_the_server(serving: Serving) -> None:
    desk = serving.desk
    one, two, three = (desk.json_of("keys", "create", "--org", org, "--json") for org in ("acme", "acme", "other"))
    assert desk.json_of("keys", "delete", one["id"], "--json") == {"deleted": [one["id"]]}
    assert "no key" in desk.done("keys", "delete", one["id"], code=2).stderr()
    assert two["id"] in desk.done("keys", "delete", "--org", "acme").stderr()
    assert "no key of acme" in desk.done("keys", "delete", "--org", "acme", code=2).stderr()
    assert "not both" in desk.done("keys", "delete", code=2).stderr()
    assert "not both" in desk.done("keys", "delete", three["id"], "--org", "other", code=2).stderr()
    assert [row["id"] for row in desk.json_of("keys", "list", "--json")] == [three["id"]]
    wait_until(
        lambda: {serving.call("GET", "/v1/batches", key=gone["key"])[0] for gone in (one, two)} == {401},
        what="them to be useless",
    )
    serving.proc.terminate()
    assert serving.proc.wait() == 0
    desk.done("keys", "delete", three["id"])
    assert "no key" in desk.done("keys", "delete", "--org", "other", code=2).stderr()


def test_keys_made_and_revoked_beside_the_server(serving: Serving) -> None:
    desk = serving.desk
    assert serving.call("GET", "/v1/batches")[0] == 200
    made = desk.json_of("keys", "create", "--org", "acme", "--label", "ci", "--expires", "90d", "--json")
    bound = desk.json_of("keys", "create", "--org", "acme", "--addresses", "192.0.2.0/24", "--json")
    assert serving.call("GET", "/v1/batches", key=bound["key"])[0] == 401
    assert desk.json_of("keys", "show", bound["id"], "--json")["addresses"] == "192.0.2.0/24"
    desk.done("keys", "change", bound["id"], "--addresses", "127.0.0.0/8,192.0.2.0/24")
    wait_until(lambda: serving.call("GET", "/v1/batches", key=bound["key"])[0] == 200, what="the change to be seen")
    desk.done("keys", "delete", bound["id"])
    wait_until(lambda: serving.call("GET", "/v1/batches")[0] == 401, what="keys to be needed")
    assert serving.call("GET", "/v1/batches", key=made["key"])[0] == 200
    batch = serving.submit([chat_line("a", "hi")], made["key"])
    assert "There is no batch" in desk.done("batches", "show", batch, "--org", "default", code=2).stderr()
    assert desk.done("batches", "watch", batch, "--org", "acme").returncode == 0
    listed = desk.done("keys", "list", "--json")
    (key,) = json.loads(listed.stdout())
    assert (key["id"], key["org"], key["label"], key["state"]) == (made["id"], "acme", "ci", "live")
    assert made["key"] not in listed.logs()
    desk.done("keys", "revoke", made["id"])
    wait_until(lambda: serving.call("GET", "/v1/batches", key=made["key"])[0] == 401, what="the key to be useless")
    assert "no key" in desk.done("keys", "revoke", made["id"], code=2).stderr()
    assert desk.json_of("keys", "list", "--json")[0]["state"] == "revoked"


def test_the_operators_routes_refuse_everyone_else(serving: Serving) -> None:
    wanted = b'{"org": "mallory"}'
    assert serving.call("POST", "/admin/v1/keys", wanted)[0] == 403
    made = serving.desk.json_of("keys", "create", "--org", "acme", "--json")
    assert serving.call("POST", "/admin/v1/keys", wanted, made["key"])[0] == 403
    assert serving.call("POST", f"/admin/v1/keys/{made['id']}/revoke", b"{}", made["key"])[0] == 403
    abandon = f"/admin/v1/batches/{'batch_' + 22 * '0'}/abandon"
    assert serving.call("POST", abandon, b"{}", made["key"])[0] == 403
    wait_until(
        lambda: serving.call("POST", "/admin/v1/keys", wanted, "tg_live_nonsense")[0] == 401,
        10,
        "the server to notice that there are keys now",
    )


def test_a_second_writer_is_refused_and_a_stop_is_clean(serving: Serving) -> None:
    desk = serving.desk
    data = desk.here / ".tidegate"
    control = data / "control.json"
    assert stat.S_IMODE(os.stat(data).st_mode) == 0o700
    assert stat.S_IMODE(os.stat(control).st_mode) == 0o600
    found = os.stat(data / "control.sock")
    assert (stat.S_ISSOCK(found.st_mode), stat.S_IMODE(found.st_mode), found.st_uid) == (True, 0o600, os.geteuid())
    token = json.loads(control.read_text())["token"]
    desk.write_requests(1)
    second = desk.run()
    assert second.wait() == 2, second.logs()
    assert f"another process (pid {serving.proc.pid}) already writes" in second.stderr()
    examined = desk.done("doctor", "--upstream", desk.engine.url)
    assert f"pid {serving.proc.pid} serves this data at {serving.url}" in examined.stdout()
    serving.proc.terminate()
    assert serving.proc.wait() == 0, serving.proc.logs()
    assert not control.exists()
    assert not (data / "control.sock").exists()
    assert token not in serving.proc.logs() + examined.logs()


def test_a_server_that_died_does_not_stand_in_the_way(serving: Serving) -> None:
    serving.proc.kill()
    made = serving.desk.done("keys", "create", "--org", "acme")
    assert made.stdout().startswith("tg_live_")
    assert "only time" in made.stderr()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--org", ""], "`org` needs 1 to 255 printable characters"),
        (["--org", "a\u0301"], "`org` needs 1 to 255 printable characters"),
        (["--org", "a\x1b[2Jb"], "`org` needs 1 to 255 printable characters"),
        (["--org", "a", "--scopes", "files:read,root"], "there is no scope 'root'"),
        (["--org", "a", "--expires", "90"], "a duration with a unit"),
        (["--org", "a", "--addresses", "10.0.0.0/8,here"], "`addresses` needs IP addresses or ranges"),
        (["--org", "a", "--limit", "month:cost=0"], "--limit 'month:cost=0': `cost` must be above 0"),
        (["--org", "a", "--limit", "month:cost=-1"], "`cost` is -1: use a number from 0"),
        (["--org", "a", "--limit", "month:cost=nan"], "`cost` is 'nan': write a number"),
        (["--org", "a", "--limit", "month:cost=0.0000000001"], "round it"),
        (["--org", "a", "--limit", "month:cost="], "write it like minute:requests=10"),
        (["--org", "a", "--limit", "minute:requests=0"], "`requests` must be a whole number from 1"),
        (["--org", "a", "--limit", "minute:requests=-3"], "`requests` must be a whole number from 1"),
        (["--org", "a", "--limit", "minute:requests=1.5"], "`requests` must be a whole number from 1"),
        (["--org", "a", "--limit", "minute:requests=1,requests=2"], "says the same twice"),
        (["--org", "a", "--limit", "fortnight:requests=3"], "it must be one of: minute"),
        (["--org", "a", "--limit", "minute:requests=1", "--limit", "minute:tokens=2"], "names minute twice"),
        (["--org", "a", "--parallel", "-1"], "--parallel"),
        (["--org", "a", "--parallel", "9999999"], "--parallel"),
    ],
)
def test_keys_that_cannot_be_made(desk: Desk, arguments: list[str], says: str) -> None:
    refused = desk.done("keys", "create", *arguments, code=2)
    assert says in refused.stderr()
    assert not (desk.here / ".tidegate").exists()


def test_doctor_finds_what_is_wrong_and_says_what_to_do(desk: Desk) -> None:
    healthy = desk.done("doctor", "--upstream", desk.engine.url, "--json")
    assert {finding["grade"] for finding in json.loads(healthy.stdout())} <= {"ok", "warning"}
    (desk.here / "c.yaml").write_text("server: {port: many, host: 0.0.0.0}\nstor: {}\n")
    broken = desk.done("doctor", "--config", "c.yaml", "--json", code=1)
    assert [finding["grade"] for finding in json.loads(broken.stdout())] == ["wrong", "wrong"]
    (desk.here / "file").write_text("")
    blocked = desk.done("doctor", "--data", "file", code=1)
    assert "is not a directory" in blocked.stdout()
    assert "-> " in blocked.stdout()


def test_serve_without_a_model_server_says_so(desk: Desk) -> None:
    assert "No model server is known" in desk.done("serve", code=2).stderr()


def test_explain_says_why_a_batch_runs_or_not(serving: Serving) -> None:
    desk = serving.desk
    batch = serving.submit([chat_line("slow", behaving("slow=60000"))])
    wait_until(lambda: "workers hold" in desk.done("explain", batch).stdout(), 30, "the batch to run")
    serving.call("POST", f"/v1/batches/{batch}/cancel")
    explanation = desk.json_of("explain", batch, "--json")
    assert explanation["batch"] == batch
    assert "closing as cancelled" in explanation["why"][1]


def test_explain_names_a_model_server_that_only_an_option_of_the_server_names(serving: Serving) -> None:
    """The server has it by an option, so the settings of the command name none."""
    desk = serving.desk
    desk.engine.proc.kill()
    desk.engine.proc.wait()
    batch = serving.submit([chat_line(f"c{number}", "hi") for number in range(40)])
    named = "the circuit of deployment upstream has been open for"
    wait_until(lambda: named in desk.done("explain", batch).stdout(), 60, "the cause in the explanation")


def test_explain_says_what_the_scheduler_would_do(serving: Serving) -> None:
    desk = serving.desk
    batch = serving.submit([chat_line(f"slow{number}", behaving("slow=60000")) for number in range(400)])
    wait_until(lambda: "workers hold" in desk.done("explain", batch).stdout(), 30, "the batch to run")
    desk.done("scheduler", "set", "fair_share_v1")
    explanation = desk.json_of("explain", batch, "--json")
    (forecast,) = explanation["standing"]["prospects"]
    assert (forecast["model"], forecast["mode"], forecast["share"]) == ("m", "fair_share_v1", 1.0)
    assert "m: no other tenant has work for it; its tenant can count on 100% of what is served." in explanation["why"]
    assert "it is unknown whether the deadline will be met" in desk.done("explain", batch).stdout()
    assert re.search(
        r"about [\d,]+ tokens of work, done ones included: size class (xs|s|m)\.", "\n".join(explanation["why"])
    )
    shown = serving.call("GET", f"/v1/batches/{batch}")[1]["tidegate"]
    assert (shown["eta"], shown["slack_seconds"]) == (None, None)


def test_explain_names_the_keys_own_limit_that_a_batch_waits_for(serving: Serving) -> None:
    desk = serving.desk
    made = desk.json_of("keys", "create", "--org", "acme", "--user", "ann", "--limit", "day:requests=1", "--json")
    batch = serving.submit([chat_line(f"c{number}", "hi") for number in range(8)], made["key"])
    wait_until(
        lambda: (
            f"the budget of key {made['id']} is used up (1 request a day)"
            in desk.done("explain", batch, "--org", "acme").stdout()
        ),
        60,
        "the key's limit to be named",
        poll_s=0.5,
    )


def test_explain_says_how_the_tide_stands(desk: Desk) -> None:
    """In the words of the process that runs the batch, for the deployments of its own model and no others."""
    place = f"deployments: [{{url: '{desk.engine.url}', engine: vllm, name"
    (desk.here / "c.yaml").write_text(f"models: {{m: {{{place}: gpu}}]}}, other: {{{place}: elsewhere}}]}}}}")
    serving = Serving(desk, "--config", "c.yaml")
    batch = serving.submit([chat_line(f"slow{number}", behaving("slow=60000")) for number in range(400)])

    def explained() -> str:
        return desk.done("explain", batch, "--config", "c.yaml").stdout()

    wait_until(lambda: "m: the tide of gpu lets batch have " in explained(), 60, "word of the tide")
    explanation = desk.json_of("explain", batch, "--config", "c.yaml", "--json")
    (forecast,) = explanation["standing"]["prospects"]
    assert [f"m: {note}" for note in forecast["notes"]] == [one for one in explanation["why"] if "the tide of" in one]
    assert not any("elsewhere" in one for one in explanation["why"])


def test_only_a_batch_that_is_finalizing_can_be_abandoned(serving: Serving) -> None:
    desk = serving.desk
    batch = serving.submit([chat_line("slow", behaving("slow=60000"))])
    refused = desk.done("batches", "abandon", batch, "--yes", code=2)
    assert "only one that is finalizing can be abandoned" in refused.stderr()
    other = desk.done("batches", "abandon", batch, "--org", "others", "--yes", code=2)
    assert f"There is no batch {batch} in organization others" in other.stderr()
    absent = desk.done("batches", "abandon", "batch_" + 22 * "0", "--yes", code=2)
    assert "No batch found with id" in absent.stderr()


def test_a_key_for_names_that_nothing_serves_is_made_with_a_warning(desk: Desk) -> None:
    (desk.here / "c.yaml").write_text(
        f"models: {{m: {{deployments: [{{url: '{desk.engine.url}'}}]}}}}\nresources: {{chat: {{model: m}}}}\n"
    )
    wanted = ("keys", "create", "--org", "acme", "--models", "m,x", "--resources", "m,chat,y")
    shown = desk.done(*wanted, "--config", "c.yaml").stderr()
    assert re.findall(r"(model|resource or model) '(\w+)', which this key allows", shown) == [
        ("model", "x"),
        ("resource or model", "y"),
    ]
    served = desk.done(*wanted, TIDEGATE_UPSTREAM_URL=desk.engine.url).stderr()
    assert "which this key allows" not in served, "one server takes every name"


def test_a_list_that_is_cut_says_so(
    serving: Serving, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    desk, cut = serving.desk, "Only the first 2 are shown; --limit N shows more."
    batches = [serving.submit(requests(3)) for _ in range(3)]
    for batch in batches:
        desk.done("batches", "watch", batch)
    for asked in (["files", "list", "--purpose", "batch"], ["batches", "list"], ["batches", "items", batches[0]]):
        shown = desk.done(*asked, "--limit", "2", "--json")
        assert cut in shown.stderr()
        assert len(json.loads(shown.stdout())) == 2
        assert "are shown" not in desk.done(*asked, "--limit", "3").stderr()
    # Fewer fit a page than are asked for: the second page begins where the first ended.
    monkeypatch.setattr(files, "PAGE_COUNT_MAX", 2)
    monkeypatch.chdir(desk.here)
    capsys.readouterr()
    files.list_files(limit=5, as_json=True)
    listed = [one["id"] for one in json.loads(capsys.readouterr().out)]
    assert len(set(listed)) == len(listed) == 5


def test_a_batch_whose_input_was_refused_is_not_reported_to_have_answers(serving: Serving) -> None:
    batch = serving.submit(requests(2), endpoint="/v1/embeddings")
    serving.desk.done("batches", "watch", batch, code=1)
    refused = serving.desk.done("batches", "retry", batch, code=2)
    assert "Its input was refused, so no request ran" in refused.stderr()


class Listing(RemoteServer):
    """A server that lists five entries, two on a page."""

    def __init__(self) -> None:
        super().__init__("http://127.0.0.1:9", None)
        self.asked: list[str] = []

    async def get(self, path: str, answer: Any, tenant: str | None = None) -> Any:
        self.asked.append(path)
        first = 2 * len(self.asked) - 1
        data = [{"id": f"a&b {number}"} for number in range(first, min(first + 2, 6))]
        return {"data": data, "has_more": first < 5, "last_id": data[-1]["id"]}


@pytest.mark.parametrize(("path", "sign"), [("/v1/batches", "?"), ("/v1/batches?org=acme", "&")])
def test_a_list_is_read_page_by_page(path: str, sign: str) -> None:
    server = Listing()
    listed = asyncio.run(server.pages(path))
    assert [one["id"] for one in listed] == [f"a&b {number}" for number in range(1, 6)]
    first = f"{path}{sign}limit=100"
    assert server.asked == [first, f"{first}&after=a%26b%202", f"{first}&after=a%26b%204"]
    assert len(asyncio.run(Listing().pages(path, count_max=3))) == 3


def test_another_server_is_asked_for_no_organization_by_name() -> None:
    async def ask() -> None:
        async with RemoteServer("http://127.0.0.1:9", None).session("acme", aiohttp.ClientTimeout(1)):
            pass

    with pytest.raises(SettingsError, match="at another server the key says which"):
        asyncio.run(ask())
