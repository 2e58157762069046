"""`tidegate run` as a user with a file meets it: mistakes show before they cost, and nothing that was paid for is lost."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Iterator
from typing import Any

import pytest

from tests.cli.conftest import Desk, summary_of
from tests.support.tidegate import TIDEGATE, behaving, chat_line
from tests.upstream.raw_server import Peer, Request
from tests.web.upstream import Upstream, chat_with


async def no_models(request: Request, peer: Peer) -> None:
    """A web server that is no model server; what it answers stands in the path."""
    if request.line.startswith("POST"):
        await peer.answer(400, b"")
    elif request.path == "/lists/v1/models":
        await peer.answer(200, b'{"object":"list","data":[{"id":"llama"},{"id":"qwen"}]}')
    elif request.path.startswith("/moved"):
        await peer.answer(302, b"", Location="https://elsewhere.example/v1/models?token=secret")
    else:
        status = 501 if request.path.startswith("/none") else 503 if request.path.startswith("/loading") else 404
        await peer.answer(status, b"no")


@pytest.fixture
def strange_server() -> Iterator[str]:
    with Upstream(no_models) as server:
        yield server.url.removesuffix("/v1")


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("/none/v1", ["status 501", "--upstream"]),
        ("/wrong", ["status 404", "Model servers have it under /v1: write --upstream http://HOST:PORT/v1"]),
        ("/wrong/v1", ["status 404", "Is it the address of a model server? Fix --upstream"]),
        ("/loading/v1", ["status 503", "If it is still starting, --wait waits for it"]),
        (
            "/moved/v1",
            ["status 302", "It leads to https://elsewhere.example/v1/models, and redirects are not followed"],
        ),
        ("/lists/v1", ["does not serve the model 'm'", "line 1 of requests.jsonl", "llama, qwen", "--model"]),
    ],
)
def test_a_server_that_cannot_serve_this_is_reported_before_the_first_call(
    desk: Desk, strange_server: str, path: str, words: list[str]
) -> None:
    desk.write_requests(3)
    proc = desk.done("run", "requests.jsonl", "--upstream", strange_server + path, "-o", "r.jsonl", code=2)
    assert all(word in proc.stderr() for word in [*words, "--no-check"]), proc.stderr()
    assert "secret" not in proc.stderr()
    assert not (desk.here / "r.jsonl").exists()


def with_models(desk: Desk, **deployments: dict[str, str]) -> tuple[str, ...]:
    """A run over a configuration with one deployment for each of these models."""
    models = {name: {"deployments": [one]} for name, one in deployments.items()}
    (desk.here / "c.yaml").write_text(json.dumps({"models": models}))
    return ("run", "requests.jsonl", "--config", "c.yaml", "-o", "r.jsonl")


def test_a_model_without_a_deployment_is_reported_before_the_first_call(desk: Desk) -> None:
    desk.write([chat_line("a", "hi"), chat_line("b", "hi").replace('"m"', '"mm"')])
    run = with_models(desk, m={"url": desk.engine.url}, other={"url": desk.engine.url})
    error = desk.done(*run, code=2).stderr()
    assert "no deployment of the model 'mm', which line 2 of requests.jsonl asks for; it has m, other." in error
    assert "--no-check" in error
    error = desk.done(*run, "--model", "none", code=2).stderr()
    assert "no deployment of the model 'none', which --model names; it has m, other." in error
    assert not (desk.here / "r.jsonl").exists()
    assert desk.engine.calls() == []
    desk.done(*run, "--no-check", code=1)
    assert [one["custom_id"] for one in desk.results("r.jsonl")] == ["a"]
    [failed] = desk.results("r.errors.jsonl")
    assert (failed["custom_id"], failed["error"]["code"]) == ("b", "model_not_found")


def test_a_model_that_its_deployments_server_does_not_list_is_reported_before_the_first_call(
    desk: Desk, strange_server: str
) -> None:
    desk.write_requests(3)
    place = {"url": f"{strange_server}/lists/v1"}
    error = desk.done(*with_models(desk, m=place), code=2).stderr()
    assert "/lists/v1 does not serve the model 'm', which line 1 of requests.jsonl asks for; it serves llama" in error
    error = desk.done(*with_models(desk, m={**place, "upstream_model": "lama"}), code=2).stderr()
    assert "does not serve under the name 'lama' the model 'm'" in error
    assert "upstream_model" in error
    for path, advice in (("/none/v1", "Fix its url under models"), ("/wrong", "write url: http://HOST:PORT/v1")):
        assert advice in desk.done(*with_models(desk, m={"url": strange_server + path}), code=2).stderr()
    # Its server knows the model by a name that it lists, or may know it by one that it does not, as Azure does: both are called.
    for more in ({"upstream_model": "llama"}, {"engine": "openai", "upstream_model": "mine"}):
        desk.done(*with_models(desk, m={**place, **more}), "--fresh", code=1)


def test_what_is_wrong_with_an_option_is_reported_under_its_own_name(desk: Desk) -> None:
    desk.write_requests(1)
    url = desk.engine.url
    for more, message in (
        (["run", "requests.jsonl", "--upstream", url, "--concurrency", "0"], "--concurrency is 0, but must be a whole"),
        (["run", "requests.jsonl", "--upstream", url, "--concurrency", "99999"], "--concurrency is 99999, but must be"),
        (["run", "requests.jsonl", "--upstream", "nonsense"], "--upstream cannot be used: "),
        (
            ["run", "requests.jsonl", "--upstream", url, "--api-key", "env:NO"],
            "--api-key names the environment variable",
        ),
        (["batches", "list", "--server", "nonsense"], "--server must be a URL such as"),
        (["batches", "list", "--server", url, "--api-key", "env:NO"], "--api-key names the environment variable"),
        (
            ["deployments", "add", "x", "--model", "m", "--url", url, "--server", url, "--server-key", "env:NO"],
            "--server-key names the",
        ),
        (["serve", "--upstream", url, "--port", "99999"], "--port is 99999, but must be"),
    ):
        error = desk.done(*more, code=2).stderr()
        assert error.startswith(f"tidegate: {message}"), error
        assert len(error.splitlines()) == 1, error
    named = desk.done("run", "requests.jsonl", code=2, OPENAI_BASE_URL="nonsense").stderr()
    assert named.startswith("tidegate: OPENAI_BASE_URL cannot be used: "), named
    elsewhere = desk.done("run", "requests.jsonl", code=2, TIDEGATE_WORKER_IN_FLIGHT_MAX="0").stderr()
    assert "worker.in_flight_max is 0" in elsewhere
    assert "[TIDEGATE_WORKER_IN_FLIGHT_MAX]" in elsewhere


@pytest.mark.parametrize("more", [[], ["--invalid-lines", "error_file"]])
def test_a_run_in_which_everything_fails_stops_by_itself(desk: Desk, more: list[str]) -> None:
    desk.write([chat_line(f"c{number}", behaving("latency=100,400")) for number in range(400)])
    proc = desk.run("--concurrency", "4", *more)
    assert proc.wait(60) == 1, proc.logs()
    assert len(desk.called()) < 300
    assert "each of the first requests failed" in proc.stderr()
    assert "x 400 " in proc.stderr()
    assert "(as c" in proc.stderr()


def test_failures_are_listed_by_cause_with_an_example_each(desk: Desk) -> None:
    lines = [
        chat_line("ok", "hello"),
        chat_line("a", behaving("400")),
        chat_line("b", behaving("404")),
        chat_line("c", behaving("404")),
    ]
    desk.write(lines)
    proc = desk.run()
    assert proc.wait() == 1
    causes = [line.strip() for line in proc.stderr().splitlines() if " x 4" in line]
    assert [line.split(":")[0] for line in causes] == ["2 x 404 model_not_found", "1 x 400 invalid_request_error"]
    assert causes[0].endswith("(as b)")


def test_results_of_another_run_are_set_aside_with_a_word(desk: Desk) -> None:
    (desk.here / "results.jsonl").write_text("mine\n")
    desk.write_requests(2)
    first = desk.run()
    assert first.wait() == 0, first.logs()
    assert "results.jsonl.1.old" in first.stderr()
    assert (desk.here / "results.jsonl.1.old").read_text() == "mine\n"
    again = desk.run()
    assert again.wait() == 0
    assert "old" not in again.stderr(), "results of this very run are written again"
    desk.write_requests(3)
    other = desk.run()
    assert other.wait() == 0
    assert len((desk.here / "results.jsonl.2.old").read_text().splitlines()) == 2


def test_small_files_keep_their_order(desk: Desk) -> None:
    desk.write([chat_line(f"c{number}", behaving(f"latency={200 - 20 * number}")) for number in range(10)])
    proc = desk.run()
    assert proc.wait() == 0, proc.logs()
    assert [line["custom_id"] for line in desk.results()] == [f"c{number}" for number in range(10)]


def test_odd_ids_keep_their_order_too(desk: Desk) -> None:
    """Quotes, other letters, and prompts that look like lines: what is read quickly is read right."""
    ids = ['with "quotes"', "größe", "plain", "\\", '"custom_id": "plain"']
    lines = [
        chat_line(name, behaving(f"latency={200 - 40 * number}") + ' "custom_id": "c9", "model": "m"')
        for number, name in enumerate(ids)
    ]
    desk.write(lines)
    proc = desk.run()
    assert proc.wait() == 0, proc.logs()
    assert [line["custom_id"] for line in desk.results()] == ids


def test_a_run_has_no_limits_of_a_public_api(desk: Desk) -> None:
    image = "x" * 2_000_000
    desk.write([chat_line(f"c{number}", image if number == 0 else "hello") for number in range(12)])
    proc = desk.run("--json", TIDEGATE_LIMITS_ITEMS_MAX="10", TIDEGATE_LIMITS_FILE_BYTES_MAX="1500000")
    assert proc.wait(60) == 0, proc.logs()
    assert summary_of(proc)["succeeded"] == 12


def test_the_names_of_openais_sdk_lead_to_the_server(desk: Desk) -> None:
    desk.write([chat_line("a", "hello")])
    usual: Any = {"OPENAI_BASE_URL": desk.engine.url, "OPENAI_API_KEY": "canary"}
    proc = desk.done("run", "requests.jsonl", "-o", "r.jsonl", "--model", "ours", **usual)
    assert "canary" not in proc.logs()
    assert len(desk.called()) == 1
    assert desk.results("r.jsonl")[0]["response"]["body"]["model"] == "ours"


SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}


def test_answers_are_checked_against_a_schema(desk: Desk) -> None:
    line = json.loads(chat_line("a", behaving("unfitx1")))
    del line["body"]["max_tokens"]
    line["body"]["response_format"] = {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}
    never = json.loads(chat_line("b", "plain words"))
    desk.write([json.dumps(line), json.dumps(never)])
    (desk.here / "schema.json").write_text(json.dumps(SCHEMA))
    proc = desk.run("--schema", "schema.json")
    assert proc.wait() == 1, proc.logs()
    assert [len(one["tidegate"]["tries"]) for one in desk.results()] == [2]
    assert "1 x schema_invalid" in proc.stderr()
    (desk.here / "schema.json").write_text('{"$ref": "https://example.com"}')
    refused = desk.run("--schema", "schema.json")
    assert refused.wait() == 2
    assert "schema.json cannot be used" in refused.stderr()


@pytest.mark.parametrize("options", [("--max-errors", "x"), ("--max-errors", "100%"), ("--max-cost", "much")])
def test_thresholds_that_cannot_be_meant_are_refused(desk: Desk, options: tuple[str, str]) -> None:
    desk.write_requests(1)
    proc = desk.run(*options)
    assert proc.wait() == 2
    assert options[0] in proc.stderr()


def test_too_many_errors_stop_a_run(desk: Desk) -> None:
    desk.write(
        [chat_line(f"c{number}", behaving("latency=50,400" if number % 2 else "latency=50")) for number in range(200)]
    )
    proc = desk.run("--max-errors", "5%", "--concurrency", "4")
    assert proc.wait(60) == 1
    assert "more than the share of 0.05" in proc.stderr()
    assert len(desk.called()) < 200


def test_version_and_completion(desk: Desk) -> None:
    assert desk.done("-V").stdout().startswith("tidegate ")
    # It is for the shell that it is called from.
    shell = ["bash", "-c", f"{TIDEGATE} --show-completion; exit $?"]
    shown = desk.processes.start(shell, env={"PATH": os.environ["PATH"], "HOME": str(desk.here)}, cwd=desk.here)
    assert shown.wait(60) == 0, shown.logs()
    assert "complete" in shown.stdout()


def test_a_dry_run_takes_no_rate_of_another_server(desk: Desk) -> None:
    desk.write_requests(20)
    assert desk.run().wait(60) == 0
    desk.write_requests(21, "ask {}")
    same = desk.run("--dry-run", "--json", "--upstream", desk.engine.url.removesuffix("/v1") + "/")
    other = desk.run("--dry-run", "--json", "--upstream", "http://127.0.0.1:9/v1")
    assert (same.wait(60), other.wait(60)) == (0, 0)
    assert summary_of(same)["eta"] is not None
    assert summary_of(other)["eta"] is None


def test_a_dry_run_says_what_a_run_would_take_and_sends_nothing(desk: Desk) -> None:
    desk.write_requests(20)
    proc = desk.run("--dry-run")
    assert proc.wait() == 0, proc.logs()
    assert "requests 20" in proc.stderr()
    assert "tokens " in proc.stderr()
    assert "Nothing was sent" in proc.stderr()
    assert not desk.called()
    assert not (desk.here / "results.jsonl").exists()
    as_json = desk.run("--dry-run", "--json")
    assert as_json.wait() == 0
    assert summary_of(as_json)["item_count"] == 20
    desk.write([chat_line("a", "hello"), "{broken"])
    bad = desk.run("--dry-run")
    assert bad.wait() == 2
    assert "line 2: " in bad.stderr()
    assert desk.done("batches", "list").stdout().count("batch_") == 0, "nothing is kept"


def test_a_server_that_was_restarted_gets_at_once_all_that_it_failed(desk: Desk) -> None:
    """Three in a minute went to a server that had nothing else to do: the last lines of a small file are all retries."""
    first_calls = 8
    all_there = asyncio.Barrier(first_calls)

    async def crashes_once(request: Request, peer: Peer) -> None:
        """Break off the first calls when all of them are there, as a server that is killed, and then serve."""
        if request.line.startswith("GET"):
            await peer.answer(200, b'{"object":"list","data":[{"id":"m"}]}')
        elif request in upstream.posts[:first_calls]:
            await all_there.wait()
            peer.close()
        else:
            await peer.answer(200, chat_with("here again"))

    with Upstream(crashes_once) as upstream:
        desk.write_requests(first_calls)
        desk.done("run", "requests.jsonl", "--upstream", upstream.url, "-o", "r.jsonl")
        assert len(desk.results("r.jsonl")) == first_calls
        assert len(upstream.posts) == 2 * first_calls


def test_a_key_that_only_calls_are_refused_for_is_reported_with_what_to_do(desk: Desk) -> None:
    desk.write_requests(2)
    desk.engine.set_faults({"401": 1.0})
    run = desk.run("--no-check")
    run.wait_for_line("^The model server refuses our key: .* name the right key with --api-key env:NAME")
    run.interrupt()
    assert run.wait(60) == 130, run.logs()
    assert "The model server went away" not in run.stderr()
    desk.engine.set_faults({})
    assert desk.run("--api-key", "env:RIGHT", RIGHT="sk-right").wait(60) == 0
    assert desk.custom_ids() == ["c0", "c1"]


def test_an_upstream_account_without_money_is_reported_as_that_and_not_as_a_server_that_comes_and_goes(
    desk: Desk,
) -> None:
    paid = False

    async def refuses(request: Request, peer: Peer) -> None:
        if request.line.startswith("GET"):
            await peer.answer(200, b'{"object":"list","data":[{"id":"m"}]}')
        elif paid:
            await peer.answer(200, chat_with("here"))
        else:
            await peer.answer(429, b'{"error":{"message":"You have no money.","code":"insufficient_quota"}}')

    with Upstream(refuses) as upstream:
        desk.write_requests(3)
        run = desk.start("run", "requests.jsonl", "--upstream", upstream.url, "-o", "r.jsonl")
        run.wait_for_line("waiting: the upstream answered 429: the quota of its account is used up")
        paid = True
        assert run.wait(60) == 0, run.logs()
    assert len(desk.results("r.jsonl")) == 3
    assert "went away" not in run.stderr()
    assert "is back" not in run.stderr()
