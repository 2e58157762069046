"""A queue as its users meet it: tried with two commands, and looked at by the doctor."""

from __future__ import annotations

import json
import secrets
from typing import Any

from redis import Redis

from tests.cli.conftest import Desk
from tests.support.processes import free_port
from tests.support.redis import RedisServer


def config(desk: Desk, url: str, pool: str, **more: Any) -> str:
    queue = {"url": url, "pool": pool, **more}
    text = json.dumps({"models": {"m": {"deployments": [{"url": desk.engine.url, "name": "queued", "queue": queue}]}}})
    (desk.here / "c.yaml").write_text(text)
    return "c.yaml"


def findings(desk: Desk, code: int = 0) -> list[tuple[str, str]]:
    found = desk.json_of("doctor", "--config", "c.yaml", "--json", code=code)
    assert "canary" not in json.dumps(found)
    return [(one["grade"], f"{one['text']} -> {one['to_do']}") for one in found if one["about"] == "queue"]


def test_a_file_is_run_through_the_queue_of_the_simulated_server(desk: Desk, redis_url: str) -> None:
    pool, port = f"pool-{secrets.token_hex(6)}", free_port()
    engine = desk.start("simulate", "--port", str(port), "--queue", redis_url, "--pool", pool)
    engine.wait_for_line(r"listening on http")
    config(desk, redis_url, pool)
    desk.write_requests(12)
    desk.done("run", "requests.jsonl", "--config", "c.yaml", "-o", "results.jsonl")
    results = [json.loads(line) for line in (desk.here / "results.jsonl").read_text().splitlines()]
    assert sorted(one["custom_id"] for one in results) == sorted(f"c{number}" for number in range(12))
    assert not desk.engine.calls()
    engine.terminate()
    assert engine.wait() == 0, engine.logs()


def test_a_queue_and_its_pools_go_together(desk: Desk, redis_url: str) -> None:
    for wrong in (["--queue", redis_url], ["--pool", "p"], ["--queue", redis_url, "--pool", "p", "--port", "0"]):
        refused = desk.start("simulate", *wrong)
        assert refused.wait() != 0
        assert "--queue" in refused.stderr()


def test_the_doctor_looks_at_queues(desk: Desk, redis_url: str) -> None:
    pool = f"pool-{secrets.token_hex(6)}"
    config(desk, redis_url, pool)
    (not_durable, fine) = findings(desk)
    assert not_durable[0] == "warning"
    assert "appendonly" in not_durable[1]
    assert fine[0] == "ok"
    assert "0 requests wait" in fine[1]
    redis: Any = Redis.from_url(redis_url)
    redis.zadd(f"llm-d-async:requests:{pool}", {"forgotten": 1.0})
    redis.lpush(f"llm-d-async:results:{pool}:tidegate:dead", "rubbish")
    report = " ".join(text for _, text in findings(desk))
    assert "no processor takes them" in report
    assert f"LRANGE llm-d-async:results:{pool}:tidegate:dead" in report


def test_the_doctor_says_that_a_queue_is_away_or_forgetful(desk: Desk, private_redis: RedisServer) -> None:
    config(desk, private_redis.url, "p")
    private_redis.command("CONFIG", "SET", "maxmemory", "100mb")
    private_redis.command("CONFIG", "SET", "maxmemory-policy", "allkeys-lru")
    assert [text for grade, text in findings(desk, code=1) if grade == "wrong" and "noeviction" in text]
    config(desk, f"redis://:canary@127.0.0.1:{free_port()}/0", "p")
    ((grade, text),) = findings(desk, code=1)
    assert grade == "wrong"
    assert "cannot be reached" in text
