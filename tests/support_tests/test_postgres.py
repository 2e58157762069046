"""The PostgreSQL of the test run: fresh databases, crashes that keep what was committed, broken connections."""

from __future__ import annotations

import subprocess
from pathlib import Path

import asyncpg
import pytest

from tests.support import postgres
from tests.support.postgres import PostgresFailed, PostgresServer
from tests.support.processes import wait_until_async


async def test_it_is_version_18_with_c_collation_and_fsync(postgres_url: str) -> None:
    connection = await asyncpg.connect(postgres_url)
    try:
        assert (await connection.fetchval("show server_version")).startswith("18.")
        assert await connection.fetchval("show fsync") == "on"
        assert await connection.fetchval("show max_connections") == "200"
        assert await connection.fetchval("select datcollate from pg_database where datname = current_database()") == "C"
    finally:
        await connection.close()


async def test_every_database_is_fresh(postgres_server: PostgresServer) -> None:
    urls = [postgres_server.create_database(), postgres_server.create_database()]
    first = await asyncpg.connect(urls[0])
    second = await asyncpg.connect(urls[1])
    try:
        await first.execute("create table things (id bigint primary key)")
        assert await second.fetchval("select to_regclass('things')") is None
    finally:
        await first.close()
        await second.close()
    for url in urls:
        postgres_server.drop_database(url)
    with pytest.raises(asyncpg.InvalidCatalogNameError):
        await asyncpg.connect(urls[0])


async def test_terminated_backends_lose_their_connection_and_may_come_back(
    postgres_server: PostgresServer, postgres_url: str
) -> None:
    connection = await asyncpg.connect(postgres_url)
    assert postgres_server.terminate_backends(postgres_url.rsplit("/", 1)[1]) == 1
    await wait_until_async(connection.is_closed, what="the connection to be seen as closed")
    again = await asyncpg.connect(postgres_url)
    assert await again.fetchval("select 1") == 1
    await again.close()


def test_the_connection_that_terminates_others_spares_itself(private_postgres_server: PostgresServer) -> None:
    assert private_postgres_server.terminate_backends("postgres") == 0


async def test_an_immediate_restart_keeps_the_port_and_what_was_committed(
    private_postgres_server: PostgresServer,
) -> None:
    url = private_postgres_server.create_database()
    connection = await asyncpg.connect(url)
    await connection.execute("create table things (id bigint primary key)")
    await connection.execute("insert into things values (7)")
    port = private_postgres_server.port
    private_postgres_server.restart_immediate()
    await wait_until_async(connection.is_closed, what="the connection to break")
    assert private_postgres_server.port == port
    again = await asyncpg.connect(url)
    assert await again.fetchval("select id from things") == 7
    await again.close()


def test_stopping_twice_is_no_error_and_a_stopped_server_starts_again(private_postgres_server: PostgresServer) -> None:
    url = private_postgres_server.create_database()
    private_postgres_server.stop()
    private_postgres_server.stop()
    with pytest.raises(PostgresFailed, match="did not answer"):
        private_postgres_server.create_database()
    private_postgres_server.start()
    assert private_postgres_server.terminate_backends(url.rsplit("/", 1)[1]) == 0


def test_a_server_that_cannot_start_says_why(private_postgres_server: PostgresServer) -> None:
    private_postgres_server.stop()
    with (private_postgres_server.data / "postgresql.conf").open("a") as configuration:
        configuration.write("\nnonsense_setting = 1\n")
    with pytest.raises(PostgresFailed, match="nonsense_setting"):
        private_postgres_server.start()


def test_programs_that_the_unprivileged_user_cannot_reach_are_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o700)
    package = postgres._installed_programs().parents[1]
    for name in (package.name, f"{package.name}.libs"):
        (closed / name).symlink_to(package.parent / name)
    closed_programs = closed / package.name / "pginstall" / "bin"
    monkeypatch.setattr(postgres, "_installed_programs", lambda: closed_programs)
    monkeypatch.setattr(postgres, "_is_root", lambda: True)
    services = tmp_path / "services"
    programs = postgres._programs(services / "postgres-x")
    assert programs.is_relative_to(services)
    # They must still find their libraries from there.
    done = subprocess.run([programs / "postgres", "--version"], check=True, capture_output=True, text=True, timeout=60)
    assert "PostgreSQL) 18." in done.stdout
