"""The command for one of several processes of a simulated engine. Only `server.py` starts it."""

import signal
import sys

import msgspec
import uvloop

from tidegate.simulate.engine.server import ChildPart, serve_child


def main() -> None:
    """Read the part from standard input, then serve until that input ends."""
    # Ctrl-C and a stop of the whole group reach the parent too, and it ends this process in order.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    part = msgspec.json.decode(sys.stdin.buffer.readline(), type=ChildPart)
    uvloop.run(serve_child(part, sys.stdin.fileno()))


if __name__ == "__main__":
    main()
