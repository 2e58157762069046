"""The commands as processes: what they print, where, and with which exit code."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.processes import Processes
from tidegate.cli.app import app
from tidegate.core.errors import SettingsError

TIDEGATE = str(Path(sys.executable).with_name("tidegate"))
CANARY = "sk-canary-never-printed"


Command = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def here(tmp_path: Path) -> Path:
    """A user's directory, with nothing of the test's own in it."""
    path = tmp_path / "here"
    path.mkdir()
    return path


@pytest.fixture
def tidegate(processes: Processes, here: Path) -> Command:
    """Runs a command in the user's directory to its end."""

    def run(*arguments: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
        surroundings = {"PATH": os.environ["PATH"], "HOME": str(here), **(env or {})}
        return processes.completed([TIDEGATE, *arguments], cwd=here, env=surroundings)

    return run


def test_config_shows_where_each_value_came_from(tidegate: Command, here: Path) -> None:
    (here / "c.yaml").write_text("server:\n  port: 9000\nupstream: {api_key: 'env:KEY'}\n")
    done = tidegate(
        "config", "--config", "c.yaml", "--data", "d", "--json",
        env={"TIDEGATE_WORKER_POLL_MS": "50", "KEY": CANARY, "TIDEGATE_STORE_URL": f"postgresql://u:{CANARY}@h/d"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    entries = {entry["key"]: entry for entry in json.loads(done.stdout)}
    assert (entries["server.port"]["value"], entries["server.port"]["origin"]) == (9000, "c.yaml:2")
    assert (entries["worker.poll_ms"]["value"], entries["worker.poll_ms"]["origin"]) == (50, "TIDEGATE_WORKER_POLL_MS")
    assert (entries["data"]["value"], entries["data"]["origin"]) == ("d", "--data")
    assert entries["limits.items_max"]["origin"] == "default"
    assert entries["store.url"]["value"] == "postgresql://u:***@h/d"
    assert entries["upstream.api_key"]["value"] == "***"
    assert CANARY not in done.stdout + done.stderr
    assert list(here.iterdir()) == [here / "c.yaml"]


def test_config_puts_no_blanks_behind_a_long_value(tidegate: Command, here: Path) -> None:
    models = ", ".join(f"m{number}: {{deployments: [{{url: 'http://h/v1'}}]}}" for number in range(9))
    (here / "c.yaml").write_text(f"models: {{{models}}}\nserver: {{port: 81}}\n")
    lines = tidegate("config", "--config", "c.yaml", "--changed").stdout.splitlines()
    assert next(line for line in lines if line.startswith("server.port")).split() == ["server.port", "c.yaml:2", "81"]
    assert max(len(line) for line in lines if not line.startswith("models")) < 80


def test_config_shows_of_an_entry_what_was_set_and_not_its_defaults(tidegate: Command, here: Path) -> None:
    (here / "c.yaml").write_text(
        "models: {m: {deployments: [{url: 'http://h/v1', weight: 2}]}}\nguardrails: {short: {prompt_bytes_max: 9}}\n"
    )
    lines = tidegate("config", "--config", "c.yaml", "--changed").stdout.splitlines()
    assert [line.split()[2] for line in lines[1:]] == [
        '{"m":{"deployments":[{"url":"http://h/v1","weight":2.0}]}}',
        '{"short":{"prompt_bytes_max":9}}',
    ]


def test_config_never_prints_a_secret_in_any_form(tidegate: Command, here: Path) -> None:
    models = {"m": {"deployments": [{"url": "http://h/v1", "api_key": CANARY}]}}
    (here / "c.yaml").write_text(json.dumps({"models": models, "auth": {"pepper": CANARY}}))
    for form in (["--json"], ["--explain"], ["--changed"], []):
        done = tidegate("config", "--config", "c.yaml", *form)
        assert done.returncode == 0
        assert CANARY not in done.stdout + done.stderr
        assert done.stderr.count("holds a secret in plain text") == 2


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (
            ["config", "--config", "absent.yaml"],
            "tidegate: There is no configuration file absent.yaml; check --config.",
        ),
        (["cnfig"], "Did you mean 'config'?"),
        (["config", "--jsn"], "No such option"),
        (["simulate", "--port", "70000"], "--port"),
        (["simulate", "--fault", "nonsense"], "is not a fault with a rate"),
        (["simulate", "--port", "0", "--calls-log", "no/x"], "tidegate: the calls log no/x cannot be opened"),
    ],
)
def test_a_mistake_is_a_sentence_and_exit_code_2(tidegate: Command, arguments: list[str], says: str) -> None:
    done = tidegate(*arguments)
    assert done.returncode == 2
    assert says in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ("files upload absent.jsonl", "There is no file absent.jsonl; name a JSONL file"),
        ("files upload .", ". is a directory; name a JSONL file."),
        ("batches create absent.jsonl", "There is no file absent.jsonl; name a JSONL file"),
        ("batches create .", ". is a directory; name a JSONL file."),
        ("batches output batch_0f3kQ2mZ8s1xW7vB4nD9Lc -o .", ". is a directory; name a file with -o."),
        ("batches output batch_0f3kQ2mZ8s1xW7vB4nD9Lc -o no/x", "There is no directory no; create it"),
        ("files download file-0f3kQ2mZ8s1xW7vB4nD9Lc -o .", ". is a directory; name a file with -o."),
        ("files download file-0f3kQ2mZ8s1xW7vB4nD9Lc -o no/x", "There is no directory no; create it"),
    ],
)
def test_a_wrong_path_is_refused_before_a_server_is_asked(
    arguments: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SettingsError, match=re.escape(says)):
        app([*arguments.split(), "--server", "http://127.0.0.1:9"], standalone_mode=False)


@pytest.mark.parametrize(
    "arguments",
    [("config", "--config", "absent.yaml", "--debug"), ("--debug", "config", "--config", "absent.yaml")],
    ids=["behind the command", "before it"],
)
def test_debug_shows_where_an_error_came_from(tidegate: Command, arguments: tuple[str, ...]) -> None:
    done = tidegate(*arguments)
    assert done.returncode == 2
    assert "Traceback" in done.stderr
    assert done.stderr.splitlines()[-1].startswith("tidegate: There is no configuration file")


def test_a_reader_that_leaves_early_is_no_error_of_ours(tmp_path: Path) -> None:
    piped = subprocess.run(
        f"{TIDEGATE} config --explain | head -n 1",
        shell=True,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert piped.stdout == "data\n"
    assert "Traceback" not in piped.stderr


@pytest.mark.parametrize(
    "command",
    [
        "migrate",
        "run - --upstream http://127.0.0.1:1/v1",
        "run '*.csv' -o o.csv --template t --upstream http://127.0.0.1:1/v1",
    ],
)
def test_a_data_directory_is_its_users_alone_whatever_makes_it(tmp_path: Path, command: str) -> None:
    line = '{"custom_id": "a", "url": "/v1/chat/completions", "body": {"model": "m", "messages": []}}'
    subprocess.run(
        f"umask 022; echo '{line}' | {TIDEGATE} {command}", shell=True, cwd=tmp_path, timeout=60, check=False
    )
    made = [tmp_path / ".tidegate", *(tmp_path / ".tidegate").iterdir()]
    assert len(made) > 1
    assert [one.name for one in made if one.stat().st_mode & 0o077] == []


def test_what_a_library_logs_is_a_line_like_any_other(tmp_path: Path) -> None:
    code = """
import logging
from tidegate.cli.terminal import logs
from tidegate.settings import load
logs.configure(load(None, None, {}, {}).settings)
logs.configure(load(None, None, {}, {}).settings)
logging.getLogger("python_multipart.multipart").warning("of no interest")
logging.getLogger("other").warning("odd %s", "\\x1b[31m\\n")
logging.getLogger("other").info("of no interest")
"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=True
    )
    [line] = [line for line in done.stderr.splitlines() if " library " in line]
    assert "of no interest" not in done.stderr
    assert line.endswith(r"warning library name=other message=odd \x1b[31m\n")
