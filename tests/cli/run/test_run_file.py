"""Where the requests of a run go, and which key goes with them."""

from __future__ import annotations

import pytest

from tidegate.cli.run.run_file import named_upstream


@pytest.mark.parametrize(
    ("upstream", "base_url", "named", "is_sent"),
    [
        (None, "http://h/v1", "http://h/v1", True),
        (None, None, None, False),
        ("https://api.openai.com/v1", None, "https://api.openai.com/v1", True),
        ("http://other/v1", None, "http://other/v1", False),
        ("http://other/v1", "http://h/v1", "http://other/v1", False),
        ("https://api.openai.com.example/v1", None, "https://api.openai.com.example/v1", False),
    ],
)
def test_the_key_of_the_environment_is_sent_to_no_other_server(
    monkeypatch: pytest.MonkeyPatch, upstream: str | None, base_url: str | None, named: str | None, is_sent: bool
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-ours")
    monkeypatch.setenv("OPENAI_BASE_URL", base_url or "")
    assert named_upstream(upstream, None) == (named, "env:OPENAI_API_KEY" if is_sent else None)
    assert named_upstream(upstream, "env:OTHER") == (named, "env:OTHER")
