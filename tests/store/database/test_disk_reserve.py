"""Room that is kept beside an embedded store: it is given up in steps, and taken back."""

from __future__ import annotations

from pathlib import Path

import pytest

from tidegate.store.database.disk_reserve import RESERVE_BYTES, STEP_BYTES, DiskReserve


def test_the_room_is_really_taken_and_really_given_up(tmp_path: Path) -> None:
    reserve = DiskReserve(tmp_path / "store.db")
    assert (reserve.size_bytes(), reserve.give_up()) == (0, False)
    reserve.fill()
    file = tmp_path / "store.db.reserve"
    assert (reserve.size_bytes(), file.stat().st_mode & 0o777) == (RESERVE_BYTES, 0o600)
    assert file.stat().st_blocks * 512 >= RESERVE_BYTES
    assert reserve.give_up()
    assert reserve.size_bytes() == RESERVE_BYTES - STEP_BYTES
    assert file.stat().st_blocks * 512 < RESERVE_BYTES
    reserve.take_back(RESERVE_BYTES)
    assert reserve.size_bytes() == RESERVE_BYTES


def test_the_room_ends(tmp_path: Path) -> None:
    reserve = DiskReserve(tmp_path / "store.db")
    reserve.fill()
    assert [reserve.give_up() for _ in range(9)] == [True] * 8 + [False]


def test_a_disk_with_room_gives_nothing_up(tmp_path: Path) -> None:
    reserve = DiskReserve(tmp_path / "store.db")
    reserve.fill()
    reserve.make_room()
    assert reserve.size_bytes() == RESERVE_BYTES


def test_a_nearly_full_disk_keeps_a_step_for_the_next_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DiskReserve, "_free_bytes", lambda self: 3 * STEP_BYTES - self.size_bytes())
    reserve = DiskReserve(tmp_path / "store.db")
    reserve.fill()
    assert reserve.size_bytes() == 2 * STEP_BYTES
    reserve.take_back(RESERVE_BYTES)
    assert reserve.size_bytes() == 3 * STEP_BYTES, "what was there before is taken back whole"


def test_a_link_in_its_place_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "mine").write_bytes(b"x" * 10)
    (tmp_path / "store.db.reserve").symlink_to(tmp_path / "mine")
    reserve = DiskReserve(tmp_path / "store.db")
    reserve.fill()
    assert not reserve.give_up()
    assert (tmp_path / "mine").read_bytes() == b"x" * 10
