"""Each fault of the TCP proxy, seen from both ends of a real connection."""

from __future__ import annotations

import select
import socket
import threading
from collections.abc import Iterator

import pytest

from tests.support.processes import free_port, wait_until
from tests.support.proxy import Proxies, Proxy

PATIENCE_S = 20.0


class EchoServer:
    """Answers every byte with itself; keeps what it received and how its connections ended."""

    def __init__(self) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self.listener.getsockname()[1]
        self.received = bytearray()
        self.ends: list[str] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self.listener.accept()
            except OSError:
                return
            threading.Thread(target=self._echo, args=(connection,), daemon=True).start()

    def _echo(self, connection: socket.socket) -> None:
        try:
            while data := connection.recv(65_536):
                self.received += data
                connection.sendall(data)
            connection.sendall(b"bye")
            self.ends.append("closed")
        except OSError:
            self.ends.append("reset")
        finally:
            connection.close()


@pytest.fixture
def echo() -> Iterator[EchoServer]:
    server = EchoServer()
    yield server
    server.listener.close()


@pytest.fixture
def proxy(echo: EchoServer, proxies: Proxies) -> Proxy:
    return proxies.open(echo.port)


def connect(proxy: Proxy) -> socket.socket:
    client = socket.create_connection(("127.0.0.1", proxy.port), timeout=PATIENCE_S)
    client.settimeout(PATIENCE_S)
    return client


def receive(client: socket.socket, count: int) -> bytes:
    received = b""
    while len(received) < count and (data := client.recv(count - len(received))):
        received += data
    return received


def echoed(client: socket.socket, data: bytes) -> bytes:
    client.sendall(data)
    return receive(client, len(data))


def answered(client: socket.socket) -> bool:
    return bool(select.select([client], [], [], 0)[0])


def test_without_faults_it_is_a_wire(proxy: Proxy, echo: EchoServer) -> None:
    body = bytes(range(256)) * 4_096
    with connect(proxy) as client:
        sender = threading.Thread(target=client.sendall, args=(body,))
        sender.start()
        assert receive(client, len(body)) == body
        sender.join()
        client.shutdown(socket.SHUT_WR)
        assert receive(client, 100) == b"bye"
    wait_until(lambda: proxy.links == 0, what="the link to be forgotten")
    assert echo.ends == ["closed"]
    assert proxy.connections_accepted == 1


def test_latency_lets_a_later_question_on_another_wire_be_answered_first(proxies: Proxies, echo: EchoServer) -> None:
    slow, fast = proxies.open(echo.port), proxies.open(echo.port)
    slow.latency(1.0, jitter_s=0.1, direction="down")
    with connect(slow) as late, connect(fast) as early:
        late.sendall(b"late")
        assert echoed(early, b"early") == b"early"
        assert not answered(late)
        assert receive(late, 4) == b"late"


def test_a_rate_leaves_a_slow_stream_behind_a_free_one(proxies: Proxies, echo: EchoServer) -> None:
    slow, free = proxies.open(echo.port), proxies.open(echo.port)
    slow.rate(20_000, direction="up")
    body = b"x" * 60_000
    with connect(slow) as late, connect(free) as early:
        late.sendall(body)
        assert len(echoed(early, b"y" * 60_000)) == 60_000
        assert echo.received.count(b"x") < len(body)
        slow.heal()
        assert receive(late, len(body)) == body


def test_a_cut_resets_after_exactly_so_many_bytes(proxy: Proxy, echo: EchoServer) -> None:
    with connect(proxy) as client:
        assert echoed(client, b"before") == b"before"
        proxy.cut(10, direction="up")
        client.sendall(b"0123456789abcdef")
        with pytest.raises(ConnectionResetError):
            receive(client, 17)
    wait_until(lambda: echo.ends, what="the server to see the cut")
    assert bytes(echo.received) == b"before0123456789"
    proxy.heal()
    with connect(proxy) as client:
        assert echoed(client, b"x" * 100) == b"x" * 100


def test_a_cut_of_nothing_resets_open_connections_at_once(proxy: Proxy) -> None:
    with connect(proxy) as client:
        assert echoed(client, b"up") == b"up"
        proxy.cut(0, direction="down")
        with pytest.raises(ConnectionResetError):
            client.recv(1)


def test_reset_breaks_open_connections_and_serves_new_ones(proxy: Proxy, echo: EchoServer) -> None:
    with connect(proxy) as client:
        assert echoed(client, b"up") == b"up"
        proxy.reset()
        with pytest.raises(ConnectionResetError):
            client.recv(1)
    wait_until(lambda: echo.ends == ["reset"], what="the server to see the reset")
    with connect(proxy) as client:
        assert echoed(client, b"again") == b"again"


def test_close_links_is_a_clean_end(proxy: Proxy) -> None:
    with connect(proxy) as client:
        assert echoed(client, b"up") == b"up"
        proxy.close_links()
        assert client.recv(1) == b""


def test_a_black_hole_swallows_and_closes_nothing_until_it_heals(proxy: Proxy, echo: EchoServer) -> None:
    with connect(proxy) as client:
        assert echoed(client, b"up") == b"up"
        proxy.blackhole()
        client.sendall(b"lost?")
        assert not answered(client)
        assert proxy.links == 1
        assert bytes(echo.received) == b"up"
        proxy.heal()
        assert receive(client, 5) == b"lost?"


def test_a_black_hole_of_one_direction_lets_the_other_pass(proxy: Proxy, echo: EchoServer) -> None:
    with connect(proxy) as client:
        proxy.blackhole("down")
        client.sendall(b"up")
        wait_until(lambda: bytes(echo.received) == b"up", what="the server to receive it")
        assert not answered(client)


def test_half_close_ends_one_direction_only(proxy: Proxy, echo: EchoServer) -> None:
    with connect(proxy) as client:
        assert echoed(client, b"up") == b"up"
        proxy.half_close("down")
        assert client.recv(1) == b""
        client.sendall(b" and up")
        wait_until(lambda: bytes(echo.received) == b"up and up", what="the other direction to go on")


def test_corrupt_flips_one_bit_of_a_chunk(proxy: Proxy, echo: EchoServer) -> None:
    proxy.corrupt("up")
    with connect(proxy) as client:
        answer = echoed(client, b"\x00" * 64)
    assert sum(answer) == 1
    assert bytes(echo.received) == answer


def test_paused_accept_connects_and_is_served_after_healing(proxy: Proxy) -> None:
    proxy.pause_accept()
    with connect(proxy) as client:
        client.sendall(b"waiting")
        assert not answered(client)
        assert proxy.connections_accepted == 0
        proxy.heal()
        assert receive(client, 7) == b"waiting"


def test_refuse_refuses_new_connections_and_keeps_open_ones(proxy: Proxy) -> None:
    with connect(proxy) as client:
        assert echoed(client, b"up") == b"up"
        proxy.refuse()
        with pytest.raises(ConnectionRefusedError):
            connect(proxy)
        assert echoed(client, b"still") == b"still"
    proxy.heal()
    with connect(proxy) as client:
        assert echoed(client, b"again") == b"again"


def test_a_target_that_is_down_resets_the_client(proxies: Proxies) -> None:
    proxy = proxies.open(free_port())

    def ask() -> None:
        # The reset may arrive as early as the connection itself is made.
        with connect(proxy) as client:
            client.recv(1)

    with pytest.raises(ConnectionResetError):
        ask()


def test_close_resets_everything_and_may_be_called_twice(proxy: Proxy) -> None:
    client = connect(proxy)
    assert echoed(client, b"up") == b"up"
    proxy.close()
    with client, pytest.raises(ConnectionResetError):
        client.recv(1)
    proxy.close()
