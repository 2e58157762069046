"""Operator commands reach the server whatever address it listens on: they go through a socket in the data directory."""

from __future__ import annotations

import json
import os
import socket
import stat
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from tests.cli.conftest import Desk, Serving
from tidegate import control
from tidegate.core.deployments import Secret
from tidegate.core.errors import SettingsError

LONG = "a-directory-with-a-name-so-long-that-the-address-of-a-socket-has-no-room-for-it-whatever-comes-before"


def own_addresses(family: socket.AddressFamily) -> list[str]:
    """Addresses of this machine that are not loopback ones."""
    found = [one.address for many in psutil.net_if_addrs().values() for one in many if one.family == family]
    return [one for one in found if not one.startswith(("127.", "fe80")) and one != "::1"]


HOSTS = ["0.0.0.0", "::", *own_addresses(socket.AF_INET)[:1], *own_addresses(socket.AF_INET6)[:1]]


class Operated(Serving):
    """A server with a key in its store, and the commands of its operator."""

    def __init__(self, desk: Desk, host: str, data: str = ".tidegate", **variables: str) -> None:
        self.desk, self.data = desk, data
        (desk.here / "c.yaml").write_text(f"models: {{fixed: {{deployments: [{{url: '{desk.engine.url}'}}]}}}}\n")
        self.did("keys", "create", "--org", "first")
        super().__init__(desk, "--config", "c.yaml", "--data", data, "--host", host, **variables)

    def did(self, *words: str, code: int = 0) -> str:
        proc = self.desk.done(*words, "--config", "c.yaml", "--data", self.data, code=code)
        return proc.stdout() + proc.stderr()


@pytest.mark.parametrize("host", HOSTS)
def test_commands_work_on_whatever_address_the_server_listens(desk: Desk, host: str) -> None:
    at = Operated(desk, host)
    made = json.loads(at.did("keys", "create", "--org", "acme", "--json"))
    at.did("deployments", "add", "gpu", "--model", "m", "--url", desk.engine.url)
    assert "gpu" in at.did("deployments", "list")
    assert "fair_share_v1" in at.did("scheduler", "set", "fair_share_v1")
    at.did("keys", "revoke", made["id"])
    assert f"pid {at.proc.pid} serves this data" in at.did("doctor")


def test_neither_proxies_nor_a_long_path_nor_a_full_house_stand_in_the_way(desk: Desk) -> None:
    """Clients that hold every connection of the API keep no operator out."""
    at = Operated(desk, "127.0.0.1", f"{LONG}/{LONG}", TIDEGATE_SERVER_CONNECTIONS_MAX="32")
    url = at.proc.wait_for_line(r"http://(\S+)$").group(1)
    host, _, port = url.rpartition(":")
    held = [socket.create_connection((host, int(port))) for _ in range(64)]
    try:
        for one in held:
            one.sendall(b"POST /v1/files HTTP/1.1\r\nHost: localhost\r\n")
        assert "tg_live_" in at.did("keys", "create", "--org", "acme")
    finally:
        for one in held:
            one.close()


def test_the_socket_of_a_process_that_died_is_taken_over(desk: Desk) -> None:
    at = Operated(desk, "127.0.0.1")
    at.proc.kill()
    assert (desk.here / ".tidegate" / "control.sock").exists()
    assert "tg_live_" in at.did("keys", "create", "--org", "acme")
    second = Operated(desk, "127.0.0.1")
    assert "tg_live_" in second.did("keys", "create", "--org", "acme")


def test_a_socket_that_another_user_left_is_not_trusted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with control.control_socket(tmp_path):
        with control.socket_address(tmp_path) as address:
            assert Path(address).is_socket()
        directory, found = tmp_path.stat(), (tmp_path / control.SOCKET_NAME).lstat()
        foreign = os.stat_result((found.st_mode, found.st_ino, found.st_dev, 1, directory.st_uid + 7, *found[5:10]))
        monkeypatch.setattr(Path, "lstat", lambda path: foreign)
        with pytest.raises(SettingsError, match="was not put there by the owner"), control.socket_address(tmp_path):
            pass
    plain = tmp_path / "plain"
    plain.mkdir()
    (plain / control.SOCKET_NAME).write_text("")
    monkeypatch.undo()
    with pytest.raises(SettingsError, match="was not put there by the owner"), control.socket_address(plain):
        pass


def test_only_the_servers_own_user_and_root_are_let_in(monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    with one, other:
        assert control.is_peer_owner(one)
        user_id = os.geteuid()
        monkeypatch.setattr(os, "geteuid", lambda: user_id + 7)
        assert control.is_peer_owner(one) == (user_id == 0)


def test_the_newest_of_two_processes_has_the_socket_and_keeps_it_when_the_other_ends(tmp_path: Path) -> None:
    path = tmp_path / control.SOCKET_NAME
    with control.control_socket(tmp_path) as first:
        before = path.lstat().st_ino
        with control.control_socket(tmp_path):
            newest = path.lstat().st_ino
            assert newest != before
            first.close()
        assert not path.exists()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("user_id", "is_let_in"), [(0, True), (os.geteuid(), True), (os.geteuid() + 7, False)])
def test_another_user_is_not_let_in_also_where_root_runs_the_server(user_id: int, is_let_in: bool) -> None:
    peer: Any = SimpleNamespace(getsockopt=lambda *_: control._CREDENTIALS.pack(1, user_id, 1))
    assert control.is_peer_owner(peer) == is_let_in


def test_a_process_that_ends_takes_nothing_of_the_next_one_along(tmp_path: Path) -> None:
    with ExitStack() as newest:
        with control.control_file(tmp_path, "http://old", Secret("a")), control.control_socket(tmp_path):
            newest.enter_context(control.control_file(tmp_path, "http://new", Secret("b")))
            newest.enter_context(control.control_socket(tmp_path))
        found = control.running_control(tmp_path)
        assert found is not None
        assert found.url == "http://new"
        modes = {path.name: stat.S_IMODE(path.lstat().st_mode) for path in tmp_path.iterdir()}
        assert modes == {control.NAME: 0o600, control.SOCKET_NAME: 0o600}, "for this user alone"
    assert list(tmp_path.iterdir()) == []


def test_a_long_address_leads_to_the_directory_as_long_as_the_socket_is_there(tmp_path: Path) -> None:
    """An event loop looks at the address of a listening socket again: from Python 3.13 on uvloop does at the start."""
    place = tmp_path / LONG
    place.mkdir()
    with control.control_socket(place) as listener, (tmp_path / "another").open("w"):
        assert Path(listener.getsockname()).parent.resolve() == place.resolve()
