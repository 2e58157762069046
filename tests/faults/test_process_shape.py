"""Batches whose callers ask for more than the lines of a file, with real processes: killed at every step, over a database that crashes."""

from __future__ import annotations

from tests.faults.conftest import MakeSite
from tests.support.postgres import PostgresServer
from tests.support.tidegate import IN_FLIGHT, Site, behaving, requests

# Longer than a crash and recovery of the server take.
PATIENT = {"TIDEGATE_WORKER_LEASE_MS": "8000"}


def slow(number: int) -> str:
    return behaving("latency=150")


def cluster(make_site: MakeSite, server: PostgresServer) -> Site:
    site = make_site("cluster")
    site.env["TIDEGATE_STORE_URL"] = server.create_database()
    site.env["TIDEGATE_PARAMETERS_DEFAULTS"] = '{"seed": 7, "max_tokens": 4}'
    return site


def test_parameters_are_sent_though_processes_die_while_the_input_is_read(
    make_site: MakeSite, private_postgres_server: PostgresServer
) -> None:
    site = cluster(make_site, private_postgres_server)
    lines = requests(40, slow)
    first = site.begin("ingest_work_durable=kill", more=PATIENT)
    batch_id = site.submit(lines, defaults={"user": "u"}, overrides={"max_tokens": 2})
    first.wait(timeout_s=60)
    second = site.worker(more=PATIENT)
    site.until_called(IN_FLIGHT + 1)
    private_postgres_server.restart_immediate()
    site.until_called(2 * IN_FLIGHT)
    second.kill()
    site.relieve(more=PATIENT)
    results = site.judge(batch_id, lines, repeats_max=2 * IN_FLIGHT)
    assert {line["response"]["body"]["usage"]["completion_tokens"] for line in results.output} == {2}
