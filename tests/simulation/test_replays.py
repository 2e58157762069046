"""What a seed shows can be looked at again: it replays, event by event."""

import os
import subprocess
import sys

import pytest

from tests.simulation.world.plan import draw
from tests.simulation.world.world import simulate

pytestmark = pytest.mark.timeout(600)


def test_a_seed_replays_to_the_same_trace() -> None:
    digests = [simulate(draw(seed)).digest for seed in (3, 7, 3, 7)]
    assert digests[:2] == digests[2:]
    assert digests[0] != digests[1]


def test_a_seed_replays_in_another_process_with_another_hash_order() -> None:
    """Nothing may hang on the order of a set, which differs from process to process."""
    command = [sys.executable, "-m", "tests.simulation.world", "5", "2", "--digest"]
    runs = [
        subprocess.run(command, env={**os.environ, "PYTHONHASHSEED": order}, capture_output=True, check=True, text=True)
        for order in ("1", "2")
    ]
    assert runs[0].stdout == runs[1].stdout
    assert len(runs[0].stdout.split()) == 2
