"""`tidegate keys`: makes, lists, changes, rotates, revokes and deletes API keys.

A key is shown once; only a keyed hash of it is kept.
"""

import secrets
import time
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer
import uvloop

from tidegate.cli.operators.deployments import shown
from tidegate.cli.operators.key_limits import limit_text, read_limits
from tidegate.cli.terminal import options, server_client, terminal
from tidegate.core import keys, window
from tidegate.core.errors import SettingsError
from tidegate.settings import Settings
from tidegate.web.doors import SCOPES

if TYPE_CHECKING:
    from tidegate.storage import Parts
    from tidegate.web.admin.audit import AuditTrail
    from tidegate.web.admin.keys import KeyChange, KeyDeletion, KeyMade, KeyRequest, KeyShown

KEYS_SHOWN_MAX = 10_000

KeyArgument = Annotated[
    str, typer.Argument(metavar="KEY", help="A key's id, as `tidegate keys list` shows it.", show_default=False)
]
LIMIT_HELP = "At most so much in one period (requests, tokens, cost, batches, bytes); may be repeated."
ADDRESSES_HELP = "Addresses or ranges it may be used from, such as 10.0.0.0/8"
ENVIRONMENTS_HELP = "Environments it may use; it then opens what has environments, and interactive calls"
NewLimits = Annotated[
    list[str] | None,
    typer.Option("--limit", metavar="minute:requests=10,tokens=500", help=LIMIT_HELP, show_default="none"),
]
NewAddresses = Annotated[
    str | None, typer.Option("--addresses", metavar="A,B", help=f"{ADDRESSES_HELP}.", show_default="any")
]
NewEnvironments = Annotated[
    str | None, typer.Option("--environments", metavar="A,B", help=f"{ENVIRONMENTS_HELP}.", show_default="any")
]
OtherAddresses = Annotated[
    str | None,
    typer.Option("--addresses", metavar="A,B", help=f"{ADDRESSES_HELP}; '' for any.", show_default="as it was"),
]
OtherEnvironments = Annotated[
    str | None,
    typer.Option("--environments", metavar="A,B", help=f"{ENVIRONMENTS_HELP}; '' for any.", show_default="as it was"),
]
PARALLEL_HELP = "How many calls it may have at once; 0 for any number."
PARALLEL_MAX = 1_000_000

app = typer.Typer(
    no_args_is_help=True, rich_markup_mode=None, help="API keys: create, list, show, change, rotate, revoke, delete."
)


@app.command()
def create(
    org: Annotated[str, typer.Option("--org", metavar="NAME", help="The organization that owns what the key makes.")],
    team: Annotated[str | None, typer.Option("--team", metavar="T", help="A team in it.")] = None,
    user: Annotated[str | None, typer.Option("--user", metavar="U", help="A user in it.")] = None,
    label: Annotated[str, typer.Option("--label", metavar="TEXT", help="What the key is for.")] = "",
    scopes: Annotated[
        str | None,
        typer.Option(
            "--scopes",
            metavar="A,B",
            help=f"What it may do: {', '.join(SCOPES.all)}.",
            show_default="all of a tenant's",
        ),
    ] = None,
    models: Annotated[
        str | None, typer.Option("--models", metavar="A,B", help="Models it may use.", show_default="any")
    ] = None,
    expires: Annotated[
        str | None, typer.Option("--expires", metavar="90d", help="How long it works.", show_default="until revoked")
    ] = None,
    resources: Annotated[
        str | None, typer.Option("--resources", metavar="A,B", help="Resources it may use.", show_default="any")
    ] = None,
    limit: NewLimits = None,
    parallel: Annotated[int, typer.Option("--parallel", metavar="N", min=0, max=PARALLEL_MAX, help=PARALLEL_HELP)] = 0,
    addresses: NewAddresses = None,
    environments: NewEnvironments = None,
    data: options.Data = None,
    config: options.Config = None,
    server: options.Server = None,
    api_key: options.ServerKey = None,
    as_json: options.AsJson = False,
) -> None:
    """Make an API key and print it, once.

    With any key in the store, every call needs one.

    Example: tidegate keys create --org acme --expires 90d
    """
    settings = options.loaded(config, data, remote__url=server, remote__key=api_key).settings
    from tidegate.web.admin.keys import KeyRequest

    wanted = KeyRequest(
        org,
        label,
        team,
        user,
        _words(scopes) or [],
        _words(models) or [],
        _duration_ms("--expires", expires),
        _words(resources) or [],
        read_limits(limit or []),
        parallel,
        _words(addresses) or [],
        _words(environments) or [],
    )
    made = uvloop.run(_create(settings, wanted))
    _warn_of_unserved_names(settings, wanted.models, wanted.resources)
    if as_json:
        terminal.show_json({"id": made.id, "key": made.key, "org": org})
        return
    typer.echo(made.key)
    terminal.say(
        f"This is the only time that key {made.id} is shown; keep it. From now on every call to this store needs a key."
    )


@app.command()
def generate() -> None:
    """Print the text of a key that no store knows yet.

    For auth.bootstrap_key, the first key of a new store.

    Example: tidegate keys generate
    """
    typer.echo(keys.make(secrets.token_bytes(keys.RANDOM_BYTES)).text.reveal())


@app.command("list")
def list_keys(
    data: options.Data = None,
    config: options.Config = None,
    server: options.Server = None,
    api_key: options.ServerKey = None,
    as_json: options.AsJson = False,
) -> None:
    """List keys, never the keys themselves.

    Example: tidegate keys list
    """
    settings = options.loaded(config, data, remote__url=server, remote__key=api_key).settings
    rows = uvloop.run(_list(settings))
    if as_json:
        terminal.show_json(rows)
    elif not rows:
        terminal.say(
            "There are no keys: only programs on this machine may use the API, and none where server.host lets others connect. "
            "Make one: tidegate keys create --org NAME"
        )
    else:
        names = ["id", "org", "label", "state", "expires", "last_used", "models", "scopes", "created"]
        terminal.show_table(names, [[row[name] for name in names] for row in rows])


@app.command()
def show(
    key: KeyArgument,
    data: options.Data = None,
    config: options.Config = None,
    server: options.Server = None,
    api_key: options.ServerKey = None,
    as_json: options.AsJson = False,
) -> None:
    """Show what a key may do, never the key itself.

    Example: tidegate keys show Ab3dE5gH
    """
    settings = options.loaded(config, data, remote__url=server, remote__key=api_key).settings
    _check_id(key)
    found = [row for row in uvloop.run(_list(settings)) if row["id"] == key]
    if not found:
        raise SettingsError(f"There is no key {key}; see `tidegate keys list`.")
    if as_json:
        terminal.show_json(found[0])
    else:
        terminal.show_facts([(name, "" if value is None else value) for name, value in found[0].items()])


@app.command()
def change(
    key: KeyArgument,
    scopes: Annotated[
        str | None,
        typer.Option(
            "--scopes",
            metavar="A,B",
            help=f"What it may do: {', '.join(SCOPES.all)}.",
            show_default="as it was",
        ),
    ] = None,
    models: Annotated[
        str | None,
        typer.Option("--models", metavar="A,B", help="Models it may use; '' for any.", show_default="as it was"),
    ] = None,
    resources: Annotated[
        str | None,
        typer.Option("--resources", metavar="A,B", help="Resources it may use; '' for any.", show_default="as it was"),
    ] = None,
    limit: Annotated[
        list[str] | None,
        typer.Option(
            "--limit",
            metavar="minute:requests=10,tokens=500",
            help=f"{LIMIT_HELP} They take the place of all that it had; '' for none.",
            show_default="as it was",
        ),
    ] = None,
    expires: Annotated[
        str | None,
        typer.Option("--expires", metavar="90d", help="How long it works from now on.", show_default="as it was"),
    ] = None,
    parallel: Annotated[
        int | None,
        typer.Option("--parallel", metavar="N", min=0, max=PARALLEL_MAX, help=PARALLEL_HELP, show_default="as it was"),
    ] = None,
    addresses: OtherAddresses = None,
    environments: OtherEnvironments = None,
    data: options.Data = None,
    config: options.Config = None,
    server: options.Server = None,
    api_key: options.ServerKey = None,
    as_json: options.AsJson = False,
) -> None:
    """Change what a key may do, everywhere, within seconds.

    It holds also for what its batches have not sent yet.

    Example: tidegate keys change Ab3dE5gH --models small,large --limit minute:requests=60
    """
    from tidegate.web.admin.keys import KeyChange

    settings = options.loaded(config, data, remote__url=server, remote__key=api_key).settings
    _check_id(key)
    limits = None if not limit else read_limits([one for one in limit if one])
    expires_ms = _duration_ms("--expires", expires)
    used = _words(scopes), _words(models), _words(resources)
    wanted = KeyChange(*used, limits, expires_ms, parallel, _words(addresses), _words(environments))
    if wanted == KeyChange():
        raise SettingsError(
            "Nothing is to be changed: give one of the options that `tidegate keys change --help` shows."
        )
    if not uvloop.run(_change(settings, key, wanted)):
        raise SettingsError(f"There is no key {key} that could be changed; see `tidegate keys list`.")
    _warn_of_unserved_names(settings, wanted.models or [], wanted.resources or [])
    if as_json:
        terminal.show_json({"id": key, "changed": True})
    else:
        terminal.say(f"Key {key} is changed; it holds everywhere within seconds.")


@app.command()
def rotate(
    key: KeyArgument,
    grace: Annotated[
        str, typer.Option("--grace", metavar="24h", help="How long the secret before still works; 0s ends it at once.")
    ] = "24h",
    data: options.Data = None,
    config: options.Config = None,
    server: options.Server = None,
    api_key: options.ServerKey = None,
    as_json: options.AsJson = False,
) -> None:
    """Give a key a new secret and print it, once.

    The one before works for the grace; batches of the key go on.

    Example: tidegate keys rotate Ab3dE5gH --grace 1h
    """
    settings = options.loaded(config, data, remote__url=server, remote__key=api_key).settings
    _check_id(key)
    grace_ms = 0 if grace in ("0", "0s") else _duration_ms("--grace", grace)
    made = uvloop.run(_rotate(settings, key, grace_ms or 0))
    if as_json:
        terminal.show_json({"id": made.id, "key": made.key})
        return
    typer.echo(made.key)
    terminal.say(
        f"This is the only time that the new secret of key {made.id} is shown; the one before works for {grace}."
    )


@app.command()
def revoke(
    key: KeyArgument,
    data: options.Data = None,
    config: options.Config = None,
    server: options.Server = None,
    api_key: options.ServerKey = None,
    as_json: options.AsJson = False,
) -> None:
    """Make a key useless, everywhere, within seconds.

    Example: tidegate keys revoke Ab3dE5gH
    """
    settings = options.loaded(config, data, remote__url=server, remote__key=api_key).settings
    _check_id(key)
    if not uvloop.run(_revoke(settings, key)):
        raise SettingsError(f"There is no key {key} that could be revoked; see `tidegate keys list`.")
    if as_json:
        terminal.show_json({"id": key, "revoked": True})
    else:
        terminal.say(f"Key {key} is revoked; it stops working everywhere within seconds.")


@app.command()
def delete(
    key: Annotated[
        str | None,
        typer.Argument(metavar="[KEY]", help="A key's id, as `tidegate keys list` shows it.", show_default=False),
    ] = None,
    org: Annotated[
        str | None, typer.Option("--org", metavar="NAME", help="Every key of this organization.", show_default="none")
    ] = None,
    data: options.Data = None,
    config: options.Config = None,
    server: options.Server = None,
    api_key: options.ServerKey = None,
    as_json: options.AsJson = False,
) -> None:
    """Take a key away for good, or all those of an organization.

    It stops working within seconds and is listed no more. What its batches have sent ends as it would; what they have not fails. Files and
    results stay until their time is over.

    Example: tidegate keys delete --org acme
    """
    from tidegate.web.admin.keys import KeyDeletion

    settings = options.loaded(config, data, remote__url=server, remote__key=api_key).settings
    if (key is None) == (org is None):
        raise SettingsError("Name the key to delete, or with --org the organization whose keys are to go; not both.")
    if key is not None:
        _check_id(key)
    deleted = uvloop.run(_delete(settings, KeyDeletion(key, org)))
    if not deleted:
        whose = f"key {key}" if org is None else f"key of {org}"
        raise SettingsError(f"There is no {whose} that could be deleted; see `tidegate keys list`.")
    if as_json:
        terminal.show_json({"deleted": deleted})
    else:
        terminal.say(f"Deleted {', '.join(deleted)}: nothing more is sent under it anywhere within seconds.")


def _warn_of_unserved_names(settings: Settings, models: list[str], resources: list[str]) -> None:
    """Warn of models and resources that a key allows but nothing serves: a name may be
    misspelt, or be added later."""
    if not models and not resources:
        return
    known = uvloop.run(shown(settings))
    deployments = [one for one in known if one.kind == "deployment"]
    if any(not one.model for one in deployments):
        # A deployment without models of its own serves every name.
        return
    served = {one.model for one in deployments}
    for name in models:
        if name not in served:
            terminal.warn(
                f"No deployment serves the model {name!r}, which this key allows. See `tidegate deployments list`."
            )
    named = served | {one.name for one in known if one.kind == "resource"}
    for name in resources:
        if name not in named:
            terminal.warn(
                f"There is no resource or model {name!r}, which this key allows. See `tidegate resources list`."
            )


async def _create(settings: Settings, wanted: "KeyRequest") -> "KeyMade":
    from tidegate import storage
    from tidegate.web.admin.keys import KeyMade, check_key_request, make_key
    from tidegate.web.http.pepper import agreed_pepper

    check_key_request(wanted)
    if (server := server_client.asked(settings)) is not None:
        return await server.post("/admin/v1/keys", KeyMade, wanted)
    async with storage.opened(settings) as parts:
        return await make_key(_trail(parts), parts.entropy, await agreed_pepper(parts.settings, parts.store), wanted)


async def _list(settings: Settings) -> list[dict[str, object]]:
    if (remote := server_client.remote(settings)) is not None:
        from tidegate.web.admin.keys import KeyShown

        found = await remote.pages("/admin/v1/keys")
        return [_shown_elsewhere(msgspec.convert(one, KeyShown)) for one in found]
    async with server_client.reading(settings) as parts:
        now_ms = await parts.store.now_ms()
        return [_shown(row, now_ms) for row in await parts.store.list_keys(KEYS_SHOWN_MAX)]


async def _change(settings: Settings, key: str, change: "KeyChange") -> bool:
    from tidegate import storage
    from tidegate.web.admin.keys import KeyChanged, change_key, check_change

    check_change(change)
    if (server := server_client.asked(settings)) is not None:
        return (await server.post(f"/admin/v1/keys/{key}/change", KeyChanged, change)).changed
    async with storage.opened(settings) as parts:
        return await change_key(_trail(parts), key, change)


async def _rotate(settings: Settings, key: str, grace_ms: int) -> "KeyMade":
    from tidegate import storage
    from tidegate.web.admin.keys import GRACE_MS_MAX, KeyMade, KeyRotation, rotate_key
    from tidegate.web.http.pepper import agreed_pepper

    if grace_ms > GRACE_MS_MAX:
        raise SettingsError(f"--grace may be {window.spoken(GRACE_MS_MAX)} at most.")
    rotation = KeyRotation(grace_ms)
    if (server := server_client.asked(settings)) is not None:
        return await server.post(f"/admin/v1/keys/{key}/rotate", KeyMade, rotation)
    async with storage.opened(settings) as parts:
        return await rotate_key(
            _trail(parts), parts.entropy, await agreed_pepper(parts.settings, parts.store), key, rotation
        )


async def _revoke(settings: Settings, key: str) -> bool:
    from tidegate import storage
    from tidegate.web.admin.keys import KeyRevoked, revoke_key

    if (server := server_client.asked(settings)) is not None:
        return (await server.post(f"/admin/v1/keys/{key}/revoke", KeyRevoked)).revoked
    async with storage.opened(settings) as parts:
        return await revoke_key(_trail(parts), key)


async def _delete(settings: Settings, deletion: "KeyDeletion") -> list[str]:
    from tidegate import storage
    from tidegate.web.admin.keys import KeysDeleted, delete_keys

    if (server := server_client.asked(settings)) is not None:
        return (await server.post("/admin/v1/keys/delete", KeysDeleted, deletion)).deleted
    async with storage.opened(settings) as parts:
        return (await delete_keys(_trail(parts), deletion)).deleted


def _trail(parts: "Parts") -> "AuditTrail":
    from tidegate.web.admin.audit import COMMAND, AuditTrail

    return AuditTrail(parts.store, parts.entropy, COMMAND)


def _shown(row: dict[str, Any], now_ms: int) -> dict[str, object]:
    from tidegate.web.admin.keys import key_shown

    shown = _shown_elsewhere(key_shown(row), now_ms / 1000)
    return {**shown, "old_secret_until": _when(row["old_until"] / 1000 if (row["old_until"] or 0) > now_ms else None)}


def _shown_elsewhere(key: "KeyShown", now_s: float | None = None) -> dict[str, object]:
    """Return a key as commands show it. Without `now_s` the clock of this machine
    decides whether it has expired."""
    is_over = key.expires_at is not None and key.expires_at <= (time.time() if now_s is None else now_s)
    return {
        "id": key.id,
        "org": key.org,
        "team": key.team,
        "user": key.user,
        "label": key.label,
        "state": "revoked" if key.revoked_at is not None else "expired" if is_over else "live",
        "created": _when(key.created_at),
        "last_used": _when(key.last_used_at),
        "expires": _when(key.expires_at),
        "scopes": " ".join(key.scopes),
        "models": " ".join(key.models) or "any",
        "resources": " ".join(key.resources) or "any",
        "limits": " ".join(limit_text(limit) for limit in key.limits) or "none",
        "parallel": key.parallel_max or "any",
        "addresses": " ".join(key.addresses) or "any",
        "environments": " ".join(key.environments) or "any",
    }


def _check_id(key: str) -> None:
    if not keys.PUBLIC_ID.fullmatch(key):
        raise SettingsError(
            "That is no key id: it has 8 letters and digits. Never paste the key itself; see `tidegate keys list`."
        )


def _when(at_s: float | None) -> str:
    return "never" if at_s is None else datetime.fromtimestamp(at_s, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _words(text: str | None) -> list[str] | None:
    return None if text is None else [word.strip() for word in text.split(",") if word.strip()]


def _duration_ms(option: str, text: str | None) -> int | None:
    if text is None:
        return None
    duration_ms = window.parse(text)
    if duration_ms is None:
        raise SettingsError(f"{option} needs a duration with a unit, such as 90d, 12h or 30m.")
    return duration_ms
