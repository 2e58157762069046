"""`tidegate webhooks`: lists webhook endpoints and failed deliveries, tests an endpoint, and sends
deliveries again."""

from typing import TYPE_CHECKING, Annotated

import msgspec
import typer
import uvloop

from tidegate.cli.terminal import options, server_client, terminal
from tidegate.core import ids
from tidegate.core.errors import SettingsError
from tidegate.core.states import DeliveryState
from tidegate.core.webhooks import EVENT_TYPES, WebhookDelivery, WebhookEndpoint
from tidegate.core.wording import in_words
from tidegate.settings import Settings

if TYPE_CHECKING:
    from tidegate.store.store import Store

PAGE_COUNT_MAX = 100

app = typer.Typer(
    no_args_is_help=True, rich_markup_mode=None, help="Webhooks: list endpoints and failed deliveries, test, replay."
)


class _Tested(msgspec.Struct):
    status_code: int


class _Replayed(msgspec.Struct):
    id: str


@app.command("list")
def list_webhooks(
    failed: Annotated[bool, typer.Option("--failed", help="List deliveries that failed for good instead.")] = False,
    every: Annotated[bool, typer.Option("--all", help="Of every organization; on the server's machine only.")] = False,
    org: options.Org = None,
    data: options.Data = None,
    config: options.Config = None,
    server: options.Server = None,
    api_key: options.ServerKey = None,
    as_json: options.AsJson = False,
) -> None:
    """List webhook endpoints, or the deliveries that failed.

    Example: tidegate webhooks list --failed --all
    """
    settings = options.loaded(config, data, remote__url=server, remote__key=api_key).settings
    if every and (org is not None or settings.remote.url):
        raise SettingsError(
            "--all is for every organization on the server's machine: use it without --org and --server."
        )
    if failed:
        rows = uvloop.run(_every_failed(settings) if every else _failed(settings, org))
        nothing = "No delivery has failed."
    else:
        rows = uvloop.run(_every_endpoint(settings) if every else _endpoints(settings, org))
        nothing = "There are no webhook endpoints. Make one: POST /v1/webhook_endpoints."
    if as_json:
        terminal.show_json(rows)
    elif not rows:
        is_whole = every or settings.remote.url or org is not None
        more = "" if is_whole else " --org NAME lists those of another organization, --all those of every one."
        terminal.say(nothing + more)
    else:
        terminal.show_table(list(rows[0]), [list(row.values()) for row in rows])


@app.command("test")
def send_sample(
    endpoint: Annotated[str, typer.Argument(metavar="ENDPOINT", help="An endpoint's id (whk_…).", show_default=False)],
    event: Annotated[str, typer.Option("--event", metavar="TYPE", help="The event type to send.")] = EVENT_TYPES[0],
    org: options.Org = None,
    data: options.Data = None,
    config: options.Config = None,
    server: options.Server = None,
    api_key: options.ServerKey = None,
    as_json: options.AsJson = False,
) -> None:
    """Send a sample event to an endpoint, and show its answer.

    Exit codes: 0 it took the event, 1 it answered otherwise.

    Example: tidegate webhooks test whk_0f3kQ2mZ8s1xW7vB4nD9Lc
    """
    settings = options.loaded(config, data, remote__url=server, remote__key=api_key).settings
    if event not in EVENT_TYPES:
        raise SettingsError(f"--event may be: {', '.join(EVENT_TYPES)}.")
    status = uvloop.run(_test(settings, org, endpoint, event))
    if as_json:
        terminal.show_json({"id": endpoint, "status_code": status})
    else:
        terminal.say(f"{endpoint} answered with status {status}.")
    raise typer.Exit(0 if 200 <= status < 300 else 1)


@app.command()
def replay(
    deliveries: Annotated[
        list[str] | None,
        typer.Argument(metavar="DELIVERY...", help="Deliveries, as `list --failed` shows them.", show_default=False),
    ] = None,
    failed: Annotated[bool, typer.Option("--failed", help="Every delivery that failed.")] = False,
    org: options.Org = None,
    data: options.Data = None,
    config: options.Config = None,
    server: options.Server = None,
    api_key: options.ServerKey = None,
    as_json: options.AsJson = False,
) -> None:
    """Send deliveries again, each from its first try.

    A running worker sends them, also to endpoints that are disabled.

    Example: tidegate webhooks replay --failed
    """
    settings = options.loaded(config, data, remote__url=server, remote__key=api_key).settings
    if bool(deliveries) == failed:
        raise SettingsError("Name deliveries, or use --failed.")
    replayed = uvloop.run(_replay(settings, org, deliveries or []))
    if as_json:
        terminal.show_json(replayed)
    else:
        terminal.say(f"{in_words(len(replayed), 'delivery', 'deliveries')} will be sent again.")


def _endpoint_facts(endpoint: WebhookEndpoint) -> dict[str, object]:
    return {
        "id": endpoint.id,
        "name": endpoint.name,
        "url": endpoint.url,
        "events": ",".join(endpoint.event_types),
        "state": "enabled" if endpoint.disabled_at is None else f"disabled ({endpoint.disabled_why})",
    }


def _delivery_facts(delivery: WebhookDelivery) -> dict[str, object]:
    return {
        "delivery": f"{delivery.event_id}.{delivery.endpoint_id}",
        "failure": delivery.failure,
        "attempts": delivery.attempt_count,
        "event": delivery.event_type,
        "url": delivery.url,
        "batch": delivery.job_id,
    }


def _whose(org: str | None) -> str:
    return f"organization {org!r}" if org else "callers without a key"


def _named(org: str | None) -> str:
    return f" --org {org}" if org else " --org NAME"


async def _endpoints(settings: Settings, org: str | None) -> list[dict[str, object]]:
    if (remote := server_client.remote(settings)) is not None:
        return [
            {
                "id": one["id"],
                "name": one["name"],
                "url": one["url"],
                "events": ",".join(one["event_types"]),
                "state": "enabled"
                if one["tidegate"]["enabled"]
                else f"disabled ({one['tidegate']['disabled_reason']})",
            }
            for one in await remote.pages("/v1/webhook_endpoints", org)
        ]
    async with server_client.reading(settings) as parts:
        found = await _endpoints_of(parts.store, await server_client.tenant(parts, org))
        return [_endpoint_facts(one) for one in found]


async def _every_endpoint(settings: Settings) -> list[dict[str, object]]:
    async with server_client.reading(settings) as parts:
        found, after = list[dict[str, object]](), None
        while orgs := await parts.store.list_orgs(after=after, count_max=PAGE_COUNT_MAX):
            for one in orgs:
                endpoints = await _endpoints_of(parts.store, one["id"])
                found += [{"org": one["name"], **_endpoint_facts(endpoint)} for endpoint in endpoints]
            after = str(orgs[-1]["id"])
        return found


async def _endpoints_of(store: "Store", tenant_id: str) -> list[WebhookEndpoint]:
    found = list[WebhookEndpoint]()
    while page := await store.list_webhook_endpoints(tenant_id, found[-1].id if found else None, PAGE_COUNT_MAX):
        found += page
    return found


async def _failed(settings: Settings, org: str | None) -> list[dict[str, object]]:
    if (remote := server_client.remote(settings)) is not None:
        names = {
            "delivery": "id",
            "failure": "failure",
            "attempts": "attempts",
            "event": "event_type",
            "url": "url",
            "batch": "batch_id",
        }
        found_there = await remote.pages("/v1/webhook_deliveries?status=failed", org)
        return [{shown: one[name] for shown, name in names.items()} for one in found_there]
    async with server_client.reading(settings) as parts:
        tenant_id, found = await server_client.tenant(parts, org), list[WebhookDelivery]()
        after: tuple[str, str] | None = None
        while page := await parts.store.list_webhook_deliveries(tenant_id, DeliveryState.FAILED, after, PAGE_COUNT_MAX):
            found += page
            after = (page[-1].event_id, page[-1].endpoint_id)
        return [_delivery_facts(one) for one in found]


async def _every_failed(settings: Settings) -> list[dict[str, object]]:
    async with server_client.reading(settings) as parts:
        found, after = list[tuple[WebhookDelivery, str]](), None
        while page := await parts.store.list_every_delivery(None, DeliveryState.FAILED, after, PAGE_COUNT_MAX):
            found += page
            after = (page[-1][0].event_id, page[-1][0].endpoint_id)
        return [{"org": org, **_delivery_facts(one)} for one, org in found]


async def _test(settings: Settings, org: str | None, endpoint_id: str, event: str) -> int:
    from tidegate import service, storage
    from tidegate.stages.deliver import send_test

    if not ids.is_valid("whk", endpoint_id):
        raise SettingsError(
            f"{endpoint_id!r} is not the id of a webhook endpoint. `tidegate webhooks list` shows them."
        )
    if (server := server_client.asked(settings)) is not None:
        path = f"/v1/webhook_endpoints/{endpoint_id}/test"
        return (await server.post(path, _Tested, {"event_type": event}, tenant=org)).status_code
    async with storage.opened(settings) as parts, service.callback_sender(settings) as callbacks:
        endpoint = await parts.store.webhook_endpoint(await server_client.tenant(parts, org), endpoint_id)
        if endpoint is None:
            raise SettingsError(
                f"There is no webhook endpoint {endpoint_id} of {_whose(org)}. `tidegate webhooks list{_named(org)}` shows them."
            )
        reply = await send_test(callbacks, parts.entropy, endpoint, event, await parts.store.now_ms())
        if not reply.status:
            raise SettingsError(f"No answer came from {endpoint.url}: {reply.word}.")
        return reply.status


async def _replay(settings: Settings, org: str | None, named: list[str]) -> list[str]:
    """Replay these deliveries, or all that failed; return their ids."""
    from tidegate import storage

    names = named or [str(one["delivery"]) for one in await _failed(settings, org)]
    if (server := server_client.asked(settings)) is not None:
        return [
            (await server.post(f"/v1/webhook_deliveries/{name}/replay", _Replayed, tenant=org)).id for name in names
        ]
    async with storage.opened(settings) as parts:
        tenant_id = await server_client.tenant(parts, org)
        for name in names:
            event_id, _, endpoint_id = name.partition(".")
            if await parts.store.replay_webhook(tenant_id, event_id, endpoint_id) is None:
                raise SettingsError(
                    f"There is no delivery {name} of {_whose(org)}. `tidegate webhooks list --failed{_named(org)}` shows them."
                )
    return names
