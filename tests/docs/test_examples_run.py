"""The examples that control a batch through the official SDK, each run as a reader would, against one server that asks for keys."""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.engine import Engine
from tests.support.processes import Processes
from tests.support.run_directory import REPOSITORY
from tests.support.server import Server


@pytest.fixture(scope="module")
def server(module_processes: Processes, module_directory: Path) -> Server:
    made = Server(module_processes, module_directory, engine=Engine(module_processes, module_directory / "engine"))
    made.start().close()
    made.key()
    made.until_it_asks_for_keys()
    return made


@pytest.mark.parametrize(
    "example",
    [
        "control_a_batch.py",
        "check_before_running.py",
        "answers_that_validate.py",
        "shape_a_batch.py",
        "same_and_changed_lines.py",
        "canary_and_retry.py",
        "cancel_a_batch.py",
    ],
)
def test_an_example_runs_to_its_end(server: Server, example: str) -> None:
    """For a tenant that has nothing yet."""
    with server.openai(server.key(f"org-{secrets.token_hex(8)}")) as client:
        env = os.environ | {"OPENAI_BASE_URL": str(client.base_url), "OPENAI_API_KEY": client.api_key}
    shown = subprocess.run(
        [sys.executable, REPOSITORY / "examples" / example],
        env=env,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert shown.returncode == 0, shown.stderr
    assert "completed" in shown.stdout.splitlines()[-1]
