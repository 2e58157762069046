"""The command of one of several processes of a simulated engine; started by `server.py`, never by hand."""

import sys

import msgspec
import uvloop

from tidegate.simulate.engine.server import ChildPart, serve_child


def main() -> None:
    """Read the part from standard input, then serve until that input ends."""
    part = msgspec.json.decode(sys.stdin.buffer.readline(), type=ChildPart)
    uvloop.run(serve_child(part, sys.stdin.fileno()))


if __name__ == "__main__":
    main()
