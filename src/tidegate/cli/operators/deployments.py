"""`tidegate deployments` and `tidegate resources`: show what serves which model, and change it
while everything runs."""

from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import quote

import typer
import uvloop

from tidegate.cli.terminal import options, server_client, terminal
from tidegate.core.errors import SettingsError
from tidegate.settings import Settings
from tidegate.settings.yaml_file import parse

if TYPE_CHECKING:
    from tidegate.web.admin.deployments import RoutingDone, RoutingRequest, RoutingShown

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Model servers: list, add, change, drain, resume, remove.",
)
resources_app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Named routes to models: list, add, change, remove.",
)

NameArgument = Annotated[str, typer.Argument(metavar="NAME", help="Its name.", show_default=False)]
SetOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="KEY=VALUE", help="Any key of an entry in the settings, its value as YAML; may be repeated."
    ),
]
Revision = Annotated[
    int | None,
    typer.Option("--revision", metavar="N", help="Only if it is still as `list` showed it.", show_default="as it is"),
]
# An operator would read the breaker's "closed" as "out of order", but it means the opposite.
STATES = {"closed": "healthy", "open": "circuit open", "paused": "key rejected"}

Force = Annotated[bool, typer.Option("--force", help="Also while a batch or a resource still needs it.")]


@app.command("list")
def list_deployments(
    data: options.Data = None,
    config: options.Config = None,
    server: options.Server = None,
    api_key: options.ServerKey = None,
    as_json: options.AsJson = False,
) -> None:
    """List deployments, those of the settings and those added.

    States (healthy, resting, circuit open, probing, key rejected) and calls in flight are those of the server on this machine;
    without one there are none.

    Example: tidegate deployments list
    """
    found = listed(options.loaded(config, data, remote__url=server, remote__key=api_key).settings, "deployment")
    if as_json:
        terminal.show_json(found)
    elif not found:
        terminal.say(
            "There are no deployments. Add one: tidegate deployments add NAME --model MODEL --url http://HOST:PORT/v1"
        )
    else:
        rows = [[one.name, _state(one), one.in_flight, one.model, one.url, one.origin, one.revision] for one in found]
        terminal.show_table(["name", "state", "in flight", "model", "url", "origin", "revision"], rows)
        tell_troubles(found)


@app.command("add")
def add_deployment(
    name: NameArgument,
    model: Annotated[
        str, typer.Option("--model", metavar="MODEL", help="Public name of the model.", show_default=False)
    ],
    url: Annotated[
        str,
        typer.Option("--url", metavar="URL", help="Where it is, such as http://10.0.0.5:8000/v1.", show_default=False),
    ],
    api_key: options.ApiKey = None,
    values: SetOption = None,
    data: options.Data = None,
    config: options.Config = None,
    server: options.Server = None,
    server_key: options.OtherServerKey = None,
    as_json: options.AsJson = False,
) -> None:
    """Add a deployment; every process serves it within seconds.

    Example: tidegate deployments add gpu-7 --model llama-3-8b --url http://10.0.0.7:8000/v1 --set engine=vllm --set max_in_flight=64
    """
    fields = {"model": model, "url": url, **({} if api_key is None else {"api_key": api_key}), **fields_of(values)}
    do(
        options.loaded(
            config,
            data,
            remote__url=server,
            remote__key=server_key,
            names=options.NAMES | {"remote.key": "--server-key"},
        ).settings,
        "deployment",
        "add",
        routing_request(name, fields),
        as_json=as_json,
    )


@app.command("change")
def change_deployment(
    name: NameArgument,
    values: SetOption = None,
    revision: Revision = None,
    data: options.Data = None,
    config: options.Config = None,
    server: options.Server = None,
    api_key: options.ServerKey = None,
    as_json: options.AsJson = False,
) -> None:
    """Change a deployment that was added.

    What is not named stays; an empty value gives back the default. Calls in flight go on. With another url or key it is another server,
    whose health is not known yet.

    Example: tidegate deployments change gpu-7 --set weight=2 --set max_in_flight=
    """
    fields = fields_of(values)
    do(
        options.loaded(config, data, remote__url=server, remote__key=api_key).settings,
        "deployment",
        "change",
        routing_request(name, fields, revision),
        as_json=as_json,
    )


@app.command("remove")
def remove_deployment(
    name: NameArgument,
    revision: Revision = None,
    force: Force = False,
    data: options.Data = None,
    config: options.Config = None,
    server: options.Server = None,
    api_key: options.ServerKey = None,
    as_json: options.AsJson = False,
) -> None:
    """Remove a deployment that was added.

    Calls in flight there end; nothing new is sent to it.

    Example: tidegate deployments remove gpu-7
    """
    settings = options.loaded(config, data, remote__url=server, remote__key=api_key).settings
    do(settings, "deployment", "remove", routing_request(name, {}, revision, force=force), as_json=as_json)


@app.command("drain")
def drain_deployment(
    name: NameArgument,
    data: options.Data = None,
    config: options.Config = None,
    server: options.Server = None,
    api_key: options.ServerKey = None,
    as_json: options.AsJson = False,
) -> None:
    """Send a deployment no new calls; those in flight end there.

    It holds over restarts until the deployment is resumed, also for one of the settings. Work for its models goes to other deployments,
    and waits where there are none.

    Example: tidegate deployments drain gpu-7
    """
    settings = options.loaded(config, data, remote__url=server, remote__key=api_key).settings
    _show_done(uvloop.run(_set_state(settings, "drain", name)), as_json=as_json)


@app.command("resume")
def resume_deployment(
    name: NameArgument,
    data: options.Data = None,
    config: options.Config = None,
    server: options.Server = None,
    api_key: options.ServerKey = None,
    as_json: options.AsJson = False,
) -> None:
    """Send a deployment calls again that was drained.

    Example: tidegate deployments resume gpu-7
    """
    settings = options.loaded(config, data, remote__url=server, remote__key=api_key).settings
    _show_done(uvloop.run(_set_state(settings, "resume", name)), as_json=as_json)


@resources_app.command("list")
def list_resources(
    data: options.Data = None,
    config: options.Config = None,
    server: options.Server = None,
    api_key: options.ServerKey = None,
    as_json: options.AsJson = False,
) -> None:
    """List resources, those of the settings and those added.

    Example: tidegate resources list
    """
    shown = listed(options.loaded(config, data, remote__url=server, remote__key=api_key).settings, "resource")
    if as_json:
        terminal.show_json(shown)
    elif not shown:
        terminal.say("There are no resources. Add one: tidegate resources add NAME --model MODEL")
    else:
        rows = [[one.name, one.model, ", ".join(one.fallbacks), one.origin, one.revision] for one in shown]
        terminal.show_table(["name", "model", "fallbacks", "origin", "revision"], rows)
        tell_troubles(shown)


@resources_app.command("add")
def add_resource(
    name: NameArgument,
    model: Annotated[str, typer.Option("--model", metavar="MODEL", help="Model it leads to.", show_default=False)],
    values: SetOption = None,
    data: options.Data = None,
    config: options.Config = None,
    server: options.Server = None,
    api_key: options.ServerKey = None,
    as_json: options.AsJson = False,
) -> None:
    """Add a resource; every process knows it within seconds.

    Example: tidegate resources add support-chat --model llama-3-8b --set "fallbacks=[gpt-4o-mini]"
    """
    fields = {"model": model, **fields_of(values)}
    do(
        options.loaded(config, data, remote__url=server, remote__key=api_key).settings,
        "resource",
        "add",
        routing_request(name, fields),
        as_json=as_json,
    )


@resources_app.command("change")
def change_resource(
    name: NameArgument,
    values: SetOption = None,
    revision: Revision = None,
    data: options.Data = None,
    config: options.Config = None,
    server: options.Server = None,
    api_key: options.ServerKey = None,
    as_json: options.AsJson = False,
) -> None:
    """Change a resource that was added.

    What is not named stays; an empty value gives back the default.

    Example: tidegate resources change support-chat --set "limits=[{period: minute, requests: 50}]"
    """
    fields = fields_of(values)
    do(
        options.loaded(config, data, remote__url=server, remote__key=api_key).settings,
        "resource",
        "change",
        routing_request(name, fields, revision),
        as_json=as_json,
    )


@resources_app.command("remove")
def remove_resource(
    name: NameArgument,
    revision: Revision = None,
    force: Force = False,
    data: options.Data = None,
    config: options.Config = None,
    server: options.Server = None,
    api_key: options.ServerKey = None,
    as_json: options.AsJson = False,
) -> None:
    """Remove a resource that was added.

    Example: tidegate resources remove support-chat
    """
    settings = options.loaded(config, data, remote__url=server, remote__key=api_key).settings
    do(settings, "resource", "remove", routing_request(name, {}, revision, force=force), as_json=as_json)


def fields_of(values: list[str] | None) -> dict[str, Any]:
    """Return the fields that `--set` gives, each value read as YAML."""
    fields: dict[str, Any] = {}
    for text in values or ():
        key, equals, value = text.partition("=")
        if not key or not equals:
            raise SettingsError(f"--set {text} has no value: write KEY=VALUE, such as --set weight=2")
        fields[key.strip()] = parse(value, f"--set {key}").values
    return fields


def listed(settings: Settings, kind: str) -> "list[RoutingShown]":
    """Return the entries of one kind, those of the settings first."""
    return [one for one in uvloop.run(shown(settings)) if one.kind == kind]


async def shown(settings: Settings) -> "list[RoutingShown]":
    """Return the entries of all kinds, from the server elsewhere or on this machine, or from the
    store if none runs."""
    from tidegate.web.admin.deployments import RoutingEditor, RoutingList

    if (server := server_client.remote(settings) or server_client.running_server(settings)) is not None:
        kinds = ("deployments", "resources", "models")
        return [one for kind in kinds for one in (await server.get(f"/admin/v1/{kind}", RoutingList)).data]
    async with server_client.reading(settings) as parts:
        return await RoutingEditor(parts.store, lambda: settings, looks_up=False).list()


def routing_request(
    name: str, fields: dict[str, Any], revision: int | None = None, *, force: bool = False
) -> "RoutingRequest":
    """Return the requested change of the entry of this name."""
    from tidegate.web.admin.deployments import RoutingRequest

    return RoutingRequest(name, fields, revision, force)


def do(settings: Settings, kind: str, verb: str, wanted: "RoutingRequest", *, as_json: bool) -> None:
    """Make one change, through the server or in the store itself, and print the result."""
    _show_done(uvloop.run(_ask(settings, kind, verb, wanted)), as_json=as_json)


def _state(one: "RoutingShown") -> str:
    return "drained" if one.is_drained else STATES.get(one.state, one.state)


def _show_done(done: "RoutingDone", *, as_json: bool) -> None:
    for warning in done.warnings:
        terminal.warn(warning)
    if as_json:
        terminal.show_json(done)
    else:
        terminal.say("Done. Every process follows within 5 s.")


async def _ask(settings: Settings, kind: str, verb: str, wanted: "RoutingRequest") -> "RoutingDone":
    from tidegate import storage
    from tidegate.web.admin.audit import COMMAND, AuditTrail
    from tidegate.web.admin.deployments import RoutingDone, RoutingEditor

    if (server := server_client.asked(settings)) is not None:
        return await server.post(f"/admin/v1/{kind}s/{verb}", RoutingDone, wanted)
    async with storage.opened(settings) as parts:
        # Only the processes that will call the deployment need its key.
        editor = RoutingEditor(parts.store, lambda: settings, looks_up=False)
        done = await editor.do(AuditTrail(parts.store, parts.entropy, COMMAND), verb, kind, wanted)
        parts.wakes.inputs.notify()
        return done


async def _set_state(settings: Settings, verb: str, name: str) -> "RoutingDone":
    from tidegate import storage
    from tidegate.web.admin.audit import COMMAND, AuditTrail
    from tidegate.web.admin.deployments import RoutingDone, RoutingEditor

    if (server := server_client.asked(settings)) is not None:
        return await server.post(f"/admin/v1/deployments/{quote(name)}/{verb}", RoutingDone)
    async with storage.opened(settings) as parts:
        editor = RoutingEditor(parts.store, lambda: settings, looks_up=False)
        return await editor.set_state(AuditTrail(parts.store, parts.entropy, COMMAND), verb, name)


def tell_troubles(shown: "list[RoutingShown]") -> None:
    """Warn of entries that cannot be used, with the reason."""
    for one in shown:
        if one.why:
            terminal.warn(f"{one.kind} {one.name} is not used: {one.why}")
