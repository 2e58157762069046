"""What a run finds out about its model servers before the first call, and what it takes for no reason to stop."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import uvloop

from tests.cli.run.test_run_job import errand_of
from tests.settings.conftest import load_text
from tidegate import service
from tidegate.cli.run.run_check import check_upstream
from tidegate.core.errors import SettingsError
from tidegate.upstream.routing.probe import Probe

TWO_SERVERS = "models: {m: {deployments: [{url: 'http://a/v1', name: a}, {url: 'http://b/v1', name: b}]}}"
GOOD = Probe("b", True, 200, ("m",), 1.0, "")
ROUTER: Any = SimpleNamespace(knows=lambda name: True, names=lambda: ["m"])


@pytest.mark.parametrize(
    ("first", "second", "refused"),
    [
        (Probe("a", True, 401, (), 1.0, "status 401"), GOOD, ""),
        (Probe("a", True, 401, (), 1.0, "status 401"), Probe("b", True, 401, (), 1.0, ""), "refuses us: status 401"),
        (Probe("a", False, 0, (), 1.0, "no route"), GOOD, ""),
        (Probe("a", True, 200, ("x",), 1.0, ""), Probe("b", True, 200, ("y",), 1.0, ""), "does not serve"),
        (Probe("a", True, 200, ("x",), 1.0, "", is_whole=False), Probe("b", True, 200, ("y",), 1.0, ""), ""),
    ],
)
def test_one_server_that_may_serve_the_lines_is_enough(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first: Probe, second: Probe, refused: str
) -> None:
    engines = TWO_SERVERS.replace("name: a", "name: a, engine: vllm").replace("name: b", "name: b, engine: vllm")
    settings, errand = load_text(tmp_path, engines).settings, errand_of(tmp_path)

    async def probes(*_: object) -> list[Probe]:
        return [first, second]

    async def queues(*_: object) -> list[Any]:
        return []

    async def knows(*_: object) -> bool:
        return False

    monkeypatch.setattr(service, "probe_upstreams", probes)
    monkeypatch.setattr(service, "queue_states", queues)
    monkeypatch.setattr(service, "knows_model", knows)
    checking = check_upstream(settings, ROUTER, errand.source, errand.run_options)
    if refused:
        with pytest.raises(SettingsError, match=refused):
            uvloop.run(checking)
    else:
        uvloop.run(checking)
