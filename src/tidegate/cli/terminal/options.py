"""The options that several commands share, and the settings that result from them."""

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tidegate.core.errors import SettingsError

# Settings take long to load, and completion and help do not need them.
if TYPE_CHECKING:
    from tidegate.settings import Loaded, Settings


# The option of each setting, for messages.
NAMES = {
    "data": "--data",
    "http.connections_max": "--concurrency",
    "remote.key": "--api-key",
    "remote.url": "--server",
    "server.host": "--host",
    "server.port": "--port",
    "upstream.api_key": "--api-key",
    "upstream.url": "--upstream",
    "worker.in_flight_max": "--concurrency",
}


def require_reference(text: str | None) -> str | None:
    """Refuse a secret on the command line itself: every user of the machine can read it
    in the list of processes."""
    if not text:
        return text
    from tidegate.settings.secrets import is_reference

    if not is_reference(text):
        raise SettingsError(
            "This option holds the key itself, and the list of processes shows it to every user of this machine. "
            "Put the key into an environment variable or a file, and write env:NAME or file:PATH. "
            "Replace the key if others use this machine."
        )
    return text


Data = Annotated[
    Path | None,
    typer.Option(
        "--data", metavar="DIR", help="Directory for everything kept on this machine.", show_default="./.tidegate"
    ),
]
Config = Annotated[
    Path | None, typer.Option("--config", metavar="FILE", help="YAML file with settings (or TIDEGATE_CONFIG).")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON for scripts.")]
UpstreamOption = Annotated[
    str | None,
    typer.Option("--upstream", metavar="URL", help="Model server for every model, such as http://localhost:8000/v1."),
]
ApiKey = Annotated[
    str | None,
    typer.Option(
        "--api-key",
        metavar="env:NAME|file:PATH",
        help="Where the upstream's key is; never the key itself.",
        callback=require_reference,
    ),
]
Server = Annotated[
    str | None, typer.Option("--server", metavar="URL", help="A server elsewhere, such as https://gateway:8080.")
]
ServerKey = Annotated[
    str | None,
    typer.Option(
        "--api-key",
        metavar="env:NAME|file:PATH",
        help="Where that server's key is; never the key itself.",
        callback=require_reference,
    ),
]
OtherServerKey = Annotated[
    str | None,
    typer.Option(
        "--server-key",
        metavar="env:NAME|file:PATH",
        help="Where that server's key is; never the key itself.",
        callback=require_reference,
    ),
]
Org = Annotated[
    str | None,
    typer.Option("--org", metavar="NAME", help="Which organization; the default is that of calls without a key."),
]
BatchOrg = Annotated[
    str | None,
    typer.Option("--org", metavar="NAME", help="Only if it is this organization's.", show_default="any"),
]
# Options of a batch, for all commands that create or change one.
Ordered = Annotated[bool, typer.Option("--ordered", help="Results in the order of the input.")]
SchemaFile = Annotated[
    str | None,
    typer.Option(
        "--schema",
        metavar="FILE",
        help="JSON schema for every answer; response_format: each line's own. What does not fit is asked again.",
        show_default=False,
    ),
]
PriorityOption = Annotated[
    int | None,
    typer.Option("--priority", metavar="N", help="-100 to 100; higher goes first within the organization."),
]
BatchId = Annotated[str, typer.Argument(metavar="BATCH", help="A batch id (batch_…).", show_default=False)]


def check_batch_id(batch: str) -> None:
    """Refuse a text that cannot be a batch id, before anything is opened."""
    from tidegate.core import ids

    if not ids.is_valid("batch", batch):
        raise SettingsError(
            "That is no batch id; ids look like batch_0f3kQ2mZ8s1xW7vB4nD9Lc. See `tidegate batches list`."
        )


def as_arguments(
    config: Path | None,
    data: Path | None,
    server: str | None = None,
    api_key: str | None = None,
    org: str | None = None,
) -> str:
    """Return these options as text to print behind the name of another command."""
    given = (("--org", org), ("--config", config), ("--data", data), ("--server", server), ("--api-key", api_key))
    return "".join(f" {name} {shlex.quote(str(path))}" for name, path in given if path is not None)


def read(
    config: Path | None,
    data: Path | None,
    *,
    calls_models: bool = True,
    names: Mapping[str, str] = NAMES,
    **overrides: object,
) -> "Loaded":
    """Return the settings with these options. Keys have `__` for the dot; `names` are the options'
    names for messages."""
    from tidegate.settings import load

    given = {key.replace("__", "."): value for key, value in overrides.items()}
    return load(config, data, given, calls_models=calls_models, option_names=names)


def loaded(
    config: Path | None,
    data: Path | None,
    *,
    calls_models: bool = False,
    names: Mapping[str, str] = NAMES,
    **overrides: object,
) -> "Loaded":
    """Return the settings with these options. With `calls_models` the keys of model servers are
    needed, and warnings are printed; other commands print none, because those that start something,
    `config` and `doctor` do."""
    found = read(config, data, calls_models=calls_models, names=names, **overrides)
    if calls_models:
        warn_of(found)
    return found


def warn_of(found: "Loaded") -> None:
    """Print the warnings of the settings."""
    from tidegate.cli.terminal import terminal

    for warning in found.warnings:
        terminal.warn(warning)


def require_upstream(settings: "Settings") -> None:
    """Refuse settings without a model server, because every batch would wait forever."""
    from tidegate.settings import deployments

    if not deployments(settings):
        raise SettingsError(
            "No model server is known: name one with --upstream http://HOST:PORT/v1, or list models in a --config file. "
            "`tidegate simulate` is one to try with."
        )
