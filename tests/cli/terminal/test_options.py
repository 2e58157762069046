"""What every command makes of the options that most of them have."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from tidegate.cli.app import app
from tidegate.cli.terminal import options

BATCH = "batch_0f3kQ2mZ8s1xW7vB4nD9Lc"
SERVER, KEY = "http://elsewhere", "env:A_KEY"


class Loaded(Exception):
    """The settings were asked for: no command goes further here."""


def commands(group: Any, *words: str) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Every command under a group, with the words that call it."""
    if hasattr(group, "commands"):
        for name, one in group.commands.items():
            yield from commands(one, *words, name)
    else:
        yield words, group


def option_names(command: Any) -> set[str]:
    return {name for param in command.params for name in param.opts}


REMOTE = {words: one for words, one in commands(typer.main.get_command(app)) if "--server" in option_names(one)}


def value_of(param: Any) -> str:
    return str(next(iter(getattr(param.type, "choices", ())), BATCH))


@pytest.mark.parametrize("words", REMOTE, ids=" ".join)
def test_a_command_asks_the_server_that_it_was_given_with_the_key_that_it_was_given(
    words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: dict[str, Any] = {}

    def loaded(config: Path | None, data: Path | None, **overrides: object) -> None:
        seen.update(overrides, config=config, data=data)
        raise Loaded

    monkeypatch.setattr(options, "loaded", loaded)
    command = REMOTE[words]
    needed: list[str] = []
    for param in command.params:
        if param.required:
            needed += [*param.opts[: param.param_type_name == "option"], value_of(param)]
    key = "--server-key" if "--server-key" in option_names(command) else "--api-key"
    given = ["--config", "c.yaml", "--data", "d", "--server", SERVER, key, KEY]
    with pytest.raises(Loaded):
        command.main([*needed, *given], standalone_mode=False)
    expected = {"config": Path("c.yaml"), "data": Path("d"), "remote__url": SERVER, "remote__key": KEY}
    assert {name: seen.get(name) for name in expected} == expected
