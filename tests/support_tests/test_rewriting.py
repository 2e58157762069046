"""What a second process does beside the collection is what the collection would have done."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from _pytest.assertion import rewrite
from hypothesis import configuration

from tests.support import rewriting
from tests.support.processes import Processes
from tests.support.run_directory import REPOSITORY

FAILS = "def test_sum():\n    two = 2\n    assert two == 3\n"
# A run that does not begin to collect before the second process is done.
PLUGIN = """
import pathlib
import pytest
from tests.support.processes import wait_until
from tests.support.rewriting import rewriting_beside
here = pathlib.Path(__file__).parent
@pytest.hookimpl(wrapper=True)
def pytest_collection(session):
    with rewriting_beside(session.config, here, here):
        wait_until(lambda: len(list(here.rglob("test_*.pyc"))) == 2)
        return (yield)
"""


def test_a_run_finds_its_tests_rewritten(processes: Processes, tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(PLUGIN)
    (tmp_path / "test_sum.py").write_text(FAILS)
    (tmp_path / "test_last.py").write_text("def test_last():\n    pass\n")
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", f"--rootdir={tmp_path}", str(tmp_path)]
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    proc = processes.start(command, cwd=REPOSITORY, env={**env, "PYTHONDONTWRITEBYTECODE": ""})
    assert proc.wait(60) == 1, proc.logs()
    assert "1 failed, 1 passed" in proc.stdout(), proc.logs()
    assert "assert 2 == 3" in proc.stdout()


def test_a_rewritten_file_is_what_the_collection_reads_until_it_changes(
    pytestconfig: pytest.Config, tmp_path: Path
) -> None:
    path = tmp_path / "test_sum.py"
    path.write_text(FAILS)
    rewriting.rewrite_file(pytestconfig, path)
    [rewritten] = rewrite.get_cache_dir(path).iterdir()
    assert rewrite._read_pyc(path, rewritten) is not None
    path.write_text(f"{FAILS}\n")
    assert rewrite._read_pyc(path, rewritten) is None


def test_constants_are_kept_where_hypothesis_looks_for_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(configuration, "__hypothesis_home_directory", tmp_path / "home")
    (tmp_path / "product.py").write_text("LIMIT = 48_611\n")
    rewriting.read_constants(tmp_path)
    [kept] = (tmp_path / "home" / "constants").iterdir()
    assert "48611" in kept.read_text().replace("_", "")
