"""The mark of a directory's host: who may use it, and who may take it over."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tidegate.backends.one_host import MARK, claim
from tidegate.core.errors import StoreRefused

LONG, SHORT, MACHINE = "name:a-container-with-a-long-name", "name:b", "machine:" + "0" * 32


def test_a_container_with_another_name_takes_the_directory_over_once_no_process_uses_it(tmp_path: Path) -> None:
    users = [claim(tmp_path, LONG) for _ in range(2)]
    for user in users:
        with pytest.raises(StoreRefused, match="belongs to another host"):
            claim(tmp_path, SHORT)
        os.close(user)
    os.close(claim(tmp_path, SHORT))
    assert (tmp_path / MARK).read_text() == f"{SHORT}\n"


def test_another_machine_never_takes_a_directory_over(tmp_path: Path) -> None:
    os.close(claim(tmp_path, MACHINE))
    with pytest.raises(StoreRefused, match="belongs to another host"):
        claim(tmp_path, MACHINE.replace("0", "1"))
    os.close(claim(tmp_path, MACHINE))
