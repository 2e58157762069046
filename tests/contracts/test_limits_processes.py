"""Real processes under one budget, killed in the middle and started again: what they wrote down as sent is never more than the limit.

The budget is a lifetime, so that it does not matter how fast the machine is.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest

from tests.support.processes import Proc, Processes, wait_until
from tests.support.redis import RedisServer
from tests.support.store_verbs import postgres_driver
from tidegate.store.store import Store

LIMIT = 300
AT_ONCE = 5
KILLS = 6

SENDER = f"""
import asyncio, os, sys
from tidegate.core.budgets.budget import Budget, BudgetRequest, Limit, LimitBound, Period
from tidegate.store.limits import StoreLimits
from tidegate.store.database.postgres import PostgresDriver
from tidegate.store.store import Store

async def main():
    database, redis, path = sys.argv[1:]
    limits = StoreLimits(Store(PostgresDriver(database, pool_size=2, statement_timeout_ms=20_000, pooler="none")), str(os.getpid()))
    if redis:
        from tidegate.backends.limits_redis import RedisLimits
        limits = RedisLimits(redis, "t", limits, timeout_s=5)
    budget = Budget(LimitBound.TENANT, "acme", (Limit(Period.LIFETIME, requests={LIMIT}), Limit(Period.MINUTE, requests=10**6)))
    log = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    refused = 0
    while refused < 5:
        [grant] = await limits.debit([BudgetRequest((budget,), {AT_ONCE}, 0)])
        for _ in range(grant.requests):
            os.write(log, b"sent\\n")
        refused = 0 if grant.requests else refused + 1
        await asyncio.sleep(0.02)
    print("spent", flush=True)

asyncio.run(main())
"""


@pytest.mark.parametrize("kind", ["postgresql", "redis"])
def test_killed_processes_never_send_more_than_the_limit(
    kind: str, postgres_url: str, private_redis: RedisServer, processes: Processes, tmp_path: Path
) -> None:
    async def prepare() -> None:
        store = Store(postgres_driver(postgres_url, pool_size=1))
        await store.migrate()
        await store.close()

    asyncio.run(prepare())
    sent = tmp_path / "sent"
    redis_url = private_redis.url if kind == "redis" else ""

    def start() -> Proc:
        return processes.start([sys.executable, "-c", SENDER, postgres_url, redis_url, str(sent)], name="sender")

    def count() -> int:
        return sent.read_bytes().count(b"\n") if sent.exists() else 0

    running = [start() for _ in range(3)]
    for number in range(KILLS):
        before = count()
        wait_until(lambda: count() > before or any(not one.running for one in running), 60, "something to be sent")  # noqa: B023
        victim = running.pop(0)
        victim.kill()
        if number % 3 == 0:
            private_redis.command("FLUSHALL")
        running.append(start())
    for one in running:
        one.wait_for_line("^spent$", timeout_s=90)
    assert count() <= LIMIT
    # Each process that was killed takes with it what it had just been granted; what lay in a block that was flushed is lost as well.
    assert count() >= (LIMIT - KILLS * AT_ONCE if kind == "postgresql" else 1)
