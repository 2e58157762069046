"""Audio items: the file that a line names is read under the rules of callbacks and sent as a form, or the item says why not."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from tests.upstream.raw_server import Peer, RawServer, Request
from tidegate.backends.callback_sender import CallbackSender
from tidegate.core.body_rules.caller_fields import STRICT
from tidegate.core.callback_targets import FetchedFile, TargetRules
from tidegate.core.nouns import Answer, Call, Item, ItemVerdict, Usage
from tidegate.core.ports import FileSource
from tidegate.core.retry import RetryPolicy
from tidegate.core.states import Outcome
from tidegate.stages.perform import FETCHED_FILES_MAX, FETCHES_PER_OWNER_MAX, Again, Performer

pytestmark = pytest.mark.anyio
ALLOWED = TargetRules(frozenset({"127.0.0.1"}), allow_http=True)


class Performing:
    """A performer, the calls that it made, and files that come from `files`."""

    def __init__(self, files: FileSource) -> None:
        self.calls: list[Call] = []
        upstream: Any = SimpleNamespace(knows=lambda model: True, send=self._send, price_of=lambda name: None)
        clock: Any = SimpleNamespace(monotonic_ms=lambda: 1_000.0)
        entropy: Any = SimpleNamespace(uniform=lambda low, high: high)
        bound: Any = SimpleNamespace(
            denial=lambda leased: None,
            guard=lambda leased: None,
            fields=lambda leased: STRICT,
            begin_by_ms=lambda leased: 60_000.0,
            retry=lambda leased: RetryPolicy(),
        )
        self._performer = Performer(upstream, clock, entropy, bound, 0, files)

    async def _send(self, call: Call) -> Answer:
        self.calls.append(call)
        return Answer(200, b'{"text":"sea"}', Usage(1, 0, 1), "d")

    async def perform(self, body: dict[str, Any], owner: str = "tenant:t") -> ItemVerdict | Again:
        leased = SimpleNamespace(
            job_id="batch_0123456789012345678901", key_id=None, model="w", endpoint="/v1/audio/transcriptions",
            share_owner=owner, answers=None, first=0, token="t", item_units=1, betas="",
        )  # fmt: skip
        held: Any = SimpleNamespace(
            slice=leased,
            deadline_ms=100_000,
            budgets=(),
            parallel=(),
            models=frozenset(),
            is_interactive=False,
            may_begin=lambda: True,
        )
        item = Item(number=0, custom_id=b'"a"', body=json.dumps({"model": "w", **body}).encode())
        return await self._performer.perform(held, item)


async def perform(body: dict[str, Any], rules: TargetRules = ALLOWED) -> tuple[ItemVerdict | Again, list[Call]]:
    files = CallbackSender(rules, "Tidegate/test")
    performing = Performing(files)
    try:
        return await performing.perform(body), performing.calls
    finally:
        await files.close()


def error_of(verdict: ItemVerdict | Again) -> dict[str, Any]:
    assert isinstance(verdict, ItemVerdict)
    assert verdict.finished.outcome is Outcome.FAILED
    return dict(msgspec.json.decode(verdict.line)["response"]["body"]["error"])


async def test_a_file_elsewhere_goes_with_the_call_and_its_address_does_not() -> None:
    async def serve(request: Request, peer: Peer) -> None:
        await peer.answer(200, b"RIFF", Content_Type="audio/wav")

    async with RawServer(serve) as host:
        verdict, [call] = await perform({"file_url": f"{host.url}/talk.wav", "language": "en"})
    assert isinstance(verdict, ItemVerdict)
    assert verdict.finished.outcome is Outcome.ANSWERED
    assert call.audio is not None
    assert (call.audio.name, call.audio.data) == ("talk.wav", b"RIFF")
    assert json.loads(call.body) == {"model": "w", "language": "en"}


@pytest.mark.parametrize(
    "url", ["https://127.0.0.1/a.wav", "http://10.0.0.1/a.wav", "https://169.254.169.254/", "file:///etc/passwd", "x"]
)
async def test_an_address_that_is_closed_fails_its_item_alone(url: str) -> None:
    verdict, calls = await perform({"file_url": url}, TargetRules())
    assert (error_of(verdict)["param"], calls) == ("body.file_url", [])


@pytest.mark.parametrize(("status", "is_tried_again"), [(404, False), (302, False), (503, True), (429, True)])
async def test_a_host_that_is_away_is_tried_again_and_one_that_refuses_is_not(
    status: int, is_tried_again: bool
) -> None:
    async def serve(request: Request, peer: Peer) -> None:
        await peer.answer(status, b"")

    async with RawServer(serve) as host:
        verdict, calls = await perform({"file_url": f"{host.url}/a.wav"})
    assert not calls
    if is_tried_again:
        assert isinstance(verdict, Again)
        assert verdict.count == 1
    else:
        assert str(status) in error_of(verdict)["message"]


class SlowHosts:
    """Files come at once, but from the host `slow`, which keeps every item waiting until it is released."""

    def __init__(self) -> None:
        self.release = asyncio.Event()
        self.waiting = 0

    async def fetch(self, url: str, size_bytes_max: int, *, owner: str) -> FetchedFile:
        if "//slow/" in url:
            self.waiting += 1
            await self.release.wait()
        return FetchedFile(200, "", "audio/wav", b"RIFF")


async def test_files_that_do_not_come_hold_up_few_items_of_their_own_tenant_and_none_of_another() -> None:
    files = SlowHosts()
    performing = Performing(files)
    slow = [asyncio.create_task(performing.perform({"file_url": "https://slow/a.wav"}, "tenant:a")) for _ in range(40)]
    await asyncio.sleep(0)
    ended = [task.result() for task in slow if task.done()]
    assert files.waiting == FETCHES_PER_OWNER_MAX
    assert len(ended) == 40 - FETCHES_PER_OWNER_MAX, "an item that cannot be served soon takes no runner"
    assert {(type(one), one.count) for one in ended if isinstance(one, Again)} == {(Again, 0)}
    for _ in range(40):
        verdict = await performing.perform({"file_url": "https://quick/b.wav"}, "tenant:b")
        assert isinstance(verdict, ItemVerdict)
    files.release.set()
    await asyncio.gather(*slow)
    assert isinstance(await performing.perform({"file_url": "https://slow/a.wav"}, "tenant:a"), ItemVerdict)
    assert not performing._performer._fetches, "nothing is kept of owners who wait for no file"


async def test_only_so_many_fetched_files_are_in_memory_at_once() -> None:
    files = SlowHosts()
    performing = Performing(files)
    body = {"file_url": "https://slow/a.wav"}
    all_items = [
        asyncio.create_task(performing.perform(body, f"tenant:{number}")) for number in range(FETCHED_FILES_MAX + 1)
    ]
    await asyncio.sleep(0)
    assert files.waiting == FETCHED_FILES_MAX
    files.release.set()
    assert all(isinstance(one, ItemVerdict) for one in await asyncio.gather(*all_items))


async def test_other_members_are_held_to_the_rules_of_every_body() -> None:
    file_url = "data:audio/wav;base64,UklGRg=="
    verdict, calls = await perform({"file_url": file_url, "priority": 1})
    assert (error_of(verdict)["code"], calls) == ("parameter_not_allowed", [])
    verdict, calls = await perform({"file_url": file_url, "image_url": "https://a.example/x.png"})
    assert (error_of(verdict)["code"], calls) == ("media_not_allowed", [])
    verdict, calls = await perform({"file_url": file_url, "response_format": "text"})
    assert (error_of(verdict)["param"], calls) == ("body.response_format", [])
