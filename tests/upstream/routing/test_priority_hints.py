"""The hints in a request, as the server receives it; and the deployment that calls of one prefix stick to."""

import asyncio
import json
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.upstream.raw_server import Peer, RawServer, Request, eventually
from tests.upstream.world import RouterWorld, deployment
from tidegate.core.deployments import Hints, Resource
from tidegate.core.errors import SettingsError
from tidegate.upstream.routing.priority_hints import PriorityHints

pytestmark = pytest.mark.anyio

ALL = Hints(
    priority_field="priority",
    priority=7,
    objective_header="x-gateway-inference-objective",
    objective="batch",
    fairness_header="x-gateway-inference-fairness-id",
    deadline_header="x-slo-ttft-ms",
    prefix_header="x-prefix-group",
)


async def test_every_hint_reaches_the_upstream_and_no_name_does(world: RouterWorld) -> None:
    body = b' {"model":"m", "seed":123456789012345678901}'
    async with RawServer() as server, world.router(deployment(server.url, hints=ALL)) as router:
        for share_owner in ("tenant:acme", "tenant:acme", "tenant:other\r\nX: y"):
            await router.send(world.call(body=body, share_owner=share_owner, prefix_salt=b"batch_1/0", left_ms=5_000))
        await router.send(world.call(body=body))
    first, second, other, bare = server.posts
    assert first.body == b' {"priority":7,"model":"m", "seed":123456789012345678901}'
    assert first.headers["x-gateway-inference-objective"] == "batch"
    assert first.headers["x-slo-ttft-ms"] == "5000"
    fairness = [request.headers["x-gateway-inference-fairness-id"] for request in (first, second, other)]
    assert fairness[0] == fairness[1] != fairness[2]
    assert "acme" not in fairness[0]
    assert "X" not in other.headers
    assert first.headers["x-prefix-group"] == second.headers["x-prefix-group"]
    assert {"x-prefix-group", "x-gateway-inference-fairness-id"}.isdisjoint(bare.headers)


@pytest.mark.parametrize(
    ("body", "sent"),
    [
        (b"{}", b'{"priority":7}'),
        (b"{ }", b'{"priority":7 }'),
        (b'{"a":"\\"priority\\""}', b'{"priority":7,"a":"\\"priority\\""}'),
        (b'{"a":{"priority":1}}', b'{"priority":7,"a":{"priority":1}}'),
        (b'{"priority":1}', b'{"priority":1}'),
        (b'{"a":1,"priority" : null}', b'{"a":1,"priority" : null}'),
        (b"[1,{}]", b"[1,{}]"),
        (b"", b""),
    ],
)
def test_a_callers_own_priority_stays_and_no_other_byte_changes(body: bytes, sent: bytes) -> None:
    assert PriorityHints(deployment("http://h/v1", hints=ALL)).body(body) == sent


_json = st.recursive(
    st.none() | st.integers() | st.text(max_size=8) | st.sampled_from(["priority", '"priority":']),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4) | st.just("priority"), inner),
    max_leaves=8,
)


@given(st.dictionaries(st.text(max_size=4) | st.just("priority"), _json, max_size=5))
def test_only_the_priority_comes_in_front(body: dict[str, object]) -> None:
    hinted = PriorityHints(deployment("http://h/v1", hints=ALL)).body(json.dumps(body).encode())
    assert json.loads(hinted) == {"priority": 7, **body}


def test_callers_choose_names_and_only_so_many_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tidegate.upstream.routing.priority_hints.NAMES_MAX", 3)
    hints = PriorityHints(deployment("http://h/v1", hints=ALL))
    names, kept = [], []
    for number in range(10):
        names.append(hints._name_of(f"tenant:{number % 5}"))
        kept.append(len(hints._names))
    assert names[:5] == names[5:], "a name that was forgotten is made the same again"
    assert len(set(names)) == 5
    assert max(kept) == 3


def test_header_names_that_would_break_a_request_are_refused() -> None:
    for name in ("Authorization", "content-length", "Host", "idempotency-key", "x y", "x:", "x\r\ny", "ü"):
        with pytest.raises(SettingsError, match="hints"):
            Hints(fairness_header=name)
    with pytest.raises(SettingsError, match="objective"):
        Hints(objective_header="x", objective="a\r\nb")


async def test_calls_of_one_prefix_go_to_one_deployment_in_every_process(world: RouterWorld) -> None:
    async with RawServer() as a, RawServer() as b, RawServer() as c:
        places = [deployment(server.url, name) for name, server in (("a", a), ("b", b), ("c", c))]
        groups = [b"batch_%d/0" % number for number in range(60)]
        where: list[dict[bytes, str]] = []
        for _ in range(2):
            async with world.router(*places) as router:
                where.append({})
                for group in groups:
                    names = {(await router.send(world.call(prefix_salt=group))).deployment for _ in range(3)}
                    assert len(names) == 1
                    where[-1][group] = names.pop()
        assert where[0] == where[1]
        assert min(Counter(where[0].values()).values()) >= 8
        # One that goes away moves only its own groups.
        async with world.router(*places[:2]) as router:
            for group in groups:
                found = (await router.send(world.call(prefix_salt=group))).deployment
                assert found == where[0][group] or where[0][group] == "c"


async def test_a_prefix_is_served_elsewhere_rather_than_wait(world: RouterWorld) -> None:
    gate = asyncio.Event()

    async def script(request: Request, peer: Peer) -> None:
        await gate.wait()
        await peer.answer()

    async with RawServer(script) as a, RawServer(script) as b:
        places = (deployment(a.url, "a"), deployment(b.url, "b"))
        async with world.router(*places) as router:
            flying = [asyncio.create_task(router.send(world.call(prefix_salt=b"one"))) for _ in range(40)]
            await eventually(lambda: len(a.posts) + len(b.posts) == 40, "all calls to arrive")
            # The favourite has up to a quarter more than its part, the other the rest.
            assert 20 < max(len(a.posts), len(b.posts)) <= 26
            gate.set()
            await asyncio.gather(*flying)


async def test_a_resource_whose_model_no_deployment_serves_is_refused(world: RouterWorld) -> None:
    with pytest.raises(SettingsError, match="no deployment serves"):
        async with world.router(deployment("http://h/v1", models=("m",)), resources=[Resource("r", "typo")]):
            pass
