"""An upload whose event loop ends under it leaves nothing that waits to be awaited."""

from __future__ import annotations

import asyncio
import warnings
from typing import Any, cast

import pytest

from tidegate.backends.system import SystemClock, SystemEntropy
from tidegate.stages.accept import Reception


class SilentStore:
    """A store that never answers."""

    async def begin_blob(self, *_: object) -> None:
        await asyncio.Event().wait()

    async def give_up_blob(self, _: str) -> bool:
        return False


@pytest.mark.parametrize("in_loop", [True, False])
def test_an_upload_that_is_thrown_away_awaits_nothing_more(in_loop: bool) -> None:
    reception = Reception(cast(Any, SilentStore()), cast(Any, None), SystemClock(), SystemEntropy(), lambda: "worker")
    upload = reception.begin_upload(10)

    async def begin() -> None:
        upload.send(None)
        if in_loop:
            upload.close()

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        asyncio.run(begin())
        upload.close()
