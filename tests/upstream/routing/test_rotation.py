"""A deployment that gets another key or certificate is tried at once, whatever was thought of it; and equal settings share connections."""

from __future__ import annotations

import os
import shutil
import ssl
from pathlib import Path

import pytest
from msgspec.structs import replace
from yarl import URL

from tests.support.certificates import self_signed, shown_by_server
from tests.upstream.calls.test_router import failure
from tests.upstream.raw_server import Peer, RawServer, Request
from tests.upstream.world import RouterWorld, deployment
from tidegate.backends.shared_redis import LocalRests
from tidegate.core.deployments import Deployment, HttpLimits, Secret, Tls
from tidegate.core.errors import KeyRejected
from tidegate.settings.renewal import Renewal
from tidegate.upstream.http.transport import AiohttpTransport, UpstreamRequest
from tidegate.upstream.routing.deployment_state import KEY_REST_MS_MAX
from tidegate.upstream.routing.slots import Capacity

pytestmark = pytest.mark.anyio


async def new_key_only(request: Request, peer: Peer) -> None:
    is_right = request.headers.get("Authorization") == "Bearer new"
    await peer.answer(200 if is_right or request.line.startswith("GET") else 401)


@pytest.mark.parametrize("is_shared", [False, True])
async def test_another_key_is_tried_at_once(world: RouterWorld, is_shared: bool) -> None:
    """Also where a process has published that the model is to be left alone."""
    rests = LocalRests(world.clock)
    async with RawServer(new_key_only) as server:
        before = deployment(server.url, models=("m",), api_key=Secret("old"))
        capacity = Capacity(rests=rests) if is_shared else None
        async with world.router(before, capacity=capacity) as router:
            error = await failure(router, world)
            assert type(error) is KeyRejected
            assert bool(rests.current()) is is_shared
            router.replace([before], ())
            assert router.free_slots("m") == 0, "the same key is no reason to try"
            router.replace([replace(before, api_key=Secret("new"))], ())
            assert (router.rests_until_ms("m"), router.closed("m")) == (0.0, "")
            await router.send(world.call())
    assert len(server.posts) == 2


async def test_what_met_a_rejected_key_looks_again_soon_and_asks_no_more_often(world: RouterWorld) -> None:
    async with RawServer(new_key_only) as server:
        async with world.router(deployment(server.url, models=("m",), api_key=Secret("old"))) as router:
            error = await failure(router, world)
            assert error.retry_after_ms == KEY_REST_MS_MAX
            for _ in range(5):
                assert router.rests_until_ms("m") == world.clock.monotonic + KEY_REST_MS_MAX
                world.clock.advance(KEY_REST_MS_MAX)
                assert router.free_slots("m") == 0
                await failure(router, world)
    assert len(server.posts) == 1


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two authorities' certificates, each for 127.0.0.1."""
    place = tmp_path_factory.mktemp("certificates")
    for name in ("one", "two"):
        self_signed(place, stem=name)
    return place


def serving(place: Path, name: str, clients: str | None = None) -> ssl.SSLContext:
    return shown_by_server(place / f"{name}.pem", place / f"{name}.key", place / f"{clients}.pem" if clients else None)


async def test_equal_settings_share_one_pool_and_others_do_not(certificates: Path) -> None:
    ca = str(certificates / "one.pem")
    async with RawServer(tls=serving(certificates, "one")) as server:
        transport = AiohttpTransport(HttpLimits())

        async def call(name: str, tls: Tls, key: str = "k") -> int:
            one = Deployment(name, server.url, tls=tls, api_key=Secret(key))
            line = transport.client_for(one)
            assert (
                await line.post(UpstreamRequest(URL(one.url_of("/v1/chat/completions")), "k", b"{}"), 10)
            ).status == 200
            return server.posts[-1].connection

        try:
            assert {
                await call("a", Tls(ca_file=ca)),
                await call("b", Tls(ca_file=ca)),
                await call("c", Tls(ca_file=ca), "other"),
            } == {1}
            assert await call("d", Tls(verify=False)) == 2
            assert await call("e", Tls(ca_file=ca, cert_file=ca, key_file=str(certificates / "one.key"))) == 3
            assert {await call("f", Tls(verify=False)), await call("g", Tls(ca_file=ca))} <= {1, 2}
            assert transport.connections.open_count() == 3, "one ceiling counts them all"
        finally:
            await transport.close()


async def test_equal_settings_share_one_pool_without_tls_too(world: RouterWorld) -> None:
    async with RawServer() as server:
        places = [deployment(server.url, name, models=(name,)) for name in ("a", "b")]
        async with world.router(*places) as router:
            for name in ("a", "b", "a", "b"):
                await router.send(world.call(name))
    assert {post.connection for post in server.posts} == {1}


async def test_a_client_certificate_that_is_replaced_is_shown_and_a_broken_one_is_not(
    world: RouterWorld, certificates: Path, tmp_path: Path
) -> None:
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    renewal = Renewal({})

    def write(name: str) -> None:
        for path, end in ((cert, "pem"), (key, "key")):
            shutil.copy(certificates / f"{name}.{end}", path)
            at_ns = os.stat(path).st_mtime_ns + 1
            os.utime(path, ns=(at_ns, at_ns))

    write("one")
    async with RawServer(tls=serving(certificates, "one", clients="two")) as server:
        tls = Tls(ca_file=str(certificates / "one.pem"), cert_file=str(cert), key_file=str(key))
        place = deployment(server.url, models=("m",), tls=tls)
        async with world.router(renewal.renewed(place)) as router:
            await failure(router, world)
            assert not renewal.has_news()
            cert.write_text("half a cert")
            assert renewal.has_news()
            assert "check that each exists" in router.replace([renewal.renewed(place)], ())["one"]
            assert router.knows("m"), "the one before serves on: no item may fail for this"
            write("two")
            assert router.replace([renewal.renewed(place)], ()) == {}
            await router.send(world.call())
    assert len(server.posts) == 1
