"""Names of inputs and outputs beyond one local file: `s3://bucket/key` and patterns such as `data/*.jsonl`.

An object is copied to this disk before it is read, and to its bucket after it is written, so that everything between deals with
local files. Address and keys are those of `blobs.*`, or the machine's own (AWS_* variables, roles).
"""

import asyncio
import fnmatch
import glob
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from tidegate.cli.input_file import Targets
from tidegate.core.errors import BlobMissing, BlobUnavailable, SettingsError
from tidegate.settings import Settings

if TYPE_CHECKING:
    from tidegate.service import Bucket

S3 = "s3://"
_PATTERN = "*?["
_READ_BYTES = 8 << 20
_KEYS_PER_PAGE = 1_000


def is_remote(name: str) -> bool:
    return name.startswith(S3)


def is_pattern(name: str) -> bool:
    """Whether this name may mean several files; a file that is really called so is meant itself."""
    return any(sign in name for sign in _PATTERN) and (is_remote(name) or not Path(name).exists())


async def bring(name: str, settings: Settings, scratch: Path) -> list[Path]:
    """The files that a name means, in the order of their names, on this disk."""
    try:
        return await _bring_objects(name, settings, scratch) if is_remote(name) else _local_files(name)
    except BlobMissing:
        raise SettingsError(f"There is no object {name}; check the bucket and the key.") from None
    except BlobUnavailable as error:
        raise SettingsError(f"{name} cannot be read: {error}") from None


def _local_files(name: str) -> list[Path]:
    found = sorted(Path(path) for path in glob.glob(name, recursive=True)) if is_pattern(name) else [Path(name)]
    files = [path for path in found if path.is_file()]
    if not files:
        raise SettingsError(
            f"There is no file {name}; name a file, a pattern such as 'data/*.jsonl', or s3://bucket/key."
        )
    return files


async def _bring_objects(name: str, settings: Settings, scratch: Path) -> list[Path]:
    objects, key = _objects(name, settings)
    keys = await _matching(objects, key) if is_pattern(name) else [key]
    if not keys:
        raise SettingsError(f"No object matches {name}; check the bucket and the pattern.")
    paths = []
    for number, one in enumerate(keys):
        path = scratch / f"{number:06}-{Path(one).name}"
        held = await objects.head(one)
        if held is None:
            raise BlobMissing(one)
        with path.open("wb") as stream:
            async for chunk in objects.chunks(one, 0, held.size_bytes):
                await asyncio.to_thread(stream.write, chunk)
        paths.append(path)
    return paths


async def _matching(objects: "Bucket", pattern: str) -> list[str]:
    keys: list[str] = []
    after, more = "", True
    while more:
        page, more = await objects.keys_after(after, _KEYS_PER_PAGE)
        keys += [key for key in page if fnmatch.fnmatchcase(key, pattern)]
        after = page[-1] if page else after
    return keys


async def send(path: Path, name: str, settings: Settings) -> None:
    """Copy a finished file to its object, whole or not at all."""
    objects, key = _objects(name, settings)
    try:
        await objects.put_file(key, path)
    except (BlobMissing, BlobUnavailable) as error:
        raise SettingsError(
            f"{name} cannot be written: {error} The results are kept; run the same command again."
        ) from None


async def send_both(targets: Targets, name: str, settings: Settings) -> Targets:
    """Copy answers and failed lines to their bucket, and say where they lie now."""
    shown = replace(targets, remote=name)
    for path, address in ((targets.results, shown.results_name), (targets.errors, shown.errors_name)):
        if path is not None and address is not None and path.exists():
            await send(path, address, settings)
    return shown


def joined(paths: Sequence[Path], path: Path) -> Path:
    """One file of all these files' lines."""
    with path.open("wb") as stream:
        for one in paths:
            last = b"\n"
            with one.open("rb") as source:
                while chunk := source.read(_READ_BYTES):
                    stream.write(chunk)
                    last = chunk[-1:]
            if last != b"\n":
                stream.write(b"\n")
    return path


def check_address(name: str) -> None:
    """Refuse an address that names no object."""
    bucket, _, key = name.removeprefix(S3).partition("/")
    if not bucket or not key or key.endswith("/"):
        raise SettingsError(f"{name} names no object: write s3://BUCKET/KEY.")


def _objects(name: str, settings: Settings) -> tuple["Bucket", str]:
    from tidegate.service import open_bucket

    check_address(name)
    bucket, _, key = name.removeprefix(S3).partition("/")
    # Only the folder before the first sign of a pattern is looked through.
    beginning = re.split(r"[*?\[]", key, maxsplit=1)[0] if is_pattern(name) else ""
    folder = beginning[: beginning.rfind("/") + 1]
    return open_bucket(settings, bucket, folder), key.removeprefix(folder)
