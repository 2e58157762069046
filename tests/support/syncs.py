"""What this process makes durable."""

from __future__ import annotations

import os
from pathlib import Path

import pytest


def noted_syncs(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Return the list to which every file and directory is added that is synced from now on."""
    sync, synced = os.fsync, list[Path]()

    def noted(descriptor: int) -> None:
        synced.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")))
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", noted)
    return synced
