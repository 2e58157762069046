"""The Makefile sets itself up once per lock and says what is wrong with an old Python."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.support.run_directory import REPOSITORY


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A checkout whose python only notes what it is asked to do."""
    for name in ("Makefile", "pyproject.toml", "requirements-dev.lock"):
        shutil.copy(REPOSITORY / name, tmp_path / name)
    program(tmp_path / ".venv" / "bin" / "python", f'echo "$*" >> {tmp_path}/asked')
    return tmp_path


def program(path: Path, body: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return path


def make(checkout: Path, *args: str) -> subprocess.CompletedProcess[str]:
    env = {name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MAKELEVEL", "MFLAGS")}
    return subprocess.run(
        ["make", *args], cwd=checkout, env=env, check=False, capture_output=True, text=True, timeout=60
    )


def asked(checkout: Path) -> list[str]:
    """What was installed since the last look."""
    path = checkout / "asked"
    lines = path.read_text().splitlines() if path.exists() else []
    path.unlink(missing_ok=True)
    return [_installed_by(line) for line in lines]


def _installed_by(line: str) -> str:
    if "--require-hashes" not in line:
        return "project"
    return "pip" if line.endswith("/pip.lock") else "lock"


def test_an_install_happens_once_per_lock(checkout: Path) -> None:
    assert make(checkout, "venv").returncode == 0
    assert asked(checkout) == ["pip", "lock", "project"]
    assert make(checkout, "venv").returncode == 0
    assert asked(checkout) == []
    with (checkout / "requirements-dev.lock").open("a") as lock:
        lock.write("# changed\n")
    assert make(checkout, "venv").returncode == 0
    assert asked(checkout) == ["pip", "lock", "project"]


def test_an_install_that_fails_is_tried_again(checkout: Path) -> None:
    python = checkout / ".venv" / "bin" / "python"
    working = python.read_text()
    program(python, "exit 1")
    assert make(checkout, "venv").returncode != 0
    python.write_text(working)
    assert make(checkout, "venv").returncode == 0
    assert asked(checkout) == ["pip", "lock", "project"]


def test_an_old_python_is_refused_with_what_to_do(checkout: Path) -> None:
    old = program(checkout / "python3.9", '[ "$1" = --version ] && echo "Python 3.9.1" && exit 0; exit 1')
    shutil.rmtree(checkout / ".venv")
    result = make(checkout, "venv", f"PYTHON={old}")
    assert result.returncode != 0
    assert "needs Python 3.11 or newer" in result.stderr
    assert "Python 3.9.1" in result.stderr
    assert not (checkout / ".venv").exists()


def test_serve_asks_for_an_upstream(checkout: Path) -> None:
    result = make(checkout, "serve")
    assert result.returncode != 0
    assert "make serve UPSTREAM=" in result.stderr


def test_a_wheel_needs_nothing_of_what_a_developer_runs(checkout: Path) -> None:
    planned = make(checkout, "--dry-run", "wheel")
    assert planned.returncode == 0, planned.stderr
    assert ".venv" not in planned.stdout
    assert "-r requirements-dev.lock" not in planned.stdout
    old = make(checkout, "wheel", f"PYTHON={program(checkout / 'old', 'exit 1')}")
    assert "needs Python 3.11 or newer" in old.stderr
