"""Deployments and limits refuse what cannot work, and secrets do not show themselves."""

import json
import pickle
from typing import Any

import msgspec
import pytest

from tidegate.core.deployments import Deployment, EngineKind, HttpLimits, Secret, Tls
from tidegate.core.errors import SettingsError
from tidegate.core.grouping.chat import ChatAdapter, ChatBatching


@pytest.mark.parametrize(
    ("base", "endpoint", "url"),
    [
        ("http://h:8000/v1", "/v1/chat/completions", "http://h:8000/v1/chat/completions"),
        ("http://h:8000/v1/", "/v1/chat/completions", "http://h:8000/v1/chat/completions"),
        ("http://h:8000", "/v1/chat/completions", "http://h:8000/v1/chat/completions"),
        ("https://h/openai/v1", "/v1/embeddings", "https://h/openai/v1/embeddings"),
        ("https://h/proxy", "/v1/embeddings", "https://h/proxy/v1/embeddings"),
        ("http://h/v1", "/rerank", "http://h/v1/rerank"),
        ("http://[::1]:8000/v1", "/v1/models", "http://[::1]:8000/v1/models"),
    ],
)
def test_an_endpoint_lies_where_a_user_expects(base: str, endpoint: str, url: str) -> None:
    assert Deployment("one", base).url_of(endpoint) == url


@pytest.mark.parametrize(
    "url",
    [
        *("", "h:8000", "ftp://h/v1", "http://", "http:///v1", "http://h:99999/v1", "http://h:x/v1", "http://u:p@h/v1"),
        *("http://h/v1?key=1", "http://h/v1#x", "http://h/v1\n", "http://h /v1", "http://[::1/v1"),
    ],
)
def test_a_bad_address_is_refused(url: str) -> None:
    with pytest.raises(SettingsError, match="deployment 'one'"):
        Deployment("one", url)


def test_a_password_in_an_address_is_not_repeated() -> None:
    with pytest.raises(SettingsError) as caught:
        Deployment("one", "http://user:canary@h/v1")
    assert "canary" not in str(caught.value)
    assert "api_key" in str(caught.value)


@pytest.mark.parametrize(
    "changes",
    [
        {"name": ""},
        {"max_in_flight": 0},
        {"weight": 0},
        {"weight": float("nan")},
        {"read_timeout_s": 0},
        {"total_timeout_s": -1},
        {"api_key": Secret("")},
        {"api_key": Secret("a\r\nX: y")},
        {"api_key": Secret("schlüssel")},
    ],
)
def test_impossible_values_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(SettingsError):
        msgspec.structs.replace(Deployment("one", "http://h/v1"), **changes)


@pytest.mark.parametrize(
    "changes",
    [
        *({"kept_alive_max": 501}, {"connections_max": 0}, {"read_timeout_s": 0}, {"response_bytes_max": 0}),
        *({"body_rate_grace_s": -1}, {"pool_timeout_s": float("nan")}),
    ],
)
def test_impossible_limits_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(SettingsError):
        msgspec.structs.replace(HttpLimits(), **changes)


def test_the_defaults_are_the_documented_ones() -> None:
    limits = HttpLimits()
    assert (limits.connect_timeout_s, limits.read_timeout_s, limits.write_timeout_s) == (10, 300, 30)
    assert (limits.pool_timeout_s, limits.connections_max, limits.kept_alive_max, limits.kept_alive_s) == (
        10,
        500,
        100,
        60,
    )


def test_half_given_tls_is_refused() -> None:
    with pytest.raises(SettingsError, match="cert_file"):
        Tls(key_file="k.pem")
    with pytest.raises(SettingsError, match="contradict"):
        Tls(ca_file="ca.pem", verify=False)


def test_a_secret_never_shows_itself() -> None:
    secret = Secret("canary")
    place = Deployment("one", "http://h/v1", engine=EngineKind.OPENAI, api_key=secret)
    shown = [str(secret), repr(secret), f"{secret}", f"{secret:>10}", "%s" % secret, repr(place), str(place)]  # noqa: UP031
    shown += [repr(msgspec.structs.asdict(place)), repr([secret]), repr({"k": secret})]
    assert "canary" not in "".join(shown)
    assert secret.reveal() == "canary"
    assert secret == Secret("canary") != Secret("other")
    for write in (pickle.dumps, json.dumps):
        with pytest.raises(TypeError):
            write(secret)


def test_an_audio_call_has_ten_minutes_unless_another_limit_is_set() -> None:
    for endpoint in ("/v1/audio/transcriptions", "/v1/audio/translations", "/v1/audio/speech"):
        assert Deployment("one", "http://h").total_s(endpoint) == 600
        assert Deployment("one", "http://h", total_timeout_s=60).total_s(endpoint) == 60
        assert Deployment("one", "http://h", endpoint_timeouts_s={endpoint: 900}).total_s(endpoint) == 900
    assert Deployment("one", "http://h").total_s("/v1/chat/completions") == 3_600


def test_chat_batching_that_has_no_effect_is_warned_of() -> None:
    def warned(**terms: Any) -> bool:
        return bool(Deployment("one", "http://h", chat_batching=ChatBatching.named(**terms)).warnings)

    assert warned(mode="sync_microbatch", upstream_max_batch_size=8)
    assert warned(mode="sync_microbatch", adapter=ChatAdapter.RESULTS)
    assert not warned(mode="sync_microbatch", upstream_max_batch_size=8, adapter=ChatAdapter.RESULTS)
    assert not warned(mode="concurrent")
