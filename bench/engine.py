"""How many calls the simulated engine answers in instant mode, and whether it uses the cores that its processes may have.

The client is a process of its own that does as little as it can: bare sockets, many calls sent at once on each, answers counted and
not read. It shares the cores with the engine, so its own part is shown beside the engine's.
"""

import json
import multiprocessing
import os
import selectors
import socket
import sys
import time
from multiprocessing.connection import Connection
from pathlib import Path
from urllib.parse import urlsplit

import psutil

from bench.inputs import chat_line
from bench.machinery import median, simulated_engine, table

CONNECTIONS = 64
PIPELINED = 16
ANSWER = b"HTTP/1.1 200 OK\r\n"
STALLED_S = 30.0


def _calls(host: str) -> bytes:
    """Some calls, as they go over the wire together."""
    calls = []
    for number in range(PIPELINED):
        body = json.dumps(json.loads(chat_line(number))["body"]).encode()
        head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: {host}\r\n"
        head += f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        calls.append(head.encode() + body)
    return b"".join(calls)


class _Caller:
    """One connection on which a row of calls is always under way."""

    def __init__(self, address: tuple[str, int], calls: bytes) -> None:
        self.socket = socket.create_connection(address)
        self._calls = calls
        self._answered = 0
        # An answer's first line may come in two pieces.
        self._rest = b""

    def send(self) -> None:
        self.socket.sendall(self._calls)

    def receive(self) -> bool:
        """True when the whole row has been answered."""
        data = self._rest + self.socket.recv(1 << 18)
        if len(data) == len(self._rest):
            raise RuntimeError("the engine closed a connection: run the benchmark again and look at its output")
        self._answered += data.count(ANSWER)
        self._rest = data[-len(ANSWER) + 1 :]
        if self._answered < PIPELINED:
            return False
        self._answered, self._rest = 0, b""
        return True


def _client(url: str, count: int, done: Connection) -> None:
    """Make this many calls; say when they begin, and then how many there were, how long they took, and this process's CPU."""
    parts = urlsplit(url)
    address = (parts.hostname or "", parts.port or 0)
    calls = _calls(parts.netloc)
    with selectors.DefaultSelector() as selector:
        for _ in range(CONNECTIONS):
            caller = _Caller(address, calls)
            selector.register(caller.socket, selectors.EVENT_READ, caller)
        done.send(None)
        begun, cpu_begun = time.perf_counter(), time.process_time()
        under_way = sent = 0
        for key in list(selector.get_map().values()):
            key.data.send()
            under_way += 1
            sent += PIPELINED
        while under_way:
            ready = selector.select(STALLED_S)
            if not ready:
                raise RuntimeError("the engine answers no more: run the benchmark again and look at its output")
            for key, _ in ready:
                if key.data.receive():
                    under_way -= 1
                    if sent < count:
                        key.data.send()
                        under_way += 1
                        sent += PIPELINED
        done.send((sent, time.perf_counter() - begun, time.process_time() - cpu_begun))


def _engine_used() -> tuple[float, float]:
    """Seconds that the serving processes of the engine have run so far, and that they have run or waited for a core."""
    ran_s = wanted_s = 0.0
    for process in psutil.Process().children(recursive=True):
        if "tidegate.simulate.engine" in " ".join(process.cmdline()):
            ran_ns, waited_ns, _ = Path(f"/proc/{process.pid}/schedstat").read_text().split()
            ran_s += int(ran_ns) / 1e9
            wanted_s += (int(ran_ns) + int(waited_ns)) / 1e9
    return ran_s, wanted_s


def _round(url: str, count: int) -> tuple[float, float, float, float]:
    """Calls a second; and in cores: what the engine used, what it would have used had they been free, what the client used."""
    spawned = multiprocessing.get_context("spawn")
    receiver, sender = spawned.Pipe(duplex=False)
    client = spawned.Process(target=_client, args=(url, count, sender))
    client.start()
    sender.close()
    try:
        receiver.recv()
        ran_before, wanted_before = _engine_used()
        sent, seconds, client_cpu_s = receiver.recv()
        ran, wanted = _engine_used()
    except EOFError:
        raise RuntimeError("the client failed: its error is above") from None
    finally:
        client.join()
    return sent / seconds, (ran - ran_before) / seconds, (wanted - wanted_before) / seconds, client_cpu_s / seconds


def main(quick: bool = False) -> dict[str, float]:
    count, rounds = (20_000, 3) if quick else (100_000, 5)
    cores = os.cpu_count() or 1
    found: dict[str, float] = {}
    rows = []
    for processes in (1, 2):
        with simulated_engine("--mode", "instant", "--processes", str(processes)) as url:
            # The first round finds a cold process.
            measured = [_round(url, count) for _ in range(rounds + 1)][1:]
        calls, engine, wanted, client = (median([one[part] for one in measured]) for part in range(4))
        names = ("calls", "engine_cores", "engine_cores_wanted", "client_cores")
        found |= {
            f"{name}_{processes}": value for name, value in zip(names, (calls, engine, wanted, client), strict=True)
        }
        both = (engine + client) / cores
        rows += [
            (f"{processes} process{'es' * (processes > 1)}", f"{calls:,.0f} calls a second", ""),
            ("  ran", f"{engine:.2f} cores' worth", ""),
            ("  ran or waited for a core", f"{wanted:.2f} cores' worth", f"at least {0.95 * processes:.2f}"),
            ("  the client", f"{client:.2f} cores' worth", ""),
            ("  engine and client", f"{both:.0%} of the machine", "" if processes < cores else "at least 95 %"),
        ]
    title = f"The simulated engine, instant, {count:,} calls of 1.5 kB on {CONNECTIONS} connections, {rounds} rounds (medians)"
    table(f"{title}; {cores} cores", rows)
    return found


if __name__ == "__main__":
    main("--quick" in sys.argv)
