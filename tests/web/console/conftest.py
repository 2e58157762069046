"""The console over a server of each test's own, with the settings of its module."""

from __future__ import annotations

from typing import Any

import pytest

from tests.web.console.world import Console


@pytest.fixture
def console(start_web: Any, web_settings: dict[str, Any]) -> Console:
    return Console(start_web(**web_settings))
