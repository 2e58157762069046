"""The image's steps run, and what they make serves as its user from a tree that cannot be written."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import httpx2
import pytest

from tests.deploy.chart import ROOT
from tests.support.engine import Engine
from tests.support.processes import Processes, free_port, wait_until
from tests.support.tidegate import requests

# Every package of the lock is installed, from an index.
BUILD_S = 600


@pytest.mark.soak
@pytest.mark.timeout(BUILD_S + 120)
def test_the_image_serves_as_its_user_from_a_read_only_tree(
    processes: Processes, engine: Engine, tmp_path: Path
) -> None:
    assert os.geteuid() == 0, "mounts need root: run this test as root"
    scratch = tmp_path / "image"
    scratch.mkdir()
    port = free_port()
    env = {**os.environ, "TIDEGATE_SERVER_PORT": str(port), "TIDEGATE_UPSTREAM_URL": engine.url}
    command = ["unshare", "--mount", "--propagation", "private", sys.executable, "-m", "tests.deploy.image"]
    server = processes.start([*command, str(scratch)], name="image", env=env, cwd=ROOT)
    server.wait_for_line(rf"http://127\.0\.0\.1:{port}", timeout_s=BUILD_S)
    status = dict(line.split(":\t", 1) for line in Path(f"/proc/{server.pid}/status").read_text().splitlines())
    assert status["Uid"].split() == status["Gid"].split() == ["65532"] * 4
    tree = Path(f"/proc/{server.pid}/root")
    assert os.statvfs(tree).f_flag & os.ST_RDONLY
    made = [tree / "var/lib/tidegate", *(tree / "var/lib/tidegate").iterdir()]
    assert len(made) > 1
    assert {one.stat().st_uid for one in made} == {65532}

    with httpx2.Client(base_url=f"http://127.0.0.1:{port}/v1", timeout=60) as client:
        file = {"file": ("in.jsonl", "\n".join(requests(3)).encode())}
        file_id = client.post("/files", files=file, data={"purpose": "batch"}).json()["id"]
        wanted = {"input_file_id": file_id, "endpoint": "/v1/chat/completions", "completion_window": "24h"}
        batch_id = client.post("/batches", json=wanted).json()["id"]
        wait_until(lambda: client.get(f"/batches/{batch_id}").json()["status"] == "completed", 60, "the batch")
    server.terminate()
    assert server.wait(60) == 0
