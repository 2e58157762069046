"""A process that writes blobs, to be killed or measured: `python -m tests.contracts.blobs_process PLACE COMMAND …`."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

from tests.contracts.blobs_places import Place, fresh_ids, new_id, put
from tidegate.core.ports import Blobs

PIECE = bytes(range(256)) * 256


def peak_bytes() -> int:
    """Of this program alone: the resource module's figure includes what its parent had when it forked."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("this kernel does not tell a process's peak memory")


def say(**fields: object) -> None:
    print(json.dumps(fields), flush=True)


async def append_for_ever(blobs: Blobs) -> None:
    """Says what is durable after each append, until it is killed."""
    taken, next_blob_id = fresh_ids()
    log = await blobs.open_log(next_blob_id)
    number = 0
    while True:
        await log.append(b'{"line":%d}\n' % number)
        number += 1
        say(blob_id=taken[-1], durable=number)


async def write_for_ever(blobs: Blobs) -> None:
    """A blob that is never finished."""
    blob_id = new_id()
    writer = await blobs.create(blob_id)
    while True:
        await writer.write(PIECE)
        say(blob_id=blob_id)


async def move_much(blobs: Blobs, size_bytes: int, scratch: Path) -> None:
    """Write, stream, copy out and adopt a large blob, and say how much memory that took at its peak."""
    first = await blobs.create(new_id())
    await first.write(PIECE)
    await first.finish()
    before = peak_bytes()
    blob_id = new_id()
    writer = await blobs.create(blob_id)
    for _ in range(size_bytes // len(PIECE)):
        await writer.write(PIECE)
    stamp = await writer.finish()
    read = 0
    async for piece in blobs.stream(blob_id, 0, stamp.size_bytes):
        read += len(piece)
    copy = scratch / "copy"
    copy.hardlink_to(await blobs.local_path(blob_id, scratch))
    await blobs.adopt(adopted := new_id(), copy)
    say(grown_bytes=peak_bytes() - before, written=stamp.size_bytes, read=read, adopted=await blobs.size(adopted))


async def write_once(blobs: Blobs) -> None:
    """One blob and the end, without any goodbye."""
    blob_id = await put(blobs, PIECE * 140)
    say(size=await blobs.size(blob_id))


async def main() -> None:
    blobs = Place.from_json(sys.argv[1]).open()
    if sys.argv[2] == "append":
        await append_for_ever(blobs)
    elif sys.argv[2] == "write":
        await write_for_ever(blobs)
    elif sys.argv[2] == "once":
        await write_once(blobs)
    elif sys.argv[2] == "move":
        await move_much(blobs, int(sys.argv[3]), Path(sys.argv[4]))


if __name__ == "__main__":
    asyncio.run(main())
