"""`tidegate init`: writes a configuration to begin with, and explains each setting in
the words of its declaration."""

import os
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from tidegate.cli.terminal import options, terminal
from tidegate.core import window
from tidegate.core.errors import SettingsError
from tidegate.settings import catalog, load
from tidegate.settings.catalog import Setting

COLUMNS = 100
NAME = "tidegate.yaml"
UPSTREAM = "http://localhost:8000/v1"
HEAD = """\
Settings of Tidegate. A line that is commented out shows the default, or an example where there is none.
All settings, and what each may be: tidegate config --explain
Check this file: tidegate doctor --config {path}
Start the server: tidegate serve --config {path}
A duration may be written 30s or 24h, a size 200MB. A secret is env:NAME or file:PATH."""
MODELS = """\
Models by name, each with the servers that serve it. Without this, upstream.url serves every model.
models:
  my-model:
    deployments:
      - url: http://10.0.0.5:8000/v1
        api_key: env:MODEL_SERVER_KEY
        max_in_flight: 32"""
TENANTS = """\
Organizations by name: their share of the capacity, and what they may use in a period.
tenants:
  acme:
    weight: 2
    limits: [{period: day, cost: 50}]"""
# The settings that most installations change; `tidegate config` shows all.
SHOWN = {
    "server": ("host", "port", "trusted_proxies"),
    "upstream": ("api_key", "max_in_flight", "total_timeout_s"),
    "store": ("url",),
    "blobs": ("url", "endpoint", "access_key_id", "secret_access_key"),
    "worker": ("in_flight_max", "grace_ms"),
    "limits": ("file_bytes_max", "items_max", "window_max_s"),
    "retention": ("file_s", "completed_s", "failed_s", "metadata_s"),
    "retry": ("attempts_max",),
    "logging": ("level", "format"),
    "metrics": ("port",),
}

EXAMPLES = {
    "server.trusted_proxies": "[10.0.0.0/8]",
    "upstream.api_key": "env:MODEL_SERVER_KEY",
    "store.url": "env:STORE_URL",
    "blobs.url": "s3://bucket/prefix",
    "blobs.endpoint": "https://s3.example.com",
    "blobs.access_key_id": "env:S3_ACCESS_KEY_ID",
    "blobs.secret_access_key": "env:S3_SECRET_ACCESS_KEY",
}


def init(
    path: Annotated[Path, typer.Argument(metavar="FILE", help="Where to write it.")] = Path(NAME),
    upstream: options.UpstreamOption = None,
    force: Annotated[bool, typer.Option("--force", help="Write over a file that is there.")] = False,
) -> None:
    """Write a configuration to begin with, explained line by line.

    Example: tidegate init --upstream http://localhost:8000/v1
    """
    text = configuration(str(path), upstream or UPSTREAM)
    load(None, None, {"upstream.url": upstream}, {})
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | (os.O_TRUNC if force else os.O_EXCL), 0o640)
    except FileExistsError:
        raise SettingsError(f"{path} is there already; name another file, or write over it with --force.") from None
    with os.fdopen(descriptor, "w") as stream:
        stream.write(text)
    terminal.say(f"Wrote {path}. Read it, then: tidegate doctor --config {path} && tidegate serve --config {path}")


def configuration(path: str, upstream: str) -> str:
    """Return the text of a configuration that sends everything to one server."""
    blocks = [_comment(HEAD.format(path=path)), *(_group(name, upstream) for name in SHOWN)]
    return "\n\n".join([*blocks, _comment(MODELS), _comment(TENANTS)]) + "\n"


def _group(name: str, upstream: str) -> str:
    lines, is_used = [], name == "upstream"
    if is_used:
        lines += [*_about(catalog.by_key()["upstream.url"]), f"  url: {upstream}"]
    for setting in (catalog.by_key()[f"{name}.{key}"] for key in SHOWN[name]):
        lines += [*_about(setting), f"  # {setting.key.partition('.')[2]}: {_default(setting)}"]
    # A group without values is allowed, so its name can stand uncommented.
    return "\n".join([f"{name}:", *lines])


def _about(setting: Setting) -> Iterator[str]:
    return (f"  # {line}" for line in textwrap.wrap(setting.about, COLUMNS - 4))


def _default(setting: Setting) -> str:
    if setting.key in EXAMPLES:
        return EXAMPLES[setting.key]
    value = setting.default
    return quantity(setting.key, value) if isinstance(value, int | float) else str(value)


def quantity(key: str, value: float) -> str:
    """Return a number as a person would write it: 30s, 14d, 200MiB, or the plain number."""
    if "_bytes" in key and value and value % (1 << 20) == 0:
        return f"{int(value) >> 20}MiB" if value % (1 << 30) else f"{int(value) >> 30}GiB"
    is_rate = key.endswith("_per_s")
    ms = value * 1_000 if key.endswith("_s") and not is_rate else value if key.endswith("_ms") else 0
    return window.spoken(int(ms)) if ms and ms % 1_000 == 0 else str(value)


def _comment(text: str) -> str:
    return "\n".join(f"# {line}" for line in text.splitlines())
