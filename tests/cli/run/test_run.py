"""`tidegate run` as a process: what goes where, what the exit code says, and that whatever stops it, the same command goes on."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections import Counter
from hashlib import sha256
from pathlib import Path

import pytest

from tests.cli.conftest import QUICK, Desk, summary_of
from tests.support.engine import Engine
from tests.support.processes import Processes, free_port, wait_until
from tests.support.tidegate import TIDEGATE, behaving, chat_line
from tidegate.cli.app import app
from tidegate.core.errors import SettingsError

SLOW = behaving("latency=150").replace("{", "{{").replace("}", "}}")


def custom_ids(lines: list[dict[str, object]]) -> Counter[object]:
    return Counter(line["custom_id"] for line in lines)


def test_a_file_becomes_results_and_a_second_run_finds_the_work_done(desk: Desk) -> None:
    desk.write_requests(40)
    first = desk.run()
    assert first.wait() == 0, first.logs()
    assert custom_ids(desk.results()) == Counter(f"c{number}" for number in range(40))
    assert first.stdout() == ""
    assert "\x1b" not in first.stderr()
    assert "done     40 of 40 items succeeded" in first.stderr()
    assert "results  results.jsonl" in first.stderr()
    assert not (desk.here / "results.errors.jsonl").exists()
    called = len(desk.called())
    desk.engine.proc.kill()
    (desk.here / "results.jsonl").unlink()
    second = desk.run("--json")
    assert second.wait() == 0, second.logs()
    assert len(desk.results()) == 40
    assert summary_of(second)["found_done"] == 40
    assert len(desk.called()) == called == 40


def test_identical_lines_run_once_where_that_is_asked_for(desk: Desk) -> None:
    body = {"model": "m", "messages": [{"role": "user", "content": "same"}], "temperature": 0}
    lines = [{"custom_id": f"c{n}", "url": "/v1/chat/completions", "body": body} for n in range(10)]
    desk.write([json.dumps(line) for line in lines])
    proc = desk.run("--dedupe")
    assert proc.wait() == 0, proc.logs()
    assert [line["custom_id"] for line in desk.results()] == [f"c{n}" for n in range(10)]
    assert "done     10 of 10 items succeeded" in proc.stderr()
    assert len(desk.called()) == 1


def test_failed_lines_go_to_their_own_file_and_the_exit_code_says_so(desk: Desk) -> None:
    desk.write([chat_line("good", "hello"), chat_line("bad", behaving("400"))])
    (desk.here / "results.errors.jsonl").write_text("stale\n")
    proc = desk.run("--json")
    assert proc.wait() == 1, proc.logs()
    summary = summary_of(proc)
    assert (summary["total"], summary["succeeded"], summary["failed"], summary["exit_code"]) == (2, 1, 1, 1)
    assert (summary["results"], summary["errors_file"]) == ("results.jsonl", "results.errors.jsonl")
    assert custom_ids(desk.results()) == Counter(["good"])
    assert custom_ids(desk.results("results.errors.jsonl")) == Counter(["bad"])
    desk.verified(str(summary["batch"]))


def test_an_error_file_does_not_outlive_its_errors(desk: Desk) -> None:
    desk.write_requests(2)
    (desk.here / "results.errors.jsonl").write_text("stale\n")
    assert desk.run().wait() == 0
    assert not (desk.here / "results.errors.jsonl").exists()


def test_stdin_to_stdout_and_nothing_else_on_it(desk: Desk) -> None:
    lines = "".join(chat_line(f"c{number}", "hi") + "\n" for number in range(5))
    done = subprocess.run(
        [TIDEGATE, "run", "-", "--upstream", desk.engine.url], input=lines, cwd=desk.here, text=True,
        capture_output=True, timeout=60, check=False, env={"PATH": os.environ["PATH"]},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert custom_ids([json.loads(line) for line in done.stdout.splitlines()]) == Counter(f"c{n}" for n in range(5))
    assert list((desk.here / ".tidegate" / "scratch").iterdir()) == []


def test_a_bad_input_is_refused_with_line_numbers_before_anything_is_sent(desk: Desk) -> None:
    desk.write([chat_line("a", "hi"), "not json", chat_line("a", "twice")])
    proc = desk.run()
    assert proc.wait() == 2, proc.logs()
    assert "nothing was sent" in proc.stderr()
    assert "line 2: " in proc.stderr()
    assert "line 3: " in proc.stderr()
    assert not (desk.here / "results.jsonl").exists()
    assert desk.called() == []
    desk.write([chat_line("a", "hi"), chat_line("b", "fixed")])
    assert desk.run().wait() == 0


def test_bad_lines_may_go_to_the_error_file_instead(desk: Desk) -> None:
    desk.write([chat_line("a", "hi"), "not json"])
    proc = desk.run("--invalid-lines", "error_file")
    assert proc.wait() == 1, proc.logs()
    assert len(desk.results()) == len(desk.results("results.errors.jsonl")) == 1


def test_lines_may_name_different_endpoints(desk: Desk) -> None:
    """Named as for vLLM's run-batch; what a model server does not serve fails its own line only."""

    def line(custom_id: str, url: str, **body: object) -> str:
        request = {"custom_id": custom_id, "method": "POST", "url": url, "body": {"model": "m", **body}}
        return json.dumps(request)

    desk.write(
        [
            chat_line("chat", "hi"),
            line("embed", "/v1/embeddings", input="hi"),
            line("score", "/v1/score", text_1="hi", text_2=["ho", "hu"]),
            line("queries", "/v1/score", queries="hi", documents=["ho", "hu"]),
            line("rerank", "/v1/rerank", query="hi", documents=["ho", "hu"]),
            line("classify", "/v1/classify", input=["hi"]),
            line("pool", "/v1/pooling", input="hi"),
            line("transcribed", "/v1/audio/transcriptions", file_url="data:audio/wav;base64,UklGRg==", language="en"),
            line("fetched", "/v1/audio/translations", file_url="https://127.0.0.1/a.mp3"),
            line("none", "/v1/nonsense", input="hi"),
        ]
    )
    engine = ["--upstream", desk.engine.url]
    done = desk.done("run", "-i", "requests.jsonl", "-o", "results.jsonl", *engine, "--json", code=1)
    assert (summary_of(done)["succeeded"], summary_of(done)["failed"]) == (8, 2)
    bodies = {str(one["custom_id"]): one["response"]["body"] for one in desk.results()}
    assert bodies["chat"]["choices"]
    assert len(bodies["embed"]["data"]) == len(bodies["pool"]["data"]) == len(bodies["classify"]["data"]) == 1
    for name in ("score", "queries"):
        assert [one["index"] for one in bodies[name]["data"]] == [0, 1]
    assert {one["index"] for one in bodies["rerank"]["results"]} == {0, 1}
    assert bodies["transcribed"]["received"] == {"name": "audio.wav", "bytes": 4, "sha256": sha256(b"RIFF").hexdigest()}
    assert bodies["transcribed"]["fields"] == {"model": "m", "language": "en"}
    failed = {str(one["custom_id"]): one for one in desk.results("results.errors.jsonl")}
    assert set(failed) == {"none", "fetched"}
    assert failed["fetched"]["response"]["body"]["error"]["param"] == "body.file_url"
    desk.done("verify", str(summary_of(done)["batch"]), "--witness", str(desk.engine.calls_log))


@pytest.mark.parametrize("text", ["", "\n", "\ufeff\r\n \t\n\n"])
def test_a_file_without_requests_is_an_empty_output(desk: Desk, text: str) -> None:
    (desk.here / "empty.jsonl").write_text(text)
    (desk.here / "results.jsonl").write_text("of another run\n")
    summary = summary_of(desk.done("run", "empty.jsonl", "-o", "results.jsonl", "--upstream", "http://h/v1", "--json"))
    assert (summary["total"], summary["failed"], summary["exit_code"]) == (0, 0, 0)
    assert (desk.here / "results.jsonl").read_bytes() == b""


def test_results_in_the_order_of_the_input(desk: Desk) -> None:
    desk.write_requests(40)
    assert desk.run("--ordered").wait() == 0
    assert [line["custom_id"] for line in desk.results()] == [f"c{number}" for number in range(40)]


def test_ctrl_c_says_how_to_go_on_and_the_same_command_repeats_nothing(desk: Desk) -> None:
    desk.write_requests(60, SLOW)
    first = desk.run()
    wait_until(lambda: len(desk.called()) >= 16, what="some calls")
    first.interrupt()
    assert first.wait() == 130, first.logs()
    assert "run the same command again to go on" in first.stderr()
    assert "Traceback" not in first.stderr()
    assert not (desk.here / "results.jsonl").exists()
    second = desk.run("--json")
    assert second.wait(60) == 0, second.logs()
    assert "Going on: " in second.stderr()
    assert len(desk.results()) == 60
    assert len(desk.called()) == 60
    desk.verified(str(summary_of(second)["batch"]))


def test_nohup_is_obeyed(desk: Desk) -> None:
    desk.write_requests(20, SLOW)
    command = ["nohup", TIDEGATE, "run", "requests.jsonl", "--upstream", desk.engine.url, "-o", "results.jsonl"]
    env = {"PATH": os.environ["PATH"], "HOME": str(desk.here), **QUICK}
    proc = desk.processes.start(command, name="run", env=env, cwd=desk.here)
    wait_until(desk.called, what="a call")
    proc.signal(signal.SIGHUP)
    assert proc.wait(60) == 0, proc.logs()
    assert len(desk.results()) == 20


def test_kill_9_and_the_same_command_goes_on_at_once(desk: Desk) -> None:
    desk.write_requests(60, SLOW)
    for wanted in (12, 28):
        proc = desk.run()
        wait_until(lambda wanted=wanted: len(desk.called()) >= wanted, what="some calls")  # type: ignore[misc]
        proc.kill()
    last = desk.run("--json")
    assert last.wait(60) == 0, last.logs()
    assert custom_ids(desk.results()) == Counter(f"c{number}" for number in range(60))
    # What was in flight, and what was answered but neither recorded nor durable yet, is called again after each kill.
    assert len(desk.called()) <= 60 + 2 * 3 * 8
    desk.verified(str(summary_of(last)["batch"]))


@pytest.mark.parametrize("border", ["upload_committed", "create_committed", "publish_committed"])
def test_killed_at_a_border_it_is_still_one_batch(desk: Desk, border: str) -> None:
    desk.write_requests(10)
    assert desk.run(TIDEGATE_FAILPOINTS=f"{border}=kill").wait() == -signal.SIGKILL
    proc = desk.run("--json")
    assert proc.wait() == 0, proc.logs()
    assert len(desk.called()) == 10
    listed = desk.json_of("batches", "list", "--json")
    assert [batch["id"] for batch in listed] == [summary_of(proc)["batch"]]


def test_a_plain_run_loads_only_what_it_needs(desk: Desk) -> None:
    """Each of these takes longer to load than ten lines take to run."""
    desk.write_requests(2)
    listed = "import sys\nfrom tidegate.cli import main\ntry: main()\nexcept SystemExit: print(*sorted(sys.modules))"
    arguments = ["run", "requests.jsonl", "--upstream", desk.engine.url, "-o", "results.jsonl"]
    done = subprocess.run(
        [sys.executable, "-c", listed, *arguments],
        cwd=desk.here,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert len(desk.results()) == 2
    loaded = {name.split(".")[0] for name in done.stdout.split()}
    assert "aiohttp" in loaded
    assert not {"opentelemetry", "psutil", "pyarrow", "pydantic", "redis", "starlette", "yaml"} & loaded


def test_a_second_signal_leaves_at_once(desk: Desk) -> None:
    desk.write_requests(8, behaving("hang").replace("{", "{{").replace("}", "}}"))
    proc = desk.run(TIDEGATE_WORKER_GRACE_MS="600000")
    wait_until(lambda: len(desk.called()) >= 8, what="calls that hang")
    proc.interrupt()
    proc.wait_for_line("press Ctrl-C again to stop at once")
    proc.interrupt()
    assert proc.wait(10) == 130


def test_how_results_look_is_no_other_run_and_fresh_begins_again(desk: Desk) -> None:
    desk.write_requests(3)
    batches = []
    looks: tuple[list[str], ...] = (
        [],
        ["--ordered"],
        ["--invalid-lines", "error_file"],
        ["--no-prefix-order"],
        ["--concurrency", "2"],
    )
    for more in (*looks, ["--fresh"], []):
        proc = desk.run("--json", *more)
        assert proc.wait() == 0, proc.logs()
        batches.append(summary_of(proc)["batch"])
    assert len(set(batches[:5])) == 1
    assert len(set(batches)) == 2
    assert batches[6] == batches[5]
    assert len(desk.called()) == 6, "nothing is paid twice"


def test_a_model_server_that_is_not_there(desk: Desk) -> None:
    desk.write_requests(1)
    url = f"http://127.0.0.1:{free_port()}/v1"
    proc = desk.done("run", "requests.jsonl", "--upstream", url, code=2)
    assert f"Nothing answers at {url}" in proc.stderr()
    assert "--wait" in proc.stderr()


def test_waiting_for_a_model_server_says_what_it_waits_for(desk: Desk, tmp_path: Path) -> None:
    desk.write_requests(4)
    port = free_port()
    proc = desk.start("run", "requests.jsonl", "--upstream", f"http://127.0.0.1:{port}/v1", "-o", "r.jsonl", "--wait")
    proc.wait_for_line(f"waiting: the call never started: no connection to 127.0.0.1:{port} ")
    Engine(desk.processes, tmp_path / "late", port=port)
    assert proc.wait(60) == 0, proc.logs()
    assert len(desk.results("r.jsonl")) == 4


def test_a_key_that_is_refused_is_reported_before_anything_begins(desk: Desk, tmp_path: Path) -> None:
    guarded = Engine(desk.processes, tmp_path / "guarded", "--api-key", "right-key")
    desk.write_requests(2)
    usual = ("run", "requests.jsonl", "--upstream", guarded.url, "-o", "r.jsonl")
    refused = desk.done(*usual, "--api-key", "env:K", code=2, K="wrong-canary")
    assert "refuses us" in refused.stderr()
    assert "wrong-canary" not in refused.logs()
    assert desk.done(*usual, "--api-key", "env:K", K="right-key").stdout() == ""


@pytest.mark.parametrize(
    "command",
    [
        ("run", "requests.jsonl", "--upstream", "http://127.0.0.1:9/v1", "-o", "r.jsonl"),
        ("serve", "--upstream", "http://127.0.0.1:9/v1"),
        ("worker", "--upstream", "http://127.0.0.1:9/v1"),
        ("doctor", "--upstream", "http://127.0.0.1:9/v1"),
        ("deployments", "add", "gpu", "--model", "m", "--url", "http://127.0.0.1:9/v1"),
    ],
)
def test_a_key_on_the_command_line_is_refused(
    command: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SettingsError) as refused:
        app([*command, "--api-key", "sk-canary-0123456789"], standalone_mode=False)
    assert "env:NAME" in str(refused.value)
    assert "file:PATH" in str(refused.value)
    assert "canary" not in str(refused.value)


def test_a_password_on_the_command_line_of_the_simulated_engine_is_refused(desk: Desk) -> None:
    refused = desk.done("simulate", "--queue", "redis://:canary@127.0.0.1:9/0", "--pool", "p", code=2)
    assert "env:NAME" in refused.stderr()
    assert "canary" not in refused.stderr()


def test_a_run_restarts_its_worker_after_a_bug_and_ends_well(desk: Desk) -> None:
    desk.write_requests(20)
    proc = desk.run(TIDEGATE_FAILPOINTS="lease_committed=1*raise:once")
    assert proc.wait(60) == 0, proc.logs()
    assert "worker_restarting" in proc.stderr()
    assert custom_ids(desk.results()) == Counter(f"c{number}" for number in range(20))
    assert len(desk.called()) == 20


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["run", "requests.jsonl"], "No model server is known"),
        (["run", "absent.jsonl", "--upstream", "http://h/v1"], "There is no file absent.jsonl"),
        (["run", "requests.jsonl", "--upstream", "h:1"], "is not an http(s) address"),
        (["run", "requests.jsonl", "--upstream", "http://h/v1", "-o", "no/r.jsonl"], "There is no directory no"),
        (["run", "requests.jsonl", "--upstream", "http://h/v1", "-o", "requests.jsonl"], "is the input itself"),
        (["run", "requests.jsonl", "--upstream", "http://h/v1", "-o", "-", "--json"], "would mix"),
        (["run", "--upstream", "http://h/v1"], "Name the file"),
        (["run", "requests.jsonl", "-i", "requests.jsonl", "--upstream", "http://h/v1"], "named twice"),
        (["run", "noise.jsonl", "--upstream", "http://h/v1"], "noise.jsonl cannot be run"),
        (
            ["run", "-i", "https://h/a.jsonl", "--upstream", "http://h/v1"],
            "curl -sSf https://h/a.jsonl | tidegate run -",
        ),
        (["run", "rows.csv", "--upstream", "http://h/v1"], "rows.csv is a table: say with --template"),
        (["run", "a.jsonl", "b.jsonl", "--upstream", "http://h/v1"], "a pattern in quotes"),
        (["verify", "batch_nonsense"], "That is no batch id"),
        (["batches", "show", "batch_0f3kQ2mZ8s1xW7vB4nD9Lc"], "Nothing is kept in"),
    ],
)
def test_mistakes_are_reported_before_any_work(
    processes: Processes, tmp_path: Path, arguments: list[str], says: str
) -> None:
    (tmp_path / "requests.jsonl").write_text(chat_line("a", "hi") + "\n")
    (tmp_path / "empty.jsonl").write_text("")
    (tmp_path / "noise.jsonl").write_bytes(os.urandom(100))
    (tmp_path / "rows.csv").write_text("id,text\n1,hi\n")
    done = processes.completed([TIDEGATE, *arguments], cwd=tmp_path, env={"PATH": os.environ["PATH"]})
    assert done.returncode == 2, done.stderr
    assert says in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""
    assert not (tmp_path / ".tidegate").exists()


def test_a_run_is_translated_for_an_engine_that_speaks_anthropics_api_and_has_its_own_names(desk: Desk) -> None:
    """Answers, usage and errors are those of chat completions, and doctor says what such an engine does not serve."""
    odd = json.loads(chat_line("odd", "hello"))
    odd["body"]["logit_bias"] = {"5": 1}
    negative = json.loads(chat_line("negative", "hello"))
    negative["body"]["max_tokens"] = -1
    lines = [chat_line("good", "hello"), chat_line("bad", behaving("400")), json.dumps(odd), json.dumps(negative)]
    desk.write(lines)
    place = {"url": desk.engine.url, "engine": "anthropic", "upstream_model": "inner"}
    (desk.here / "c.yaml").write_text(json.dumps({"models": {"m": {"deployments": [place]}}}))
    done = desk.done("run", "requests.jsonl", "--config", "c.yaml", "-o", "results.jsonl", "--json", code=1)
    desk.verified(str(summary_of(done)["batch"]))
    [good] = desk.results()
    body = good["response"]["body"]
    assert (good["custom_id"], body["object"]) == ("good", "chat.completion")
    assert body["choices"][0]["message"]["content"]
    assert body["usage"]["total_tokens"] == body["usage"]["prompt_tokens"] + body["usage"]["completion_tokens"] > 0
    failed = {one["custom_id"]: one["response"] for one in desk.results("results.errors.jsonl")}
    assert {name: one["status_code"] for name, one in failed.items()} == {"bad": 400, "odd": 400, "negative": 400}
    assert all(set(one["body"]["error"]) == {"message", "type", "param", "code"} for one in failed.values())
    assert failed["odd"]["body"]["error"]["param"] == "logit_bias"
    calls = [call for call in desk.engine.calls() if call["path"] == "/v1/messages"]
    assert {call["model"] for call in calls} == {"inner"}
    assert len(calls) == 2
    found = desk.json_of("doctor", "--config", "c.yaml", "--json")
    assert any("/v1/embeddings" in one["text"] and "not served" in one["text"] for one in found)


def test_moderations_need_no_model(desk: Desk) -> None:
    inputs = [{"input": "calm"}, {"input": ["calm"]}, {"input": "calm", "model": "omni"}]
    asks = [{"custom_id": f"m-{at}", "url": "/v1/moderations", "body": body} for at, body in enumerate(inputs)]
    desk.write([json.dumps({**ask, "method": "POST"}) for ask in asks])
    done = desk.done("run", "requests.jsonl", "--upstream", desk.engine.url, "-o", "results.jsonl", "--json")
    assert custom_ids(desk.results()) == Counter(["m-0", "m-1", "m-2"])
    assert all(one["response"]["body"]["results"] for one in desk.results())
    desk.verified(str(summary_of(done)["batch"]))
