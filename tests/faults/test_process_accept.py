"""The API dies between the steps of accepting: a retry with the same key gives one file and one batch, and nothing is left lying about."""

from __future__ import annotations

import httpx2
import pytest

from tests.faults.conftest import CLUSTER_IN_SOAK
from tests.support.tidegate import Site, requests

LINES = requests(4)


def _front(site: Site, failpoints: str = "") -> None:
    if site.embedded:
        site.serve(failpoints)
    else:
        site.api(failpoints)


def _dies(site: Site) -> None:
    assert site.front is not None
    assert site.front.wait() == -9


def test_killed_after_the_file_was_committed(site: Site) -> None:
    _front(site, "upload_committed=kill")
    with pytest.raises(httpx2.TransportError):
        site.upload(LINES, key="once")
    _dies(site)
    _front(site)
    again = site.upload(LINES, key="once")
    assert again.status_code == 200, again.text
    assert [file["id"] for file in site.get("/v1/files")["data"]] == [again.json()["id"]]
    other = site.upload([*LINES, *requests(1)], key="once")
    assert other.status_code in (409, 422), other.text


@CLUSTER_IN_SOAK
@pytest.mark.parametrize(("failpoint", "becomes"), [("upload_blob_durable", 0), ("upload_committed", 1)])
def test_killed_while_parts_become_a_file(site: Site, failpoint: str, becomes: int) -> None:
    """Either the upload is pending with all its parts, or the file is whole: both end in one file when asked again."""
    _front(site, f"{failpoint}=2*kill")
    whole = "".join(f"{line}\n" for line in LINES).encode()
    asked = {"bytes": len(whole), "filename": "in.jsonl", "mime_type": "application/jsonl", "purpose": "batch"}
    path = f"/v1/uploads/{site.client().post('/v1/uploads', json=asked).json()['id']}"
    half = len(whole) // 2
    part_ids = [
        site.client().post(f"{path}/parts", files={"data": ("part", data)}).json()["id"]
        for data in (whole[:half], whole[half:])
    ]
    with pytest.raises(httpx2.TransportError):
        site.client().post(f"{path}/complete", json={"part_ids": part_ids})
    _dies(site)
    _front(site)
    assert len(site.get("/v1/files")["data"]) == becomes
    done = site.client().post(f"{path}/complete", json={"part_ids": part_ids})
    assert done.status_code == 200, done.text
    file_id = done.json()["file"]["id"]
    assert [file["id"] for file in site.get("/v1/files")["data"]] == [file_id]
    if not site.embedded:
        site.worker()
    site.judge(site.create(file_id).json()["id"], LINES)


def test_killed_after_the_batch_was_committed(site: Site) -> None:
    _front(site, "create_committed=kill")
    file_id = site.upload(LINES).json()["id"]
    with pytest.raises(httpx2.TransportError):
        site.create(file_id, key="once")
    _dies(site)
    _front(site)
    again = site.create(file_id, key="once")
    assert again.status_code == 200, again.text
    batch_id = again.json()["id"]
    assert [batch["id"] for batch in site.get("/v1/batches")["data"]] == [batch_id]
    if not site.embedded:
        site.worker()
    site.judge(batch_id, LINES)
