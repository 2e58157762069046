"""The ports: what the engine needs from the world, in the engine's own verbs.

Each port has one behaviour suite in `tests/contracts/` that every implementation passes.
"""

from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

import msgspec

from tidegate.core.budgets.budget import Budget, BudgetRequest, Grant, Limit, Settlement
from tidegate.core.callback_targets import CallbackReply, FetchedFile
from tidegate.core.files import Placed, Stamp
from tidegate.core.nouns import Answer, Call
from tidegate.core.queues import Put, QueueRequest, QueueState, Sorted, Withdrawal
from tidegate.core.usage.prices import Price


class Clock(Protocol):
    def now_ms(self) -> int:
        """Return wall time in unix milliseconds: for stamps that people read, never for a decision
        about a lease.
        """

    def monotonic_ms(self) -> float:
        """Return the time of a clock that never jumps: for durations inside one process."""


class Entropy(Protocol):
    def token_bytes(self, count: int) -> bytes:
        """Return random bytes for ids and lease tokens."""

    def uniform(self, low: float, high: float) -> float:
        """Return a random number for jitter."""


class BlobWriter(Protocol):
    """A blob while it is written.

    Nothing counts until `finish` returns; after any failure the writer stays void.
    """

    async def write(self, data: bytes) -> None:
        """Take these bytes; they may be anywhere from memory to disk when this returns."""

    async def finish(self) -> Stamp:
        """Make everything durable and verified; return its size and SHA-256."""

    async def abort(self) -> None:
        """Throw away what was written. Safe to call at any time, also after a failure."""


class ResultLog(Protocol):
    """One incarnation's log of finished lines of one kind: private, random name, created
    exclusively.

    After any failed write the log raises BlobVoid for ever: its owner opens another one under
    another id.
    """

    @property
    def seal_after_ms(self) -> int:
        """Return how long lines may wait before `seal` is worth its cost on this backend."""

    @property
    def seal_after_bytes(self) -> int:
        """Return how many bytes may wait before `seal` is worth its cost on this backend."""

    async def append(self, data: bytes) -> None:
        """Add whole lines; they are durable on this host when it returns (kill -9 and power
        cut)."""

    async def seal(self) -> Placed | None:
        """Make everything appended since the last seal readable to every process; return where it
        lies.

        None when nothing was appended.
        """

    async def close(self) -> None:
        """Close the log: no more lines. What was sealed stays."""


class LogIds(Protocol):
    async def __call__(self) -> str:
        """Return the id of a fresh blob whose row is already in the store; a log takes one whenever
        it begins a new blob.
        """


class Blobs(Protocol):
    """The store of bytes. Ids are ours (`blob_…`); no name is ever built from a caller's text."""

    async def create(self, blob_id: str) -> BlobWriter:
        """Begin a new blob; an id that exists already is an error."""

    async def adopt(self, blob_id: str, path: Path) -> None:
        """Make a finished local file the bytes of a new blob, durable; the file is gone
        afterwards."""

    async def open_log(self, next_blob_id: LogIds) -> ResultLog:
        """Begin this incarnation's log."""

    async def read(self, blob_id: str, at: int, count: int) -> bytes:
        """Return exactly these bytes; when there are fewer, raise BlobMissing (gone) or
        BlobUnavailable (try again).
        """

    def stream(self, blob_id: str, at: int, count: int) -> AsyncGenerator[bytes, None]:
        """Yield these bytes in pieces of bounded size."""

    async def size(self, blob_id: str) -> int | None:
        """Return the size of a blob; None when it does not exist."""

    async def recover(self, blob_id: str) -> int | None:
        """Make the durable part of a dead process's log readable; return its size.

        None: this process can reach nothing of it.
        """

    async def holds_end(self, blob_id: str) -> bool:
        """Return whether the end that a dead process made durable in its log can be read here.

        False: it may lie in another host's spool.
        """

    async def left_logs(self) -> list[str]:
        """Return the logs with lines in this host's spool whose process is dead."""

    async def delete(self, blob_id: str) -> None:
        """Remove a blob, and what is left of it in any spool; to remove an absent one is fine."""

    async def list_ids(self, after: str, count_max: int) -> list[str]:
        """Return ids of present blobs, in order, after this one: for the sweep that looks for
        orphans.
        """

    async def local_path(self, blob_id: str, scratch: Path) -> Path:
        """Return a path where the whole blob can be read as a plain file: the blob itself, or a
        copy in `scratch`.
        """

    async def check(self) -> None:
        """Raise BlobUnavailable with what to do when bytes cannot be written or read here."""

    async def close(self) -> None:
        """Give back connections."""


class Upstream(Protocol):
    async def send(self, call: Call) -> Answer:
        """Send one item's request to a deployment of its model; raises an UpstreamError of exactly
        one class.
        """

    async def send_interactive(self, call: Call, owner: str) -> Answer:
        """Send a call that a user waits for, ahead of background work; `owner` is whose slots it
        takes.
        """

    def takes_interactive(self, model: str) -> bool:
        """Return whether a deployment serves this model to interactive calls."""

    def free_slots(self, model: str) -> int:
        """Return how many more items of this model this process may have in flight now; 0 while no
        deployment is fit.
        """

    def items_per_call(self, model: str | None = None) -> int:
        """Return the most items of this model that may share one call; without a name, of any
        model.
        """

    def rests_until_ms(self, model: str) -> float:
        """Return the monotonic moment before which nothing may be sent to this model; 0 when it may
        be sent now.
        """

    def closed(self, model: str) -> str:
        """Return why nothing may be sent to this model now, as a word of `core.schedule.Reason`;
        empty while something may.
        """

    def spent_until_ms(self, budgets: tuple[Budget, ...]) -> float:
        """Return the monotonic moment before which these budgets allow nothing, as far as is known
        here; 0 when they may.
        """

    def on_room(self, tell: Callable[[], None]) -> None:
        """Call `tell` whenever more may be sent than before."""

    def knows(self, model: str) -> bool:
        """Return whether any deployment is configured for this model."""

    def price_of(self, name: str, /) -> Price | None:
        """Return the price of tokens at a deployment; None where they cost nothing."""

    def recorded(self, items: Iterable[tuple[str, int]]) -> None:
        """Forget the answers of these items, by job and number: the store has them now."""


class Limits(Protocol):
    """Budgets and slots that all processes share; without them nothing new is sent."""

    async def debit(self, asks: Sequence[BudgetRequest]) -> list[Grant]:
        """Grant what is asked for, or as much of it as the budgets allow now: one grant per
        request, in order.

        Raises LimitsUnavailable when the budgets cannot be asked."""

    async def settle_grants(self, settlements: Sequence[Settlement]) -> None:
        """Replace what was reserved by what was used.

        Reserves that are never settled stay until they leave their window.

        Raises LimitsUnavailable when that cannot be entered now. It is kept, and the next call
        enters it first, even a call with nothing to settle.
        """

    async def share_slots(
        self, worker_id: str, wanted: Mapping[str, int], in_use: Mapping[str, int], caps: Mapping[str, int]
    ) -> dict[str, int]:
        """Return how many calls this process may have in flight per name of `caps` now.

        Over all processes that is never above the cap. `in_use` is the most that may be in flight
        until the answer comes: what is in flight now, or the last answer where that is more and
        calls may still begin under it. Slots that were granted, are not wanted any more and are not
        in use are given back. An answer below `in_use` means: begin nothing new; slots in use stay
        taken until a later call does not name them. A process that is gone has none.
        """


class DiscoveredLimitsStore(Protocol):
    """Limits that deployments reported, kept for a week for every process and the next start."""

    async def put_discovered(self, deployment: str, limit: Limit) -> None:
        """Replace the limits of this deployment by those that it has just reported."""

    async def discovered(self) -> dict[str, Limit]:
        """Return the known limits by the deployment's name."""


class Callbacks(Protocol):
    """The way to receivers that tenants name."""

    async def post(self, url: str, body: bytes, headers: Mapping[str, str], *, owner: str) -> CallbackReply:
        """Send one request, to a public address or one that the operator allows.

        Any failure is a reply with a word for it.

        Calls of one owner to a host take turns; they hold up no other owner's.
        """


class FileSource(Protocol):
    """The way to files that tenants name by their address."""

    async def fetch(self, url: str, size_bytes_max: int, *, owner: str) -> FetchedFile:
        """Read a file, from a public address or one that the operator allows.

        Any failure is a reply with a word for it.

        Calls of one owner to a host take turns; they hold up no other owner's.
        """


class RequestQueue(Protocol):
    """A queue from which a processor takes requests, and to which it returns results.

    Every verb may be repeated, and each raises QueueAway when the queue does not answer."""

    async def reach(self) -> None:
        """Return when the queue can be asked now."""

    async def put(self, request: QueueRequest) -> Put:
        """Put a request into the queue, unless one with its id is out already: then this process
        waits for that one.
        """

    async def is_out(self, request_id: str) -> bool:
        """Return whether a request with this id is out: it waits, runs, or was answered and is not
        recorded.
        """

    async def collect(self, ids: Sequence[str], result_bytes_max: int, *, look: bool) -> Sorted:
        """Sort the results that came back, and report what is known of these requests; reading
        removes nothing.

        With `look`, also report which of them the queue no longer knows.
        """

    async def withdraw(self, request_id: str) -> Withdrawal:
        """Take back a request of this process, or ask the processor that has it to stop."""

    async def acknowledge(self, ids: Sequence[str]) -> None:
        """Let the results of these requests go: their outcomes are recorded."""

    async def discard(self, ids: Sequence[str]) -> None:
        """Let results go which say that nothing was done; their requests may be put again."""

    async def sweep(self) -> int:
        """Remove results that no process waits for any more; return how many."""

    async def state(self) -> QueueState:
        """Return the state of the queue, for its operators."""

    async def close(self) -> None:
        """Give back connections; nothing in the queue changes."""


class Rests(Protocol):
    """The rests of deployments, shared by all processes. Losing one costs a refused call."""

    def publish(self, deployment: str, rest_ms: int) -> None:
        """Report that a deployment wants nothing for so long; a longer rest always wins over a
        shorter one.
        """

    def current(self) -> Mapping[str, float]:
        """Return the monotonic moment until which each deployment rests, as far as this process
        knows.
        """


class Present(msgspec.Struct, frozen=True):
    """Calls at one deployment: processes that send background calls there, such calls that are out,
    and calls that gateways pass on.

    `tide` is how many background calls may be out there now, where that is known, and `why` the
    reason in words.
    """

    workers: int = 0
    calls: int = 0
    interactive: int = 0
    interactive_awaiting: int = 0
    has_gateway: bool = False
    why: str = ""
    tide: int = 0


class FleetReport(NamedTuple):
    """The calls of another process at one deployment, and how long ago it reported them."""

    present: Present
    age_ms: float


class DeploymentTrouble(msgspec.Struct, frozen=True):
    """A deployment to which a process sends nothing: its circuit is open after failures, or it
    rejects our key.

    `why` is its last failure.
    """

    deployment: str
    is_key_rejected: bool
    for_ms: int
    why: str


class WorkerReport(msgspec.Struct, frozen=True):
    """The reasons why a process runs no items: its own trouble, in words, and that of
    deployments."""

    trouble: str = ""
    deployments: tuple[DeploymentTrouble, ...] = ()


class ReportedWorker(msgspec.Struct, frozen=True):
    """A process that runs items, or did lately, its last report, and the time since its last
    heartbeat.
    """

    host: str
    is_alive: bool
    silent_ms: int
    report: WorkerReport


class Fleet(Protocol):
    """Processes' reports of their calls: calls that no process reports come from elsewhere."""

    async def report_to_fleet(
        self, worker_id: str, mine: Mapping[str, Present]
    ) -> Mapping[str, Mapping[str, FleetReport]]:
        """Report the calls of this process; return those of others, by deployment and process."""

    async def learned_calls(self, worker_id: str) -> Mapping[str, int]:
        """Return how many background calls each deployment took when this process last reported,
        also before a restart."""


class Notices(Protocol):
    """Short messages from one process to all others of an installation, at once and without any
    promise.

    A lost notice costs one poll interval, never correctness.
    """

    async def send_notice(self, text: str) -> None:
        """Send a notice to every process that listens; it may be lost, and then nothing is
        raised."""

    def on_notice(self, listener: Callable[[str], None]) -> None:
        """Call `listener` with every notice that arrives from now on, including this process's
        own."""


class Listener(Protocol):
    def notify(self) -> None:
        """Wake this listener alone."""

    async def wait(self, timeout_s: float) -> None:
        """Return at once if it was woken since the last wait, else when it is woken or after this
        time.
        """


class Wake(Protocol):
    """An early nudge for loops that poll anyway: losing one costs a poll interval, never
    correctness.
    """

    def notify(self) -> None:
        """Wake all listeners: something changed."""

    def listen(self) -> Listener:
        """Return a listener for one loop."""


class Wakes(msgspec.Struct, frozen=True):
    """The wake-ups of one process: an input waits to be ingested, slices wait to be leased, a job
    has come further.
    """

    inputs: Wake
    slices: Wake
    jobs: Wake
