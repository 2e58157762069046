"""Help is for a user in a hurry: every command has one line, an example, and the options that are everywhere."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer.main

from tidegate.cli.app import app
from tidegate.cli.command_table import COMMANDS
from tidegate.cli.terminal.loading import CALLS_MODELS_WITH

TIDEGATE = str(Path(sys.executable).with_name("tidegate"))


def commands(command: Any = None, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    command = command or typer.main.get_command(app)
    for name, inner in getattr(command, "commands", {}).items():
        if hasattr(inner, "commands"):
            yield from commands(inner, (*path, name))
        else:
            yield (*path, name), inner


ALL = dict(commands())
# They read no settings.
WITHOUT_SETTINGS = {("init",), ("keys", "generate")}


@pytest.mark.parametrize("path", ALL, ids=" ".join)
def test_every_command_has_a_line_and_an_example(path: tuple[str, ...]) -> None:
    text = ALL[path].help
    first = text.strip().splitlines()[0]
    assert first.endswith(".")
    assert len(first) <= 60
    assert f"Example: tidegate {' '.join(path)}" in text


@pytest.mark.parametrize("arguments", [(), ("batches", "create")], ids=["tidegate", "create"])
def test_a_command_to_copy_is_one_line_at_80_columns(arguments: tuple[str, ...]) -> None:
    shown = subprocess.run(
        [TIDEGATE, *arguments, "--help"],
        env={**os.environ, "COLUMNS": "80"},
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    wanted = (
        "tidegate run requests.jsonl --upstream http://localhost:8000/v1 -o out.jsonl"
        if not arguments
        else ("Example: tidegate batches create requests.jsonl --server https://gateway:8080 --api-key env:GATEWAY_KEY")
    )
    assert wanted in [line.strip() for line in shown.splitlines()]


@pytest.mark.parametrize("path", sorted(ALL.keys() - WITHOUT_SETTINGS), ids=" ".join)
def test_data_and_config_are_everywhere(path: tuple[str, ...]) -> None:
    options = {name for parameter in ALL[path].params for name in parameter.opts}
    assert {"--data", "--config"} <= options


@pytest.mark.parametrize("path", ALL, ids=" ".join)
def test_every_option_is_explained(path: tuple[str, ...]) -> None:
    for parameter in ALL[path].params:
        assert parameter.help, (path, parameter.name)


@pytest.mark.parametrize("name", COMMANDS)
def test_the_table_says_what_the_command_says(name: str) -> None:
    command = typer.main.get_command(app).commands[name]  # type: ignore[attr-defined]
    assert command.help.strip().splitlines()[0] == COMMANDS[name].words
    assert len(COMMANDS[name].words) <= 62, "longer lines would be broken at 80 columns"


def test_what_a_run_loads_beside_its_http_client_holds_no_part_of_that_client() -> None:
    """Two threads that load one package through different modules may meet half of a module."""
    listed = "import sys, tidegate.cli.run.run_file, tidegate.cli.terminal.input_file; print(*sorted(sys.modules))"
    done = subprocess.run([sys.executable, "-c", listed], capture_output=True, text=True, timeout=60, check=True)
    loaded = done.stdout.split()
    assert "tidegate.cli.run.run_file" in loaded
    assert [name for name in loaded if name.split(".")[0] == CALLS_MODELS_WITH] == []


def test_help_loads_no_command() -> None:
    listed = "import sys, tidegate.cli.app as a\ntry: a.app(['--help'])\nexcept SystemExit: print(*sorted(sys.modules))"
    done = subprocess.run([sys.executable, "-c", listed], capture_output=True, text=True, timeout=60, check=True)
    loaded = done.stdout.splitlines()[-1].split()
    assert not {"uvloop", "msgspec", "rich", "tidegate.settings", "tidegate.cli.run.run"} & set(loaded)


@pytest.mark.parametrize(("command", "room"), [("serve", "server"), ("run", "run")])
def test_what_draws_is_loaded_only_for_a_terminal(command: str, room: str) -> None:
    listed = (
        f"import sys, tidegate.cli.app as a\nlist(a.LazyCommands().commands[{command!r}].params)\nprint(*sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", listed], capture_output=True, text=True, timeout=60, check=True)
    loaded = set(done.stdout.split())
    assert {"structlog", f"tidegate.cli.{room}.{command}"} <= loaded
    assert {"rich", "pygments"} & loaded == set()


@pytest.mark.parametrize("command", [("batches", "list"), ("keys", "create", "--org", "acme")])
def test_a_command_that_looks_into_the_store_loads_no_client_of_servers(
    command: tuple[str, ...], tmp_path: Path
) -> None:
    run = f"import sys, tidegate.cli.app as a\ntry: a.app({[*command, '--data', str(tmp_path)]})\nfinally: print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", run], capture_output=True, text=True, timeout=60, check=False)
    loaded = set(done.stdout.splitlines()[-1].split())
    assert "tidegate.store.database.sqlite" in loaded or "Nothing is kept" in done.stderr, done.stderr
    assert {"aiohttp", "tidegate.service", "tidegate.upstream.calls.router"} & loaded == set()


def completed(shell: str, words: str) -> tuple[str, set[str]]:
    """What a shell is offered for these words, and the modules that this took."""
    listed = "import sys, tidegate.cli.app as a\ntry: a.app(prog_name='tidegate')\nfinally: print(*sys.modules, file=sys.stderr)"
    asked = {"COMP_WORDS": words, "COMP_CWORD": str(words.count(" ")), "_TYPER_COMPLETE_ARGS": words}
    env = {**os.environ, **asked, "_TIDEGATE_COMPLETE": f"complete_{shell}", "_TYPER_COMPLETE_FISH_ACTION": "get-args"}
    done = subprocess.run(
        [sys.executable, "-c", listed], capture_output=True, text=True, timeout=60, check=True, env=env
    )
    return done.stdout, set(done.stderr.split())


def test_an_option_of_run_is_completed_without_loading_what_it_does() -> None:
    offered, loaded = completed("bash", "tidegate run --max-c")
    assert offered.split() == ["--max-cost"]
    assert {"uvloop", "msgspec", "tidegate.settings", "tidegate.cli.run.run_file"} & loaded == set()


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_names_are_completed_without_loading_a_command(shell: str) -> None:
    offered, loaded = completed(shell, "tidegate re")
    assert "restore" in offered
    assert "resources" in offered
    assert "serve" not in offered
    assert not {"uvloop", "msgspec", "tidegate.settings", "tidegate.cli.server.backup"} & loaded


def test_without_arguments_a_new_user_is_shown_what_there_is() -> None:
    done = subprocess.run(
        [TIDEGATE], capture_output=True, text=True, timeout=60, check=False, env={"PATH": os.environ["PATH"]}
    )
    shown = done.stdout + done.stderr
    assert "tidegate run requests.jsonl --upstream" in shown
    for path in ALL:
        assert path[0] in shown
