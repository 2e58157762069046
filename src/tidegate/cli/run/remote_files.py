"""Inputs and outputs that are not one local file: `s3://bucket/key`, `az://container/key` and
patterns such as `data/*.jsonl`.

An object is copied to this disk before it is read, and to its bucket after it is written, so that
all other code deals with local files. Address and keys are those of `blobs.*`, or the machine's own
(AWS_* and AZURE_* variables, roles).
"""

import asyncio
import fnmatch
import glob
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from msgspec.structs import replace

from tidegate.cli.terminal import results, terminal
from tidegate.cli.terminal.input_file import Targets
from tidegate.core.errors import BlobMissing, BlobUnavailable, SettingsError
from tidegate.core.job_shape import InputPlaces
from tidegate.settings import Settings

if TYPE_CHECKING:
    from tidegate.storage import Bucket

SCHEMES = ("s3://", "az://")
_PATTERN = "*?["
_READ_BYTES = 8 << 20
_KEYS_PER_PAGE = 1_000


def is_remote(name: str) -> bool:
    return name.startswith(SCHEMES)


def is_pattern(name: str) -> bool:
    """Return whether this name may mean several files. The name of an existing file
    means that file."""
    return any(sign in name for sign in _PATTERN) and (is_remote(name) or not Path(name).exists())


class SourceFile(msgspec.Struct, frozen=True):
    """A file of an input on this disk, and its name as its author knows it."""

    path: Path
    place: str


async def bring(name: str, settings: Settings, scratch: Path) -> list[SourceFile]:
    """Return the files that a name means, copied to this disk if they are objects, in
    the order of their names."""
    try:
        return await _bring_objects(name, settings, scratch) if is_remote(name) else _local_files(name)
    except BlobMissing:
        raise SettingsError(f"There is no object {name}; check the bucket and the key.") from None
    except BlobUnavailable as error:
        raise SettingsError(f"{name} cannot be read: {error}") from None


def _local_files(name: str) -> list[SourceFile]:
    found = sorted(Path(path) for path in glob.glob(name, recursive=True)) if is_pattern(name) else [Path(name)]
    files = [path for path in found if path.is_file()]
    if not files and Path(name).is_dir():
        raise SettingsError(
            f"{name} is a directory; name its files with a pattern in quotes, such as '{name}/*.jsonl'."
        )
    if not files:
        raise SettingsError(
            f"There is no file {name}; name a file, a pattern such as 'data/*.jsonl', or s3://bucket/key."
        )
    return [SourceFile(path, str(path)) for path in files]


async def _bring_objects(name: str, settings: Settings, scratch: Path) -> list[SourceFile]:
    objects, key = _objects(name, settings)
    keys = await _matching(objects, key) if is_pattern(name) else [key]
    if not keys:
        raise SettingsError(f"No object matches {name}; check the bucket and the pattern.")
    files = []
    for number, one in enumerate(keys):
        # In a directory of its own it keeps its name, which messages use.
        path = scratch / f"{number:06}" / (Path(one).name or "object")
        path.parent.mkdir()
        stored = await objects.head(one)
        if stored is None:
            raise BlobMissing(one)
        with path.open("wb") as stream:
            async for chunk in objects.chunks(one, 0, stored.size_bytes):
                await asyncio.to_thread(stream.write, chunk)
        files.append(SourceFile(path, one))
    return files


def check_apart(output: str | None, source: str) -> None:
    """Refuse a place for results that matches the pattern of the input, because the
    next run would read it."""
    if output is None or not is_pattern(source) or is_remote(source) != is_remote(output):
        return
    directory, name = os.path.split(source)
    if is_remote(source):
        is_read = fnmatch.fnmatchcase(output, source)
    else:
        target = Path(output)
        parents = [Path(one) for one in glob.glob(directory, recursive=True)] if directory else [Path()]
        is_read = fnmatch.fnmatchcase(target.name, name) and any(
            one.is_dir() and one.samefile(target.parent) for one in parents
        )
    if is_read:
        raise SettingsError(
            f"{output} is a name that {source} matches, so the next run would read it: choose another place with -o."
        )


async def _matching(objects: "Bucket", pattern: str) -> list[str]:
    keys: list[str] = []
    after, more = "", True
    while more:
        page, more = await objects.keys_after(after, _KEYS_PER_PAGE)
        keys += [key for key in page if fnmatch.fnmatchcase(key, pattern)]
        after = page[-1] if page else after
    return keys


async def send(path: Path, name: str, settings: Settings, job_ids: Sequence[str] = ()) -> None:
    """Copy a finished file to its object, whole or not at all. Other content there, not of these
    batches, is kept beside it."""
    objects, key = _objects(name, settings)
    try:
        if await _set_aside(objects, key, path, job_ids, name):
            await objects.put_file(key, path)
    except (BlobMissing, BlobUnavailable) as error:
        raise SettingsError(
            f"{name} cannot be written: {error} The results are kept; run the same command again."
        ) from None


async def _set_aside(objects: "Bucket", key: str, path: Path, job_ids: Sequence[str], name: str) -> bool:
    """Copy an object that holds anything but results of these batches to another key,
    and print that.

    Return False if the object already equals this file."""
    stored = await objects.head(key)
    if stored is None or not stored.size_bytes:
        return True
    if await _is_same(objects, key, stored.size_bytes, path):
        return False
    if not results.begins_with(await objects.read(key, 0, min(results.BEGIN_BYTES, stored.size_bytes)), job_ids):
        number = 1
        while await objects.head(f"{key}.{number}.old") is not None:
            number += 1
        await objects.copy(key, f"{key}.{number}.old")
        terminal.say(f"{name} held other results than this run's; they are now in {name}.{number}.old.")
    return True


async def _is_same(objects: "Bucket", key: str, size_bytes: int, path: Path) -> bool:
    """Return whether an object of this size has the same bytes as a file."""
    with path.open("rb") as stream:
        async for chunk in objects.chunks(key, 0, size_bytes):
            if chunk != await asyncio.to_thread(stream.read, len(chunk)):
                return False
        return not await asyncio.to_thread(stream.read, 1)


async def send_both(targets: Targets, name: str, settings: Settings, job_ids: Sequence[str]) -> Targets:
    """Copy answers and failed lines of these batches to their bucket, and return their places."""
    shown = replace(targets, remote=name)
    for path, address in ((targets.results, shown.results_name), (targets.errors, shown.errors_name)):
        if path is not None and address is not None and path.exists():
            await send(path, address, settings, job_ids)
    return shown


def joined(files: Sequence[SourceFile], path: Path) -> InputPlaces:
    """Write the lines of all these files to one file. Return where each file begins, with its name,
    or its full place if names repeat."""
    starts, lines = [], 0
    with path.open("wb") as stream:
        for one in files:
            starts.append(lines)
            last = b"\n"
            with one.path.open("rb") as source:
                while chunk := source.read(_READ_BYTES):
                    stream.write(chunk)
                    lines += chunk.count(b"\n")
                    last = chunk[-1:]
            if last != b"\n":
                stream.write(b"\n")
                lines += 1
    names = tuple(one.path.name for one in files)
    return InputPlaces(names if len(set(names)) == len(names) else tuple(one.place for one in files), tuple(starts))


def check_address(name: str) -> None:
    """Refuse an address that names no object."""
    scheme, _, place = name.partition("://")
    bucket, _, key = place.partition("/")
    if not bucket or not key or key.endswith("/"):
        raise SettingsError(f"{name} names no object: write {scheme}://BUCKET/KEY.")


def _objects(name: str, settings: Settings) -> tuple["Bucket", str]:
    from tidegate.storage import open_bucket

    check_address(name)
    scheme, _, place = name.partition("://")
    bucket, _, key = place.partition("/")
    # Only the folder before the first sign of a pattern is listed.
    beginning = re.split(r"[*?\[]", key, maxsplit=1)[0] if is_pattern(name) else ""
    folder = beginning[: beginning.rfind("/") + 1]
    return open_bucket(settings, scheme, bucket, folder), key.removeprefix(folder)
