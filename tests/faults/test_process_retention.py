"""What has outlived its time goes, on both stores; a kill in the middle loses nothing and the next process goes on."""

from __future__ import annotations

import asyncio

import apsw
import asyncpg
import pytest

from tests.faults.conftest import CLUSTER_IN_SOAK
from tests.support.processes import Proc, wait_until
from tests.support.tidegate import Site, requests
from tidegate.settings import local_path

FIRST_BATCH = (
    "update files set expires_at = expires_at - 3456000000 where job_id = (select id from jobs order by created_at limit 1)"
    " or id = (select input_file_id from jobs order by created_at limit 1)",
    "update blobs set created_at = created_at - 3456000000",
    "update jobs set created_at = created_at - 3456000000, completed_at = completed_at - 3456000000"
    " where id = (select id from jobs order by created_at limit 1)",
)
UPLOADS = (
    "update uploads set created_at = created_at - 86400000, expires_at = expires_at - 86400000",
    "update blobs set created_at = created_at - 3456000000",
)
PART_BLOBS = "select blob_id from upload_parts"
END_S = 60
SOON = {"TIDEGATE_RETENTION_ORPHAN_S": "60", "TIDEGATE_WORKER_SWEEP_MS": "100"}


def age(site: Site, statements: tuple[str, ...]) -> None:
    """Let something have happened long ago. Asked while nothing runs."""

    async def in_postgres() -> None:
        connection = await asyncpg.connect(site.settings.store.location)
        for statement in statements:
            await connection.execute(statement)
        await connection.close()

    if site.embedded:
        with apsw.Connection(str(local_path(site.settings.store.location))) as connection:
            for statement in statements:
                connection.execute(statement)
    else:
        asyncio.run(in_postgres())


@CLUSTER_IN_SOAK
def test_a_kill_in_the_middle_of_retention(site: Site) -> None:
    """A process is killed after it forgot the job, and the next one after it removed the first of its bytes."""
    lines = requests(8)
    site.begin(more=SOON)
    old = site.submit(lines)
    site.judge(old, lines)
    young = site.submit(lines)
    site.judge(young, lines)
    site.end_all()
    site.workers.clear()
    age(site, FIRST_BATCH)

    for border in ("job_forgotten=kill", "blob_removed=kill"):
        victim: Proc = site.begin(border, more=SOON)
        assert victim.wait(END_S) == -9
    site.relieve(more=SOON)
    wait_until(lambda: site.client().get(f"/v1/batches/{old}").status_code == 404, END_S, "the old batch to go")
    wait_until(
        lambda: len(site.rows("select id from files where state <> 'deleted' and job_id is not null")) == 1,
        END_S,
        "its files to go, and only its",
    )
    assert site.rows("select distinct job_id from outcomes") == [{"job_id": young}]
    wait_until(
        lambda: not site.rows("select id from blobs where state <> 'writing' and uses = 0 and kind = 'upload'"),
        END_S,
        "its input's bytes to go",
    )
    site.judge(young, lines)
    assert {row["blob_id"] for row in site.rows("select blob_id from extents")} <= site.blobs()


@pytest.mark.soak
def test_a_kill_while_the_parts_of_an_expired_upload_go(site: Site) -> None:
    """The first process is killed with the upload pending, the next one after it removed the first part's bytes."""
    process = site.begin(more=SOON)
    client = site.client()
    asked = {"purpose": "batch", "filename": "in.jsonl", "mime_type": "application/jsonl", "bytes": 60}
    upload_id = client.post("/v1/uploads", json=asked).json()["id"]
    for _ in range(2):
        sent = client.post(f"/v1/uploads/{upload_id}/parts", files={"data": ("part", b"x" * 30)})
        assert sent.status_code == 200, sent.text
    parts = {str(row["blob_id"]) for row in site.rows(PART_BLOBS)}
    assert len(parts) == 2
    assert parts <= site.blobs()
    process.kill()
    process.wait()
    site.end_all()
    site.workers.clear()
    age(site, UPLOADS)

    victim = site.begin("blob_removed=kill", more=SOON)
    assert victim.wait(END_S) == -9
    assert len(parts & site.blobs()) == 1
    site.relieve(more=SOON)
    wait_until(lambda: not parts & site.blobs(), END_S, "the bytes of both parts to go")
    assert site.rows("select state from uploads") == [{"state": "expired"}]
    refused = site.client().post(f"/v1/uploads/{upload_id}/parts", files={"data": ("part", b"x")})
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "upload_not_pending")
