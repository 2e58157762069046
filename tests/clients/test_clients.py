"""Two of the clients that install in seconds, unpatched, against one server; `make clients` runs all of them."""

from __future__ import annotations

import pytest

from tests.clients.environments import CLIENTS, Environment
from tests.clients.servers import started

QUICK = ("openbatch", "batchwizard")


@pytest.mark.timeout(600)
def test_two_clients_that_install_in_seconds() -> None:
    environments = {name: Environment(name, CLIENTS[name]) for name in QUICK}
    with started("embedded") as site:
        for name, environment in environments.items():
            shown = environment.run(site.url, site.keyed(name).api_key)
            assert shown.passed, f"{name}: {shown.text}"
