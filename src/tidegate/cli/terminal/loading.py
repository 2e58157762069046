"""Makes commands start sooner: slow imports run in a thread beside the others, or not at all."""

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
    """Collect garbage seldom while modules are loaded. They make many objects that stay, and
    scanning those repeatedly would take a tenth of a start."""
    gc.set_threshold(10 * OBJECTS_PER_COLLECTION)


@cache
def settle_memory() -> None:
    """Exclude loaded objects from all later garbage collections, because they live as
    long as the process.

    Only the first call does so: a later one would keep garbage of an ended part of a run."""
    gc.freeze()
    gc.set_threshold(OBJECTS_PER_COLLECTION)


@contextmanager
def http_client_loaded() -> Iterator[None]:
    """Load the HTTP client in a thread while the block loads other modules. It reads every
    certificate that the machine trusts, which takes a tenth of a start and does not block Python.

    The block must not import any part of that package: two threads that import it through different
    modules may see half of it."""
    # Both threads need asyncio, so it is loaded before the second begins.
    importlib.import_module("asyncio")
    loading = threading.Thread(target=importlib.import_module, args=(CALLS_MODELS_WITH,), name="load")
    loading.start()
    try:
        yield
    finally:
        loading.join()


def load_logging() -> None:
    """Load structlog without rich, which takes an eighth of a server's start and is needed only for
    drawn tracebacks; ours are plain."""
    hidden = "rich" not in sys.modules
    if hidden:
        # Importing a module whose entry is None fails.
        sys.modules["rich"] = None  # type: ignore[assignment]
    try:
        importlib.import_module("structlog")
    finally:
        if hidden:
            del sys.modules["rich"]
