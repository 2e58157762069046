"""What was added at run time beside the settings: the same rules, the settings win, and secrets are only ever references."""

import json
from pathlib import Path
from typing import Any

import pytest

from tidegate.core.deployments import Deployment, Engine, Resource, Secret
from tidegate.core.errors import SettingsError
from tidegate.settings import Settings, load
from tidegate.settings.added import Added, added, check
from tidegate.settings.renewal import Renewal

CANARY = "sk-canary-77aa"
PLACE = {"model": "m", "url": "http://h/v1"}
BY_MODEL = "models: {fixed: {deployments: [{url: 'http://f/v1', name: steady}]}}\nresources: {own: {model: fixed}}"


def settings(tmp_path: Path, text: str = BY_MODEL) -> Settings:
    (tmp_path / "c.yaml").write_text(text)
    return load(tmp_path / "c.yaml", None, {}, {}).settings


def read(found: Settings, *entries: tuple[str, str, dict[str, Any] | str], **environ: str) -> Added:
    texts = [(kind, name, said if isinstance(said, str) else json.dumps(said)) for kind, name, said in entries]
    return added(found, texts, renewal=Renewal(environ))


def test_an_entry_becomes_what_the_settings_would_make_of_it(tmp_path: Path) -> None:
    place = {**PLACE, "engine": "vllm", "api_key": "env:KEY", "max_in_flight": 8}
    found = read(settings(tmp_path), ("deployment", "d", place), ("resource", "r", {"model": "m"}), KEY="k")
    assert found.unusable == {}
    assert found.deployments == [
        Deployment(
            "d", "http://h/v1", ("m",), Engine.VLLM, Secret("k"), max_in_flight=8, price=found.deployments[0].price
        )
    ]
    assert found.resources == [Resource("r", "m")]


def test_the_settings_win(tmp_path: Path) -> None:
    found = read(settings(tmp_path), ("deployment", "steady", PLACE), ("resource", "own", {"model": "m"}))
    assert (found.deployments, found.resources) == ([], [])
    assert all("and that one wins" in why for why in found.unusable.values())
    one = read(settings(tmp_path, "upstream: {url: 'http://h/v1'}"), ("deployment", "d", PLACE))
    assert "one gateway for every model" in one.unusable["deployment", "d"]


def test_one_that_cannot_be_used_takes_no_other_with_it(tmp_path: Path) -> None:
    found = read(
        settings(tmp_path),
        ("deployment", "keyless", {**PLACE, "api_key": "env:NOT_THERE"}),
        ("deployment", "fileless", {**PLACE, "api_key": "file:/no/such/file"}),
        ("deployment", "newer", {**PLACE, "from_a_newer_version": 1}),
        ("deployment", "torn", '{"url": '),
        ("resource", "a", {"model": "m", "fallbacks": ["b"]}),
        ("resource", "b", {"model": "m", "fallbacks": ["a"]}),
        ("deployment", "good", PLACE),
    )
    assert [one.name for one in found.deployments] == ["good"]
    assert {name for _, name in found.unusable} >= {"keyless", "fileless", "newer", "torn", "a"}
    assert "remove it and add it again" in found.unusable["deployment", "torn"]


def test_a_loop_over_settings_and_added_ones_is_broken_where_it_was_added(tmp_path: Path) -> None:
    text = BY_MODEL.replace("{own: {model: fixed}}", "{own: {model: fixed, fallbacks: [other]}, other: {model: fixed}}")
    found = read(settings(tmp_path, text), ("resource", "late", {"model": "fixed", "fallbacks": ["own"]}))
    assert [one.name for one in found.resources] == ["late"]


@pytest.mark.parametrize("secret", [CANARY, f"file://{CANARY}", ""])
def test_a_secret_itself_is_refused_and_not_repeated(secret: str) -> None:
    with pytest.raises(SettingsError, match="env:NAME") as refused:
        check("deployment", "d", {**PLACE, "api_key": secret})
    assert CANARY not in str(refused.value)


@pytest.mark.parametrize("place", ["env:ANY", "os.environ/ANY", "file:/run/key"])
def test_a_reference_is_not_looked_up_when_it_is_only_noted(place: str) -> None:
    check("deployment", "d", {**PLACE, "api_key": place})


def test_what_holds_for_a_model_is_held_to_the_settings_rules(tmp_path: Path) -> None:
    found = read(
        settings(tmp_path),
        ("model", "m", {"in_flight_max": 5, "retry": {"attempts_max": 2}}),
        ("model", "fixed", {"in_flight_max": 5}),
        ("model", "slow", {"retry": {"backoff_ms": 60_000, "backoff_ms_max": 10}}),
        ("model", "odd", {"deployments": []}),
        ("model", "worse", {"in_flight_max": -1}),
    )
    assert {name: (one.in_flight_max, one.retry.attempts_max) for name, one in found.models.items()} == {"m": (5, 2)}
    assert "that one wins" in found.unusable["model", "fixed"]
    assert "backoff_ms (60,000) above backoff_ms_max (10)" in found.unusable["model", "slow"]
    assert "deployments" in found.unusable["model", "odd"]
    assert "in_flight_max" in found.unusable["model", "worse"]
    with pytest.raises(SettingsError, match="in_flight_max"):
        check("model", "m", {"in_flight_max": "many"})
