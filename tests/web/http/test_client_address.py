"""Where a request comes from: the peer, or what proxies that the operator trusts say of it, and nothing that a caller wrote."""

from __future__ import annotations

import pytest
from starlette.datastructures import Headers

from tidegate.core.keys import addresses_text
from tidegate.web.http.client_address import client_address, is_allowed, networks_of, owner_of

PROXIES = networks_of(["10.0.0.0/8", "192.0.2.1", "fd00::/8"])


@pytest.mark.parametrize(
    ("peer", "forwarded", "address"),
    [
        ("203.0.113.5", "198.51.100.1", "203.0.113.5"),
        ("10.0.0.1", "", "10.0.0.1"),
        ("10.0.0.1", "198.51.100.1", "198.51.100.1"),
        ("10.0.0.1", "1.2.3.4, 198.51.100.1", "198.51.100.1"),
        ("10.0.0.1", "1.2.3.4, 198.51.100.1, 192.0.2.1, 10.9.9.9", "198.51.100.1"),
        ("10.0.0.1", "10.0.0.2, 10.0.0.3", "10.0.0.2"),
        ("10.0.0.1", "198.51.100.1, nonsense", "10.0.0.1"),
        ("10.0.0.1", "198.51.100.1:4711", "10.0.0.1"),
        ("10.0.0.1", ",,,", "10.0.0.1"),
        ("::ffff:10.0.0.1", "198.51.100.1", "198.51.100.1"),
        ("fd00::1", "2001:db8::7", "2001:db8::7"),
        ("10.0.0.1", ", ".join(["198.51.100.1"] + ["10.0.0.9"] * 5_000), "10.0.0.9"),
        ("", "198.51.100.1", ""),
    ],
)
def test_the_last_address_that_is_no_trusted_proxy(peer: str, forwarded: str, address: str) -> None:
    headers = Headers({"x-forwarded-for": forwarded} if forwarded else {})
    assert client_address(peer, headers, PROXIES) == address
    assert client_address(peer, headers, ()) == peer


@pytest.mark.parametrize(
    ("address", "networks", "allowed"),
    [
        ("198.51.100.7", [], True),
        ("", [], True),
        ("198.51.100.7", ["198.51.100.7"], True),
        ("198.51.100.8", ["198.51.100.7"], False),
        ("198.51.100.8", ["10.0.0.0/8", "198.51.100.0/24"], True),
        ("::ffff:198.51.100.8", ["198.51.100.0/24"], True),
        ("2001:db8:1::9", ["2001:db8:1::/48"], True),
        ("2001:db8:2::9", ["2001:db8:1::/48"], False),
        ("198.51.100.7", ["::/0"], False),
        ("", ["0.0.0.0/0"], False),
        ("nonsense", ["0.0.0.0/0", "::/0"], False),
    ],
)
def test_where_a_key_may_be_used_from(address: str, networks: list[str], allowed: bool) -> None:
    assert is_allowed(address, addresses_text(networks)) is allowed


def test_several_headers_are_one_list() -> None:
    lines = [(b"x-forwarded-for", b"1.2.3.4"), (b"x-forwarded-for", b"198.51.100.1"), (b"x-forwarded-for", b"10.2.2.2")]
    assert client_address("10.0.0.1", Headers(raw=lines), PROXIES) == "198.51.100.1"


def test_failures_of_an_ipv6_network_count_together() -> None:
    assert owner_of("2001:db8:1:2::7") == owner_of("2001:db8:1:2:ffff::1") != owner_of("2001:db8:1:3::7")
    assert owner_of("::ffff:198.51.100.1") == owner_of("198.51.100.1") == "198.51.100.1"
    assert owner_of("") == ""
