"""The table of all commands. Each is loaded when it is called, so that a start loads
only what it uses."""

from collections.abc import Iterator, MutableMapping
from importlib import import_module
from typing import Any, NamedTuple, cast

import typer
import typer.core
import typer.main

from tidegate.cli.terminal.loading import load_logging

EXAMPLE = "Example: "
# Before a paragraph, this tells click to print its lines as they are.
UNWRAPPED = "\b"


class Entry(NamedTuple):
    """The module and name of a command, and its line in the help."""

    module: str
    attribute: str
    words: str


COMMANDS = {
    "run": Entry("run.run", "run", "Turn a file of requests into a file of results."),
    "init": Entry("server.init", "init", "Write a configuration to begin with, explained line by line."),
    "serve": Entry("server.serve", "serve", "Serve the API and run its batches, in one process."),
    "api": Entry("server.serve", "api", "Serve the API only, beside `tidegate worker`."),
    "worker": Entry("server.serve", "worker", "Run batches only, beside `tidegate api`."),
    "workers": Entry("operators.workers", "workers", "List the processes that run batches, newest first."),
    "top": Entry("operators.top", "top", "Watch queues, deployments, tides and batches."),
    "simulate": Entry("server.simulate", "simulate", "Serve a simulated model: any model name, no GPU."),
    "verify": Entry("operators.verify", "verify", "Check one batch against every promise."),
    "explain": Entry("batches.explain", "explain", "Say why a batch runs, waits, or ended as it did."),
    "usage": Entry("operators.usage", "usage", "Print what was used and what it cost."),
    "limits": Entry("operators.limits", "limits", "Show what limits have left: requests, tokens and money."),
    "doctor": Entry("server.doctor", "doctor", "Say what is wrong and what to do about it."),
    "backup": Entry("server.backup", "backup", "Copy an embedded store and its files, also while it runs."),
    "restore": Entry("server.backup", "restore", "Make a new data directory from a backup."),
    "migrate": Entry("server.migrate", "migrate", "Bring the store to this program's version."),
    "config": Entry("server.config", "config", "Show the settings in force and where each came from."),
    "batches": Entry("batches.batch_commands", "app", "Batches: create, list, watch, pause, cancel, retry and more."),
    "files": Entry("batches.files", "app", "Files at a server: upload, list, show, download, delete."),
    "keys": Entry("operators.keys", "app", "API keys: create, list, show, change, rotate, revoke, delete."),
    "scheduler": Entry("operators.scheduler", "app", "Show or switch what chooses the next slice: show, set."),
    "deployments": Entry("operators.deployments", "app", "Model servers: list, add, change, drain, resume, remove."),
    "resources": Entry("operators.deployments", "resources_app", "Named routes to models: list, add, change, remove."),
    "models": Entry("operators.models", "app", "What holds for a whole model: list, add, change, remove."),
    "audit": Entry("operators.audit", "app", "What operators changed: verify, export."),
    "webhooks": Entry("operators.webhooks", "app", "Webhooks: list endpoints and failed deliveries, test, replay."),
}


class CompletedName(NamedTuple):
    """The name of a command as the completion of a shell shows it."""

    value: str
    help: str
    type: str = "plain"


class LoadedCommands(MutableMapping[str, Any]):
    """The commands of the table by name, each loaded at its first use."""

    def __init__(self) -> None:
        self._loaded: dict[str, Any] = {}

    def __getitem__(self, name: str) -> Any:
        if name not in self._loaded:
            self._loaded[name] = _load(name, COMMANDS[name])
        return self._loaded[name]

    def __setitem__(self, name: str, command: Any) -> None:
        self._loaded[name] = command

    def __delitem__(self, name: str) -> None:
        del self._loaded[name]

    def __iter__(self) -> Iterator[str]:
        return iter(COMMANDS)

    def __len__(self) -> int:
        return len(COMMANDS)


class LazyCommands(typer.core.TyperGroup):
    """The group of all commands. Its help shows their lines without loading them."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        self.commands = LoadedCommands()

    def list_commands(self, ctx: Any) -> list[str]:
        return list(COMMANDS)

    def shell_complete(self, ctx: Any, incomplete: str) -> Any:
        """Complete options, or names from the table without loading any command."""
        if incomplete.startswith("-"):
            return super().shell_complete(ctx, incomplete)
        return [CompletedName(name, entry.words) for name, entry in COMMANDS.items() if name.startswith(incomplete)]

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, entry.words) for name, entry in COMMANDS.items()])


def _load(name: str, entry: Entry) -> Any:
    load_logging()
    found = getattr(import_module(f"tidegate.cli.{entry.module}"), entry.attribute)
    parent = typer.Typer(rich_markup_mode=None, add_completion=False)
    parent.callback()(lambda: None)
    if isinstance(found, typer.Typer):
        parent.add_typer(found, name=name)
    else:
        parent.command(name)(found)
    command = cast("typer.core.TyperGroup", typer.main.get_command(parent)).commands[name]
    _keep_examples_whole(command)
    return command


def _keep_examples_whole(command: Any) -> None:
    """Mark examples as text that is not wrapped: an example broken over two lines
    cannot be copied."""
    if command.help:
        command.help = command.help.replace(f"\n\n{EXAMPLE}", f"\n\n{UNWRAPPED}\n{EXAMPLE}")
    for inner in getattr(command, "commands", {}).values():
        _keep_examples_whole(inner)
