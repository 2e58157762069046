"""A process that writes blobs while its disk fails: `python -m tests.faults.blobs_scenarios PLACE SCENARIO [STEP]`.

It runs under the disk shim, turns the faults on and off itself, and says what became of each attempt as one line of JSON.
"""

from __future__ import annotations

import asyncio
import json
import os
import resource
import signal
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from tests.contracts.blobs_places import Place, fresh_ids, new_id, put
from tidegate.core.errors import TidegateError
from tidegate.core.ports import Blobs

# The second rule of a pair lets half of the data through first.
WRITER_RULES = [
    "enospc-write",
    "edquot-write",
    "erofs-create",
    "enospc-create",
    "eio-write",
    "eio-fsync",
    "eio-fsync:1",
]
WRITER_RULES += ["eio-rename", "enospc-write:1 short-write"]
LOG_RULES = ["enospc-write", "edquot-write", "eio-fsync", "eio-write", "enospc-write:1 short-write"]
LOG_RULES += ["eio-truncate enospc-write:1 short-write"]
LINES = b"".join(b'{"line":%d}\n' % number for number in range(1_000))


def faults(rules: str) -> None:
    control = Path(os.environ["SHIM_DISK_CONTROL"])
    partial = control.with_name(control.name + ".partial")
    partial.write_text(rules)
    partial.replace(control)


async def outcome(attempt: Awaitable[object]) -> list[str]:
    try:
        await attempt
    except TidegateError as failure:
        return [type(failure).__name__, str(failure)]
    return ["ok", ""]


async def upload(blobs: Blobs, blob_id: str, log: list[list[str]]) -> None:
    writer = await blobs.create(blob_id)
    try:
        for _ in range(4):
            await writer.write(bytes(300_000))
        await writer.finish()
    except TidegateError:
        log.append(await outcome(writer.finish()))
        await writer.abort()
        raise


async def writers(blobs: Blobs) -> dict[str, Any]:
    outcomes = {}
    # The directories are there already, so that the faults meet the blob itself.
    for rules in WRITER_RULES:
        blob_id, after = new_id(), list[list[str]]()
        await blobs.delete(await put(blobs, b"x"))
        faults(rules)
        during = await outcome(upload(blobs, blob_id, after))
        checked = await outcome(blobs.check())
        faults("")
        outcomes[rules] = {
            "during": during,
            "after": after,
            "checked": checked,
            "size": await blobs.size(blob_id),
            "listed": await blobs.list_ids("", 10),
            "healed": await outcome(put(blobs, b"works again")),
        }
        for left in await blobs.list_ids("", 10):
            await blobs.delete(left)
    return outcomes


async def logs(blobs: Blobs) -> dict[str, Any]:
    outcomes = {}
    for rules in LOG_RULES:
        taken, next_blob_id = fresh_ids()
        log = await blobs.open_log(next_blob_id)
        await log.append(LINES)
        await log.append(LINES)
        faults(rules)
        during = await outcome(log.append(LINES))
        faults("")
        after = [await outcome(log.append(LINES)), await outcome(log.seal())]
        await log.close()
        size = await blobs.recover(taken[0])
        outcomes[rules] = {
            "during": during,
            "after": after,
            "recovered": size,
            "whole": await blobs.read(taken[0], 0, 2 * len(LINES)) == LINES * 2,
        }
        other = await blobs.open_log(next_blob_id)
        await other.append(LINES)
        outcomes[rules]["healed"] = (await other.seal()) is not None
        await other.close()
    return outcomes


async def few_descriptors(blobs: Blobs) -> dict[str, Any]:
    blob_id = await put(blobs, b"content")
    log = await blobs.open_log(fresh_ids()[1])
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    state = [os.open("/dev/null", os.O_RDONLY)]
    resource.setrlimit(resource.RLIMIT_NOFILE, (state[0] + 1, limits[1]))
    during = [await outcome(blobs.read(blob_id, 0, 7)), await outcome(blobs.create(new_id()))]
    during.append(await outcome(log.append(b"line\n")))
    resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    return {"during": during, "healed": (await blobs.read(blob_id, 0, 7)).decode()}


async def killed_at(blobs: Blobs, step: int) -> dict[str, Any]:
    """One blob and two appends, with a kill in front of the given system call that changes the disk."""
    print(json.dumps({"blob_id": (blob_id := new_id()), "log_id": (log_id := new_id())}), flush=True)
    for name in ("write", "fsync", "fdatasync", "mkdir", "rename"):
        setattr(os, name, _counted(getattr(os, name), step))

    async def next_blob_id() -> str:
        return log_id

    writer = await blobs.create(blob_id)
    await writer.write(LINES)
    await writer.finish()
    os.writev(1, [b'{"finished":true}\n'])
    log = await blobs.open_log(next_blob_id)
    for number in (1, 2):
        await log.append(LINES)
        os.writev(1, [b'{"appended":%d}\n' % number])
    return {"survived": True}


_calls = 0


def _counted(call: Callable[..., Any], step: int) -> Callable[..., Any]:
    def counted(*args: Any, **kwargs: Any) -> Any:
        global _calls
        _calls += 1
        if _calls == step:
            os.kill(os.getpid(), signal.SIGKILL)
        return call(*args, **kwargs)

    return counted


async def main() -> None:
    blobs = Place.from_json(sys.argv[1]).open()
    if sys.argv[2] == "killed_at":
        outcomes = await killed_at(blobs, int(sys.argv[3]))
    else:
        outcomes = await {"writers": writers, "logs": logs, "few_descriptors": few_descriptors}[sys.argv[2]](blobs)
    os.writev(1, [json.dumps(outcomes).encode() + b"\n"])


if __name__ == "__main__":
    asyncio.run(main())
