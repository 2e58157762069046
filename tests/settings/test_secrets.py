"""Secrets come from the environment or a file, and no message, warning or repr ever shows one."""

from pathlib import Path

import pytest

from tests.settings.conftest import load_text
from tidegate.core.errors import SettingsError
from tidegate.settings import load

KEY = "sk-very-secret-canary"


def test_a_secret_from_the_environment_a_file_or_a_variable(tmp_path: Path) -> None:
    (tmp_path / "key").write_text(KEY + "\n")
    for value, environ in ((f"file:{tmp_path / 'key'}", {}), ("env:K", {"K": KEY})):
        loaded = load(None, None, {"upstream.api_key": value}, environ)
        assert loaded.settings.upstream.api_key is not None
        assert loaded.settings.upstream.api_key.reveal() == KEY
        assert loaded.warnings == ()
        assert KEY not in repr(loaded)
    loaded = load(None, None, {}, {"TIDEGATE_UPSTREAM_API_KEY": KEY})
    assert loaded.settings.upstream.api_key is not None
    assert loaded.settings.upstream.api_key.reveal() == KEY
    assert loaded.warnings == ()


def test_a_variable_of_our_prefix_may_hold_a_secret_that_the_file_names(tmp_path: Path) -> None:
    text = "upstream: {api_key: 'env:TIDEGATE_MY_KEY'}"
    assert load_text(tmp_path, text, {"TIDEGATE_MY_KEY": KEY}).settings.upstream.api_key is not None
    on_the_command_line = {"remote.key": "env:TIDEGATE_MY_KEY"}
    assert load(None, None, on_the_command_line, {"TIDEGATE_MY_KEY": KEY}).settings.remote.key is not None


def test_a_literal_works_with_a_warning_that_does_not_repeat_it(tmp_path: Path) -> None:
    loaded = load_text(tmp_path, f"upstream:\n  api_key: {KEY}\n")
    assert loaded.settings.upstream.api_key is not None
    assert loaded.settings.upstream.api_key.reveal() == KEY
    assert load(tmp_path / "tidegate.yaml", None, {}, {}, calls_models=False).warnings == loaded.warnings
    assert loaded.warnings == (
        f"upstream.api_key [{tmp_path / 'tidegate.yaml'}:2] holds a secret in plain text; use env:NAME or file:PATH instead.",
    )


def test_a_store_url_is_a_secret_only_with_a_password() -> None:
    plain = load(None, None, {"store.url": "postgresql://tide@db/tide", "blobs.url": "s3://b/p"}, {})
    assert plain.warnings == ()
    assert plain.settings.store.is_postgresql
    loaded = load(None, None, {"store.url": f"postgresql://tide:{KEY}@db/tide", "blobs.url": "s3://b/p"}, {})
    assert len(loaded.warnings) == 1
    assert KEY not in repr(loaded)
    assert KEY not in loaded.warnings[0]


@pytest.mark.parametrize(
    "overrides",
    [
        {"store.url": f"mysql://u:{KEY}@h/d"},
        {"redis.url": f"http://:{KEY}@h:6379/0"},
        {"upstream.api_key": f"{KEY}\n{KEY}"},
        {"upstream.url": f"http://me:{KEY}@h/v1"},
        {"blobs.secret_access_key": KEY},
    ],
)
def test_a_refusal_never_shows_the_secret(overrides: dict[str, object]) -> None:
    with pytest.raises(SettingsError) as caught:
        load(None, None, overrides, {})
    assert KEY not in str(caught.value)


@pytest.mark.parametrize("content", [b"", b"\n", b"two\nlines", b"\xff\xfe", b"x" * 70_000])
def test_a_secret_file_must_hold_one_line(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "key").write_bytes(content)
    with pytest.raises(SettingsError, match="names the file"):
        load(None, None, {"upstream.api_key": f"file:{tmp_path / 'key'}"}, {})
