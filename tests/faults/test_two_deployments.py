"""Two deployments of each model, one of them failing in one way: every item is answered while it fails, and it comes back by itself."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.faults.matrix import SETTINGS
from tests.support.engine import Engine
from tests.support.processes import Processes, wait_until
from tests.support.proxy import Proxies, Proxy
from tests.support.tidegate import END_S, Site, chat_line

# How the network fails: bytes up are requests, bytes down are answers.
BY_THE_NETWORK: dict[str, Callable[[Proxy], None]] = {
    "refused": lambda proxy: proxy.refuse(),
    "reset": lambda proxy: proxy.cut(0, "up"),
    "silent": lambda proxy: proxy.blackhole("down"),
    "trickle": lambda proxy: proxy.rate(40, "down"),
    "half": lambda proxy: proxy.cut(250, "down"),
}
BY_THE_SERVER = {
    "error": "500",
    "overloaded": "503:ra=1",
    "throttled": "429:ra=1",
    "key": "401",
    "garbage": "malformed",
}
SICK_IN_FLIGHT = 2
# A circuit opens after five failures in a row; what was in flight by then fails too, and so may some probes.
FAILURES_MAX = 5 + SICK_IN_FLIGHT + 6
# Retries may be a tenth of first calls: so many that all of them have room within a minute.
ITEMS = 80


class Witnesses(Engine):
    """The well engine, with the logs of all engines as one."""

    def __init__(self, processes: Processes, directory: Path) -> None:
        super().__init__(processes, directory / "well")
        self.own_log = self.calls_log
        self.others: list[Engine] = []
        self.calls_log = directory / "all-calls.jsonl"

    def calls(self) -> list[dict[str, Any]]:
        logs = [self.own_log, *(engine.calls_log for engine in self.others)]
        whole = [log.read_text().rpartition("\n")[0].splitlines() for log in logs]
        made = sorted((json.loads(line) for lines in whole for line in lines), key=lambda call: call["at"])
        self.calls_log.write_text("".join(json.dumps(call) + "\n" for call in made))
        return made


class Pairs:
    """A model for each way, with one well deployment and one that fails."""

    def __init__(self, processes: Processes, proxies: Proxies, directory: Path) -> None:
        self.well = Witnesses(processes, directory)
        behind = Engine(processes, directory / "behind")
        self.proxies = {way: proxies.open(behind.port) for way in BY_THE_NETWORK}
        self.engines = {way: Engine(processes, directory / way) for way in BY_THE_SERVER}
        self.well.others = [behind, *self.engines.values()]
        self.sick_engines = self.engines | dict.fromkeys(BY_THE_NETWORK, behind)
        self.healed_at = 0.0
        sick = {way: f"http://{proxy.address}/v1" for way, proxy in self.proxies.items()}
        sick |= {way: engine.url for way, engine in self.engines.items()}
        models = {way: {"deployments": [self._sick(way, url), {"url": self.well.url}]} for way, url in sick.items()}
        self.site = Site("embedded", processes, directory, self.well, dict(SETTINGS))
        self.site.configure(models=models)
        self.proc = self.site.begin()

    def _sick(self, way: str, url: str) -> dict[str, object]:
        return {
            "url": url,
            "name": f"sick-{way}",
            "weight": 10.0,
            "max_in_flight": SICK_IN_FLIGHT,
            "read_timeout_s": 1.0,
        }

    def fail(self) -> None:
        for way, proxy in self.proxies.items():
            BY_THE_NETWORK[way](proxy)
        for way, engine in self.engines.items():
            engine.set_faults({BY_THE_SERVER[way]: 1.0})

    def heal(self) -> None:
        for proxy in self.proxies.values():
            proxy.heal()
        for engine in self.engines.values():
            engine.set_faults()
        self.healed_at = time.time()

    def run(self, ways: list[str], items: int, repeats_max: int) -> None:
        """One batch over these models, judged: every item is answered."""
        lines = [chat_line(f"{way} {number}", f"say {number}", way) for way in ways for number in range(items)]
        results = self.site.judge(self.site.submit(lines), lines, repeats_max=repeats_max)
        assert results.errors == []

    def is_back(self, way: str) -> bool:
        calls = [call for call in self.sick_engines[way].calls() if call["model"] == way]
        return any(call["status"] == 200 and call["at"] > self.healed_at for call in calls)


def test_a_sick_deployment_beside_a_well_one_costs_no_item_and_comes_back(
    processes: Processes, proxies: Proxies, tmp_path: Path
) -> None:
    pairs = Pairs(processes, proxies, tmp_path)
    ways = [*BY_THE_NETWORK, *BY_THE_SERVER]
    pairs.fail()
    pairs.run(ways, ITEMS, repeats_max=FAILURES_MAX * len(ways))
    pairs.heal()
    # A key that was rejected is asked for again only once a minute; see the router's own test.
    missing = [way for way in ways if way != "key"]

    def all_are_back() -> bool:
        missing[:] = [way for way in missing if not pairs.is_back(way)]
        if missing:
            pairs.run(missing, 4, repeats_max=FAILURES_MAX * len(missing))
        return not missing

    wait_until(all_are_back, END_S, "every deployment but the one with the wrong key to come back")
