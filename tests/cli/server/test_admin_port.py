"""The operators' listener: on an address that others reach, the admin API and the console have a port of their own."""

from __future__ import annotations

import httpx2

from tests.cli.conftest import Desk, Serving
from tests.support.processes import free_port

ADMIN = ("/admin/v1/overview", "/admin/v1/audit", "/console", "/%61dmin/v1/overview")


def test_operators_and_callers_have_ports_of_their_own(desk: Desk) -> None:
    operator = desk.json_of("keys", "create", "--org", "ops", "--scopes", "admin:read", "--json")["key"]
    caller = desk.json_of("keys", "create", "--org", "acme", "--json")["key"]
    port = free_port()
    serving = Serving(desk, "--host", "0.0.0.0", TIDEGATE_ADMIN_PORT=str(port))
    public = f":{serving.url.rpartition(':')[2]}"
    with httpx2.Client(follow_redirects=False) as client:

        def status(where: str, path: str, key: str = "") -> int:
            headers = {"Authorization": f"Bearer {key}"} if key else {}
            return client.get(f"http://127.0.0.1{where}{path}", headers=headers).status_code

        private = f":{port}"
        for path in ADMIN:
            # Not even its own key shows the admin API where callers are, and nothing says that it exists.
            assert status(public, path, operator) == status(public, "/no/such/path", operator) == 404, path
        # A proxy beside the server calls it as a program of this machine would.
        assert status(public, "/metrics") == 404
        assert status(private, "/metrics") == 200
        assert status(private, "/admin/v1/overview", operator) == 200
        assert status(private, "/admin/v1/overview", caller) == 403
        assert status(private, "/admin/v1/overview") == 401
        assert status(private, "/console") in (200, 303)
        assert status(private, "/v1/models", caller) == 404
        assert status(public, "/v1/models", caller) == 200
    serving.proc.terminate()
    assert serving.proc.wait() == 0


def test_without_its_port_the_admin_api_is_nowhere_but_on_this_machine(desk: Desk) -> None:
    key = desk.json_of("keys", "create", "--org", "ops", "--scopes", "admin:read", "--json")["key"]
    public = f":{Serving(desk, '--host', '0.0.0.0').url.rpartition(':')[2]}"
    headers = {"Authorization": f"Bearer {key}"}
    assert httpx2.get(f"http://127.0.0.1{public}/admin/v1/overview", headers=headers).status_code == 404
    assert httpx2.get(f"http://127.0.0.1{public}/metrics").status_code == 404
    # Commands come through the socket in the data directory.
    assert desk.done("workers").stdout()
