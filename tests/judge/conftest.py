"""One world for all tests of the judge; each test that damages something takes a copy."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.judge.world import JudgedWorld, build
from tests.support.engine import Engine
from tests.support.processes import Processes
from tests.support.run_directory import RunDirectory


@pytest.fixture(scope="session")
def judged_world(run_directory: RunDirectory, tmp_path_factory: pytest.TempPathFactory) -> Iterator[JudgedWorld]:
    """No test may damage this one."""
    directory = tmp_path_factory.mktemp("judged")
    with Processes(directory / "logs", run_directory.process_registry()) as processes:
        yield asyncio.run(build(directory / "data", Engine(processes, directory / "engine")))


@pytest.fixture
def world(judged_world: JudgedWorld, tmp_path: Path) -> JudgedWorld:
    """A copy to damage."""
    return judged_world.copy(tmp_path / "world")
