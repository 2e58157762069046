"""A real Prometheus, and promtool, from Debian's package: `make prometheus` fetches it without root.

It scrapes once a second and keeps everything in the test's directory. What it is asked about is not known here.
"""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx2
import yaml

from tests.support.processes import Processes, free_port, wait_until

FETCHED = Path(__file__).resolve().parents[2] / "build/prometheus/usr/bin"
START_S = 60

Found = list[tuple[dict[str, str], float]]


def program(name: str) -> str:
    """Where `prometheus` or `promtool` is."""
    found = shutil.which(name, path=os.pathsep.join([str(FETCHED), os.environ.get("PATH", "")]))
    assert found is not None, f"{name} is not here: run `make prometheus`, or put Prometheus on the PATH"
    return found


class PrometheusServer:
    """`start` it with what it scrapes and the files of its rules, then ask."""

    def __init__(self, processes: Processes, directory: Path) -> None:
        self._processes = processes
        self._directory = directory
        self._client = httpx2.Client(base_url=f"http://127.0.0.1:{free_port()}", timeout=30, trust_env=False)

    def start(self, targets: Mapping[str, Mapping[str, str]], rules: Sequence[Path]) -> None:
        """Scrape these addresses, each with labels of its own, and return when every one has been."""
        scraped = [{"targets": [address], "labels": dict(labels)} for address, labels in targets.items()]
        config = {
            "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
            "rule_files": [str(path) for path in rules],
            "scrape_configs": [{"job_name": "scraped", "static_configs": scraped}],
        }
        self._directory.mkdir()
        path = self._directory / "prometheus.yml"
        path.write_text(yaml.safe_dump(config))
        listens = f"127.0.0.1:{self._client.base_url.port}"
        proc = self._processes.start(
            [
                program("prometheus"),
                f"--config.file={path}",
                f"--storage.tsdb.path={self._directory / 'data'}",
                f"--web.listen-address={listens}",
            ],
            name="prometheus",
        )
        proc.wait_for_line("Server is ready to receive web requests", timeout_s=START_S)
        wait_until(lambda: len(self.query("up == 1")) == len(targets), START_S, "every target to be scraped")

    def query(self, expr: str) -> Found:
        """What an expression gives now, without what is not a number."""
        found = [(one["metric"], float(one["value"][1])) for one in self._ask("query", query=expr)["result"]]
        return [(labels, value) for labels, value in found if not math.isnan(value)]

    def series(self, selector: str) -> list[dict[str, str]]:
        return [dict(labels) for labels in self._ask("series", **{"match[]": selector})]

    def rules(self) -> list[dict[str, Any]]:
        return [rule for group in self._ask("rules")["groups"] for rule in group["rules"]]

    def _ask(self, path: str, **params: str) -> Any:
        answer = self._client.get(f"/api/v1/{path}", params=params).json()
        assert answer["status"] == "success", (params, answer)
        return answer["data"]
