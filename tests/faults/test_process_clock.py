"""A worker whose wall clock jumps by an hour: the database's clock decides, so nothing changes but its stamps."""

from __future__ import annotations

import time

import pytest

from tests.support.shims import Shims, preload_env
from tests.support.tidegate import IN_FLIGHT, Site, behaving, requests

HOUR_S = 3_600


@pytest.mark.parametrize("jump_s", [HOUR_S, -HOUR_S])
def test_the_clock_of_a_worker_jumps(cluster: Site, shims: Shims, jump_s: int) -> None:
    began = time.time()
    clock = shims.clock()
    # The object store refuses a signature of another hour, whoever asks; the store of rows must not mind.
    env = {**preload_env(clock, base={}), "TIDEGATE_BLOBS_URL": f"file://{cluster.data}/blobs"}
    cluster.env["TIDEGATE_BLOBS_URL"] = env["TIDEGATE_BLOBS_URL"]
    cluster.begin(more=env)
    lines = requests(32, lambda number: behaving("latency=200"))
    batch_id = cluster.submit(lines)
    cluster.until_called(IN_FLIGHT + 1)
    clock.jump_to(jump_s)
    cluster.relieve()
    results = cluster.judge(batch_id, lines)
    assert began - 1 <= results.batch["in_progress_at"] <= results.batch["completed_at"] <= time.time() + 1
    assert results.batch["expires_at"] - results.batch["created_at"] == 24 * HOUR_S
    assert cluster.living() == 3
