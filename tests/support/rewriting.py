"""What the collection of a fresh checkout waits for, done by a second process beside it.

There pytest rewrites every test file, and Hypothesis reads every constant of the product: two thirds of the collection. Both keep what they
made in files. So the second process begins with the last test file, and each finds what the other has made.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import NoReturn

import pytest
from _pytest.assertion import rewrite
from hypothesis.configuration import storage_directory
from hypothesis.internal.constants_ast import constants_from_module


@contextlib.contextmanager
def rewriting_beside(config: pytest.Config, tests: Path, product: Path) -> Iterator[None]:
    """Have a second process rewrite tests while the block collects them."""
    if sys.dont_write_bytecode:
        yield
        return
    pid = os.fork()
    if not pid:
        _work(config, tests, product)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGTERM)
        os.waitpid(pid, 0)


def _work(config: pytest.Config, tests: Path, product: Path) -> NoReturn:
    """What goes wrong here goes wrong again in the collection, which reports it."""
    try:
        is_over = []
        # A file that was begun is written to its end.
        signal.signal(signal.SIGTERM, lambda *_: is_over.append(True))
        if not storage_directory("constants").path.exists():
            read_constants(product)
        for path in sorted(tests.rglob("test_*.py"), reverse=True):
            if is_over:
                break
            rewrite_file(config, path)
    finally:
        os._exit(0)


def read_constants(product: Path) -> None:
    for path in sorted(product.rglob("*.py")):
        module = ModuleType(path.stem)
        module.__file__ = str(path)
        constants_from_module(module)


def rewrite_file(config: pytest.Config, path: Path) -> None:
    """One that was rewritten before is left alone, even if it has changed since."""
    cache = rewrite.get_cache_dir(path)
    rewritten = cache / f"{path.stem}{rewrite.PYC_TAIL}"
    if not rewritten.exists():
        cache.mkdir(exist_ok=True)
        digest, code = rewrite._rewrite_test(path, config)
        rewrite._write_pyc(config.stash[rewrite.assertstate_key], code, digest, rewritten)
