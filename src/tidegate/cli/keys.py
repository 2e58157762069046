"""`tidegate keys`: make, list and revoke API keys. A key is shown once, when it is made; only a keyed hash of it is kept."""

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any

import typer
import uvloop

from tidegate.cli import beside, options, screen
from tidegate.core import keys, window
from tidegate.core.errors import SettingsError
from tidegate.settings import Settings

if TYPE_CHECKING:
    from tidegate.web.operator import KeyMade

KEYS_SHOWN_MAX = 10_000

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="API keys: create, list, revoke.")


@app.command()
def create(
    org: Annotated[str, typer.Option("--org", metavar="NAME", help="The organization that owns what the key makes.")],
    team: Annotated[str | None, typer.Option("--team", metavar="T", help="A team in it.")] = None,
    user: Annotated[str | None, typer.Option("--user", metavar="U", help="A user in it.")] = None,
    label: Annotated[str, typer.Option("--label", metavar="TEXT", help="What the key is for.")] = "",
    scopes: Annotated[
        str | None,
        typer.Option("--scopes", metavar="A,B", help=f"What it may do: {', '.join(keys.SCOPES)}.", show_default="all"),
    ] = None,
    models: Annotated[
        str | None, typer.Option("--models", metavar="A,B", help="Models it may use.", show_default="any")
    ] = None,
    expires: Annotated[
        str | None, typer.Option("--expires", metavar="90d", help="How long it works.", show_default="until revoked")
    ] = None,
    data: options.Data = None,
    config: options.Config = None,
    as_json: options.AsJson = False,
    debug: options.Debug = False,
) -> None:
    """Make an API key and print it, once.

    With any key in the store, every call needs one.

    Example: tidegate keys create --org acme --expires 90d
    """
    settings = options.loaded(config, data).settings
    made = uvloop.run(_create(settings, org, label, team, user, _words(scopes), _words(models), _duration_ms(expires)))
    if as_json:
        screen.show_json({"id": made.id, "key": made.key, "org": org})
        return
    typer.echo(made.key)
    screen.say(
        f"This is the only time that key {made.id} is shown; keep it. From now on every call to this store needs a key."
    )


@app.command("list")
def list_keys(
    data: options.Data = None,
    config: options.Config = None,
    as_json: options.AsJson = False,
    debug: options.Debug = False,
) -> None:
    """List keys, never the keys themselves.

    Example: tidegate keys list
    """
    settings = options.loaded(config, data).settings
    rows = uvloop.run(_list(settings))
    if as_json:
        screen.show_json(rows)
    elif not rows:
        screen.say(
            "There are no keys: anyone on this machine may use the API. Make one: tidegate keys create --org NAME"
        )
    else:
        names = ["id", "org", "label", "state", "created", "last_used", "expires", "scopes", "models"]
        screen.show_table(names, [[row[name] for name in names] for row in rows])


@app.command()
def revoke(
    key: Annotated[
        str, typer.Argument(metavar="KEY", help="A key's id, as `tidegate keys list` shows it.", show_default=False)
    ],
    data: options.Data = None,
    config: options.Config = None,
    as_json: options.AsJson = False,
    debug: options.Debug = False,
) -> None:
    """Make a key useless, everywhere, within seconds.

    Example: tidegate keys revoke Ab3dE5gH
    """
    settings = options.loaded(config, data).settings
    if not keys.PUBLIC_ID.fullmatch(key):
        raise SettingsError(
            "That is no key id: it has 8 letters and digits. Never paste the key itself; see `tidegate keys list`."
        )
    if not uvloop.run(_revoke(settings, key)):
        raise SettingsError(f"There is no key {key} that could be revoked; see `tidegate keys list`.")
    if as_json:
        screen.show_json({"id": key, "revoked": True})
    else:
        screen.say(f"Key {key} is revoked; it stops working everywhere within seconds.")


async def _create(
    settings: Settings,
    org: str,
    label: str,
    team: str | None,
    user: str | None,
    scopes: list[str],
    models: list[str],
    expires_after_ms: int | None,
) -> "KeyMade":
    from tidegate import service
    from tidegate.web.operator import KeyMade, KeyWish, check_wish, make_key
    from tidegate.web.pepper import pepper_of

    wish = KeyWish(org, label, team, user, scopes, models, expires_after_ms)
    check_wish(wish)
    if (server := beside.server(settings)) is not None:
        return await server.post("/control/keys", KeyMade, wish)
    async with service.opened(settings) as parts:
        return await make_key(parts.store, parts.entropy, pepper_of(settings), wish)


async def _list(settings: Settings) -> list[dict[str, object]]:
    async with beside.reading(settings) as parts:
        now_ms = await parts.store.now_ms()
        return [_told(row, now_ms) for row in await parts.store.list_keys(KEYS_SHOWN_MAX)]


async def _revoke(settings: Settings, key: str) -> bool:
    from tidegate import service
    from tidegate.web.operator import KeyRevoked

    if (server := beside.server(settings)) is not None:
        return (await server.post(f"/control/keys/{key}/revoke", KeyRevoked)).revoked
    async with service.opened(settings) as parts:
        return await parts.store.revoke_key(key)


def _told(row: dict[str, Any], now_ms: int) -> dict[str, object]:
    is_over = row["expires_at"] is not None and row["expires_at"] <= now_ms
    state = "revoked" if row["revoked_at"] is not None else "expired" if is_over else "live"
    return {
        "id": row["id"],
        "org": row["tenant"],
        "team": row["team"],
        "user": row["user_name"],
        "label": row["label"],
        "state": state,
        "created": _when(row["created_at"]),
        "last_used": _when(row["last_used_at"]),
        "expires": _when(row["expires_at"]),
        "scopes": row["scopes"],
        "models": " ".join(sorted(keys.models_from(row["models"]))) or "any",
    }


def _when(at_ms: int | None) -> str:
    return "never" if at_ms is None else datetime.fromtimestamp(at_ms / 1000, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _words(text: str | None) -> list[str]:
    return [word.strip() for word in (text or "").split(",") if word.strip()]


def _duration_ms(text: str | None) -> int | None:
    if text is None:
        return None
    duration_ms = window.parse(text)
    if duration_ms is None:
        raise SettingsError("--expires needs a duration with a unit, such as 90d, 12h or 30m.")
    return duration_ms
