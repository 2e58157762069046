"""`make clients`: run other people's clients, unpatched, against the server, and write the table of docs/clients.md.

First each alone, embedded and on PostgreSQL. Then all at once while the process that runs their items is killed again and again.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.clients.environments import CLIENTS, ROOT, Environment, Shown
from tests.clients.peers import run_peers
from tests.clients.servers import SLOW_CALL_MS, STORES, Killer, started

PAGE = ROOT / "docs" / "clients.md"
BEGIN, END = "<!-- written by make clients -->", "<!-- /written -->"
# Embedded, the server itself is away for a moment; not every client tries again.
KILLED = {"embedded": "`serve` killed", "PostgreSQL": "worker killed"}


def run_each(store: str, names: Sequence[str]) -> dict[str, Shown]:
    """Run the clients one after another."""
    shown = {}
    with started(store) as site:
        for name in names:
            shown[name] = Environment(name, CLIENTS[name]).run(site.url, site.keyed(name).api_key)
            print(f"{name} on {store}: {_verdict(shown[name])}", flush=True)
    return shown


def run_killed(store: str, names: Sequence[str]) -> dict[str, tuple[Shown, int]]:
    """Run the clients at once while processes are killed, each again until the last kill; return what each showed, and how many kills it
    met."""
    with started(store, SLOW_CALL_MS) as site, ThreadPoolExecutor(len(names)) as pool:
        keys = {name: site.keyed(name).api_key for name in names}
        killer = Killer(site)

        def run(name: str) -> tuple[Shown, int]:
            environment, runs = Environment(name, CLIENTS[name]), 0
            while not killer.is_done or not runs:
                shown, runs = environment.run(site.url, keys[name]), runs + 1
                if not shown.passed:
                    break
            met = killer.kills
            print(f"{name} on {store}, {KILLED[store]} {met} times in {runs} runs: {_verdict(shown)}", flush=True)
            return shown, met

        killer.start()
        try:
            return dict(zip(names, pool.map(run, names), strict=True))
        finally:
            killer.stop()


def _verdict(shown: Shown) -> str:
    return f"{'passed' if shown.passed else 'FAILED'}: {shown.text}"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.clients", description=__doc__)
    parser.add_argument("names", nargs="*", help=f"which ones: {', '.join(CLIENTS)} (default: all, and write the page)")
    parser.add_argument(
        "--peers", type=Path, help="run the peers' own suites from their checkouts in this directory instead"
    )
    arguments = parser.parse_args()
    if arguments.peers is not None:
        run_peers(arguments.peers)
        return 0
    chosen = arguments.names or list(CLIENTS)
    began = time.monotonic()
    alone = {store: run_each(store, chosen) for store in STORES}
    killed = {}
    for store in STORES:
        able = [name for name in chosen if store == "PostgreSQL" or CLIENTS[name].retries]
        killed[store] = run_killed(store, able) if able else {}
    has_failed = not all(shown.passed for showing in alone.values() for shown in showing.values())
    has_failed |= not all(shown.passed for showing in killed.values() for shown, _ in showing.values())
    print(f"{len(chosen)} clients in {time.monotonic() - began:.0f} s", flush=True)
    if not has_failed and len(chosen) == len(CLIENTS):
        head = ["client", "version", "passed on", *(f"{words}, times" for words in KILLED.values()), "showed"]
        rows = []
        for name, client in CLIENTS.items():
            met = [str(killed[store][name][1]) if name in killed[store] else "" for store in KILLED]
            cells = [name, Environment(name, client).version(), ", ".join(alone), *met, alone["embedded"][name].text]
            rows.append(f"| {' | '.join(cells)} |")
        table = "\n".join([f"| {' | '.join(head)} |", "|" + " --- |" * len(head), *rows])
        before, _, rest = PAGE.read_text().partition(BEGIN)
        PAGE.write_text(f"{before}{BEGIN}\n\n{table}\n\n{END}{rest.partition(END)[2]}")
    return int(has_failed)


if __name__ == "__main__":
    sys.exit(main())
