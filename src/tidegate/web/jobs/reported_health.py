"""The health of deployments as workers reported it, for an API process that calls none of them
itself.
"""

from collections.abc import Sequence

import msgspec

from tidegate.core.ports import DeploymentTrouble, ReportedWorker
from tidegate.upstream.routing.deployment_status import DeploymentStatus
from tidegate.upstream.routing.health import BreakerState


def reported_troubles(workers: Sequence[ReportedWorker]) -> dict[str, DeploymentTrouble]:
    """Return the deployments to which a living worker sends nothing, by name.

    Of several reports the longest trouble counts.
    """
    reported: dict[str, DeploymentTrouble] = {}
    for worker in workers:
        for one in worker.report.deployments if worker.is_alive else ():
            known = reported.get(one.deployment)
            if known is None or one.for_ms > known.for_ms:
                reported[one.deployment] = one
    return reported


def reported_status(status: DeploymentStatus, trouble: DeploymentTrouble | None) -> DeploymentStatus:
    """Return a deployment's status in this process; where only a worker found it unhealthy, with
    that worker's report.
    """
    if trouble is None or status.open_for_ms is not None or status.is_drained:
        return status
    return msgspec.structs.replace(
        status,
        state=BreakerState.PAUSED if trouble.is_key_rejected else BreakerState.OPEN,
        last_failure=trouble.why,
        is_key_rejected=trouble.is_key_rejected,
        open_for_ms=trouble.for_ms,
    )
