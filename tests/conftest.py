"""Fixtures that every test may ask for. Nothing is started until a test asks, and nothing outlives the run."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import sys
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

import tidegate
from tests.support.azure import AzureServer, azure_server
from tests.support.engine import Engine
from tests.support.postgres import PostgresServer
from tests.support.prepared import prepared
from tests.support.processes import Processes
from tests.support.proxy import Proxies, WiredDatabase
from tests.support.receiver import Receiver
from tests.support.redis import RedisServer
from tests.support.rewriting import rewriting_beside
from tests.support.run_directory import RunDirectory, ServiceFailed, use_memory_for_files
from tests.support.s3 import S3Server
from tests.support.sdks import load_before_fork
from tests.support.shims import Shims
from tests.support.store_verbs import postgres_driver
from tests.support.tidegate import s3_env
from tidegate.store.store import Store

pytest_plugins = ["tests.support.workers"]

RUN = pytest.StashKey[RunDirectory]()
# From so many on, some tests in every worker use the SDKs.
MOST_TESTS = 3_000
OwnModule = Callable[[str], str]


# Properties are judged by what holds, never by how long an example takes: the machine may be busy. Every run draws examples of its own, and
# the soak many more.
for profile, count in (("unhurried", 50), ("thorough", 1_500)):
    settings.register_profile(profile, deadline=None, max_examples=count, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("unhurried")

TESTS = Path(__file__).parent
# An authority that signed nothing: its key was never kept.
AUTHORITY = TESTS / "support" / "authority.pem"

# Tests sign certificates, run the pages' commands as a reader would, and build small shims.
TOOLS = ("bash", "cc", "curl", "openssl")


def pytest_configure(config: pytest.Config) -> None:
    if missing := [tool for tool in TOOLS if shutil.which(tool) is None]:
        pytest.exit(f"The tests need {', '.join(missing)} on PATH: install what is missing and run them again.", 2)
    # A run in a shell's background ignores Ctrl-C, and so would every process that a test interrupts.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    use_memory_for_files()
    # A developer's own settings must not steer the tests. Workers inherit what is left.
    for name in [name for name in os.environ if name.startswith("TIDEGATE_")]:
        del os.environ[name]
    config.stash[RUN] = RunDirectory.create()
    # Reading the system's authorities costs each of the thousands of clients 50 ms of CPU, and no test meets any of them.
    os.environ |= {"SSL_CERT_FILE": str(AUTHORITY), "SSL_CERT_DIR": os.devnull}
    # To ask PostgreSQL for TLS, which it has not, takes half of what a connection takes here. Commands that get no environment of ours do.
    os.environ["PGSSLMODE"] = "disable"


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Generator[None, object, object]:
    """Use both cores while a whole run is collected: rewrite tests, and begin what the product's processes are forked from, once for all
    workers."""
    config = session.config
    if config.getoption("workers") < 2 or config.args_source is not pytest.Config.ArgsSource.TESTPATHS:
        return (yield)
    with rewriting_beside(config, TESTS, Path(tidegate.__file__).parent):
        prepared("")
        return (yield)


def pytest_collection_finish(session: pytest.Session) -> None:
    if session.config.getoption("workers") > 1 and len(session.items) > MOST_TESTS:
        load_before_fork()


def pytest_worker_started(config: pytest.Config) -> None:
    """Leave the run's directory to the controller."""
    config.stash[RUN] = config.stash[RUN].left_to_controller()


def pytest_unconfigure(config: pytest.Config) -> None:
    config.stash[RUN].close()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Name the seeds that only this run drew, so that any of them can be run again."""
    reports = [report for kind in ("passed", "failed") for report in terminalreporter.stats.get(kind, ())]
    drawn = [str(value) for report in reports for name, value in report.user_properties if name == "fresh_seeds"]
    if drawn:
        terminalreporter.write_line(f"fresh seeds of the simulation: {', '.join(sorted(drawn))}")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Function, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Show the output of the processes of a failed test."""
    report = yield
    for processes in getattr(item, "funcargs", {}).values():
        if report.failed and isinstance(processes, Processes):
            for proc in processes.started:
                report.sections.append((f"process {proc.name}", proc.logs()))
    return report


@pytest.fixture(scope="session")
def anyio_backend() -> tuple[str, dict[str, bool]]:
    """Coroutine tests run on the loop that the product runs on, which also takes a seventh less CPU."""
    return "asyncio", {"use_uvloop": True}


@pytest.fixture(scope="session")
def run_directory(request: pytest.FixtureRequest) -> RunDirectory:
    """The directory that all processes of this test run share."""
    return request.config.stash[RUN]


@contextlib.contextmanager
def failing_plainly() -> Iterator[None]:
    """Let a test fail with the words of a server that could not be had, and nothing else."""
    try:
        yield
    except ServiceFailed as failure:
        pytest.fail(str(failure), pytrace=False)


@pytest.fixture(scope="session")
def postgres_server(run_directory: RunDirectory) -> PostgresServer:
    """The run's PostgreSQL. Others use it too: to stop or restart one, ask for `private_postgres_server`."""
    with failing_plainly():
        return run_directory.shared(PostgresServer)


@pytest.fixture(scope="session")
def database_drops() -> Iterator[Callable[[PostgresServer, str], None]]:
    """Drops databases while other tests run: each drop waits for a checkpoint."""
    drops: list[Future[None]] = []
    with ThreadPoolExecutor(1) as thread:
        yield lambda server, url: drops.append(thread.submit(server.drop_database, url))
    for drop in drops:
        drop.result()


@pytest.fixture
def postgres_url(
    postgres_server: PostgresServer, database_drops: Callable[[PostgresServer, str], None]
) -> Iterator[str]:
    """A fresh, empty database."""
    url = postgres_server.create_database()
    yield url
    database_drops(postgres_server, url)


@pytest.fixture(scope="session")
def migrated_template(postgres_server: PostgresServer) -> str:
    """The name of a database that has the schema and nothing in it: to copy one costs half of migrating one."""
    url = postgres_server.create_database()
    opened = Store(postgres_driver(url, pool_size=1))

    async def migrate() -> None:
        await opened.migrate()
        await opened.close()

    asyncio.run(migrate())
    return url.rsplit("/", 1)[1]


@pytest.fixture
def migrated_postgres_url(
    postgres_server: PostgresServer,
    migrated_template: str,
    database_drops: Callable[[PostgresServer, str], None],
) -> Iterator[str]:
    """A fresh database with the schema of the product."""
    url = postgres_server.create_database(migrated_template)
    yield url
    database_drops(postgres_server, url)


@pytest.fixture
def private_postgres_server(run_directory: RunDirectory) -> Iterator[PostgresServer]:
    """A PostgreSQL of this test's own, to be restarted and stopped at will."""
    with failing_plainly(), run_directory.private(PostgresServer) as server:
        yield server


@pytest.fixture(scope="session")
def s3_server(run_directory: RunDirectory) -> S3Server:
    """The run's S3 server. Others use it too: to stop one, ask for `private_s3_server`."""
    with failing_plainly():
        return run_directory.shared(S3Server)


@pytest.fixture
def s3_bucket(s3_server: S3Server) -> Iterator[str]:
    """A fresh, empty bucket."""
    bucket = s3_server.create_bucket()
    yield bucket
    s3_server.delete_bucket(bucket)


@pytest.fixture
def private_s3_server(run_directory: RunDirectory) -> Iterator[S3Server]:
    """An S3 server of this test's own, to be stopped at will."""
    with failing_plainly(), run_directory.private(S3Server) as server:
        yield server


@pytest.fixture(scope="session")
def redis_server(run_directory: RunDirectory) -> RedisServer:
    """The run's Redis. Others use it too: to flush or stop one, ask for `private_redis`."""
    with failing_plainly():
        return run_directory.shared(RedisServer)


@pytest.fixture
def redis_url(redis_server: RedisServer) -> str:
    """Return the address of the shared server, where each test writes under a prefix of its own."""
    return redis_server.url


@pytest.fixture
def private_redis(run_directory: RunDirectory) -> Iterator[RedisServer]:
    """A Redis of this test's own, to be flushed, paused and stopped at will."""
    with failing_plainly(), run_directory.private(RedisServer) as server:
        yield server


@pytest.fixture(scope="module")
def azure(module_directory: Path) -> Iterator[AzureServer]:
    """An Azure server that all tests of a module share."""
    with azure_server(module_directory / "azure") as server:
        yield server


@pytest.fixture
def processes(run_directory: RunDirectory, tmp_path: Path) -> Iterator[Processes]:
    """Yield a starter of processes. None of them outlives the test, and a failed test shows their output."""
    with Processes(tmp_path / "process-logs", run_directory.process_registry()) as started:
        yield started


@pytest.fixture(scope="module")
def module_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory for what all tests of a module share."""
    return tmp_path_factory.mktemp("module")


@pytest.fixture(scope="module")
def module_processes(run_directory: RunDirectory, module_directory: Path) -> Iterator[Processes]:
    """Starts processes that all tests of a module share."""
    with Processes(module_directory / "process-logs", run_directory.process_registry()) as started:
        yield started


@pytest.fixture
def engine(processes: Processes, tmp_path: Path) -> Engine:
    """The simulated engine in instant mode."""
    return Engine(processes, tmp_path / "engine")


@pytest.fixture
def own_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[OwnModule]:
    """Writes a module of an operator's own and returns its name, which no other test has. Beside it NAME_broken cannot be imported. What
    waits for its event `never` goes on when the test is over."""
    name = f"own_{tmp_path.parent.name}_{tmp_path.name}".replace("-", "_")
    monkeypatch.syspath_prepend(str(tmp_path))

    def write(text: str) -> str:
        (tmp_path / f"{name}.py").write_text(text)
        (tmp_path / f"{name}_broken.py").write_text("import nothing_of_this_name\n")
        return name

    yield write
    made = sys.modules.pop(name, None)
    if made is not None and hasattr(made, "never"):
        made.never.set()


@pytest.fixture
def cluster_env(migrated_postgres_url: str, s3_server: S3Server, s3_bucket: str) -> dict[str, str]:
    """What the processes of a cluster share: a database and a bucket of its own."""
    return {"TIDEGATE_STORE_URL": migrated_postgres_url, **s3_env(s3_server, s3_bucket)}


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    """Takes webhooks."""
    with Receiver() as made:
        yield made


@pytest.fixture
def proxies() -> Iterator[Proxies]:
    """Puts TCP proxies with faults in front of servers."""
    opened = Proxies()
    yield opened
    opened.close()


@pytest.fixture
def wired_database(migrated_postgres_url: str, postgres_server: PostgresServer, proxies: Proxies) -> WiredDatabase:
    """A fresh database with the schema of the product, behind a proxy of its own."""
    wire = proxies.open(postgres_server.port)
    return WiredDatabase(migrated_postgres_url.replace(f":{postgres_server.port}/", f":{wire.port}/"), wire)


@pytest.fixture(scope="session")
def shims(tmp_path_factory: pytest.TempPathFactory) -> Shims:
    """Compiles the preload shims for a full disk and a jumping clock."""
    return Shims(tmp_path_factory.mktemp("shims"))
