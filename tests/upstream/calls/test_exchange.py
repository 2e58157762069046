"""Every status is an answer or exactly one class of error."""

import pytest

from tidegate.core.errors import Ambiguous, BrokenAnswer, KeyRejected, Refused, Throttled, UpstreamError
from tidegate.upstream.calls.admission import accept

CHAT = "/v1/chat/completions"
NOW_MS = 1_700_000_000_000


def now() -> int:
    return NOW_MS


def expected(status: int) -> type[UpstreamError]:
    special = {401: KeyRejected, 403: KeyRejected, 408: Ambiguous, 425: Ambiguous, 429: Throttled}
    if status in special:
        return special[status]
    by_hundred = {1: BrokenAnswer, 2: BrokenAnswer, 3: Refused, 4: Refused, 5: Ambiguous}
    return by_hundred.get(status // 100, BrokenAnswer)


def test_every_status_is_one_class() -> None:
    for status in range(100, 1_000):
        with pytest.raises(UpstreamError) as caught:
            accept(CHAT, status, {}, b'{"error": {"message": "no"}}', now)
        assert type(caught.value) is expected(status), status
        assert caught.value.status == status


def test_a_success_is_an_answer() -> None:
    line, usage = accept(CHAT, 200, {}, b'{"choices":[{}],"usage":{"prompt_tokens":2}}', now)
    assert (line, usage.input_tokens) == (b'{"choices":[{}],"usage":{"prompt_tokens":2}}', 2)
