"""Result files: durable under their name, and never half written."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import uvloop

from tests.support.syncs import noted_syncs
from tidegate.cli.terminal import results
from tidegate.core.errors import StoreUnavailable


def test_results_are_durable_before_they_have_their_name_and_so_is_the_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def chunks() -> AsyncIterator[bytes]:
        yield b"{}\n"

    synced = noted_syncs(monkeypatch)
    assert uvloop.run(results.save(chunks(), tmp_path / "results.jsonl")) == 3
    partial, folder = synced
    assert (partial.parent, folder) == (tmp_path, tmp_path)
    assert partial.name.startswith(".results.jsonl.")
    assert [path.name for path in tmp_path.iterdir()] == ["results.jsonl"]


def test_results_that_break_off_leave_the_file_of_before_and_nothing_else(tmp_path: Path) -> None:
    async def chunks() -> AsyncIterator[bytes]:
        yield b"{}\n"
        raise StoreUnavailable("the store is away")

    target = tmp_path / "results.jsonl"
    target.write_bytes(b"before")
    with pytest.raises(StoreUnavailable):
        uvloop.run(results.save(chunks(), target))
    assert [(path.name, path.read_bytes()) for path in tmp_path.iterdir()] == [("results.jsonl", b"before")]
