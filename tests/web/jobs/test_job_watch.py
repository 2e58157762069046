"""The watch over jobs that requests wait for: what each of them gets."""

from __future__ import annotations

import httpx2

from tests.web.calls import create, upload
from tests.web.server import WebServer
from tidegate.web.jobs.job_watch import JobWatch


def test_a_reader_that_missed_the_last_change_of_a_job_gets_it_though_others_have_it(
    web: WebServer, client: httpx2.Client
) -> None:
    batch_id = create(client, upload(client))["id"]
    before = web.job(batch_id)

    async def follow() -> None:
        watch = JobWatch(web.context)
        with watch.following(before) as first:
            await web.store.cancel_job(before.tenant_id, batch_id)
            await watch.look()
            changed = first.job
            assert changed is not None
            assert changed.closing is not None
            with watch.following(before) as late:
                await watch.look()
                assert late.job == changed

    web.run(follow())
