"""What the other processes of an installation have at one deployment: what each reported to the store, and since then in a notice.

The store is read twice a second and is the truth: it says which processes live. A notice says at once how many interactive calls one
process has; it counts until a later row of that process is read. Ages decide which of the two is later, so no two processes compare
clocks. This module sends nothing.
"""

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import msgspec

from tidegate.core.ports import Clock, FleetReport, Present

# The report of another process counts for so long; then it may be gone, or the store may be out of reach.
REPORT_VALID_MS = 3_000.0
# Notices go out for so long after the last worker was seen: one that has nothing to send for a moment is not gone.
WORKERS_MS = 10_000.0
# So long after the last interactive call passed a gateway, its silence means that no user is there.
GATEWAY_MS = 600_000.0
PEERS_MAX = 1_000
COUNT_MAX = 1_000_000
NOTICE_CHARS_MAX = 6_000


class Users(NamedTuple):
    """The interactive calls of one process at one deployment, and how many of them wait for their first token."""

    interactive: int
    awaiting: int


NO_USERS = Users(0, 0)


class Notice(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One process says what users it has, by deployment."""

    process: str
    users: dict[str, Users]


def encode_notices(process: str, users: Mapping[str, Users]) -> Iterator[str]:
    """Return these as few notices as they fit into."""
    some: dict[str, Users] = {}
    chars = 0
    for name, one in users.items():
        if some and chars + len(name) > NOTICE_CHARS_MAX // 4:
            yield msgspec.json.encode(Notice(process, some)).decode()
            some, chars = {}, 0
        some[name] = one
        # A name may be of signs that take several bytes each, and the numbers take some too.
        chars += len(name) + 16
    if some:
        yield msgspec.json.encode(Notice(process, some)).decode()


def decode_notice(text: str) -> Notice | None:
    """Return the notice; None for anything that is none, which anybody who reaches the database could have sent."""
    try:
        notice = msgspec.json.decode(text, type=Notice)
    except (msgspec.MsgspecError, UnicodeError):
        return None
    sane = all(0 <= one.awaiting <= one.interactive <= COUNT_MAX for one in notice.users.values())
    return notice if sane else None


class _Peer(msgspec.Struct):
    present: Present
    reported_ms: float
    noticed_ms: float | None = None
    users: Users = NO_USERS


class Peers:
    """The other processes at one deployment, as this process knows them."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._peers: dict[str, _Peer] = {}
        # How many other processes send batch calls there.
        self.workers = 0
        self._read_ms: float | None = None
        self._workers_ms: float | None = None
        self._gateway_ms: float | None = None

    def read(self, rows: Mapping[str, FleetReport]) -> None:
        """Take over what the store has of all processes that reported lately."""
        now_ms = self._read_ms = self._clock.monotonic_ms()
        before, self._peers = self._peers, {}
        for process, reported in rows.items():
            peer = _Peer(reported.present, now_ms - reported.age_ms)
            old = before.get(process)
            if old is not None:
                peer.noticed_ms, peer.users = old.noticed_ms, old.users
            self._peers[process] = peer
            if reported.present.workers:
                self._workers_ms = now_ms
            if reported.present.has_gateway:
                self._gateway_ms = now_ms
        for process, old in before.items():
            # One that is not in the store yet, but spoke a moment ago, is about to be.
            if process not in rows and old.noticed_ms is not None and now_ms - old.noticed_ms < REPORT_VALID_MS:
                self._peers[process] = _Peer(Present(has_gateway=True), old.noticed_ms, old.noticed_ms, old.users)
        self.workers = sum(peer.present.workers for peer in self._peers.values())

    def notice(self, process: str, users: Users) -> None:
        """Take over a notice of how many users another process has now."""
        now_ms = self._gateway_ms = self._clock.monotonic_ms()
        peer = self._peers.get(process)
        if peer is None:
            if len(self._peers) >= PEERS_MAX:
                return
            peer = self._peers[process] = _Peer(Present(has_gateway=True), now_ms)
        peer.noticed_ms, peer.users = now_ms, users

    @property
    def present(self) -> Present:
        """Sum over all processes. Users that no process reported lately do not count."""
        now_ms = self._clock.monotonic_ms()
        is_current = self.is_current
        calls = interactive = awaiting = 0
        # A gateway without calls says nothing more: it is there all the same, and will say when somebody comes.
        has_gateway = self._gateway_ms is not None and now_ms - self._gateway_ms < GATEWAY_MS
        for peer in self._peers.values():
            present = peer.present
            calls += present.calls
            if (
                peer.noticed_ms is not None
                and peer.noticed_ms >= peer.reported_ms
                and now_ms - peer.noticed_ms < REPORT_VALID_MS
            ):
                interactive += peer.users.interactive
                awaiting += peer.users.awaiting
            elif is_current:
                interactive += present.interactive
                awaiting += present.interactive_awaiting
        return Present(self.workers, calls, interactive, awaiting, has_gateway)

    @property
    def is_current(self) -> bool:
        """Whether the store was read lately."""
        return self._read_ms is not None and self._clock.monotonic_ms() - self._read_ms < REPORT_VALID_MS

    @property
    def has_listeners(self) -> bool:
        """Return whether a notice may be of use: a worker was seen elsewhere lately, or the store was not read yet."""
        if not self.is_current:
            return True
        return self._workers_ms is not None and self._clock.monotonic_ms() - self._workers_ms < WORKERS_MS
