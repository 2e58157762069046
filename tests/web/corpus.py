"""Reads the corpus of inputs that other people will try: one case a line, with short names for what is long."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).parent.parent / "corpus" / "http"
_LONG = re.compile(r"\$([0-9]+)(HEADERS)?")


def cases(name: str) -> list[Any]:
    """Every case of a file as a parameter of a test, under its own name."""
    lines = (FOLDER / f"{name}.jsonl").read_text("utf-8").split("\n")
    found = [json.loads(line) for line in lines if line]
    assert len({case["name"] for case in found}) == len(found), f"{name}.jsonl names two cases alike"
    return [pytest.param(case, id=case["name"].replace(" ", "_")) for case in found]


def spelled(text: str, names: dict[str, str] | None = None) -> str:
    """`$FILE` as the id it stands for, `$300` as 300 letters, `$96HEADERS` as 96 headers."""
    for name, value in (names or {}).items():
        text = text.replace(f"${name}", value)

    def long(match: re.Match[str]) -> str:
        count = int(match[1])
        return "".join(f"X-{n}: y\r\n" for n in range(count)) if match[2] else "k" * count

    return _LONG.sub(long, text)
