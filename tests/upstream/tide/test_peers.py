"""What other processes have at a deployment: the store's rows, the notices since, and which of the two is later."""

from __future__ import annotations

import json

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.support.ports import HandClock
from tidegate.core.ports import FleetReport, Present
from tidegate.upstream.tide.peers import (
    COUNT_MAX,
    NOTICE_CHARS_MAX,
    PEERS_MAX,
    REPORT_VALID_MS,
    Notice,
    Peers,
    Users,
    decode_notice,
    encode_notices,
)

API = Present(0, 0, 2, 1, True)


@pytest.fixture
def clock() -> HandClock:
    return HandClock()


@pytest.fixture
def peers(clock: HandClock) -> Peers:
    return Peers(clock)


def test_a_notice_counts_at_once_and_until_a_later_row_is_read(peers: Peers, clock: HandClock) -> None:
    peers.read({"api": FleetReport(Present(0, 0, 0, 0, True), 10)})
    peers.notice("api", Users(3, 2))
    assert (peers.present.interactive, peers.present.interactive_awaiting) == (3, 2)
    clock.advance(100)
    peers.read({"api": FleetReport(Present(0, 0, 0, 0, True), 200)})
    assert peers.present.interactive == 3, "the row is older than the notice"
    clock.advance(400)
    peers.read({"api": FleetReport(API, 100)})
    assert peers.present == API, "the row is later: the notice of the end was lost"


def test_every_process_counts_by_itself(peers: Peers) -> None:
    peers.read({"api": FleetReport(API, 0), "api2": FleetReport(API, 0), "worker": FleetReport(Present(1, 7), 0)})
    peers.notice("api", Users(0, 0))
    assert peers.present == Present(1, 7, 2, 1, True)


def test_a_process_that_only_sent_notices_counts_until_it_is_silent(peers: Peers, clock: HandClock) -> None:
    peers.notice("api", Users(1, 1))
    assert peers.present == Present(0, 0, 1, 1, True)
    clock.advance(1_000)
    peers.read({})
    assert peers.present.interactive_awaiting == 1
    clock.advance(2_500)
    peers.read({})
    assert peers.present == Present(has_gateway=True)


def test_a_gateway_that_has_no_calls_is_there_all_the_same_and_not_for_ever(peers: Peers, clock: HandClock) -> None:
    assert not peers.present.has_gateway
    peers.read({"api": FleetReport(API, 0)})
    clock.advance(60_000)
    peers.read({})
    assert peers.present == Present(has_gateway=True), "it will report a user at once"
    clock.advance(600_000)
    peers.read({})
    assert peers.present == Present()


def test_a_killed_process_ends_though_its_last_notice_reported_a_waiting_user(peers: Peers, clock: HandClock) -> None:
    peers.read({"api": FleetReport(Present(has_gateway=True), 400)})
    peers.notice("api", Users(1, 1))
    clock.advance(2_800)
    peers.read({})
    clock.advance(500)
    peers.read({})
    assert peers.present == Present(has_gateway=True)


def test_while_the_store_is_away_notices_still_count_and_old_rows_keep_no_call_waiting(
    peers: Peers, clock: HandClock
) -> None:
    peers.read({"api": FleetReport(API, 0), "worker": FleetReport(Present(1, 7), 0)})
    clock.advance(4_000)
    assert peers.present == Present(1, 7, 0, 0, True)
    assert not peers.is_current
    peers.notice("api", Users(2, 1))
    assert peers.present == Present(1, 7, 2, 1, True)


def test_notices_are_worth_sending_while_a_worker_was_seen_lately_or_may_be_there(
    peers: Peers, clock: HandClock
) -> None:
    assert peers.has_listeners
    peers.read({"api": FleetReport(API, 0)})
    assert not peers.has_listeners
    peers.read({"worker": FleetReport(Present(1, 7), 0)})
    clock.advance(5_000)
    peers.read({})
    assert peers.has_listeners
    clock.advance(6_000)
    peers.read({})
    assert not peers.has_listeners
    clock.advance(4_000)
    assert peers.has_listeners, "the store was not read for long"


NAMES = st.text(min_size=1, max_size=300)


@given(st.dictionaries(NAMES, st.tuples(st.integers(0, 1_000_000), st.integers(0, 1_000_000)), max_size=60))
@example({f"{number}{'n' * 290}": (number, 1) for number in range(30)})
def test_notices_come_back_as_they_were_sent_and_fit_the_database(users: dict[str, tuple[int, int]]) -> None:
    sent = {name: Users(max(two), min(two)) for name, two in users.items()}
    texts = list(encode_notices("worker_1", sent))
    assert all(len(text.encode()) < 7_900 for text in texts)
    received: dict[str, Users] = {}
    for text in texts:
        notice = decode_notice(text)
        assert notice is not None
        assert notice.process == "worker_1"
        received |= notice.users
    assert received == sent
    assert len(texts) <= 1 + sum(len(name) + 16 for name in sent) // (NOTICE_CHARS_MAX // 8)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "null",
        "{}",
        "\udcff",
        json.dumps({"process": "a", "users": {"one": [1]}}),
        json.dumps({"process": "a", "users": {"one": [-1, -1]}}),
        json.dumps({"process": "a", "users": {"one": [1, 2]}}),
        json.dumps({"process": "a", "users": {"one": [10**12, 0]}}),
        json.dumps({"process": "a", "users": {"one": ["1", "0"]}}),
        json.dumps({"process": 1, "users": {}}),
    ],
)
def test_what_is_no_notice_is_ignored(text: str) -> None:
    assert decode_notice(text) is None


def test_an_empty_notice_says_nothing() -> None:
    assert decode_notice('{"process": "a", "users": {}}') == Notice("a", {})
    assert list(encode_notices("a", {})) == []


def test_reports_and_notices_count_until_the_moment_at_which_they_are_old(peers: Peers, clock: HandClock) -> None:
    peers.read({"api": FleetReport(API, 0)})
    peers.notice("other", Users(4, 3))
    clock.advance(REPORT_VALID_MS - 1)
    assert peers.is_current
    assert (peers.present.interactive, peers.present.interactive_awaiting) == (6, 4)
    clock.advance(1)
    assert not peers.is_current
    assert (peers.present.interactive, peers.present.interactive_awaiting) == (0, 0)


def test_a_row_that_is_as_old_as_the_notice_does_not_take_its_place(peers: Peers, clock: HandClock) -> None:
    peers.notice("api", Users(5, 5))
    clock.advance(100)
    peers.read({"api": FleetReport(API, 100)})
    assert peers.present.interactive == 5


def test_a_process_that_is_not_in_the_store_yet_is_kept_for_as_long_as_its_notice_counts(
    peers: Peers, clock: HandClock
) -> None:
    peers.notice("api", Users(1, 1))
    clock.advance(REPORT_VALID_MS - 1)
    peers.read({})
    assert peers.present.interactive == 1
    clock.advance(1)
    assert peers.present.interactive == 0


def test_only_so_many_processes_are_remembered(peers: Peers) -> None:
    for number in range(PEERS_MAX + 1):
        peers.notice(f"api-{number}", Users(1, 0))
    assert peers.present.interactive == PEERS_MAX
    peers.notice("api-0", Users(3, 0))
    assert peers.present.interactive == PEERS_MAX + 2, "a notice of a known one counts all the same"


@pytest.mark.parametrize(
    ("users", "is_sane"),
    [((COUNT_MAX, COUNT_MAX), True), ((COUNT_MAX + 1, 0), False), ((2, 3), False), ((2, -1), False), ((0, 0), True)],
)
def test_a_notice_with_impossible_counts_is_none(users: tuple[int, int], is_sane: bool) -> None:
    text = json.dumps({"process": "api", "users": {"gpu": users}})
    assert (decode_notice(text) is not None) is is_sane
