"""Settings from a file, as most tests of this room read them."""

from __future__ import annotations

from pathlib import Path

from tidegate.settings import load
from tidegate.settings.layers import Loaded


def load_text(directory: Path, text: str, environ: dict[str, str] | None = None) -> Loaded:
    """Load the settings that a file with this text gives."""
    path = directory / "tidegate.yaml"
    path.write_text(text)
    return load(path, None, {}, environ or {})
