"""How commands start sooner: what takes long to load is loaded beside their own modules, or not at all."""

import gc
import importlib
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

CALLS_MODELS_WITH = "aiohttp"
OBJECTS_PER_COLLECTION = 20_000


def collect_seldom() -> None:
    """Collect garbage seldom while modules are loaded. They make many objects that stay; looking through them again and again would take a
    tenth of a start."""
    gc.set_threshold(10 * OBJECTS_PER_COLLECTION)


@cache
def settle_memory() -> None:
    """Leave what was loaded out of every later collection of garbage: it stays as long as the process does. Once, for a later call would
    keep what an ended part of a run left behind."""
    gc.freeze()
    gc.set_threshold(OBJECTS_PER_COLLECTION)


@contextmanager
def http_client_loaded() -> Iterator[None]:
    """Load the HTTP client in a thread while the block loads other modules. It reads every certificate that the machine trusts, which
    takes a tenth of a start and does not keep Python from going on.

    The block must not load any part of that package: two threads that enter a package through different modules may meet half of one."""
    # Both threads need it, so it is whole before there are two.
    importlib.import_module("asyncio")
    loading = threading.Thread(target=importlib.import_module, args=(CALLS_MODELS_WITH,), name="load")
    loading.start()
    try:
        yield
    finally:
        loading.join()


def load_logging() -> None:
    """Load structlog without rich, which it would load to draw tracebacks: that takes an eighth of a server's start, and ours are plain."""
    hidden = "rich" not in sys.modules
    if hidden:
        # What is None cannot be imported.
        sys.modules["rich"] = None  # type: ignore[assignment]
    try:
        importlib.import_module("structlog")
    finally:
        if hidden:
            del sys.modules["rich"]
