"""Reports of what keeps a process from work: by them commands can say why a batch waits."""

import asyncio
from collections.abc import Callable, Iterable

import structlog

from tidegate.core.errors import BlobError, StoreError
from tidegate.core.ports import Blobs, DeploymentTrouble, WorkerReport
from tidegate.store.store import Store
from tidegate.upstream.routing.deployment_status import DeploymentStatus
from tidegate.worker.registration import Registration

log = structlog.get_logger()

EVERY_S = 2.0
# A check writes a blob, so it is repeated only after a failed one.
CHECK_BLOBS_S = 15.0
# An object store counts as away only after half a minute of tries. The log reports it sooner.
UNANSWERED_S = 5.0
_UNANSWERED = (
    f"the place for files has not answered a test write for {UNANSWERED_S:g} s: check blobs.url and blobs.endpoint"
)
DEPLOYMENTS_MAX = 100
WHY_CHARS_MAX = 300


class Reporting:
    """The service of reports.

    It looks every two seconds, and writes only if the report has changed.
    """

    def __init__(
        self,
        store: Store,
        blobs: Blobs,
        me: Registration,
        deployments: Callable[[], Iterable[DeploymentStatus]],
        trouble: Callable[[], str | None],
    ) -> None:
        self._store = store
        self._blobs = blobs
        self._me = me
        self._deployments = deployments
        self._trouble = trouble
        self._blob_trouble = ""
        self._written = ("", WorkerReport())

    async def run(self) -> None:
        """Report until it is cancelled."""
        checking = asyncio.create_task(self._check_blobs())
        try:
            while True:
                await self.report()
                await asyncio.sleep(EVERY_S)
        finally:
            checking.cancel()
            await asyncio.gather(checking, return_exceptions=True)

    async def report(self) -> None:
        """Write what keeps this process from work, unless the store knows it already."""
        report = WorkerReport(self._trouble() or self._blob_trouble, troubles(self._deployments()))
        now = (self._me.id, report)
        if now == self._written or (report == WorkerReport() and self._written[1] == WorkerReport()):
            return
        try:
            await self._store.report_worker(*now)
            self._written = now
        except StoreError as error:
            log.warning("worker_report_failed", error=str(error))

    async def _check_blobs(self) -> None:
        """Try to write a blob until it works.

        The process goes on meanwhile, and is not ready until then.
        """
        has_failed = False
        while True:
            try:
                await self._checked()
                self._blob_trouble = ""
                return
            except (BlobError, OSError) as error:
                if not has_failed:
                    log.error("blobs_unwritable", why=str(error))
                has_failed = True
                self._blob_trouble = f"it cannot keep answers: {str(error)[:WHY_CHARS_MAX]}"
            await asyncio.sleep(CHECK_BLOBS_S)

    async def _checked(self) -> None:
        """Check the blobs once, and log when that takes long."""
        checking = asyncio.create_task(self._blobs.check())
        try:
            done, _ = await asyncio.wait({checking}, timeout=UNANSWERED_S)
            if not done and not self._blob_trouble:
                log.warning("blobs_unanswered", why=_UNANSWERED)
                self._blob_trouble = f"it cannot keep answers: {_UNANSWERED}"
            await checking
        finally:
            checking.cancel()


def troubles(deployments: Iterable[DeploymentStatus]) -> tuple[DeploymentTrouble, ...]:
    """Return the deployments whose circuit is open, with the last failure of each."""
    found = [
        DeploymentTrouble(one.name, one.is_key_rejected, one.open_for_ms, one.last_failure[:WHY_CHARS_MAX])
        for one in deployments
        if one.open_for_ms is not None
    ]
    return tuple(found[:DEPLOYMENTS_MAX])
