"""accept: a caller's bytes become a file, a caller's request becomes a job.

Both are durable before they are acknowledged.

Every id is drawn before the store is asked, so a call whose commit is unknown can be repeated with
the same effect. This module knows nothing of HTTP.
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Sequence
from hashlib import sha256
from typing import TypeVar

import msgspec
from msgspec.structs import replace

from tidegate import tracing
from tidegate.core import ids, window
from tidegate.core.errors import ApiProblem, StoreFull, StoreUnavailable, TidegateError
from tidegate.core.files import File, NewFile, Stamp
from tidegate.core.follow_up import FollowUp
from tidegate.core.job_controls import RetryChoice
from tidegate.core.nouns import (
    Caller,
    Idempotency,
    IngestPlan,
    Job,
    JobRequest,
    JobStart,
    Quotas,
    ResponseInput,
    ResponseTerms,
)
from tidegate.core.ports import Blobs, BlobWriter, Clock, Entropy
from tidegate.core.states import JobKind
from tidegate.core.webhooks import SECRET_BYTES
from tidegate.failpoints import hit
from tidegate.stages.running_keys import RunningKeys
from tidegate.store.store import Store

T = TypeVar("T")

REPLAY_MS = 5_000
_PAUSE_FIRST_S = 0.05
_PAUSE_S_MAX = 1.0
_UNWANTED_COUNT_MAX = 1_000
REMOVE_WAIT_S = 5.0
# A coroutine that ends with its loop (GeneratorExit) cannot await; the sweeps collect what it
# began.
_ENDED_IN_THE_LOOP = (Exception, asyncio.CancelledError)
# The trailer of a work file whose one item is the first line of its input.
_FIRST_LINE = (1).to_bytes(4, "little")


class Reception:
    """The entry of files and jobs of one process.

    `worker_id` returns the incarnation that begins a blob. A door holds the Idempotency-Key of a
    create in `running_keys` from the request's head until the object is made.
    """

    def __init__(
        self, store: Store, blobs: Blobs, clock: Clock, entropy: Entropy, worker_id: Callable[[], str]
    ) -> None:
        self._store = store
        self._blobs = blobs
        self._clock = clock
        self._entropy = entropy
        self._worker_id = worker_id
        self._unwanted: set[str] = set()
        self.running_keys = RunningKeys()

    async def begin_upload(self, size_bytes_max: int, over: ApiProblem | None = None) -> "Upload":
        """Return a blob with a row, ready to take bytes.

        `over` is raised when there are too many.
        """
        await self._give_up_leftovers()
        blob_id = self.new_id("blob")
        try:
            await self.replayed(lambda: self._store.begin_blob(blob_id, "upload", self._worker_id()))
            writer = await self._blobs.create(blob_id)
        except _ENDED_IN_THE_LOOP:
            await asyncio.shield(self.give_up(blob_id))
            raise
        return Upload(self, self._store, blob_id, writer, size_bytes_max, over or too_large(size_bytes_max))

    async def create_job(
        self,
        caller: Caller,
        request: JobRequest,
        *,
        idempotency_key: str | None = None,
        quotas: Quotas | None = None,
        share_owner: str | None = None,
    ) -> Job:
        """Create a job in `validating`, or return the job that this Idempotency-Key made before.

        The job counts towards the share of `share_owner`.
        """
        job_id = self.new_id("batch")
        idempotency = Idempotency(idempotency_key, request_hash(request)) if idempotency_key else None
        if request.webhook is not None:
            secret = self._entropy.token_bytes(SECRET_BYTES)
            request = replace(request, webhook=replace(request.webhook, secret=secret))
        traces = tracing.ACTIVE
        creation = None if traces is None else traces.begin_creation()
        if creation is not None:
            request = replace(request, traceparent=creation.traceparent)
        job = await self.replayed(
            lambda: self._store.create_job(
                caller, job_id, request, idempotency=idempotency, quotas=quotas, share_owner=share_owner
            )
        )
        await hit("create_committed")
        if traces is not None and creation is not None:
            traces.end_creation(creation, job)
        return job

    async def retry_job(
        self,
        caller: Caller,
        job_id: str,
        choice: RetryChoice,
        *,
        idempotency_key: str | None = None,
        quotas: Quotas | None = None,
        share_owner: str | None = None,
    ) -> Job | None:
        """Create a job that runs items of an ended one again; None if that is gone."""
        new_id, secret = self.new_id("batch"), self._entropy.token_bytes(SECRET_BYTES)
        retry = FollowUp(job_id, choice, new_id, self.new_id("file"), self.new_id("file"), secret)
        traces = tracing.ACTIVE
        creation = None if traces is None else traces.begin_creation()
        if creation is not None:
            retry = replace(retry, traceparent=creation.traceparent)
        asked = sha256(msgspec.json.encode([job_id, choice])).hexdigest()
        idempotency = Idempotency(idempotency_key, asked) if idempotency_key else None
        job = await self.replayed(
            lambda: self._store.retry_job(
                caller, retry, idempotency=idempotency, quotas=quotas, share_owner=share_owner
            )
        )
        await hit("create_committed")
        if traces is not None and creation is not None and job is not None:
            traces.end_creation(creation, job)
        return job

    async def create_response(
        self, caller: Caller, line: bytes, plan: IngestPlan, terms: ResponseTerms, idempotency_key: str | None
    ) -> Job:
        """Create a job of one item that has started already.

        `line` is both its input and its work file. `plan` is the plan that ingest would make of it.
        """
        await self._give_up_leftovers()
        digest = sha256(line).hexdigest()
        blob_id, file_id = self.new_id("blob"), self.new_id("file")
        token = self._entropy.token_bytes(16).hex()
        start = JobStart(
            self.new_id("batch"),
            token,
            plan,
            blob_id,
            output_file_id=self.new_id("file"),
            error_file_id=self.new_id("file"),
        )
        request = JobRequest(
            terms.endpoint, file_id, window.DAY_MS, window.DEFAULT_TEXT, prefix_order=False, kind=JobKind.RESPONSE
        )
        traces = tracing.ACTIVE
        creation = None if traces is None else traces.begin_creation()
        if creation is not None:
            request = replace(request, traceparent=creation.traceparent)
        asked_for = digest if terms.interactive_after_ms is None else f"{digest} {terms.interactive_after_ms}"
        asked = ResponseInput(file_id, digest, Idempotency(idempotency_key, asked_for) if idempotency_key else None)
        try:
            await self.replayed(lambda: self._store.begin_blob(blob_id, "work", self._worker_id()))
            writer = await self._blobs.create(blob_id)
            try:
                await writer.write(line + _FIRST_LINE)
                await writer.finish()
            except _ENDED_IN_THE_LOOP:
                await writer.abort()
                raise
            await hit("upload_blob_durable")
            job = await self.replayed(
                lambda: self._store.create_response(caller, request, start, asked, terms, self._worker_id())
            )
        except _ENDED_IN_THE_LOOP:
            # The commit may have succeeded: then the blob is in use and the store keeps it.
            await asyncio.shield(self.give_up(blob_id))
            raise
        if job.id != start.job_id:
            await self.give_up(blob_id)
        await hit("create_committed")
        if traces is not None and creation is not None:
            traces.end_creation(creation, job)
        return job

    async def replayed(self, call: Callable[[], Awaitable[T]]) -> T:
        """Repeat a call for a short while, as long as it is unknown whether it was committed."""
        give_up_at_ms = self._clock.monotonic_ms() + REPLAY_MS
        pause_s = _PAUSE_FIRST_S
        while True:
            try:
                return await call()
            except StoreFull:
                # Nothing was written, and a disk stays full for longer than this.
                raise
            except StoreUnavailable:
                pause = pause_s * self._entropy.uniform(0.5, 1.0)
                if self._clock.monotonic_ms() + pause * 1000 > give_up_at_ms:
                    raise
                await asyncio.sleep(pause)
                pause_s = min(2 * pause_s, _PAUSE_S_MAX)

    async def give_up(self, blob_id: str) -> None:
        """Remove a blob that will not be used. While the store is away, do it later."""
        try:
            if await self._store.give_up_blob(blob_id):
                await self._remove(blob_id)
        except TidegateError:
            # Blobs beyond this count are collected when this incarnation ends.
            if len(self._unwanted) < _UNWANTED_COUNT_MAX:
                self._unwanted.add(blob_id)

    async def delete_file(self, tenant_id: str, file_id: str) -> bool:
        """Delete a file and the bytes that no other file uses; False if there is no such file."""
        extents = await self._store.list_extents(file_id, 0, 1)
        if not await self._store.delete_file(tenant_id, file_id):
            return False
        await self.remove_unused([extent.blob_id for extent in extents])
        return True

    async def take_back_file(self, tenant_id: str, file_id: str, key: str | None) -> None:
        """Delete a file that was uploaded for one job, which was refused or deleted.

        The file stays if another job uses it. `key` is the Idempotency-Key of its upload, which can
        then be used again.
        """
        extents = await self._store.list_extents(file_id, 0, 1)
        if await self._store.take_back_file(tenant_id, file_id, key):
            await self.remove_unused([extent.blob_id for extent in extents])

    async def remove_unused(self, blob_ids: Sequence[str]) -> None:
        """Remove the blobs among these uploads that are unused.

        The sweeps remove those that fail here.
        """
        with contextlib.suppress(TidegateError):
            for blob_id in await self._store.condemn_uploads(blob_ids):
                await self._remove(blob_id)

    async def _remove(self, blob_id: str) -> None:
        """Remove the bytes of a condemned blob, then its row.

        A caller waits for this, so the wait is short: if the blobs do not answer, a sweep removes
        it.
        """
        with contextlib.suppress(TidegateError, TimeoutError):
            async with asyncio.timeout(REMOVE_WAIT_S):
                await self._blobs.delete(blob_id)
            await self._store.forget_blob(blob_id)

    async def _give_up_leftovers(self) -> None:
        while self._unwanted:
            blob_id = self._unwanted.pop()
            try:
                if await self._store.give_up_blob(blob_id):
                    await self._remove(blob_id)
            except TidegateError:
                self._unwanted.add(blob_id)
                return

    def new_id(self, kind: str) -> str:
        """Return a new id of this kind."""
        return ids.make(kind, self._entropy.token_bytes(ids.RANDOM_BYTES))


class Upload:
    """A file that is being uploaded. It is visible only after `keep` returns.

    If `keep` does not return, `abandon` must be called.
    """

    def __init__(
        self,
        reception: Reception,
        store: Store,
        blob_id: str,
        writer: BlobWriter,
        size_bytes_max: int,
        over: ApiProblem,
    ) -> None:
        self._reception = reception
        self._store = store
        self._writer = writer
        self._size_bytes_max = size_bytes_max
        self._over = over
        self._newline_count = 0
        self._last_byte = b""
        self._is_durable = False
        self.file_id = reception.new_id("file")
        self.blob_id = blob_id
        self.size_bytes = 0

    def note_with(self, store: Store) -> None:
        """Create the file through this store, which notes who made it."""
        self._store = store

    @property
    def line_count(self) -> int:
        """Return the number of lines so far, with an unfinished last one."""
        return self._newline_count + (self._last_byte not in (b"", b"\n"))

    async def write(self, data: bytes) -> None:
        """Write the next bytes, and return when there is room for more."""
        if not data:
            return
        self.size_bytes += len(data)
        if self.size_bytes > self._size_bytes_max:
            raise self._over
        self._newline_count += data.count(b"\n")
        self._last_byte = data[-1:]
        await self._writer.write(data)

    async def finish(self) -> Stamp:
        """Make the bytes durable."""
        stamp = await self._writer.finish()
        self._is_durable = True
        await hit("upload_blob_durable")
        return stamp

    async def keep(
        self,
        caller: Caller,
        *,
        purpose: str,
        filename: str,
        expires_after_ms: int | None,
        idempotency_key: str | None = None,
        quotas: Quotas | None = None,
    ) -> File:
        """Make the bytes durable and create the file.

        Return the file that this Idempotency-Key made before, if it did.
        """
        stamp = await self.finish()
        idempotency = None
        if idempotency_key:
            idempotency = Idempotency(idempotency_key, upload_hash(stamp.sha256, purpose, filename, expires_after_ms))
        file = await self._reception.replayed(
            lambda: self._store.create_file(
                caller,
                NewFile(self.file_id, self.blob_id, stamp, purpose, filename, self.line_count, expires_after_ms),
                idempotency=idempotency,
                quotas=quotas,
            )
        )
        if file.id != self.file_id:
            await self._reception.give_up(self.blob_id)
        await hit("upload_committed")
        return file

    async def abandon(self) -> None:
        """Throw the bytes away, even when the caller's task is cancelled."""
        await asyncio.shield(self._abandon())

    async def _abandon(self) -> None:
        # Once the bytes are durable, the file may have been committed: then the store keeps the
        # bytes.
        if not self._is_durable:
            with contextlib.suppress(TidegateError):
                await self._writer.abort()
        await self._reception.give_up(self.blob_id)


def too_large(size_bytes_max: int) -> ApiProblem:
    return ApiProblem(
        413,
        "file_too_large",
        f"The file is larger than {size_bytes_max:,} bytes. Split it into several files, each a batch of its own.",
        param="file",
    )


def upload_hash(content_sha256: str, purpose: str, filename: str, expires_after_ms: int | None) -> str:
    """Return the hash that an upload's Idempotency-Key is bound to."""
    return sha256(msgspec.json.encode([content_sha256, purpose, filename, expires_after_ms])).hexdigest()


def request_hash(request: JobRequest) -> str:
    """Return the hash that a job's Idempotency-Key is bound to.

    It depends on the meaning, not on the spelling.
    """
    meaning = msgspec.to_builtins(request)
    del meaning["window_text"], meaning["traceparent"]
    return sha256(msgspec.json.encode(meaning, order="sorted")).hexdigest()
