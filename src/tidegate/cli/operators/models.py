"""`tidegate models`: shows and changes the settings of a whole model, over all its deployments,
while everything runs."""

from typing import Annotated

import typer

from tidegate.cli.operators.deployments import (
    NameArgument,
    Revision,
    do,
    fields_of,
    listed,
    routing_request,
    tell_troubles,
)
from tidegate.cli.terminal import options, terminal

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    help="What holds for a whole model: list, add, change, remove.",
)
ModelSetOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="in_flight_max, retry, allowed_fields or media_hosts, its value as YAML; may be repeated.",
        show_default=False,
    ),
]


@app.command("list")
def list_models(
    data: options.Data = None,
    config: options.Config = None,
    server: options.Server = None,
    api_key: options.ServerKey = None,
    as_json: options.AsJson = False,
) -> None:
    """List what holds for models.

    It shows those of the settings and those that were changed at run time.

    Example: tidegate models list
    """
    shown = listed(options.loaded(config, data, remote__url=server, remote__key=api_key).settings, "model")
    if as_json:
        terminal.show_json(shown)
    elif not shown:
        terminal.say("No model has settings of its own. Add some: tidegate models add NAME --set in_flight_max=32")
    else:
        rows = [
            [
                one.name,
                one.document.get("in_flight_max", ""),
                _retry(one.document.get("retry")),
                one.origin,
                one.revision,
            ]
            for one in shown
        ]
        terminal.show_table(["name", "in flight max", "retry", "origin", "revision"], rows)
        tell_troubles(shown)


@app.command("add")
def add_model(
    name: NameArgument,
    values: ModelSetOption = None,
    data: options.Data = None,
    config: options.Config = None,
    server: options.Server = None,
    api_key: options.ServerKey = None,
    as_json: options.AsJson = False,
) -> None:
    """Say what holds for a model whose deployments were added.

    Every process follows within seconds.

    Example: tidegate models add llama-3-8b --set in_flight_max=32 --set "retry={attempts_max: 5}"
    """
    do(
        options.loaded(config, data, remote__url=server, remote__key=api_key).settings,
        "model",
        "add",
        routing_request(name, fields_of(values)),
        as_json=as_json,
    )


@app.command("change")
def change_model(
    name: NameArgument,
    values: ModelSetOption = None,
    revision: Revision = None,
    data: options.Data = None,
    config: options.Config = None,
    server: options.Server = None,
    api_key: options.ServerKey = None,
    as_json: options.AsJson = False,
) -> None:
    """Change what holds for a model.

    What is not named stays; an empty value gives back the default.

    Example: tidegate models change llama-3-8b --set in_flight_max=
    """
    do(
        options.loaded(config, data, remote__url=server, remote__key=api_key).settings,
        "model",
        "change",
        routing_request(name, fields_of(values), revision),
        as_json=as_json,
    )


@app.command("remove")
def remove_model(
    name: NameArgument,
    revision: Revision = None,
    data: options.Data = None,
    config: options.Config = None,
    server: options.Server = None,
    api_key: options.ServerKey = None,
    as_json: options.AsJson = False,
) -> None:
    """Take back what was set for a model at run time.

    It goes by what holds for all models then. Its deployments stay.

    Example: tidegate models remove llama-3-8b
    """
    do(
        options.loaded(config, data, remote__url=server, remote__key=api_key).settings,
        "model",
        "remove",
        routing_request(name, {}, revision),
        as_json=as_json,
    )


def _retry(retry: object) -> str:
    return ", ".join(f"{name}: {value}" for name, value in retry.items()) if isinstance(retry, dict) else ""
