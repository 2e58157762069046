"""Who is this very machine where no key protects the door: every sign must say so, and one that says otherwise is enough."""

from __future__ import annotations

import pytest
from starlette.datastructures import Headers

from tidegate.core.errors import ApiProblem
from tidegate.web.http.loopback import FORWARDED, is_local_program, is_sent_without_a_network, refuse_remote

LOCAL = {"host": "localhost:8080", "origin": "http://127.0.0.1:3000", "sec-fetch-site": "same-origin"}


@pytest.mark.parametrize("client", ["127.0.0.1", "::1", "::ffff:127.0.0.1"])
@pytest.mark.parametrize("headers", [{}, LOCAL, {"host": "[::1]:80"}, {"sec-fetch-site": "none"}])
def test_a_program_on_this_machine_is_served(client: str, headers: dict[str, str]) -> None:
    assert is_local_program(client, Headers(headers))
    refuse_remote(client, Headers(headers))


@pytest.mark.parametrize(
    ("client", "headers"),
    [
        ("10.0.0.7", LOCAL),
        ("", LOCAL),
        ("127.0.0.1", LOCAL | {"host": "evil.example"}),
        ("127.0.0.1", LOCAL | {"host": "localhost.evil.example"}),
        ("127.0.0.1", LOCAL | {"host": "[::"}),
        ("127.0.0.1", LOCAL | {"origin": "https://evil.example"}),
        ("127.0.0.1", LOCAL | {"origin": "null"}),
        ("127.0.0.1", LOCAL | {"sec-fetch-site": "cross-site"}),
        ("127.0.0.1", LOCAL | {"sec-fetch-site": "same-site"}),
    ],
)
def test_one_sign_of_another_place_is_enough(client: str, headers: dict[str, str]) -> None:
    assert not is_local_program(client, Headers(headers))
    with pytest.raises(ApiProblem) as refused:
        refuse_remote(client, Headers(headers))
    assert (refused.value.status, refused.value.code) == (403, "local_only")


@pytest.mark.parametrize("name", FORWARDED)
def test_what_a_proxy_passes_on_comes_from_elsewhere(name: str) -> None:
    with pytest.raises(ApiProblem):
        refuse_remote("127.0.0.1", Headers(LOCAL | {name: "1"}))
    assert not is_sent_without_a_network("10.0.0.7", Headers({"host": "localhost", name: "1"}))
    assert is_sent_without_a_network("10.0.0.7", Headers({"host": "localhost"}))
    assert not is_sent_without_a_network("10.0.0.7", Headers({"host": "10.0.0.1"}))
