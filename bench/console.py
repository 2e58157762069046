"""What one open page of the console costs the server: the CPU of a refresh, over the time between two."""

import json
import os
import subprocess
import sys
import time
import urllib.error
import urllib.parse
import urllib.request

from bench.gateway import Place, gateway
from bench.machinery import simulated_engine, table
from bench.scrape import run_items

BUDGET_PERCENT = 1.0
REFRESHES = 300
# Each page, and how many seconds lie between two of its refreshes.
PAGES = {
    "overview": ("", 3),
    "batches": ("/batches", 5),
    "batch": ("/batches/{batch}", 2),
    "deployments": ("/deployments", 3),
}


class _KeepAnswer(urllib.request.HTTPRedirectHandler):
    """A redirect is the answer itself."""

    def redirect_request(self, *_: object) -> None:
        return None


def _cpu_s(pid: int) -> float:
    with open(f"/proc/{pid}/stat") as stream:
        fields = stream.read().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _session(place: Place, root: str) -> str:
    """Make a key that may look, and sign in with it."""
    command = [sys.executable, "-m", "tidegate", "keys", "create", "--org", "ops", "--scopes", "admin:read", "--json"]
    made = subprocess.run([*command, *place.options], check=True, stdout=subprocess.PIPE)
    form = urllib.parse.urlencode({"key": json.loads(made.stdout)["key"]}).encode()
    opener = urllib.request.build_opener(_KeepAnswer)
    try:
        opener.open(f"{root}/console/sign-in", form)
    except urllib.error.HTTPError as answer:
        return str(answer.headers["set-cookie"]).partition(";")[0]
    raise RuntimeError("the console did not let the key in")


def _refresh(url: str, cookie: str) -> None:
    with urllib.request.urlopen(
        urllib.request.Request(url, headers={"Cookie": cookie, "HX-Request": "true"})
    ) as answer:
        if b'id="live"' not in answer.read():
            raise RuntimeError(f"{url} is no page that is refreshed")


def _idle_share(pid: int, seconds: float) -> float:
    """Return how much of a core the server takes while no page is open."""
    began, before_s = time.perf_counter(), _cpu_s(pid)
    time.sleep(seconds)
    return (_cpu_s(pid) - before_s) / (time.perf_counter() - began)


def main(quick: bool = False) -> dict[str, float]:
    rows, found = [], {}
    with simulated_engine("--mode", "instant") as engine, gateway(engine) as place:
        root = place.url.removesuffix("/v1")
        batch = run_items(place.url, place.headers, 200 if quick else 5_000)
        cookie = _session(place, root)
        idle = _idle_share(place.pid, 2 if quick else 10)
        for name, (path, every_s) in PAGES.items():
            url = f"{root}/console{path.format(batch=batch)}"
            _refresh(url, cookie)
            count = 20 if quick else REFRESHES
            began, before_s = time.perf_counter(), _cpu_s(place.pid)
            for _ in range(count):
                _refresh(url, cookie)
            passed_s = time.perf_counter() - began
            each_ms = (_cpu_s(place.pid) - before_s - idle * passed_s) * 1000 / count
            share = each_ms / (every_s * 1000) * 100
            found[name] = share
            rows.append(
                (
                    f"{name} page",
                    f"{each_ms:.1f} ms of CPU every {every_s} s: {share:.2f} % of a core",
                    f"under {BUDGET_PERCENT:g} %",
                )
            )
    table("One open page", rows)
    return found


if __name__ == "__main__":
    main("--quick" in sys.argv)
