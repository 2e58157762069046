"""Blobs that are counted do all that the blobs behind them do, and each operation counts once, by how it ended."""

from __future__ import annotations

import inspect
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tidegate import metrics
from tidegate.backends.blobs_local import LocalBlobs
from tidegate.backends.counted_blobs import CountedBlobs
from tidegate.core.errors import BlobError, BlobMissing, BlobUnavailable
from tidegate.core.ports import Blobs

pytestmark = pytest.mark.anyio

BLOB, LOG, MADE = ("blob_" + letter * 22 for letter in "abc")
VERBS = sorted(name for name, one in inspect.getmembers(Blobs, inspect.isfunction) if not name.startswith("_"))


def counts() -> dict[str, int]:
    return metrics.counted(metrics.blob_operations)


async def test_what_is_written_through_it_is_there_and_counted(tmp_path: Path) -> None:
    async def next_blob_id() -> str:
        return LOG

    (scratch := tmp_path / "scratch").mkdir()
    (made := scratch / "made").write_bytes(b"adopted")
    inner = LocalBlobs(tmp_path / "blobs")
    blobs, before = CountedBlobs(inner, "apiserver", "local"), counts()
    await blobs.check()
    writer = await blobs.create(BLOB)
    await writer.write(b"one\ntwo\n")
    assert (await writer.finish()).size_bytes == 8
    await blobs.adopt(MADE, made)
    log = await blobs.open_log(next_blob_id)
    await log.append(b"line\n")
    placed = await log.seal()
    assert placed is not None
    assert (placed.blob_id, placed.size_bytes) == (LOG, 5)
    await log.close()
    assert await blobs.read(BLOB, 4, 3) == b"two"
    assert b"".join([piece async for piece in blobs.stream(MADE, 0, 7)]) == b"adopted"
    assert (await blobs.local_path(BLOB, scratch)).read_bytes() == b"one\ntwo\n"
    assert await blobs.size(BLOB) == await inner.size(BLOB) == 8
    assert (await blobs.recover(LOG), await blobs.holds_end(LOG)) == (5, await inner.holds_end(LOG))
    assert await blobs.left_logs() == await inner.left_logs()
    assert await blobs.list_ids("", 10) == await inner.list_ids("", 10) == sorted([BLOB, LOG, MADE])
    await blobs.delete(BLOB)
    assert await inner.size(BLOB) is None
    added = {name: count - before.get(name, 0) for name, count in counts().items()}
    assert added["retrieve,apiserver,success"] == 3
    assert added["delete,garbage-collector,success"] == 1
    assert added["store,apiserver,success"] == 6
    await blobs.close()


@pytest.mark.parametrize("verb", VERBS)
async def test_every_verb_gives_what_the_blobs_behind_it_give(verb: str) -> None:
    given, seen = SimpleNamespace(write=None, abort=None), list[tuple[Any, ...]]()

    async def does(*arguments: Any) -> Any:
        seen.append(arguments)
        return given

    async def streams(*arguments: Any) -> Any:
        seen.append(arguments)
        yield given

    inner: Any = SimpleNamespace(**{verb: streams if verb == "stream" else does})
    method = getattr(CountedBlobs(inner, "apiserver", "local"), verb)
    arguments = [object() for _ in inspect.signature(method).parameters]
    found = [one async for one in method(*arguments)] if verb == "stream" else [await method(*arguments)]
    assert seen == [tuple(arguments)]
    if verb in ("create", "open_log"):
        assert found[0]._inner is given
    elif verb not in ("adopt", "check", "close", "delete"):
        assert found == [given]


@pytest.mark.parametrize(("error", "status"), [(BlobUnavailable("away"), "retry"), (BlobMissing("gone"), "exhausted")])
@pytest.mark.parametrize("verb", ["read", "stream"])
async def test_a_failure_is_counted_and_passed_on(error: BlobError, status: str, verb: str) -> None:
    async def fails(*_: Any) -> Any:
        raise error

    async def breaks_off(*_: Any) -> Any:
        raise error
        yield b""

    inner: Any = SimpleNamespace(read=fails, stream=breaks_off)
    blobs, before = CountedBlobs(inner, "apiserver", "local"), counts()
    with pytest.raises(type(error)):
        await (blobs.read(BLOB, 0, 1) if verb == "read" else anext(blobs.stream(BLOB, 0, 1)))
    added = {name: count - before.get(name, 0) for name, count in counts().items() if count != before.get(name, 0)}
    assert added == {f"retrieve,apiserver,{status}": 1}
