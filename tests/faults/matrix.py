"""One installation for all the ways in which an upstream can fail: a model for each way, so that no rest or open circuit of one hides
another.

`tidegate serve` runs over the simulated engine, a TCP proxy before the same engine, and scripted servers for what no engine of ours says.
Time-outs are short, waits between tries are next to nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support.certificates import self_signed, shown_by_server
from tests.support.engine import Engine
from tests.support.processes import Proc, Processes
from tests.support.proxy import Proxies, Proxy
from tests.support.tidegate import LEASE_MS, Results, Site, behaving, chat_line, requests
from tests.upstream.raw_server import Request, Script
from tests.web.upstream import Upstream, answers

RETRY_AFTER_MAX_MS = 1_500
RESPONSE_BYTES_MAX = 1 << 20
# Longer than a lease: who waits for a silent upstream must go on beating.
READ_TIMEOUT_S = LEASE_MS / 1000 + 1.0
ATTEMPTS_MAX = 3
SETTINGS = {
    "TIDEGATE_RETRY_RETRY_AFTER_MS_MAX": str(RETRY_AFTER_MAX_MS),
    "TIDEGATE_RETRY_BACKOFF_MS": "20",
    "TIDEGATE_RETRY_DEFERRAL_MS": "20",
    "TIDEGATE_RETRY_ATTEMPTS_MAX": str(ATTEMPTS_MAX),
    "TIDEGATE_WORKER_IN_FLIGHT_MAX": "64",
    "TIDEGATE_HTTP_READ_TIMEOUT_S": str(READ_TIMEOUT_S),
    "TIDEGATE_HTTP_RESPONSE_BYTES_MAX": str(RESPONSE_BYTES_MAX),
    "TIDEGATE_HTTP_BODY_RATE_MIN_BYTES_PER_S": "2000",
    "TIDEGATE_HTTP_BODY_RATE_GRACE_S": "0.5",
}


@dataclass(frozen=True)
class Case:
    """One item that meets a fault, beside one that meets none, and what must become of it.

    `says` is the status or the code of its error line, or nothing when it is answered in the end; `calls` is how often it is called."""

    fault: str
    calls: int
    says: str = ""

    @property
    def model(self) -> str:
        return f"case {self.fault}"


class Matrix:
    def __init__(
        self,
        processes: Processes,
        directory: Path,
        cases: Sequence[Case],
        scripts: Mapping[str, Script],
        models: Mapping[str, Any],
    ) -> None:
        self.engine = Engine(processes, directory / "engine")
        self._proxies = Proxies()
        self.proxies: dict[str, Proxy] = {
            name: self._proxies.open(self.engine.port) for name, place in models.items() if "PROXY" in place["url"]
        }
        self._scripted = {name: Upstream(script) for name, script in scripts.items()}
        self._scripted["tls"] = Upstream(answers(), shown_by_server(*self_signed(directory)))
        places: dict[str, dict[str, Any]] = {case.model: {"url": self.engine.url} for case in cases}
        places |= {name: {"url": upstream.url} for name, upstream in self._scripted.items()}
        places |= {name: {**place, "url": self._url(name, place["url"])} for name, place in models.items()}
        self.site = Site("embedded", processes, directory, self.engine, dict(SETTINGS))
        self.site.configure(models={name: {"deployments": [place]} for name, place in places.items()})
        self.proc: Proc = self.site.begin()

    def _url(self, name: str, url: str) -> str:
        if url == "SCRIPT":
            return self._scripted[name].url
        address = self.proxies[name].address if name in self.proxies else ""
        return url.replace("PROXY", address).replace("ENGINE", f"127.0.0.1:{self.engine.port}")

    def check(self, cases: Sequence[Case]) -> dict[str, list[dict[str, Any]]]:
        """Run all of them as one batch and judge it; gives the calls of each by its fault."""
        lines = [
            chat_line(f"{case.fault} {number}", text, case.model)
            for case in cases
            for number, text in enumerate((behaving(case.fault), "say 1"))
        ]
        batch_id = self.site.submit(lines)
        results = self.site.judge(batch_id, lines, repeats_max=sum(case.calls - 1 for case in cases))
        assert says(results) == {f"{case.fault} 0": case.says for case in cases if case.says}
        made: dict[str, list[dict[str, Any]]] = {case.model: [] for case in cases}
        for call in self.site.calls_of(batch_id):
            made[call["model"]].append(call)
        # The second item of each was called once.
        assert {case.fault: len(made[case.model]) - 1 for case in cases} == {case.fault: case.calls for case in cases}
        return {case.fault: made[case.model] for case in cases}

    def fails(self, model: str, code: str, calls: int) -> dict[str, Any]:
        """One item for a scripted server: it must fail with this code after so many calls. Gives its line."""
        lines = requests(1, model=model)
        results = self.site.judge(self.site.submit(lines), lines, witnessed=False)
        assert says(results) == {"c0": code}, model
        assert len(self._scripted[model].posts) == calls, model
        return results.errors[0]

    def posts(self, name: str) -> list[Request]:
        """What a scripted server was sent."""
        return self._scripted[name].posts

    def no_worker_was_lost(self) -> bool:
        return self.site.rows("select count(*) as n from workers where state = 'gone'") == [{"n": 0}]

    def close(self) -> None:
        self._proxies.close()
        for upstream in self._scripted.values():
            upstream.close()


def says(results: Results) -> dict[str, str]:
    """What the error lines say, by custom id: our code, or the upstream's status."""
    return {
        str(line["custom_id"]): str(line["error"]["code"] if line["error"] else line["response"]["status_code"])
        for line in results.errors
    }
