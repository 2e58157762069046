"""The calls of other processes at one deployment, as they report them to the store and in notices.

- The store is read twice a second and decides which processes are alive.
- A notice reports at once how many interactive calls one process has. It counts until a later row
  of that process is read.
- Ages decide which of the two is later, so processes never compare clocks.

This module sends nothing.
"""

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import msgspec

from tidegate.core.ports import Clock, FleetReport, Present

# A report of another process counts this long. After that the process may be gone or the store out
# of reach.
REPORT_VALID_MS = 3_000.0
# Notices are sent for this long after the last worker was seen, because a worker may pause for a
# moment.
WORKERS_MS = 10_000.0
# A gateway counts this long after its last interactive call. While it counts, silence means that no
# user is there.
GATEWAY_MS = 600_000.0
PEERS_MAX = 1_000
COUNT_MAX = 1_000_000
NOTICE_CHARS_MAX = 6_000


class Users(NamedTuple):
    """The interactive calls of one process at one deployment, and those without a first token."""

    interactive: int
    awaiting: int


NO_USERS = Users(0, 0)


class Notice(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A notice of how many users one process has, by deployment."""

    process: str
    users: dict[str, Users]


def encode_notices(process: str, users: Mapping[str, Users]) -> Iterator[str]:
    """Yield these users in as few notices as possible."""
    some: dict[str, Users] = {}
    chars = 0
    for name, one in users.items():
        if some and chars + len(name) > NOTICE_CHARS_MAX // 4:
            yield msgspec.json.encode(Notice(process, some)).decode()
            some, chars = {}, 0
        some[name] = one
        # A letter of a name may take several bytes, and the numbers take some too.
        chars += len(name) + 16
    if some:
        yield msgspec.json.encode(Notice(process, some)).decode()


def decode_notice(text: str) -> Notice | None:
    """Return the notice; None for any other text, because any user of the database can send one."""
    try:
        notice = msgspec.json.decode(text, type=Notice)
    except (msgspec.MsgspecError, UnicodeError):
        return None
    sane = all(0 <= one.awaiting <= one.interactive <= COUNT_MAX for one in notice.users.values())
    return notice if sane else None


class _KnownPeer(msgspec.Struct):
    present: Present
    reported_ms: float
    noticed_ms: float | None = None
    users: Users = NO_USERS


class Peers:
    """The other processes at one deployment, as this process knows them."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._peers: dict[str, _KnownPeer] = {}
        # The number of other processes that send background calls there.
        self.workers = 0
        self._read_ms: float | None = None
        self._workers_ms: float | None = None
        self._gateway_ms: float | None = None

    def read(self, rows: Mapping[str, FleetReport]) -> None:
        """Take over the store's reports of all processes that reported lately."""
        now_ms = self._read_ms = self._clock.monotonic_ms()
        before, self._peers = self._peers, {}
        for process, reported in rows.items():
            peer = _KnownPeer(reported.present, now_ms - reported.age_ms)
            old = before.get(process)
            if old is not None:
                peer.noticed_ms, peer.users = old.noticed_ms, old.users
            self._peers[process] = peer
            if reported.present.workers:
                self._workers_ms = now_ms
            if reported.present.has_gateway:
                self._gateway_ms = now_ms
        for process, old in before.items():
            # A process that sent a notice a moment ago, but is not in the store, is about to be
            # there.
            if process not in rows and old.noticed_ms is not None and now_ms - old.noticed_ms < REPORT_VALID_MS:
                self._peers[process] = _KnownPeer(Present(has_gateway=True), old.noticed_ms, old.noticed_ms, old.users)
        self.workers = sum(peer.present.workers for peer in self._peers.values())

    def notice(self, process: str, users: Users) -> None:
        """Take over a notice of how many users another process has now."""
        now_ms = self._gateway_ms = self._clock.monotonic_ms()
        peer = self._peers.get(process)
        if peer is None:
            if len(self._peers) >= PEERS_MAX:
                return
            peer = self._peers[process] = _KnownPeer(Present(has_gateway=True), now_ms)
        peer.noticed_ms, peer.users = now_ms, users

    @property
    def present(self) -> Present:
        """Return the sum over the other processes.

        Users that no process reported lately do not count.
        """
        now_ms = self._clock.monotonic_ms()
        is_current = self.is_current
        calls = interactive = awaiting = 0
        # A gateway without calls sends nothing. It is still there, and will send a notice when a
        # user comes.
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
        """Return whether the store was read lately."""
        return self._read_ms is not None and self._clock.monotonic_ms() - self._read_ms < REPORT_VALID_MS

    @property
    def has_listeners(self) -> bool:
        """Return whether a notice may be useful.

        It may if a worker was seen elsewhere lately, or if the store was not read lately.
        """
        if not self.is_current:
            return True
        return self._workers_ms is not None and self._clock.monotonic_ms() - self._workers_ms < WORKERS_MS
