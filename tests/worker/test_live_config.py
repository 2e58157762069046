"""Deployments added at run time while the store comes and goes: what is served goes on being served, and changes arrive later."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import structlog

from tests.support.processes import wait_until_async
from tidegate import live_config
from tidegate.core.body_rules.caller_fields import OTHER
from tidegate.core.deployments import Deployment, Resource
from tidegate.core.errors import StoreUnavailable
from tidegate.core.nouns import Job, LeasedSlice
from tidegate.core.policy.policy_rules import KeyState
from tidegate.guards.guard import Guards
from tidegate.live_config import LOOK_WAIT_MS, OUTDATED_WAIT_MS, LiveConfig
from tidegate.settings import Settings, load
from tidegate.settings.reload import SettingsFile
from tidegate.store.database.sqlite import SqliteDriver
from tidegate.store.store import Store
from tidegate.worker.call_rules import KeyStates, LeasedCallRules
from tidegate.worker.leased_work import LeasedSliceState, LeasedWork
from tidegate.worker.policies import OperatorPolicies

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize("error", [StoreUnavailable("the database is away"), ValueError("a fault of ours")], ids=repr)
async def test_while_a_look_fails_everything_stays_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    monkeypatch.setattr(live_config, "LOOK_S", 0.001)
    store = Store(SqliteDriver(tmp_path / "store.db", lambda: 0))
    await store.migrate()
    served: list[list[str]] = []
    looks = 0
    away = False
    ask = store.routing_number

    async def routing_number() -> int:
        nonlocal looks
        looks += 1
        if away:
            raise error
        return await ask()

    def serve(deployments: Iterable[Deployment], _: Iterable[Resource], __: Mapping[str, int]) -> dict[str, str]:
        served.append([one.name for one in deployments])
        return {}

    monkeypatch.setattr(store, "routing_number", routing_number)
    following = asyncio.create_task(LiveConfig(store, load(None, tmp_path, {}, {}).settings, serve).follow())
    try:
        await store.put_routing("deployment", "one", '{"model": "m", "url": "http://one/v1"}', 0)
        await wait_until_async(lambda: served[-1:] == [["one"]], what="the first to be served")
        away, seen = True, looks
        # A look that was under way has ended when the next one begins.
        await wait_until_async(lambda: looks > seen, what="a look in vain")
        await store.put_routing("deployment", "two", '{"model": "m", "url": "http://two/v1"}', 0)
        seen = looks
        await wait_until_async(lambda: looks > seen + 3, what="some looks in vain")
        assert served[-1] == ["one"]
        away = False
        await wait_until_async(lambda: served[-1] == ["one", "two"], what="the second to be served too")
    finally:
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)
        await store.close()


def renewals(logged: structlog.testing.CapturingLogger) -> list[list[str]]:
    return [call.kwargs["deployments"] for call in logged.calls if call.args == ("upstream_keys_reloaded",)]


@pytest.mark.parametrize("names", [{"own"}, {"own", "added"}], ids=["settings", "added"])
async def test_another_key_in_the_same_file_is_used_without_a_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, names: set[str]
) -> None:
    """Of the settings' deployments, where nothing was ever added too, and of those that were; half a file changes nothing."""
    monkeypatch.setattr(live_config, "LOOK_S", 0.001)
    key, config = tmp_path / "key", tmp_path / "c.yaml"
    key.write_text("first")
    place = f"url: 'http://h/v1', api_key: 'file:{key}'"
    config.write_text(f"models: {{m: {{deployments: [{{{place}, name: own}}]}}}}\nadded: {{folders: ['{tmp_path}']}}")
    store = Store(SqliteDriver(tmp_path / "store.db", lambda: 0))
    await store.migrate()
    served: list[dict[str, str]] = []

    def serve(deployments: Iterable[Deployment], _: Iterable[Resource], __: Mapping[str, int]) -> dict[str, str]:
        served.append({one.name: one.api_key.reveal() for one in deployments if one.api_key is not None})
        return {}

    following = asyncio.create_task(LiveConfig(store, load(config, tmp_path, {}, {}).settings, serve).follow())
    logged = structlog.testing.CapturingLogger()
    monkeypatch.setattr(live_config, "log", logged)
    try:
        document = f'{{"model": "m", "url": "http://h/v1", "api_key": "file:{key}"}}'
        if "added" in names:
            await store.put_routing("deployment", "added", document, 0)
        first, second = dict.fromkeys(names, "first"), dict.fromkeys(names, "second")
        await wait_until_async(lambda: served[-1:] == [first], what="all to be served")
        seen = len(served)
        key.write_text("half\na key")
        await wait_until_async(lambda: len(served) > seen + 2, what="looks at half a key")
        assert served[-1] == first
        key.write_text("second")
        await wait_until_async(lambda: served[-1] == second, what="the new key")
        await wait_until_async(lambda: bool(renewals(logged)), what="a word of it in the log")
        assert renewals(logged) == [sorted(names)]
        assert "second" not in str(logged.calls)
    finally:
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)
        await store.close()


async def test_what_holds_for_a_model_follows_in_the_same_mappings(tmp_path: Path) -> None:
    config = tmp_path / "c.yaml"
    place = "deployments: [{url: 'http://h/v1'}]"
    config.write_text(
        f"models: {{own: {{{place}, in_flight_max: 3, retry: {{attempts_max: 7}}}}}}\nretry: {{backoff_ms: 40}}"
    )
    store = Store(SqliteDriver(tmp_path / "store.db", lambda: 0))
    await store.migrate()
    caps: list[Mapping[str, int]] = []

    def serve(
        _: Iterable[Deployment], __: Iterable[Resource], model_in_flight_max: Mapping[str, int]
    ) -> dict[str, str]:
        caps.append(model_in_flight_max)
        return {}

    try:
        kept = LiveConfig(store, load(config, tmp_path, {}, {}).settings, serve)
        retry_of = kept.retry_of
        assert {name: one.attempts_max for name, one in retry_of.items()} == {"own": 7}
        await store.put_routing("deployment", "d", '{"model": "m", "url": "http://h/v1"}', 0)
        await store.put_routing("resource", "chat", '{"model": "m"}', 0)
        fields_of = kept.fields_of
        assert set(fields_of) == {OTHER, "own"}
        document = '{"in_flight_max": 5, "retry": {"attempts_max": 1}, "allowed_fields": ["rid"], "media_hosts": ["h.example"]}'
        seen = await store.put_routing("model", "m", document, 0)
        await store.put_routing("model", "own", '{"in_flight_max": 99}', 0)
        await kept.look()
        assert caps[-1] == {"own": 3, "m": 5}
        assert {name: (one.attempts_max, one.backoff_ms) for name, one in retry_of.items()} == {
            "own": (7, 40),
            "m": (1, 40),
            "chat": (1, 40),
        }
        for name in ("m", "chat"):
            assert (set(fields_of[name].allowed), set(fields_of[name].media_hosts)) == ({"rid"}, {"h.example"})
        assert list(kept.unusable) == [("model", "own")], "the settings win"
        await store.drop_routing("model", "m", seen)
        await kept.look()
        assert caps[-1] == {"own": 3}
        assert list(retry_of) == ["own"]
        assert not fields_of["m"].allowed, "its deployment is there, and no document names it"
    finally:
        await store.close()


def test_a_message_batch_has_a_bound_of_its_own(tmp_path: Path) -> None:
    values = {"limits.message_batch_items_max": "7", "limits.items_max": "5"}
    settings = load(None, tmp_path, values, {}).settings
    live = LiveConfig(Store(SqliteDriver(tmp_path / "store.db", lambda: 0)), settings, lambda *_: {})
    policies = OperatorPolicies(settings, live)
    jobs = [
        cast(Job, SimpleNamespace(endpoint=endpoint, invalid_lines="fail", prefix_order=True))
        for endpoint in ("/v1/messages", "/v1/chat/completions")
    ]
    assert [policies.line_rules(job).item_count_max for job in jobs] == [7, 5]


async def test_work_that_rests_is_looked_at_again_when_limits_change(tmp_path: Path) -> None:
    """In a process that reads its file again, and in one that starts with other settings than the last one; twice after a change, since
    work may be on its way to a rest at that moment."""
    config = tmp_path / "c.yaml"
    store = Store(SqliteDriver(tmp_path / "store.db", lambda: 0))
    await store.migrate()
    woken: list[str] = []
    wake = store.wake_under

    async def wake_under(terms: str) -> None:
        woken.append(terms)
        await wake(terms)

    store.wake_under = wake_under  # type: ignore[method-assign]

    def limited(requests: int) -> Settings:
        config.write_text(f"tenants: {{acme: {{limits: [{{period: day, requests: {requests}}}]}}}}")
        return load(config, tmp_path, {}, {}).settings

    async def looked(live: LiveConfig, times: int = 3) -> int:
        for _ in range(times):
            await live.look()
        return len(woken)

    def serve(*_: object) -> dict[str, str]:
        return {}

    try:
        first = LiveConfig(
            store, limited(4), serve, SettingsFile(config, lambda: load(config, tmp_path, {}, {}).settings)
        )
        assert await looked(first) == 1
        assert await looked(LiveConfig(store, limited(4), serve)) == 1, "nothing is new to a process that comes later"
        limited(400)
        assert await looked(first, 5) == 3
        assert await looked(LiveConfig(store, first.settings, serve)) == 3
        await store.put_routing("deployment", "d", '{"model": "m", "url": "http://h/v1"}', 0)
        assert await looked(first) == 5
        assert await looked(LiveConfig(store, limited(4), serve)) == 6
        assert len(set(woken)) == 4
    finally:
        await store.close()


async def test_work_that_rests_is_looked_at_again_once_the_store_is_back(tmp_path: Path) -> None:
    store = Store(SqliteDriver(tmp_path / "store.db", lambda: 0))
    await store.migrate()
    live = LiveConfig(store, load(None, tmp_path, {}, {}).settings, lambda *_: {})
    wake = store.wake_under

    async def fail(terms: str) -> None:
        raise StoreUnavailable("the database is away")

    try:
        await live.look()
        before = await store.terms()
        store.wake_under = fail  # type: ignore[method-assign]
        await store.put_routing("deployment", "d", '{"model": "m", "url": "http://h/v1"}', 0)
        with pytest.raises(StoreUnavailable):
            await live.look()
        store.wake_under = wake  # type: ignore[method-assign]
        await live.look()
        assert await store.terms() != before
    finally:
        await store.close()


async def test_a_process_that_differs_from_the_one_that_changed_last_says_so_and_fails_no_unknown_model_for_a_while(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Store(SqliteDriver(tmp_path / "store.db", lambda: 0))
    await store.migrate()
    logged = structlog.testing.CapturingLogger()
    monkeypatch.setattr(live_config, "log", logged)
    monkeypatch.setattr(live_config, "OUTDATED_LOOKS_MAX", 20)

    def process(model: str, key: str = "", url: str = "postgresql://h/d") -> LiveConfig:
        config = tmp_path / "c.yaml"
        config.write_text(f"models: {{{model}: {{deployments: [{{url: 'http://h/v1'{key}}}]}}}}")
        settings = load(config, tmp_path, {"store.url": url}, {"KEY": "a-key-of-one-host"}).settings
        return LiveConfig(store, settings, lambda *_: {})

    try:
        old = process("m")
        await old.look()
        assert old.unknown_wait_ms("n") == LOOK_WAIT_MS, "another process may have started in this moment"
        await process("m", ", api_key: 'env:KEY'").look()
        await old.look()
        assert old.unknown_wait_ms("n") == 0, "each process has keys of its own"
        new = process("n")
        await new.look()
        alone = process("m", url="sqlite:///x.db")
        for _ in range(20):
            await old.look()
            await new.look()
            assert [one.unknown_wait_ms("n") for one in (old, alone)] == [OUTDATED_WAIT_MS, 0]
        assert new.unknown_wait_ms("x") == LOOK_WAIT_MS
        await new.look()
        assert new.unknown_wait_ms("x") == 0
        [call] = logged.calls
        assert (call.args, call.kwargs["unknown_models"]) == (("settings_differ",), ["n"]), (
            "once, however often it was asked"
        )
        await old.look()
        assert old.unknown_wait_ms("n") == 0, "the other process may be gone"
        for _ in range(10):
            await old.look()
        assert old.unknown_wait_ms("n") == LOOK_WAIT_MS, "it was long ago that it looked for this one"
    finally:
        await store.close()


async def test_hosts_with_certificates_of_their_own_work_under_the_same_terms(tmp_path: Path) -> None:
    store = Store(SqliteDriver(tmp_path / "store.db", lambda: 0))
    await store.migrate()
    authority, config, found = tmp_path / "ca.pem", tmp_path / "c.yaml", list[str]()
    known = await asyncio.to_thread(Path(os.environ["SSL_CERT_FILE"]).read_text)
    place = f"{{url: 'https://h/v1', tls: {{ca_file: '{authority}'}}}}"
    config.write_text(f"models: {{m: {{deployments: [{place}]}}}}")
    try:
        for remark in ("", "# of another host\n"):
            authority.write_text(remark + known)
            settings = load(config, tmp_path, {"store.url": "postgresql://h/d"}, {}).settings
            await LiveConfig(store, settings, lambda *_: {}).look()
            found.append(await store.terms())
        assert found[0] == found[1] != ""
    finally:
        await store.close()


async def test_a_look_that_the_store_did_not_answer_fails_no_unknown_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Store(SqliteDriver(tmp_path / "store.db", lambda: 0))
    await store.migrate()
    live = LiveConfig(store, load(None, tmp_path, {"store.url": "postgresql://h/d"}, {}).settings, lambda *_: {})

    async def away() -> str:
        raise StoreUnavailable("away")

    try:
        await live.look()
        assert live.unknown_wait_ms("n") == LOOK_WAIT_MS
        with monkeypatch.context() as outage:
            outage.setattr(store, "terms", away)
            with pytest.raises(StoreUnavailable):
                await live.look()
        assert live.unknown_wait_ms("n") == LOOK_WAIT_MS
        await live.look()
        assert live.unknown_wait_ms("n") == 0
    finally:
        await store.close()


async def test_more_unknown_models_than_are_remembered_are_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Callers choose the names: were each forgotten for the next, all of them would wait for ever."""
    store = Store(SqliteDriver(tmp_path / "store.db", lambda: 0))
    await store.migrate()
    monkeypatch.setattr(live_config, "UNKNOWN_MAX", 3)
    monkeypatch.setattr(live_config, "UNKNOWN_LOOKS_MAX", 2)
    live = LiveConfig(store, load(None, tmp_path, {"store.url": "postgresql://h/d"}, {}).settings, lambda *_: {})
    names = [f"x{number}" for number in range(5)]
    try:
        await live.look()
        waits = [live.unknown_wait_ms(name) for name in names]
        assert waits == [LOOK_WAIT_MS, LOOK_WAIT_MS, LOOK_WAIT_MS, 0, 0]
        await live.look()
        assert [live.unknown_wait_ms(name) for name in names] == [0] * 5
        for _ in range(2):
            await live.look()
        assert live.unknown_wait_ms("another") == LOOK_WAIT_MS, "those of long ago have made room"
    finally:
        await store.close()


def test_a_slice_that_is_held_is_bound_to_what_its_tenant_may_have_now(tmp_path: Path) -> None:
    config = tmp_path / "c.yaml"

    def limited(requests: int) -> Settings:
        config.write_text(f"budgets: {{tenant: [{{period: day, requests: {requests}}}]}}")
        return load(config, tmp_path, {}, {}).settings

    settings = limited(400)
    live = LiveConfig(Store(SqliteDriver(tmp_path / "store.db", lambda: 0)), settings, lambda *_: {})
    policies = OperatorPolicies(settings, live)
    rules = LeasedCallRules(cast(LeasedWork, None), cast(KeyStates, None), policies, cast(Guards, None))
    leased = SimpleNamespace(tenant="acme", tenant_id="t", user=None, team=None, key_id=None, job_id="j", limits=())
    state = LeasedSliceState(cast(LeasedSlice, leased), 0.0)
    for requests in (400, 4):
        live.tenants.follow(limited(requests))
        rules.bind(state)
        assert [limit.requests for budget in state.budgets for limit in budget.limits] == [requests]


def test_items_of_a_key_have_no_more_calls_at_once_than_the_key_may(tmp_path: Path) -> None:
    settings = load(None, tmp_path, {}, {}).settings
    live = LiveConfig(Store(SqliteDriver(tmp_path / "store.db", lambda: 0)), settings, lambda *_: {})
    policies, key = OperatorPolicies(settings, live), KeyState("k", frozenset(), frozenset(), None, parallel_max=3)
    keys = cast(KeyStates, SimpleNamespace(of=lambda leased: key))
    rules = LeasedCallRules(cast(LeasedWork, None), keys, policies, cast(Guards, None))
    leased = SimpleNamespace(tenant="acme", tenant_id="t", user=None, team=None, key_id="k", job_id="j", limits=())
    state = LeasedSliceState(cast(LeasedSlice, leased), 0.0)
    rules.bind(state)
    assert state.parallel == (("key:k", 3),)
