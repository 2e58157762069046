"""What one open page of the console costs the server: the CPU while many are followed, over their number."""

import asyncio
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
from bench.scrape import asked, run_items

BUDGET_PERCENT = 1.0
PAGES_OPEN = 40
PAGES = {
    "overview": "",
    "list of batches": "/batches",
    "batch": "/batches/{batch}",
    "queues": "/queues",
    "deployments": "/deployments",
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


def _waiting(place: Place, done: str) -> str:
    """Make a batch that waits, of the file of one that ran: the page of a batch that ended is not followed."""
    ran = asked(f"{place.url}/batches/{done}", place.headers, b"", "application/json")
    wanted = {name: ran[name] for name in ("input_file_id", "endpoint", "completion_window")}
    body = json.dumps({**wanted, "not_before": int(time.time()) + 7200}).encode()
    return str(asked(f"{place.url}/batches", place.headers, body, "application/json")["id"])


async def _follow(url: str, cookie: str) -> None:
    """Read the events of one page until the reader is cancelled."""
    parts = urllib.parse.urlsplit(url)
    stream, writer = await asyncio.open_connection(parts.hostname, parts.port, limit=1 << 20)
    head = f"GET {parts.path} HTTP/1.1\r\nHost: {parts.netloc}\r\nCookie: {cookie}\r\nAccept: text/event-stream\r\n\r\n"
    writer.write(head.encode())
    try:
        while line := await stream.readline():
            if line.startswith((b"event: trouble", b"event: signed-out")):
                raise RuntimeError(f"{url} cannot be followed")
    finally:
        writer.close()
    raise RuntimeError(f"{url} ended")


async def _share(pid: int, url: str, cookie: str, seconds: float) -> float:
    """Return how much of a core the server takes while pages are open."""
    readers = [asyncio.create_task(_follow(url, cookie)) for _ in range(PAGES_OPEN)]
    # The first events of all come at once.
    await asyncio.sleep(2)
    began, before_s = time.perf_counter(), _cpu_s(pid)
    done, _ = await asyncio.wait(readers, timeout=seconds, return_when=asyncio.FIRST_EXCEPTION)
    share = (_cpu_s(pid) - before_s) / (time.perf_counter() - began)
    for one in readers:
        one.cancel()
    for one in done:
        one.result()
    await asyncio.gather(*readers, return_exceptions=True)
    return share


def _idle_share(pid: int, seconds: float) -> float:
    """Return how much of a core the server takes while no page is open."""
    began, before_s = time.perf_counter(), _cpu_s(pid)
    time.sleep(seconds)
    return (_cpu_s(pid) - before_s) / (time.perf_counter() - began)


def main(quick: bool = False) -> dict[str, float]:
    rows, found = [], {}
    with simulated_engine("--mode", "instant") as engine, gateway(engine) as place:
        root = place.url.removesuffix("/v1")
        batch = _waiting(place, run_items(place.url, place.headers, 200 if quick else 5_000))
        cookie = _session(place, root)
        idle = _idle_share(place.pid, 2 if quick else 10)
        for name, path in PAGES.items():
            url = f"{root}/console{path.format(batch=batch)}"
            shared = asyncio.run(_share(place.pid, url, cookie, 6 if quick else 30))
            found[name] = (shared - idle) / PAGES_OPEN * 100
            rows.append((f"{name} page", f"{found[name]:.2f} % of a core", f"under {BUDGET_PERCENT:g} %"))
    table("One open page", rows)
    return found


if __name__ == "__main__":
    main("--quick" in sys.argv)
