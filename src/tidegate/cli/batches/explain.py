"""`tidegate explain`: prints why a batch runs, waits or ended, and what the scheduler
would do with it."""

from typing import TYPE_CHECKING

import msgspec
import typer
import uvloop

from tidegate.cli.batches import batch_facts, remote_batches
from tidegate.cli.operators.deployments import shown
from tidegate.cli.terminal import options, server_client, terminal
from tidegate.core.deployments import Deployment, Resource
from tidegate.core.errors import TidegateError
from tidegate.core.nouns import Job
from tidegate.core.schedule import explain as reasons
from tidegate.settings import Settings, deployments, resources
from tidegate.settings.added import added

if TYPE_CHECKING:
    from tidegate.web.jobs.explanation import Explanation, RoutingEntries


def explain(
    batch: options.BatchId,
    org: options.BatchOrg = None,
    data: options.Data = None,
    config: options.Config = None,
    server: options.Server = None,
    api_key: options.ServerKey = None,
    as_json: options.AsJson = False,
) -> None:
    """Say why a batch runs, waits, or ended as it did.

    Here it reads the store only, so it works beside a running server and with none. Elsewhere a key with the scope admin:read sees
    the batches of every organization, and deployments and workers by name.

    Example: tidegate explain batch_0f3kQ2mZ8s1xW7vB4nD9Lc
    """
    options.check_batch_id(batch)
    settings = options.loaded(config, data, remote__url=server, remote__key=api_key).settings
    if (remote := server_client.remote(settings)) is not None:
        found = uvloop.run(explained_by(remote, batch))
        if as_json:
            terminal.show_json({"batch": found.batch_id, "status": found.status, "why": found.why})
            return
        sentences = found.why
    else:
        job, explain_inputs = uvloop.run(explain_inputs_of(settings, org, batch))
        sentences = reasons.explain(job, explain_inputs)
        if as_json:
            facts = msgspec.to_builtins(explain_inputs)
            facts["prospects"] = facts.pop("forecasts")
            terminal.show_json({"batch": job.id, "status": job.state, "why": sentences, "standing": facts})
            return
    for sentence in sentences:
        typer.echo(terminal.clean(sentence))


async def explained_by(server: server_client.AskedServer, batch: str) -> "Explanation":
    """Ask a server why a batch waits, as an operator if the key is one, else as the
    owner of the batch."""
    from tidegate.web.jobs.explanation import Explanation

    return await remote_batches.at_either(
        server, lambda path: server.get(f"{path}/{batch}/explain", Explanation), operator_first=True
    )


async def explain_inputs_of(settings: Settings, org: str | None, batch: str) -> tuple[Job, reasons.ExplainInputs]:
    """Return a batch, and all facts that explain why it runs or waits."""
    from tidegate.upstream.calls.open_router import open_router
    from tidegate.web.jobs.explanation import Explainer

    async with server_client.reading(settings) as parts:
        job = await batch_facts.job_of(parts, org, batch)
        router = open_router(settings.http.limits(), parts.clock, parts.entropy)
        try:
            _, entries = await parts.store.routing()
            # Nothing is sent, so no key of a deployment is looked up.
            found = added(settings, [(one.kind, one.name, one.document) for one in entries], looks_up=False)
            router.replace([*deployments(settings), *found.deployments], [*resources(settings), *found.resources])
            elsewhere = await _routing_of_server(settings)
            return job, await Explainer(parts.store, parts.blobs, lambda: settings, router, elsewhere).inputs(job)
        finally:
            await router.close()


async def _routing_of_server(settings: Settings) -> "RoutingEntries":
    """Return the deployments and resources that the server on this machine has by settings of its
    own, such as its --upstream."""
    if deployments(settings) or server_client.running_server(settings) is None:
        return [], []
    try:
        found = [one for one in await shown(settings) if one.origin == "settings"]
    except TidegateError:
        # The server may be stopping: then less is known.
        return [], []
    places = [
        Deployment(one.name, one.url, models=(one.model,) if one.model else ())
        for one in found
        if one.kind == "deployment"
    ]
    routes = [Resource(one.name, one.model, fallbacks=tuple(one.fallbacks)) for one in found if one.kind == "resource"]
    return places, routes
