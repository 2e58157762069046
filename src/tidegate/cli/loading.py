"""How a command that calls model servers starts sooner: what takes long to load is loaded beside its own modules."""

import importlib
import threading
from collections.abc import Iterator
from contextlib import contextmanager

CALLS_MODELS_WITH = "aiohttp"


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
