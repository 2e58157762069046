"""Webhooks without a network: what an event says, how it is signed, and when a failed delivery is tried again."""

import pytest

from tests.support.sdks import openai
from tidegate.core.callback_targets import CallbackReply
from tidegate.core.webhooks import (
    ATTEMPTS_MAX,
    JITTER,
    EndpointShape,
    LeasedDelivery,
    event_body,
    retry_wait_ms,
    secret_text,
    signed_headers,
)

HOUR_MS = 3_600_000
FIRST, SECOND, OTHER = (secret_text(bytes([value]) * 32) for value in (1, 2, 3))
FAILED = CallbackReply(500)


def test_the_sdk_unwraps_what_is_signed_with_any_live_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    client = openai.OpenAI(api_key="x")
    body = event_body("evt_1", "batch.completed", 1_700_000_000_999, "batch_1")
    monkeypatch.setattr("time.time", lambda: 1_700_000_100.0)
    headers = signed_headers("evt_1", 1_700_000_000_999, body, (SECOND, FIRST))
    for secret in (FIRST, SECOND):
        event = client.webhooks.unwrap(body, headers, secret=secret.reveal())
        assert (event.id, event.type, event.created_at) == ("evt_1", "batch.completed", 1_700_000_000)
        assert event.to_dict()["data"] == {"id": "batch_1"}
        assert event.to_dict()["object"] == "event"
    with pytest.raises(openai.InvalidWebhookSignatureError):
        client.webhooks.unwrap(body, headers, secret=OTHER.reveal())
    with pytest.raises(openai.InvalidWebhookSignatureError):
        client.webhooks.unwrap(body + b" ", headers, secret=FIRST.reveal())
    with pytest.raises(openai.InvalidWebhookSignatureError):
        client.webhooks.unwrap(body, {**headers, "webhook-id": "evt_2"}, secret=FIRST.reveal())
    with pytest.raises(openai.InvalidWebhookSignatureError):
        client.webhooks.unwrap(body, {**headers, "webhook-timestamp": "1700000001"}, secret=FIRST.reveal())


def test_ten_attempts_take_about_three_days() -> None:
    waits = [retry_wait_ms(attempt, FAILED, 1.0) for attempt in range(1, ATTEMPTS_MAX)]
    assert waits[:4] == [5_000, 300_000, 1_800_000, 2 * HOUR_MS]
    assert 75 * HOUR_MS < sum(wait or 0 for wait in waits) < 76 * HOUR_MS
    assert retry_wait_ms(ATTEMPTS_MAX, FAILED, 1.0) is None


@pytest.mark.parametrize("jitter", JITTER)
def test_jitter_never_makes_a_wait_as_long_as_the_next(jitter: float) -> None:
    waits = [retry_wait_ms(attempt, FAILED, jitter) or 0 for attempt in range(1, ATTEMPTS_MAX)]
    assert waits == sorted(waits)
    assert waits[0] == 5_000 * jitter


def test_retry_after_only_lengthens_a_wait_up_to_a_day() -> None:
    assert retry_wait_ms(1, CallbackReply(503, retry_after_ms=60_000), 1.0) == 60_000
    assert retry_wait_ms(2, CallbackReply(503, retry_after_ms=60_000), 1.0) == 300_000
    assert retry_wait_ms(1, CallbackReply(503, retry_after_ms=10**12), 1.0) == 24 * HOUR_MS


def test_a_receiver_that_is_gone_is_not_asked_again() -> None:
    assert retry_wait_ms(1, CallbackReply(410), 1.0) is None


@pytest.mark.parametrize(
    ("reply", "is_success", "word"),
    [
        (CallbackReply(200), True, ""),
        (CallbackReply(299), True, ""),
        (CallbackReply(301), False, "http_3xx"),
        (CallbackReply(404), False, "http_4xx"),
        (CallbackReply(503), False, "http_5xx"),
        (CallbackReply(failure="timed_out"), False, "timed_out"),
    ],
)
def test_only_2xx_is_a_success(reply: CallbackReply, is_success: bool, word: str) -> None:
    assert reply.is_success is is_success
    assert is_success or reply.word == word


def test_a_secret_shows_itself_nowhere() -> None:
    assert FIRST.reveal().startswith("whsec_")
    assert FIRST.reveal() not in f"{FIRST} {FIRST!r}"
    headers = {"Authorization": "Bearer of-the-receiver"}
    shape = EndpointShape("name", "https://example.com", headers=headers)
    leased = LeasedDelivery(
        "evt", "whk", "t", "batch", "batch.failed", 0, 0, "https://x", (FIRST,), 0, "", headers=headers
    )
    assert "of-the-receiver" not in f"{shape!r} {leased!r}"
