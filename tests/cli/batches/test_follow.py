"""Looking at a batch again and again until it ends."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest

from tidegate.cli.batches import remote_batches, watching
from tidegate.cli.terminal.signals import Stopping

pytestmark = pytest.mark.anyio


class Growing:
    """A server whose batch has another line at each look, and ends at the third."""

    def __init__(self) -> None:
        self.looks = 0

    async def get(self, *_: Any) -> dict[str, Any]:
        self.looks += 1
        return {"status": "completed" if self.looks == 3 else "in_progress"}

    async def content(self, path: str, *, start: int) -> AsyncIterator[bytes]:
        assert path.endswith("/output")
        yield b"".join(b"%d\n" % number for number in range(self.looks))[start:]


async def test_each_line_of_a_batch_that_is_followed_is_written_once(
    monkeypatch: pytest.MonkeyPatch, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    monkeypatch.setattr(remote_batches, "FOLLOW_EVERY_S", 0.0)
    server: Any = Growing()
    assert await remote_batches.output(server, "batch", None, errors=False, follow=True) == 0
    assert capfdbinary.readouterr().out == b"0\n1\n2\n"


async def test_where_no_server_tells_of_a_batch_it_is_looked_at_again_and_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(watching, "LOOK_S", 0.0)
    stopping = Stopping()
    assert not await watching._wait(stopping, None)
    stopping.asked.set()
    assert await watching._wait(stopping, None)
