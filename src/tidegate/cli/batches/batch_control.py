"""`tidegate batches pause | resume | set | canary | retry | delete`: change a batch,
also beside a running server."""

from enum import StrEnum
from typing import Annotated, Any

import msgspec
import typer
import uvloop

from tidegate.cli.batches import batch_facts, remote_batches
from tidegate.cli.terminal import moments, options, server_client, terminal
from tidegate.core.errors import SettingsError
from tidegate.core.problems import batch_not_ended
from tidegate.core.states import JOB_ENDED
from tidegate.settings import Settings

# Actions for the owner of a batch alone; an operator may do the others, too.
OWNERS_ACTIONS = ("set", "canary")


class CanaryAction(StrEnum):
    CONTINUE = "continue"
    STOP = "stop"


def pause(
    batch: options.BatchId,
    org: options.BatchOrg = None,
    data: options.Data = None,
    config: options.Config = None,
    server: options.Server = None,
    api_key: options.ServerKey = None,
    as_json: options.AsJson = False,
) -> None:
    """Send nothing new of a batch until it is resumed.

    Calls in flight end, and the deadline runs on.

    Example: tidegate batches pause batch_0f3kQ2mZ8s1xW7vB4nD9Lc
    """
    settings = options.loaded(config, data, remote__url=server, remote__key=api_key).settings
    known = uvloop.run(_control(settings, org, batch, "pause"))
    where = options.as_arguments(config, data, server, api_key, org)
    _show_control(known, f"{batch} is paused. It goes on with: tidegate batches resume {batch}{where}", as_json=as_json)


def resume(
    batch: options.BatchId,
    org: options.BatchOrg = None,
    data: options.Data = None,
    config: options.Config = None,
    server: options.Server = None,
    api_key: options.ServerKey = None,
    as_json: options.AsJson = False,
) -> None:
    """Let a paused batch go on.

    Example: tidegate batches resume batch_0f3kQ2mZ8s1xW7vB4nD9Lc
    """
    settings = options.loaded(config, data, remote__url=server, remote__key=api_key).settings
    known = uvloop.run(_control(settings, org, batch, "resume"))
    where = options.as_arguments(config, data, server, api_key, org)
    _show_control(known, f"{batch} goes on. Follow it with: tidegate batches watch {batch}{where}", as_json=as_json)


def canary(
    batch: options.BatchId,
    action: Annotated[CanaryAction, typer.Argument(metavar="continue|stop", help="What follows the canary.")],
    org: options.BatchOrg = None,
    data: options.Data = None,
    config: options.Config = None,
    server: options.Server = None,
    api_key: options.ServerKey = None,
    as_json: options.AsJson = False,
) -> None:
    """Say whether a batch goes on after its canary.

    A batch with `canary` and `then: wait` runs its sample and then waits for this.

    Example: tidegate batches canary batch_0f3kQ2mZ8s1xW7vB4nD9Lc continue
    """
    settings = options.loaded(config, data, remote__url=server, remote__key=api_key).settings
    known = uvloop.run(_control(settings, org, batch, "canary", {"action": action.value}))
    word = "goes on" if action is CanaryAction.CONTINUE else "stops; what is done is kept"
    where = options.as_arguments(config, data, server, api_key, org)
    _show_control(known, f"{batch} {word}. Follow it with: tidegate batches watch {batch}{where}", as_json=as_json)


def retry(
    batch: options.BatchId,
    code: Annotated[
        list[str] | None,
        typer.Option("--code", metavar="CODE", help="Only requests with this error code; may be given several times."),
    ] = None,
    outcome: Annotated[
        list[str] | None,
        typer.Option("--outcome", metavar="OUTCOME", help="failed, expired or cancelled; may be given several times."),
    ] = None,
    org: options.BatchOrg = None,
    data: options.Data = None,
    config: options.Config = None,
    server: options.Server = None,
    api_key: options.ServerKey = None,
    as_json: options.AsJson = False,
) -> None:
    """Run failed requests of a batch again, as a new one.

    The first batch stays as it is; the new one's merged output holds the answers of both.

    Example: tidegate batches retry batch_0f3kQ2mZ8s1xW7vB4nD9Lc --outcome failed --outcome expired
    """
    settings = options.loaded(config, data, remote__url=server, remote__key=api_key).settings
    asked = {name: value for name, value in (("codes", code), ("outcomes", outcome)) if value}
    known = uvloop.run(_retry(settings, org, batch, asked))
    where = options.as_arguments(config, data, server, api_key, org)
    # Whether any request has the code shows only when the new batch reads the errors of the first.
    sentence = f"{known['id']} runs them again."
    if code:
        codes = " or ".join(code)
        sentence = f"{known['id']} runs those with {codes} again, and fails with nothing_to_retry if none has it."
        sentence += f"\nSee the codes with: tidegate batches items {batch} --outcome failed{where}"
    sentence += f"\nFollow it with: tidegate batches watch {known['id']}{where}"
    _show_control(known, sentence, as_json=as_json)


async def _retry(settings: Settings, org: str | None, batch: str, asked: dict[str, list[str]]) -> dict[str, Any]:
    from tidegate import storage
    from tidegate.core.nouns import Caller
    from tidegate.stages.accept import Reception
    from tidegate.web.requests import requests
    from tidegate.web.requests.retry_requests import RetryRequest, retry_choice

    options.check_batch_id(batch)
    if (server := server_client.asked(settings)) is not None:
        owner = await remote_batches.owner(server, org, batch)
        return remote_batches.facts(
            await remote_batches.at_either(
                server, lambda path: server.post(f"{path}/{batch}/retry", dict[str, Any], asked, tenant=owner)
            )
        )
    choice = retry_choice(requests.decoded(msgspec.json.encode(asked), RetryRequest))
    async with storage.opened(settings) as parts:
        reception = Reception(parts.store, parts.blobs, parts.clock, parts.entropy, lambda: "")
        job = await reception.retry_job(Caller(await batch_facts.owner_id(parts, org, batch)), batch, choice)
        if job is None:
            raise batch_facts.absent(batch, org)
        return batch_facts.facts(job)


def delete(
    batch: options.BatchId,
    org: options.BatchOrg = None,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    data: options.Data = None,
    config: options.Config = None,
    server: options.Server = None,
    api_key: options.ServerKey = None,
) -> None:
    """Remove a batch that has ended, and its results.

    Its input stays.

    Example: tidegate batches delete batch_0f3kQ2mZ8s1xW7vB4nD9Lc --yes
    """
    settings = options.loaded(config, data, remote__url=server, remote__key=api_key).settings
    if not yes:
        terminal.agree(f"Remove {batch} and its results?")
    uvloop.run(_delete(settings, org, batch))
    terminal.say(f"{batch} is gone.")


async def _delete(settings: Settings, org: str | None, batch: str) -> None:
    from tidegate import storage

    options.check_batch_id(batch)
    if (server := server_client.asked(settings)) is not None:
        owner = await remote_batches.owner(server, org, batch)
        await server.delete(f"/v1/batches/{batch}", dict[str, msgspec.Raw], tenant=owner)
        return
    async with storage.opened(settings) as parts:
        job = await batch_facts.job_of(parts, org, batch)
        if job.state not in JOB_ENDED:
            raise batch_not_ended()
        await parts.store.forget_job(job.id)


def set_batch(
    batch: options.BatchId,
    priority: options.PriorityOption = None,
    not_before: Annotated[
        str | None,
        typer.Option(
            "--not-before", metavar="MOMENT", help="Begin then at the earliest: 2026-11-01T22:00; 0: at once."
        ),
    ] = None,
    window: Annotated[
        str | None,
        typer.Option("--window", metavar="TIME", help="Be done within this time of its creation, such as 36h."),
    ] = None,
    max_cost: Annotated[
        str | None,
        typer.Option("--max-cost", metavar="AMOUNT", help="Stop when its answers cost more; `none`: no maximum."),
    ] = None,
    max_errors: Annotated[
        str | None,
        typer.Option(
            "--max-errors",
            metavar="N|SHARE",
            help="Stop when more requests fail, such as 100 or 5%; `none`: no maximum.",
        ),
    ] = None,
    org: options.BatchOrg = None,
    data: options.Data = None,
    config: options.Config = None,
    server: options.Server = None,
    api_key: options.ServerKey = None,
    as_json: options.AsJson = False,
) -> None:
    """Change a batch: its priority, times and thresholds.

    Example: tidegate batches set batch_0f3kQ2mZ8s1xW7vB4nD9Lc --priority 10 --window 36h --max-errors 5%
    """
    settings = options.loaded(config, data, remote__url=server, remote__key=api_key).settings
    change = _change(priority, not_before, window, max_cost, max_errors)
    known = uvloop.run(_control(settings, org, batch, "set", change))
    where = options.as_arguments(config, data, server, api_key, org)
    _show_control(known, f"{batch} is changed. See it with: tidegate batches show {batch}{where}", as_json=as_json)


def _show_control(known: dict[str, Any], sentence: str, *, as_json: bool) -> None:
    if as_json:
        terminal.show_json(known)
    else:
        terminal.say(sentence)


def _change(
    priority: int | None, not_before: str | None, window: str | None, max_cost: str | None, max_errors: str | None
) -> dict[str, Any]:
    """Return the given options as a body of the API; `none` removes a threshold."""
    asked = {
        "priority": priority,
        "not_before": None if not_before is None else moments.unix_s(not_before, "--not-before"),
        "completion_window": window,
        "max_cost": max_cost,
        "max_errors": None if max_errors is None else errors_max(max_errors),
    }
    change = {name: value for name, value in asked.items() if value is not None}
    if not change:
        raise SettingsError("Nothing to change: give --priority, --not-before, --window, --max-cost or --max-errors.")
    return {name: None if value == "none" else value for name, value in change.items()}


def errors_max(text: str) -> dict[str, float] | str:
    """Return what `--max-errors` of a change asks for: `none`, or the same as for a new batch."""
    return text if text == "none" else errors_wanted(text)


def errors_wanted(text: str) -> dict[str, float]:
    """Return what `--max-errors` asks for: a count, or a share with a percent sign."""
    try:
        return {"share": float(text[:-1]) / 100} if text.endswith("%") else {"count": int(text)}
    except ValueError:
        raise SettingsError(f"--max-errors {text!r} is neither a count such as 100 nor a share such as 5%.") from None


async def _control(
    settings: Settings, org: str | None, batch: str, action: str, change: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Do the action, through the server that holds the store or in the store itself,
    and return the batch after it."""
    from tidegate import storage
    from tidegate.web.requests import requests
    from tidegate.web.requests.control_requests import BatchChange

    options.check_batch_id(batch)
    if (server := server_client.asked(settings)) is not None:
        owner = await remote_batches.owner(server, org, batch)
        if action in OWNERS_ACTIONS:
            path = f"{remote_batches.OWN}/{batch}" if action == "set" else f"{remote_batches.OWN}/{batch}/{action}"
            return remote_batches.facts(await server.post(path, dict[str, Any], change, tenant=owner))
        return remote_batches.facts(
            await remote_batches.at_either(
                server, lambda path: server.post(f"{path}/{batch}/{action}", dict[str, Any], tenant=owner)
            )
        )
    async with storage.opened(settings) as parts:
        tenant_id = await batch_facts.owner_id(parts, org, batch)
        if action == "set":
            body = requests.decoded(msgspec.json.encode(change), BatchChange)
            job = await parts.store.change_job(tenant_id, batch, requests.job_change(body, settings))
        elif action == "canary":
            goes_on = change == {"action": CanaryAction.CONTINUE.value}
            job = await parts.store.end_canary(tenant_id, batch, goes_on=goes_on)
        else:
            verb = parts.store.pause_job if action == "pause" else parts.store.resume_job
            job = await verb(tenant_id, batch)
        if job is None:
            raise batch_facts.absent(batch, org)
        return batch_facts.facts(job)
