"""What health pages and `doctor` show of a deployment."""

import msgspec

from tidegate.core.budgets.budget import Limit
from tidegate.core.deployments import Serves


class DeploymentStatus(msgspec.Struct, frozen=True):
    """The status of one deployment, for health pages and `doctor`.

    - `open_for_ms` is how long its circuit has been open; None while it is closed.
    - `max_in_flight` is this process's share of its slots.
    - `capacity` is the number of calls that it takes from all processes.
    """

    name: str
    url: str
    models: tuple[str, ...]
    state: str
    in_flight: int
    interactive_in_flight: int
    max_in_flight: int
    rests_for_ms: int
    answered: int
    failures: dict[str, int]
    last_failure: str
    spent_for_ms: int = 0
    discovered: Limit | None = None
    upstream_model: str = ""
    is_key_rejected: bool = False
    open_for_ms: int | None = None
    limits: tuple[Limit, ...] = ()
    is_drained: bool = False
    serves: Serves = Serves.BOTH
    capacity: int = 0
