"""Objects of a bucket as inputs and results of a run: which of them are read, and what a run overwrites."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tidegate.cli.run import remote_files
from tidegate.core.ids import item_id

OURS = "batch_" + "a" * 22
RESULT = f'{{"id":"{item_id(OURS, 7)}","custom_id":"c"}}\n'.encode()


class Bucket:
    """A bucket that lists two keys at once."""

    def __init__(self, objects: dict[str, bytes]) -> None:
        self.objects = objects

    async def head(self, key: str) -> Any:
        return SimpleNamespace(size_bytes=len(self.objects[key])) if key in self.objects else None

    async def read(self, key: str, at: int, count: int) -> bytes:
        return self.objects[key][at : at + count]

    async def chunks(self, key: str, at: int, count: int) -> AsyncIterator[bytes]:
        for start in range(at, at + count, 5):
            yield self.objects[key][start : start + 5]

    async def copy(self, key: str, to: str) -> None:
        self.objects[to] = self.objects[key]

    async def keys_after(self, after: str, count_max: int) -> tuple[list[str], bool]:
        keys = sorted(key for key in self.objects if key > after)
        return keys[:2], len(keys) > 2


@pytest.mark.parametrize(
    ("stored", "is_written", "kept"),
    [
        ({}, True, []),
        ({"k": b""}, True, []),
        ({"k": b"result one\nresult two\n"}, False, []),
        ({"k": b"result one\n"}, True, ["k.1.old"]),
        ({"k": b"other", "k.1.old": b"before", "k.2.old": b"before"}, True, ["k.3.old"]),
        ({"k": RESULT}, True, []),
    ],
)
def test_only_results_of_this_run_are_overwritten(
    tmp_path: Path, stored: dict[str, bytes], is_written: bool, kept: list[str]
) -> None:
    (tmp_path / "results").write_bytes(b"result one\nresult two\n")
    bucket: Any = Bucket(dict(stored))
    setting_aside = remote_files._set_aside(bucket, "k", tmp_path / "results", [OURS], "s3://b/k")
    assert asyncio.run(setting_aside) == is_written
    assert [key for key in bucket.objects if key not in stored] == kept
    assert {key: bucket.objects[key] for key in stored} == stored, "what was kept before stays"


def test_a_pattern_finds_its_objects_on_every_page() -> None:
    bucket: Any = Bucket(dict.fromkeys(("a.jsonl", "b.txt", "c.txt", "d.txt", "e.jsonl", "f.jsonl"), b""))
    assert asyncio.run(remote_files._matching(bucket, "*.jsonl")) == ["a.jsonl", "e.jsonl", "f.jsonl"]


def test_files_are_joined_line_by_line_though_one_ends_without_a_newline(tmp_path: Path) -> None:
    files = []
    for number, content in enumerate((b"one\ntwo", b"", b"three\n", b"four")):
        path = tmp_path / f"{number}" / "in.jsonl"
        path.parent.mkdir()
        path.write_bytes(content)
        files.append(remote_files.SourceFile(path, f"place {number}"))
    found = remote_files.joined(files, tmp_path / "joined")
    assert (tmp_path / "joined").read_bytes() == b"one\ntwo\nthree\nfour\n"
    assert found.starts == (0, 2, 2, 3)
    assert found.names == ("place 0", "place 1", "place 2", "place 3"), "their names alone would be the same"
