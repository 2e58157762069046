"""The file of settings is looked at again and again: what could not be read is read once it can be."""

from __future__ import annotations

from pathlib import Path

import pytest

from tidegate.core.errors import SettingsError
from tidegate.settings import Settings
from tidegate.settings.reload import SettingsFile


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
