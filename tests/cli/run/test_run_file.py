"""Where the requests of a run go, and which key goes with them."""

from __future__ import annotations

import pytest

from tidegate.cli.run.run_file import OWN_LIMITS, _for_ones_own_file, named_upstream
from tidegate.settings import load
from tidegate.settings.groups import Retry


@pytest.mark.parametrize(
    ("upstream", "base_url", "named", "is_sent"),
    [
        (None, "http://h/v1", "http://h/v1", True),
        (None, None, None, False),
        ("https://api.openai.com/v1", None, "https://api.openai.com/v1", True),
        ("http://other/v1", None, "http://other/v1", False),
        ("http://other/v1", "http://h/v1", "http://other/v1", False),
        ("https://api.openai.com.example/v1", None, "https://api.openai.com.example/v1", False),
        ("http://h/?https://api.openai.com/v1", None, "http://h/?https://api.openai.com/v1", False),
    ],
)
def test_the_key_of_the_environment_is_sent_to_no_other_server(
    monkeypatch: pytest.MonkeyPatch, upstream: str | None, base_url: str | None, named: str | None, is_sent: bool
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-ours")
    monkeypatch.setenv("OPENAI_BASE_URL", base_url or "")
    assert named_upstream(upstream, None) == (named, "env:OPENAI_API_KEY" if is_sent else None)
    assert named_upstream(upstream, "env:OTHER") == (named, "env:OTHER")


@pytest.mark.parametrize(("named", "used"), [({}, 900), ({"retry.budget_min": 4}, 4)])
def test_a_restarted_server_gets_all_failed_calls_at_once_unless_the_settings_bound_them(
    named: dict[str, object], used: int
) -> None:
    settings = load(None, None, {"worker.in_flight_max": 900, "http.connections_max": 900, **named}, {}).settings
    own = _for_ones_own_file(settings)
    assert (own.retry.budget_min, own.retry.backoff_ms) == (used, Retry().backoff_ms)
    assert {name: getattr(own.limits, name) for name in OWN_LIMITS} == OWN_LIMITS
