"""`tidegate backup` and `tidegate restore`: an embedded store with its bytes, in one
directory that can be checked.

A backup holds a copy of the database, the blobs that it names, the pepper, and a manifest. The
manifest is written last: a directory without one is no backup. A restore writes the database last:
until then it can be repeated, and no server can open half of it.
"""

import os
from collections.abc import AsyncIterator, Iterator
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, BinaryIO

import msgspec
import typer
import uvloop

from tidegate import __version__
from tidegate.cli.server import examine_blobs
from tidegate.cli.terminal import options, terminal
from tidegate.core.deployments import Secret
from tidegate.core.errors import BlobError, BlobMissing, SettingsError
from tidegate.core.files import StoredBlob
from tidegate.core.ids import is_valid
from tidegate.core.wording import in_words
from tidegate.settings import Settings, local_path

if TYPE_CHECKING:
    from tidegate.core.ports import Blobs
    from tidegate.store.store import Store

DATABASE = "tidegate.db"
MANIFEST = "manifest.json"
PEPPER = "pepper"
_TRIES_MAX = 5
_PAGE_MAX = 1_000
_PIECE_BYTES = 1 << 20
_MANIFEST_BYTES_MAX = 1 << 30

Directory = Annotated[Path, typer.Argument(metavar="DIR", help="Directory of the backup.", show_default=False)]


class Kept(msgspec.Struct, frozen=True):
    """One file of a backup."""

    size_bytes: int
    sha256: str


class Manifest(msgspec.Struct, frozen=True):
    tidegate: str
    schema_version: int
    files: dict[str, Kept]


def backup(
    directory: Directory,
    data: options.Data = None,
    config: options.Config = None,
    as_json: options.AsJson = False,
) -> None:
    """Copy an embedded store and its files, also while it runs.

    DIR must be new or empty. It holds prompts, answers and what keys are hashed with: keep it as you keep those.

    Example: tidegate backup /backups/2026-11-16
    """
    settings = options.loaded(config, data).settings
    _require_embedded(settings)
    made = uvloop.run(_back_up(settings, directory))
    _report("backed up to", directory, made, as_json)


def restore(
    directory: Directory,
    data: options.Data = None,
    config: options.Config = None,
    as_json: options.AsJson = False,
) -> None:
    """Make a new data directory from a backup.

    Nothing is restored over a store that is there. Batches go on where the backup saw them; what was answered later is called again.

    Example: tidegate restore /backups/2026-11-16 --data .tidegate
    """
    settings = options.loaded(config, data).settings
    _require_embedded(settings)
    restored = uvloop.run(_restore(settings, directory))
    _report("restored from", directory, restored, as_json)


def _report(verb: str, directory: Path, manifest: Manifest, as_json: bool) -> None:
    size_bytes = sum(kept.size_bytes for kept in manifest.files.values())
    if as_json:
        terminal.show_json({"directory": str(directory), "files": len(manifest.files), "bytes": size_bytes})
    else:
        terminal.say(
            f"{in_words(len(manifest.files), 'file')}, {in_words(size_bytes, 'byte')} {verb} {directory}; every checksum holds."
        )


def _require_embedded(settings: Settings) -> None:
    if settings.store.is_postgresql:
        raise SettingsError(
            "This is for the embedded store. Back up PostgreSQL with its own tools (pg_dump, a base backup), and the bucket after it; "
            "docs/operations.md says how."
        )


# ---- backup


def _prepare(source: Path, directory: Path) -> None:
    if not source.exists():
        raise SettingsError(f"There is no store at {source}. Name its directory with --data.")
    if directory.exists() and any(directory.iterdir()):
        raise SettingsError(f"{directory} is not empty. Name a new directory, so that no older backup is harmed.")
    (directory / "blobs").mkdir(mode=0o700, parents=True, exist_ok=True)
    directory.chmod(0o700)


async def _back_up(settings: Settings, directory: Path) -> Manifest:
    source = local_path(settings.store.location)
    _prepare(source, directory)
    schema_version = await _copy_all(settings, source, directory)
    if (settings.data_dir / PEPPER).exists():
        _copy_file(settings.data_dir / PEPPER, directory / PEPPER)
    names = [DATABASE, *(f"blobs/{path.name}" for path in sorted((directory / "blobs").iterdir()))]
    names += [PEPPER] * (directory / PEPPER).exists()
    manifest = Manifest(__version__, schema_version, {name: _kept(directory / name) for name in names})
    _write(directory / MANIFEST, iter([msgspec.json.format(msgspec.json.encode(manifest), indent=1)]))
    return manifest


async def _copy_all(settings: Settings, source: Path, directory: Path) -> int:
    """Copy the store, then the bytes that the copy names. If some were deleted
    meanwhile, copy the store again.

    Return its schema version."""
    from tidegate import storage
    from tidegate.store.database.sqlite_copy import copy_database

    target = directory / DATABASE
    copied = msgspec.structs.replace(
        settings, store=msgspec.structs.replace(settings.store, url=Secret(f"sqlite:///{target.absolute()}"))
    )
    missing: list[str] = []
    for _ in range(_TRIES_MAX):
        target.unlink(missing_ok=True)
        copy_database(source, target)
        target.chmod(0o600)
        async with storage.opened(copied, read_only=True) as parts:
            named = [blob async for blob in _needed(parts.store)]
            missing = [blob.id for blob in named if not await _copied(parts.blobs, blob, directory / "blobs")]
            schema_version = await parts.store.schema_version()
        if not missing:
            for path in (directory / "blobs").iterdir():
                if path.name not in {blob.id for blob in named}:
                    path.unlink()
            return schema_version
    raise BlobError(
        f"{in_words(len(missing), 'blob that the store needs has', 'blobs that the store needs have')} no bytes, such as {missing[0]}. "
        "`tidegate doctor` says which files they belong to."
    )


async def _needed(store: "Store") -> AsyncIterator[StoredBlob]:
    after = ""
    while page := await store.list_blobs(after, _PAGE_MAX):
        for blob in page:
            if blob.is_needed and blob.size_bytes:
                yield blob
        after = page[-1].id


async def _copied(blobs: "Blobs", blob: StoredBlob, folder: Path) -> bool:
    """Copy the bytes that the store knows of; a growing log has more behind them. Return False if
    the bytes are gone."""
    path = folder / blob.id
    if path.exists() and path.stat().st_size == blob.size_bytes:
        return True
    try:
        with _private(path) as stream:
            async for piece in blobs.stream(blob.id, 0, blob.size_bytes):
                stream.write(piece)
            stream.flush()
            os.fsync(stream.fileno())
    except BlobMissing:
        path.unlink(missing_ok=True)
        return False
    return True


# ---- restore


async def _restore(settings: Settings, directory: Path) -> Manifest:
    from tidegate import storage

    manifest = _checked_manifest(directory)
    target = local_path(settings.store.location)
    if target.exists():
        raise SettingsError(f"There is a store at {target} already. Name a new directory with --data.")
    settings.data_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    async with storage.open_blobs(settings) as blobs:
        for name in manifest.files:
            if name.startswith("blobs/"):
                await _put_blob(blobs, directory / name)
    if PEPPER in manifest.files:
        _copy_file(directory / PEPPER, settings.data_dir / PEPPER)
    _copy_file(directory / DATABASE, target)
    async with storage.opened(settings, read_only=True) as parts:
        mismatches = await examine_blobs.compare(parts)
    if mismatches.missing:
        raise BlobError(
            f"{in_words(len(mismatches.missing), 'blob is', 'blobs are')} missing after the restore, such as {mismatches.missing[0]}."
        )
    return manifest


async def _put_blob(blobs: "Blobs", path: Path) -> None:
    """Write one blob; first delete what an interrupted restore left of it."""
    await blobs.delete(path.name)
    writer = await blobs.create(path.name)
    try:
        for piece in _pieces(path):
            await writer.write(piece)
        await writer.finish()
    except BaseException:
        await writer.abort()
        raise


def _checked_manifest(directory: Path) -> Manifest:
    try:
        with (directory / MANIFEST).open("rb") as stream:
            manifest = msgspec.json.decode(stream.read(_MANIFEST_BYTES_MAX), type=Manifest)
    except FileNotFoundError:
        raise SettingsError(f"{directory} holds no whole backup: it has no {MANIFEST}.") from None
    except msgspec.DecodeError as error:
        raise SettingsError(f"{directory / MANIFEST} cannot be read: {error}.") from None
    for name, kept in manifest.files.items():
        folder, _, blob_id = name.partition("/")
        if name not in (DATABASE, PEPPER) and not (folder == "blobs" and is_valid("blob", blob_id)):
            raise SettingsError(f"{directory / MANIFEST} names {terminal.clean(name)[:60]!r}, which no backup has.")
        path = directory / name
        if not path.is_file() or _kept(path) != kept:
            raise SettingsError(f"{path} is missing or damaged. Nothing was restored; take another backup.")
    if DATABASE not in manifest.files:
        raise SettingsError(f"{directory / MANIFEST} names no {DATABASE}.")
    return manifest


# ---- files


def _private(path: Path) -> BinaryIO:
    """Open a file for writing that only this user can read."""
    return os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600), "wb")


def _pieces(path: Path) -> Iterator[bytes]:
    with path.open("rb") as stream:
        while piece := stream.read(_PIECE_BYTES):
            yield piece


def _kept(path: Path) -> Kept:
    digest, size_bytes = sha256(), 0
    for piece in _pieces(path):
        digest.update(piece)
        size_bytes += len(piece)
    return Kept(size_bytes, digest.hexdigest())


def _copy_file(source: Path, target: Path) -> None:
    _write(target, _pieces(source))


def _write(target: Path, pieces: Iterator[bytes]) -> None:
    """Write a file durably and as a whole: nothing appears under its name before."""
    partial = target.with_name(f".{target.name}.partial")
    with _private(partial) as stream:
        for piece in pieces:
            stream.write(piece)
        stream.flush()
        os.fsync(stream.fileno())
    partial.replace(target)
    descriptor = os.open(target.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
