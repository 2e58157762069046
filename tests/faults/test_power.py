"""Power cuts: at every border the disk holds only what was synced, and still everything that was acknowledged is there and whole.

A real `tidegate serve` runs a batch under a shim that writes down each change and each sync. Then its disk is rebuilt as a power cut at
each sync would have left it, and the store on it is held against the blobs on it: no row may name bytes that are not there.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import time
from dataclasses import dataclass
from pathlib import Path

import apsw

from tests.support.power import DIR_SYNCED, SYNCED, Change, Disk, read_journal
from tests.support.shims import Shims, preload_env
from tests.support.tidegate import Site, requests


@dataclass(frozen=True)
class Promise:
    """Something that was acknowledged to a caller, and when: it must be on every disk from then on."""

    since_ns: int
    sql: str
    words: tuple[str, ...]


def acknowledge(sql: str, *words: str) -> Promise:
    return Promise(time.monotonic_ns(), sql, words)


def borders(changes: list[Change]) -> list[int]:
    """Before and after each sync: the moments at which what survives is at its least and has just become more."""
    syncs = [number for number, change in enumerate(changes) if change.kind in (SYNCED, DIR_SYNCED)]
    return sorted({cut for number in syncs for cut in (number, number + 1)})


def blob_path(data: Path, blob_id: str) -> Path:
    return data / "blobs" / blob_id[5:7] / blob_id


def look(data: Path, promises: list[Promise], cut: str) -> set[str]:
    """Hold one rebuilt disk against itself and against what was acknowledged. Returns the states of the jobs on it."""
    database = data / "tidegate.db"
    if not database.exists():
        assert not promises, f"{cut}: the database itself is lost after {promises[0].sql}"
        return set()
    store = apsw.Connection(str(database))
    try:
        assert store.execute("pragma integrity_check").get == "ok", cut
        if not store.execute("select count(*) from sqlite_master where name = 'jobs'").get:
            assert not promises, f"{cut}: the tables are lost after {promises[0].sql}"
            return set()
        for promise in promises:
            found = store.execute(promise.sql, promise.words).get
            assert found, f"{cut}: lost after it was acknowledged: {promise.sql} {promise.words}"
        for blob_id, end in store.execute("select blob_id, max(blob_at + size_bytes) from extents group by blob_id"):
            path = blob_path(data, blob_id)
            assert path.exists(), f"{cut}: a file is made of {blob_id}, which is lost"
            assert path.stat().st_size >= end, f"{cut}: a file is made of bytes of {blob_id} that are lost"
        for blob_id, size in store.execute("select id, size_bytes from blobs where state = 'kept'"):
            path = blob_path(data, blob_id)
            assert path.exists(), f"{cut}: the blob {blob_id} is lost"
            assert path.stat().st_size >= size, f"{cut}: bytes of the blob {blob_id} are lost"
        for file_id, sha256 in store.execute("select id, sha256 from files where job_id is null and state = 'ready'"):
            assert hashlib.sha256(content(store, data, str(file_id))).hexdigest() == sha256, (
                f"{cut}: an upload is damaged"
            )
        files = store.execute("select id from files where job_id is not null").fetchall()
        lines = [line for (file_id,) in files for line in content(store, data, str(file_id)).splitlines()]
        for line in lines:
            json.loads(line)
        outcomes = store.execute("select count(*) from outcomes").get
        assert len(lines) == outcomes, f"{cut}: {outcomes} outcomes, but {len(lines)} lines"
        return {state for (state,) in store.execute("select state from jobs")}
    finally:
        store.close()


def content(store: apsw.Connection, data: Path, file_id: str) -> bytes:
    parts = store.execute("select blob_id, blob_at, size_bytes from extents where file_id = ? order by at", (file_id,))
    pieces = []
    for blob_id, at, size in parts:
        pieces.append(blob_path(data, blob_id).read_bytes()[at : at + size])
    return b"".join(pieces)


def test_a_power_cut_at_any_border_loses_nothing_acknowledged(embedded: Site, shims: Shims, tmp_path: Path) -> None:
    power = shims.power(tmp_path)
    variables = {"LD_PRELOAD": preload_env(power)["LD_PRELOAD"], **power.variables()}
    server = embedded.serve(more=variables)
    lines = requests(16)
    uploaded = embedded.upload(lines).json()["id"]
    promises = [acknowledge("select count(*) from files where id = ? and state = 'ready'", uploaded)]
    batch_id = embedded.create(uploaded).json()["id"]
    promises.append(acknowledge("select count(*) from jobs where id = ?", batch_id))
    embedded.until_done(batch_id, 4)
    promises.append(acknowledge("select answered_count >= 4 from jobs where id = ?", batch_id))
    embedded.ended(batch_id)
    promises.append(acknowledge("select count(*) from jobs where id = ? and state = 'completed'", batch_id))
    server.kill()

    changes = list(read_journal(power.journal))
    disk, cuts, states, applied = Disk(tmp_path.resolve()), borders(changes), set[str](), 0
    assert len(cuts) > 30
    for number, cut in enumerate(cuts):
        while applied < cut:
            disk.apply(changes[applied])
            applied += 1
        now_ns = changes[cut].at_ns if cut < len(changes) else time.monotonic_ns()
        image = tmp_path / f"image-{number}"
        disk.rebuild(image)
        states |= look(image / "data", [one for one in promises if one.since_ns < now_ns], f"cut {cut}")
        shutil.rmtree(image)
    assert {"validating", "in_progress", "completed"} <= states, "the cuts meet every part of the road"
