"""Preload shims: a disk that fails, a wall clock that jumps, and a witness of what is sent, for one process at a time and while it runs.

The C sources lie beside this file and are compiled once per worker of a test run.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

SOURCES = Path(__file__).parent


class Shim(Protocol):
    """A compiled shim with its settings for one process."""

    library: Path

    def variables(self) -> dict[str, str]:
        """The environment variables that the shim reads in the process."""
        ...


class DiskFault:
    """A failing disk under one directory. Rules are described at the top of diskfull.c."""

    def __init__(self, library: Path, control: Path, prefix: Path) -> None:
        self.library = library
        self.control = control
        self.prefix = prefix.resolve()
        self.heal()

    def fail(self, *rules: str) -> None:
        """Put rules in force at once, for example `enospc`, `eio-fsync`, `short-write` or `enospc-write:3`."""
        _replace(self.control, " ".join(rules))

    def heal(self) -> None:
        _replace(self.control, "")

    def variables(self) -> dict[str, str]:
        return {"SHIM_DISK_CONTROL": str(self.control), "SHIM_DISK_PREFIX": str(self.prefix)}


class ClockShift:
    """A wall clock that is off by some seconds; monotonic clocks stay true."""

    def __init__(self, library: Path, control: Path) -> None:
        self.library = library
        self.control = control
        self.jump_to(0)

    def jump_to(self, offset_s: float) -> None:
        """Set the distance from the true time, at once."""
        _replace(self.control, repr(float(offset_s)))

    def variables(self) -> dict[str, str]:
        return {"SHIM_CLOCK_OFFSET": str(self.control)}


class SendsLog:
    """Every call with an Idempotency-Key that processes under this shim sent, with the moment at which the kernel got it."""

    def __init__(self, library: Path, log: Path) -> None:
        self.library = library
        self.log = log

    def sent(self) -> list[tuple[float, str]]:
        """Seconds and key of each, in the order of time."""
        if not self.log.exists():
            return []
        whole, _, _ = self.log.read_text().rpartition("\n")
        parts = [line.split(" ", 1) for line in whole.splitlines()]
        return sorted((float(at), key) for at, key in parts)

    def variables(self) -> dict[str, str]:
        return {"SHIM_SENDS_LOG": str(self.log)}


class PowerJournal:
    """Every change under one directory and every sync, for tests/support/power.py."""

    def __init__(self, library: Path, journal: Path, prefix: Path) -> None:
        self.library = library
        self.journal = journal
        self.prefix = prefix.resolve()

    def variables(self) -> dict[str, str]:
        return {"SHIM_POWER_JOURNAL": str(self.journal), "SHIM_POWER_PREFIX": str(self.prefix)}


class Shims:
    """Compiles on first use; each `disk` or `clock` has a control file of its own."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._made = 0

    def disk(self, prefix: Path) -> DiskFault:
        return DiskFault(self._compiled("diskfull"), self._control(), prefix)

    def clock(self) -> ClockShift:
        return ClockShift(self._compiled("clock"), self._control())

    def sends(self) -> SendsLog:
        return SendsLog(self._compiled("sends"), self._control())

    def power(self, prefix: Path) -> PowerJournal:
        return PowerJournal(self._compiled("power"), self._control(), prefix)

    def _control(self) -> Path:
        self._made += 1
        return self.directory / f"control-{self._made}"

    def _compiled(self, name: str) -> Path:
        library = self.directory / f"{name}.so"
        if not library.exists():
            compiler = shutil.which("cc") or shutil.which("gcc")
            if compiler is None:
                raise RuntimeError("no C compiler (cc or gcc) on PATH; install one to run the fault tests")
            command = [compiler, "-O2", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", "-o", str(library)]
            built = subprocess.run(
                [*command, str(SOURCES / f"{name}.c"), "-ldl", "-pthread"], check=False, capture_output=True, text=True
            )
            if built.returncode != 0:
                raise RuntimeError(f"{name}.c did not compile:\n{built.stderr}")
        return library


def preload_env(*shims: Shim, base: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment for a process under these shims, on top of `base` (this process's own unless given)."""
    env = dict(os.environ if base is None else base)
    libraries = [str(shim.library) for shim in shims]
    if env.get("LD_PRELOAD"):
        libraries.append(env["LD_PRELOAD"])
    env["LD_PRELOAD"] = ":".join(libraries)
    for shim in shims:
        env.update(shim.variables())
    return env


def _replace(path: Path, text: str) -> None:
    """Whole or not at all: a process may read at any moment."""
    partial = path.with_name(path.name + ".partial")
    partial.write_text(text)
    partial.replace(path)
