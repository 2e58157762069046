"""A backup of a store that runs, what a restore refuses, what a restored store goes on with, and the doctor's comparison."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import uvloop

from tests.cli.conftest import Desk, Serving
from tests.support.processes import wait_until
from tests.support.syncs import noted_syncs
from tests.support.tidegate import behaving, chat_line
from tidegate import service
from tidegate.cli.run import run_job
from tidegate.cli.server.backup import _back_up, _copy_all, _restore
from tidegate.cli.terminal import input_file
from tidegate.core.errors import BlobError
from tidegate.settings import Settings, load


def blob_paths(data: Path) -> list[Path]:
    return sorted(path for path in (data / "blobs").glob("*/blob_*") if path.stat().st_size)


def test_a_store_is_backed_up_while_it_runs_and_goes_on_after_a_restore(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = [chat_line(f"c{number}", behaving("latency=300")) for number in range(40)]
    serving = Serving(desk)
    done = serving.submit([chat_line(f"d{number}", "say it") for number in range(5)])
    wait_until(lambda: serving.call("GET", f"/v1/batches/{done}")[1]["status"] == "completed", 60, "the first batch")
    running = serving.submit(lines)

    def some() -> bool:
        counts = serving.call("GET", f"/v1/batches/{running}")[1]["request_counts"]
        return int(counts["completed"]) >= 8

    wait_until(some, 60, "some answers")
    made = desk.json_of("backup", "copy", "--json")
    assert made["files"] >= 4, "the database, the pepper, an input and answers"
    assert not any(path.stat().st_mode & 0o077 for path in (desk.here / "copy").rglob("*")), "it holds prompts"
    serving.proc.kill()
    serving.proc.wait()

    assert desk.done("backup", "copy", code=2).stderr().count("is not empty") == 1
    assert "a store at" in desk.done("restore", "copy", code=2).stderr()
    desk.done("restore", "copy", "--data", "again")
    assert (desk.here / "again/pepper").read_bytes() == (desk.here / ".tidegate/pepper").read_bytes()
    assert (desk.here / "again/tidegate.db").stat().st_mode & 0o077 == 0
    desk.done("doctor", "--upstream", desk.engine.url, "--data", "again")
    desk.done("verify", done, "--data", "again")

    restored = Serving(desk, "--data", "again")
    wait_until(
        lambda: restored.call("GET", f"/v1/batches/{running}")[1]["status"] == "completed", 90, "the second batch"
    )
    assert restored.call("GET", f"/v1/batches/{running}")[1]["request_counts"]["completed"] == len(lines)
    desk.done("verify", running, "--data", "again")

    synced = noted_syncs(monkeypatch)
    uvloop.run(_back_up(load(None, desk.here / "again", {}, {}).settings, desk.here / "durable"))
    assert set((desk.here / "durable/blobs").iterdir()) <= set(synced), "before the manifest says that it is whole"


@pytest.mark.parametrize("damage", ["a blob cut short", "the database changed", "no manifest", "a name that leads out"])
def test_a_damaged_backup_is_refused_and_leaves_nothing(desk: Desk, damage: str) -> None:
    desk.write_requests(3)
    assert desk.run().wait(60) == 0
    desk.done("backup", "copy")
    copy = desk.here / "copy"
    blob = next(path for path in (copy / "blobs").iterdir() if path.stat().st_size)
    if damage == "a blob cut short":
        blob.write_bytes(blob.read_bytes()[:-1])
    elif damage == "the database changed":
        with (copy / "tidegate.db").open("r+b") as stream:
            stream.seek(5_000)
            stream.write(b"x")
    elif damage == "no manifest":
        (copy / "manifest.json").unlink()
    else:
        text = (copy / "manifest.json").read_text()
        (copy / "manifest.json").write_text(text.replace(f"blobs/{blob.name}", "blobs/../../../etc/passwd"))
    refused = desk.done("restore", "copy", "--data", "again", code=2)
    assert "Traceback" not in refused.stderr()
    assert not (desk.here / "again/tidegate.db").exists()


def test_a_restore_that_was_cut_short_is_made_again(desk: Desk) -> None:
    desk.write_requests(3)
    assert desk.run().wait(60) == 0
    desk.done("backup", "copy")
    desk.done("restore", "copy", "--data", "again")
    # As a kill leaves it: some blobs, one of them half, and no database.
    (desk.here / "again/tidegate.db").unlink()
    first = blob_paths(desk.here / "again")[0]
    first.rename(first.with_name(first.name + ".part"))
    desk.done("restore", "copy", "--data", "again")
    desk.done("doctor", "--upstream", desk.engine.url, "--data", "again")


async def stored_file(settings: Settings, path: Path) -> None:
    """Keep one file in the store of these settings."""
    source = input_file.read_input(str(path), path.parent, 1 << 20)
    options = input_file.RunOptions("/v1/chat/completions")
    begin = run_job.Begin(fresh=False, retry_failed=False, wait=False, is_checked=False)
    errand = run_job.Errand(settings, source, input_file.Targets(None, None), options, begin, "", "")
    async with service.estimating(settings) as estimating:
        await run_job.send_in(errand, estimating.parts, estimating.reception)


@pytest.fixture
def small_store(tmp_path: Path) -> Settings:
    settings = load(None, tmp_path / "data", {"upstream.url": "http://127.0.0.1:9/v1"}, {}).settings
    path = tmp_path / "in.jsonl"
    path.write_text(chat_line("a", "hi") + "\n")
    uvloop.run(stored_file(settings, path))
    return settings


def test_of_bytes_that_an_earlier_try_copied_only_those_are_kept_that_are_whole_and_needed(
    small_store: Settings, tmp_path: Path
) -> None:
    """The store is copied again when bytes were deleted meanwhile; a log may have grown by then."""
    [blob] = blob_paths(small_store.data_dir)
    folder = tmp_path / "copy" / "blobs"
    folder.mkdir(parents=True)
    (folder / blob.name).write_bytes(blob.read_bytes()[:5])
    (folder / ("blob_" + "0" * 22)).write_bytes(b"of a file that is deleted")
    uvloop.run(_copy_all(small_store, small_store.data_dir / "tidegate.db", tmp_path / "copy"))
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == {blob.name: blob.read_bytes()}


def test_a_restore_of_a_backup_that_lacks_bytes_says_so(small_store: Settings, tmp_path: Path) -> None:
    uvloop.run(_back_up(small_store, tmp_path / "copy"))
    manifest = json.loads((tmp_path / "copy/manifest.json").read_text())
    [blob] = [name for name in manifest["files"] if name.startswith("blobs/")]
    del manifest["files"][blob]
    (tmp_path / "copy/manifest.json").write_text(json.dumps(manifest))
    again = load(None, tmp_path / "again", {"upstream.url": "http://127.0.0.1:9/v1"}, {}).settings
    with pytest.raises(BlobError, match=f"missing after the restore, such as {blob.removeprefix('blobs/')}"):
        uvloop.run(_restore(again, tmp_path / "copy"))


def test_a_database_of_its_own_is_backed_up_with_its_own_tools(desk: Desk) -> None:
    refused = desk.done("backup", "copy", code=2, TIDEGATE_STORE_URL="postgresql://u@127.0.0.1:1/d")
    assert "pg_dump" in refused.stderr()
    assert not (desk.here / "copy").exists()


def test_the_doctor_finds_bytes_that_are_missing_and_bytes_without_a_row(desk: Desk) -> None:
    desk.write_requests(3)
    assert desk.run().wait(60) == 0
    data = desk.here / ".tidegate"

    def found(code: int) -> list[tuple[str, str]]:
        listed = desk.json_of("doctor", "--upstream", desk.engine.url, "--json", code=code)
        return [(one["grade"], one["text"]) for one in listed if one["about"] == "blobs"]

    assert any("have their bytes" in text for _, text in found(0))
    stray = data / "blobs/00" / ("blob_" + "0" * 22)
    stray.parent.mkdir(exist_ok=True)
    stray.write_bytes(b"x")
    assert ("warning", f"1 blob has no row in the store, such as {stray.name}") in found(0)
    stray.unlink()
    (needed,) = [path for path in blob_paths(data) if b'"response"' in path.read_bytes()]
    whole = needed.read_bytes()
    needed.write_bytes(whole[:-1])
    (cut,) = [text for grade, text in found(1) if grade == "wrong"]
    assert needed.name in cut
    assert "file-" in cut or "file_" in cut
    needed.write_bytes(whole)
    found(0)
