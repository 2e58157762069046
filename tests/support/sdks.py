"""The official SDKs and other large libraries of tests, loaded when a test first uses a name of theirs.

Loading all costs four seconds of CPU, and every worker of a test run imports every test file.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any


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
