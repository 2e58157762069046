"""`tidegate explain`: why a batch is or is not running now."""

import dataclasses

import typer
import uvloop

from tidegate.cli import batches, beside, options, screen
from tidegate.core import explain as reasons
from tidegate.core.nouns import Job
from tidegate.settings import Settings


def explain(
    batch: options.BatchId,
    org: options.Org = None,
    data: options.Data = None,
    config: options.Config = None,
    as_json: options.AsJson = False,
    debug: options.Debug = False,
) -> None:
    """Say why a batch is or is not running now.

    Reads the store only, so it works beside a running server and with none.

    Example: tidegate explain batch_0f3kQ2mZ8s1xW7vB4nD9Lc
    """
    options.check_batch_id(batch)
    settings = options.loaded(config, data).settings
    job, standing = uvloop.run(_standing(settings, org, batch))
    said = reasons.explain(job, standing)
    if as_json:
        screen.show_json({"batch": job.id, "status": job.state, "why": said, "standing": dataclasses.asdict(standing)})
        return
    for sentence in said:
        typer.echo(screen.clean(sentence))


async def _standing(settings: Settings, org: str | None, batch: str) -> tuple[Job, reasons.Standing]:
    async with beside.reading(settings) as parts:
        job = await batches.job_of(parts, org, batch)
        standing = await parts.store.standing(job.id)
        assert standing is not None, "the job was just read"
        return job, standing
