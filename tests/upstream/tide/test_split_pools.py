"""Servers that prefill and servers that decode, behind one router: the tide reads the page of those that decode, and no other."""

from __future__ import annotations

import pytest

from tests.upstream.raw_server import RawServer, eventually
from tests.upstream.tide.test_tides import Model, gauges, sea
from tidegate.core.schedule import Reason

pytestmark = pytest.mark.anyio

SENT = 4


def decoding(*servers: tuple[int, int]) -> bytes:
    """The page of several servers that decode, as a collector of theirs shows it: running and waiting calls of each."""
    lines = [
        gauges(*one).replace(b'{model_name="m"}', b'{model_name="m",pod="%d"}' % n) for n, one in enumerate(servers)
    ]
    return b"".join(lines)


async def test_the_tide_goes_by_the_servers_that_decode() -> None:
    decoders = Model()
    async with RawServer(decoders) as pool, sea(metrics_url=f"{pool.url.removesuffix('/v1')}/metrics") as at:
        # Where calls are sent, a page shows the queue for prefill. Read as the engine's own, it would keep batches out for ever.
        at.model.page = gauges(40, 40)
        decoders.page = decoding((1, 0), (0, 0))
        for _ in range(SENT):
            at.send()
        await at.arrived(1)
        await at.until(lambda: at.tide._sample is not None, "a look")
        await at.until(lambda: at.tide.calls >= SENT, "every call to be allowed")
        await at.arrived(SENT)
        decoders.page = decoding((1, 0), (2, 0))
        await at.until(lambda: at.tide._reading is not None and at.tide._reading.running == 3, "both to be added up")
        assert at.tide._tide._outside == 0, "the fourth of our calls is being prefilled, and none of them is unknown"
        assert at.router.closed("m") != Reason.TIDE_CLOSED

        decoders.page = decoding((5, 1), (6, 1))
        await at.until(lambda: at.router.closed("m") == Reason.TIDE_CLOSED, "to stand back for users it cannot see")
        decoders.page = decoding((2, 0), (2, 0))
        await at.until(lambda: at.router.closed("m") != Reason.TIDE_CLOSED, "to go on")
        assert (at.model.scrapes, decoders.flying) == (0, [])


async def test_servers_that_prefill_are_asked_for_nothing_while_those_that_decode_are_away() -> None:
    decoders = Model()
    async with RawServer(decoders) as pool, sea(metrics_url=f"{pool.url.removesuffix('/v1')}/metrics") as at:
        at.model.page = gauges(40, 40)
        at.send()
        await at.arrived(1)
        await eventually(lambda: decoders.scrapes > 0, "a look at the page that is not there")
        await at.turned()
        assert at.model.scrapes == 0
        assert at.router.closed("m") != Reason.TIDE_CLOSED, "without a page it goes by latency and refusals"
