"""The simulated engine as tests start it: it answers, it fails as the test asks, and its log is the witness."""

from __future__ import annotations

import json
import urllib.error
import urllib.request

import pytest

from tests.support.engine import Engine
from tests.support.processes import wait_until


def ask(engine: Engine) -> int:
    body = {"model": "llama-3-8b", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}
    headers = {"Content-Type": "application/json", "Idempotency-Key": "key-1"}
    request = urllib.request.Request(f"{engine.url}/chat/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=30) as response:
        return int(response.status)


def test_every_call_is_witnessed_and_faults_come_and_go(engine: Engine) -> None:
    assert engine.calls() == []
    assert ask(engine) == 200
    engine.set_faults({"503": 1.0})
    with pytest.raises(urllib.error.HTTPError, match="503"):
        ask(engine)
    engine.set_faults()
    assert ask(engine) == 200
    wait_until(lambda: len(engine.calls()) == 3, what="three calls in the log")
    assert [call["status"] for call in engine.calls()] == [200, 503, 200]
    assert {call["model"] for call in engine.calls()} == {"llama-3-8b"}
