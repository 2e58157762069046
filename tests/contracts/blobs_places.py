"""Where the blobs of a test lie, in a form that another process can be handed: one word per backend."""

from __future__ import annotations

import contextlib
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from tidegate.backends.blobs_local import LocalBlobs
from tidegate.backends.blobs_s3 import S3Blobs
from tidegate.backends.blobs_s3_client import S3Settings
from tidegate.core import ids
from tidegate.core.ports import Blobs, LogIds

if TYPE_CHECKING:
    # The processes that write blobs need none of what starts servers, nor pytest: loading that took most of their time.
    from tests.support.azure import AzureServer
    from tests.support.s3 import S3Server


@dataclass(frozen=True)
class Place:
    """Opens the same blobs as often as asked: two of them are two processes' views."""

    kind: str
    directory: str
    s3: S3Settings | None = None

    def open(self) -> Blobs:
        if self.s3 is None:
            return LocalBlobs(Path(self.directory))
        return S3Blobs(self.s3, Path(self.directory))

    def to_json(self) -> str:
        s3 = msgspec.structs.asdict(self.s3) if self.s3 is not None else None
        return json.dumps({"kind": self.kind, "directory": self.directory, "s3": s3})

    @classmethod
    def from_json(cls, text: str) -> Place:
        fields = json.loads(text)
        settings = fields.pop("s3")
        return cls(**fields, s3=S3Settings(**settings) if settings else None)


def s3_settings(
    server: S3Server, bucket: str, *, endpoint: str | None = None, retry_for_ms: int = 20_000
) -> S3Settings:
    return S3Settings(
        bucket=bucket,
        prefix="some/prefix",
        endpoint=endpoint or server.endpoint,
        region=server.region,
        access_key_id=server.access_key,
        secret_access_key=server.secret_key,
        allow_http=True,
        retry_for_ms=retry_for_ms,
        missing_after_ms=0,
    )


def azure_settings(server: AzureServer, container: str) -> S3Settings:
    return S3Settings(
        bucket=container,
        is_azure=True,
        prefix="some/prefix",
        endpoint=server.endpoint,
        access_key_id=server.account,
        secret_access_key=server.key,
        allow_http=True,
        retry_for_ms=20_000,
        missing_after_ms=0,
    )


def new_id() -> str:
    return ids.make("blob", os.urandom(ids.RANDOM_BYTES))


def fresh_ids() -> tuple[list[str], LogIds]:
    """Ids for a log, and the list of those that it took."""
    taken: list[str] = []

    async def next_blob_id() -> str:
        taken.append(new_id())
        return taken[-1]

    return taken, next_blob_id


async def put(blobs: Blobs, data: bytes) -> str:
    blob_id = new_id()
    writer = await blobs.create(blob_id)
    await writer.write(data)
    await writer.finish()
    return blob_id


def descriptors_under(directory: str | Path) -> list[str]:
    """What this process has open in the directory; the other descriptors of a test process come and go as they like."""
    targets = []
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the descriptor that listed them is gone by now
            targets.append(os.readlink(f"/proc/self/fd/{name}"))
    return sorted(target for target in targets if Path(target).is_relative_to(directory))
