"""The Redis server of the test run: it answers, it can be broken, and it comes back under the same address knowing nothing."""

from __future__ import annotations

import pytest

from tests.support.redis import RedisServer


def test_a_killed_server_comes_back_empty(private_redis: RedisServer) -> None:
    url = private_redis.url
    assert private_redis.command("SET", "name", "value") == "+OK"
    private_redis.stop()
    private_redis.stop()
    with pytest.raises(OSError, match=r"refused|reset"):
        private_redis.command("GET", "name")
    private_redis.start()
    assert private_redis.url == url
    assert private_redis.command("GET", "name") == "$-1"


def test_the_shared_server_answers(redis_url: str, redis_server: RedisServer) -> None:
    assert redis_url.startswith("redis://127.0.0.1:")
    assert redis_server.command("PING") == "+PONG"
