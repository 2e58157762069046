"""Help is for someone in a hurry: every command has one line, an example, and the options that are everywhere."""

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


def test_help_loads_no_command() -> None:
    listed = "import sys, tidegate.cli.app as a\ntry: a.app(['--help'])\nexcept SystemExit: print(*sorted(sys.modules))"
    done = subprocess.run([sys.executable, "-c", listed], capture_output=True, text=True, timeout=60, check=True)
    loaded = done.stdout.splitlines()[-1].split()
    assert not {"uvloop", "msgspec", "rich", "tidegate.settings", "tidegate.cli.run"} & set(loaded)


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_names_are_completed_without_loading_a_command(shell: str) -> None:
    listed = "import sys, tidegate.cli.app as a\ntry: a.app(prog_name='tidegate')\nfinally: print(*sys.modules, file=sys.stderr)"
    asked = {"COMP_WORDS": "tidegate re", "COMP_CWORD": "1", "_TYPER_COMPLETE_ARGS": "tidegate re"}
    env = {**os.environ, **asked, "_TIDEGATE_COMPLETE": f"complete_{shell}", "_TYPER_COMPLETE_FISH_ACTION": "get-args"}
    done = subprocess.run(
        [sys.executable, "-c", listed], capture_output=True, text=True, timeout=60, check=True, env=env
    )
    assert "restore" in done.stdout
    assert "resources" in done.stdout
    assert "serve" not in done.stdout
    assert not {"uvloop", "msgspec", "tidegate.settings", "tidegate.cli.backup"} & set(done.stderr.split())


def test_the_words_for_a_newcomer() -> None:
    done = subprocess.run(
        [TIDEGATE], capture_output=True, text=True, timeout=60, check=False, env={"PATH": os.environ["PATH"]}
    )
    shown = done.stdout + done.stderr
    assert "tidegate run requests.jsonl --upstream" in shown
    for path in ALL:
        assert path[0] in shown
