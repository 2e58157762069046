"""Result files: durable under their name, and never half written."""

from __future__ import annotations

import io
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

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


def test_results_of_another_run_behind_a_link_are_set_aside_and_the_link_stays(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    link, target = tmp_path / "results.jsonl", tmp_path / "there" / "target.jsonl"
    target.write_bytes(b"other")
    link.symlink_to(target)
    results.set_aside(link)
    assert link.is_symlink()
    assert not target.exists()
    assert (tmp_path / "results.jsonl.1.old").read_bytes() == b"other"


def test_a_stream_that_takes_a_few_bytes_at_a_time_gets_all_of_them() -> None:
    taken: list[bytes] = []

    class Narrow(io.BytesIO):
        def write(self, data: Any, /) -> int:
            taken.append(bytes(data[:3]))
            return len(taken[-1])

    async def chunks() -> AsyncIterator[bytes]:
        yield b"0123456"
        yield b"789"

    assert uvloop.run(results._copy(chunks(), Narrow(), "stdout")) == 10
    assert b"".join(taken) == b"0123456789"
