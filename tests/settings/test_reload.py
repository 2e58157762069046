"""The file of settings is looked at again and again: what could not be read is read once it can be."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace

from tests.settings.conftest import load_text
from tidegate.core.errors import SettingsError
from tidegate.settings import Settings, load
from tidegate.settings.reload import RELOADED, SettingsFile, reloaded


def test_a_file_that_could_not_be_read_is_read_when_it_can_be(tmp_path: Path) -> None:
    """Neither the file nor its time changes when its disk comes back, or when a key that it names appears."""
    path, wrong, settings = tmp_path / "c.yaml", [True], Settings()
    path.write_text("{}")

    def read() -> Settings:
        if wrong:
            raise SettingsError("its disk is gone")
        return settings

    watched = SettingsFile(path, read)
    path.write_text("{ }")
    assert watched.news() is None, "it may still be written"
    for _ in range(2):
        with pytest.raises(SettingsError):
            watched.news()
    wrong.clear()
    assert watched.news() is settings
    assert watched.news() is None, "used once"


def test_models_routes_and_what_tenants_may_use_change_without_a_restart(tmp_path: Path) -> None:
    text = """\
models: {m: {deployments: [{url: 'http://h/v1'}]}}
resources: {chat: {model: m}}
tiers: {gold: 2}
tenants: {acme: {tier: gold}}
budgets: {key: [{period: day, requests: 1}]}
"""
    used, found = load(None, None, {}, {}).settings, load_text(tmp_path, text).settings
    assert reloaded(used, found) == (found, [])


def test_what_may_change_is_used_and_the_rest_is_named_as_waiting() -> None:
    used = load(None, None, {}, {}).settings
    found = load(None, None, {}, {"TIDEGATE_UPSTREAM_URL": "http://h/v1", "TIDEGATE_SERVER_PORT": "9"}).settings
    for name in RELOADED:
        found = replace(found, **{name: getattr(used, name)})
    assert reloaded(used, used) == (used, [])
    now, waiting = reloaded(used, found)
    assert now == used
    assert waiting == ["server", "upstream"]
