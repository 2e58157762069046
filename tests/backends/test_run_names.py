"""The names of runs: one process has each, it goes with its process, and a process that died says which worker it was."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from typing import Any

import pytest

from tests.contracts.blobs_places import descriptors_under
from tidegate.backends.run_names import hold_names
from tidegate.core.errors import StoreRefused


def test_a_name_has_one_holder_and_nothing_stays_of_it(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    with hold_names(runs, ["one", "two"]) as held:
        assert held.dead_worker_ids == ()
        held.note_worker("worker_1")
        taken = descriptors_under(runs)
        with pytest.raises(StoreRefused, match=rf"pid {os.getpid()}\)"), hold_names(runs, ["three", "two"]):
            pass
        assert sorted(os.listdir(runs)) == ["one", "two"], "a process that lacks one of its names holds none"
        assert descriptors_under(runs) == taken
    assert os.listdir(runs) == []
    assert descriptors_under(runs) == []


def test_each_worker_that_died_is_named_once_and_what_is_no_name_is_passed_over(tmp_path: Path) -> None:
    for name, text in (("one", "7 worker_long"), ("two", "7 worker_long"), ("three", "7"), ("four", "")):
        (tmp_path / name).write_text(f"{text}\n")
    with hold_names(tmp_path, ["one", "two", "three", "four"]) as held:
        assert held.dead_worker_ids == ("worker_long",)
        held.note_worker("w")
        assert [(tmp_path / name).read_text() for name in ("one", "four")] == [f"{os.getpid()} w\n"] * 2


def test_a_name_that_its_holder_gave_up_meanwhile_is_taken_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the open and the lock the last holder may remove the file: a lock on that one would hold no process back."""
    flock, is_removed = fcntl.flock, [False]

    def removed_first(fd: int, how: int) -> Any:
        if not is_removed[0]:
            is_removed[0] = True
            (tmp_path / "one").unlink()
        return flock(fd, how)

    monkeypatch.setattr(fcntl, "flock", removed_first)
    with hold_names(tmp_path, ["one"]):
        assert descriptors_under(tmp_path) == [str(tmp_path / "one")]
        with pytest.raises(StoreRefused), hold_names(tmp_path, ["one"]):
            pass
    assert descriptors_under(tmp_path) == []


def test_a_name_is_removed_while_it_is_still_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the file of a process that took the name in between would be removed, and a third could have it too."""
    unlink, was_held = Path.unlink, list[bool]()

    def noted(path: Path, missing_ok: bool = False) -> None:
        with path.open("rb") as stream:
            try:
                fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
                was_held.append(False)
            except BlockingIOError:
                was_held.append(True)
        unlink(path, missing_ok)

    monkeypatch.setattr(Path, "unlink", noted)
    with hold_names(tmp_path, ["one", "two"]):
        pass
    assert was_held == [True, True]
