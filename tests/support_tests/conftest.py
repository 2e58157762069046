"""A run of pytest inside a test."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.postgres import CLUSTER_VARIABLE, PostgresServer
from tests.support.processes import Proc, Processes
from tests.support.run_directory import REPOSITORY


@pytest.fixture
def outside() -> Iterator[Path]:
    """A temporary directory that PostgreSQL's unprivileged user can pass through, unlike pytest's own."""
    path = Path(tempfile.mkdtemp(prefix="tidegate-nested-"))
    path.chmod(0o755)
    yield path
    shutil.rmtree(path)


@pytest.fixture
def nested(processes: Processes, outside: Path, tmp_path: Path, postgres_server: PostgresServer) -> Callable[..., Proc]:
    """Runs pytest with this repository's fixtures over one small test file."""

    def run(source: str, *options: str) -> Proc:
        (tmp_path / "test_nested.py").write_text(source)
        env = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
        # The run under test keeps its own temporary files apart from its run directory, which must be gone at the end.
        base = [
            "-p",
            "no:cacheprovider",
            "-p",
            "no:xdist",
            "-p",
            "tests.conftest",
            f"--basetemp={tmp_path / 'base'}",
            "--rootdir=.",
        ]
        command = [sys.executable, "-m", "pytest", *base, *options, str(tmp_path / "test_nested.py")]
        return processes.start(
            command,
            name="pytest",
            cwd=REPOSITORY,
            env={**env, "TMPDIR": str(outside), CLUSTER_VARIABLE: str(postgres_server.cluster)},
        )

    return run
