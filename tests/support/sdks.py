"""The official SDKs and other large libraries of tests, loaded when a test first uses a name of theirs.

Loading all costs four seconds of CPU, and most runs need none of them. A run of most tests loads two of
them once for all its workers.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

SEVERAL_USE = ("anthropic", "openai")


def load_before_fork() -> None:
    """Load what most workers would load, each for itself."""
    for module in SEVERAL_USE:
        importlib.import_module(module)


class Sdk:
    """Stands for a module until one of its names is needed."""

    __test__ = False

    def __init__(self, module: str) -> None:
        self._module = module

    def __getattr__(self, name: str) -> Any:
        # The names that collectors of tests look for are none of an SDK's.
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(importlib.import_module(self._module), name)


if TYPE_CHECKING:
    import anthropic as anthropic
    import openai as openai
    import schemathesis as schemathesis
    from playwright import sync_api as sync_api
else:
    anthropic = Sdk("anthropic")
    openai = Sdk("openai")
    schemathesis = Sdk("schemathesis")
    sync_api = Sdk("playwright.sync_api")

# The library of the Standard Webhooks: small, and used by one test.
standardwebhooks: Any = Sdk("standardwebhooks")
