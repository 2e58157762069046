"""`tidegate doctor`: finds what is wrong with a configuration, a store or an upstream,
and what to do about it.

It opens the store read-only, and writes only one small blob that it removes.
"""

import os
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING

import typer
import uvloop

from tidegate.cli.server import examine, examine_blobs, examine_routing
from tidegate.cli.server.examine import DoctorFinding, Grade
from tidegate.cli.terminal import options, terminal
from tidegate.core.errors import SettingsError, TidegateError
from tidegate.core.ports import Blobs
from tidegate.settings import Loaded, Settings, load, local_path, redacted

if TYPE_CHECKING:
    from tidegate.storage import Parts

FREE_BYTES_MIN = 1 << 30
DESCRIPTORS_BESIDE = 256
SOMETHING_WRONG = 1


def doctor(
    data: options.Data = None,
    config: options.Config = None,
    upstream: options.UpstreamOption = None,
    api_key: options.ApiKey = None,
    as_json: options.AsJson = False,
) -> None:
    """Say what is wrong and what to do about it.

    It looks at the settings, the data directory, the store, the blobs, Redis, queues, resources, the model servers and what they show of
    their load: those of the settings and those that were added while everything ran.

    Exit codes: 0 nothing is wrong, 1 something is.

    Example: tidegate doctor --upstream http://localhost:8000/v1
    """
    findings = uvloop.run(_examine(config, data, {"upstream.url": upstream, "upstream.api_key": api_key}))
    if as_json:
        terminal.show_json([{"about": f.about, "grade": f.grade, "text": f.text, "to_do": f.to_do} for f in findings])
    else:
        for finding in findings:
            typer.echo(f"{finding.grade:<8} {finding.about:<10} {terminal.clean(finding.text)}")
            if finding.to_do:
                typer.echo(f"{'':20}-> {terminal.clean(finding.to_do)}")
    raise typer.Exit(SOMETHING_WRONG if any(finding.grade is Grade.WRONG for finding in findings) else 0)


async def _examine(config: Path | None, data: Path | None, overrides: dict[str, object]) -> list[DoctorFinding]:
    try:
        loaded = load(config, data, overrides)
    except SettingsError as error:
        return [
            DoctorFinding("settings", Grade.WRONG, line, "fix it and ask again") for line in str(error).splitlines()
        ]
    settings = loaded.settings
    routing = await examine_routing.routing(settings)
    findings = _settings(loaded)
    findings += _directory(settings)
    findings += _descriptors(settings)
    findings += examine.budgets(settings, routing.deployments, routing.resources, routing.models)
    findings += [finding async for finding in _store(settings)]
    findings += [finding async for finding in examine.redis(settings)]
    findings += [finding async for finding in examine.queues(routing.deployments)]
    findings += [finding async for finding in examine_routing.findings(settings, routing)]
    findings += [finding async for finding in examine.engines(routing.deployments)]
    return findings


def _settings(loaded: Loaded) -> list[DoctorFinding]:
    given = sum(origin != "default" for origin in loaded.origins.values())
    first = DoctorFinding(
        "settings", Grade.OK, f"{len(loaded.origins)} settings, {given} of them given; `tidegate config` shows them"
    )
    return [first, *(DoctorFinding("settings", Grade.WARNING, warning) for warning in loaded.warnings)]


def _directory(settings: Settings) -> list[DoctorFinding]:
    path = settings.data_dir
    if path.exists() and not path.is_dir():
        return [DoctorFinding("data", Grade.WRONG, f"{path} is not a directory", "choose another with --data")]
    place = next(one for one in (path, *path.parents) if one.exists())
    if not os.access(place, os.W_OK | os.X_OK):
        return [
            DoctorFinding(
                "data",
                Grade.WRONG,
                f"{place} cannot be written",
                "give this user the right, or choose another with --data",
            )
        ]
    if path.exists() and path.stat().st_mode & 0o007:
        return [
            DoctorFinding(
                "data", Grade.WARNING, f"{path} can be read by every user of this machine", f"chmod o-rwx {path}"
            ),
            *_free_space(place),
        ]
    return [DoctorFinding("data", Grade.OK, str(path)), *_free_space(place)]


def _free_space(place: Path) -> list[DoctorFinding]:
    free_bytes = shutil.disk_usage(place).free
    if free_bytes < FREE_BYTES_MIN:
        return [
            DoctorFinding(
                "data",
                Grade.WARNING,
                f"only {free_bytes >> 20:,} MiB are free on its disk",
                "make room before a large batch",
            )
        ]
    return []


def _descriptors(settings: Settings) -> list[DoctorFinding]:
    import resource

    # A server raises its own limit to the hard limit, and does not start if that is too low.
    _, allowed = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = settings.http.connections_max + DESCRIPTORS_BESIDE
    if allowed != resource.RLIM_INFINITY and allowed < needed:
        to_do = f"ulimit -n {needed} (or LimitNOFILE={needed} in the service's unit), or lower http.connections_max"
        return [
            DoctorFinding("system", Grade.WRONG, f"{allowed:,} open files are allowed, {needed:,} are needed", to_do)
        ]
    return [
        DoctorFinding(
            "system", Grade.OK, f"enough open files are allowed for {settings.http.connections_max:,} connections"
        )
    ]


async def _store(settings: Settings) -> AsyncIterator[DoctorFinding]:
    from tidegate import storage
    from tidegate.control import running_control

    where = redacted(settings.store.location)
    control = running_control(settings.data_dir)
    if control is not None:
        yield DoctorFinding("server", Grade.OK, f"pid {control.pid} serves this data at {control.url}")
    if not settings.store.is_postgresql and not local_path(settings.store.location).exists():
        yield DoctorFinding("store", Grade.OK, f"{where} does not exist yet; the first command that needs it makes it")
        async for finding in _bucket(settings):
            yield finding
        yield _keyless(settings)
        return
    try:
        if await storage.is_empty(settings):
            text = f"{where} is an empty database; the first `tidegate serve`, `api` or `worker` makes its tables"
            yield DoctorFinding("store", Grade.OK, text)
            async for finding in _bucket(settings):
                yield finding
            yield _keyless(settings)
            return
        async with storage.opened(settings, read_only=True) as parts:
            version, ours = await parts.store.schema_version(), parts.store.program_version
            at = (
                "this program's version"
                if version == ours
                else f"version {version}; this program, of {ours}, can use it"
            )
            yield DoctorFinding("store", Grade.OK, f"{where} is there, at {at}")
            async for finding in _contents(parts):
                yield finding
    except TidegateError as error:
        yield DoctorFinding("store", Grade.WRONG, f"{where}: {error}", "see the sentence above; nothing was changed")
        async for finding in _bucket(settings):
            yield finding


async def _bucket(settings: Settings) -> AsyncIterator[DoctorFinding]:
    """Check the object store if the database cannot be read. A local directory needs no check: it
    is made with the store."""
    from tidegate import storage

    if settings.blobs.is_object_store:
        async with storage.open_blobs(settings) as blobs:
            yield await _written(settings, blobs)


async def _written(settings: Settings, blobs: Blobs) -> DoctorFinding:
    try:
        await blobs.check()
    except TidegateError as error:
        to_do = "check blobs.* in `tidegate config`"
        return DoctorFinding("blobs", Grade.WRONG, f"{settings.blobs.url}: {error}", to_do)
    return DoctorFinding("blobs", Grade.OK, f"{settings.blobs.url} can be written and read")


async def _contents(parts: "Parts") -> AsyncIterator[DoctorFinding]:
    written = await _written(parts.settings, parts.blobs)
    yield written
    if written.grade is Grade.OK:
        async for finding in examine_blobs.findings(parts):
            yield finding
    counts = await parts.store.state_counts()
    text = ", ".join(f"{count:,} {state}" for state, count in sorted(counts.items())) or "none yet"
    yield DoctorFinding("batches", Grade.OK, text)
    async for finding in examine.tenants(parts):
        yield finding
    async for finding in _keys(parts):
        yield finding


async def _keys(parts: "Parts") -> AsyncIterator[DoctorFinding]:
    from tidegate.web.http.pepper import can_check_keys

    if await parts.store.any_key():
        can_check = await can_check_keys(parts.settings, parts.store)
        to_do = "set auth.pepper as the other processes have it, or copy the file `pepper` of their data directory"
        if can_check is None:
            text = "keys exist, and this machine lacks the pepper that they are hashed with, so it can run workers only"
            yield DoctorFinding("keys", Grade.WARNING, text, to_do)
        elif not can_check:
            text = "keys exist, and they are hashed with another pepper, so an API process refuses to start here"
            yield DoctorFinding("keys", Grade.WRONG, text, to_do)
        else:
            yield DoctorFinding("keys", Grade.OK, "keys exist: every call needs one")
    else:
        yield _keyless(parts.settings)


def _keyless(settings: Settings) -> DoctorFinding:
    """Return what a server does over a store without keys."""
    from tidegate.web.http.loopback import is_loopback

    host = settings.server.host
    if settings.auth.bootstrap_key is not None:
        return DoctorFinding("keys", Grade.OK, "no keys yet: the first server that starts makes auth.bootstrap_key one")
    if is_loopback(host):
        return DoctorFinding("keys", Grade.OK, "no keys: any program on this machine may call, nothing else can")
    to_do = "auth.bootstrap_key with a text from `tidegate keys generate`, or tidegate keys create --org NAME"
    return DoctorFinding("keys", Grade.WRONG, f"no keys, so a server on {host} refuses every call (401)", to_do)
