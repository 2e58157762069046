"""What a reader types, as the process that comes of it: a shell does nothing with a plain command but to start it."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path

# `make wheel-test` has the same pages followed from an environment that has only the wheel.
BIN = Path(os.environ.get("READER_BIN") or Path(sys.executable).parent)
# What a shell reads as more than words and quotes.
SHELL_SIGNS = frozenset("$`*?[]{}|&;<>()~!#\\\n")


def environment(home: Path) -> dict[str, str]:
    """What a reader's processes find: the installed command, and as few authorities as other tests have, which each process reads."""
    authorities = {name: os.environ[name] for name in ("SSL_CERT_FILE", "SSL_CERT_DIR")}
    return {"PATH": f"{BIN}:{os.environ['PATH']}", "HOME": str(home), **authorities}


def started_as(text: str) -> list[str]:
    """The command for `Processes.start`: what is typed in a line of plain words, or a shell that reads the text."""
    text = text.strip()
    first, _, rest = text.partition(" ")
    if first == "tidegate" and SHELL_SIGNS.isdisjoint(text):
        return [str(BIN / first), *shlex.split(rest)]
    return ["bash", "-euo", "pipefail", "-c", text]
