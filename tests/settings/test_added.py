"""What was added at run time beside the settings: the same rules, the settings win, and secrets are only ever references."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from tests.settings.conftest import load_text
from tidegate.core.deployments import Deployment, EngineKind, Resource, Secret
from tidegate.core.errors import SettingsError
from tidegate.settings import Settings
from tidegate.settings.added import Added, added, check
from tidegate.settings.renewal import Renewal

CANARY = "sk-canary-77aa"
PLACE = {"model": "m", "url": "http://h/v1"}
BY_MODEL = "models: {fixed: {deployments: [{url: 'http://f/v1', name: steady}]}}\nresources: {own: {model: fixed}}"
MAY_READ = "\nadded: {env_names: [KEY, NOT_THERE, UP_*], folders: [/no/such]}"


def settings(tmp_path: Path, text: str = BY_MODEL) -> Settings:
    return load_text(tmp_path, text).settings


def read(found: Settings, *entries: tuple[str, str, dict[str, Any] | str], **environ: str) -> Added:
    texts = [(kind, name, value if isinstance(value, str) else json.dumps(value)) for kind, name, value in entries]
    return added(found, texts, renewal=Renewal(environ))


def test_an_entry_becomes_what_the_settings_would_make_of_it(tmp_path: Path) -> None:
    place = {**PLACE, "engine": "vllm", "api_key": "env:KEY", "max_in_flight": 8}
    found = read(
        settings(tmp_path, BY_MODEL + MAY_READ), ("deployment", "d", place), ("resource", "r", {"model": "m"}), KEY="k"
    )
    assert found.unusable == {}
    assert found.deployments == [
        Deployment(
            "d", "http://h/v1", ("m",), EngineKind.VLLM, Secret("k"), max_in_flight=8, price=found.deployments[0].price
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
        settings(tmp_path, BY_MODEL + MAY_READ),
        ("deployment", "keyless", {**PLACE, "api_key": "env:NOT_THERE"}),
        ("deployment", "fileless", {**PLACE, "api_key": "file:/no/such/file"}),
        ("deployment", "newer", {**PLACE, "from_a_newer_version": 1}),
        ("deployment", "torn", '{"url": '),
        ("resource", "a", {"model": "m", "fallbacks": ["b"]}),
        ("resource", "b", {"model": "m", "fallbacks": ["a"]}),
        ("deployment", "good", PLACE),
    )
    assert [one.name for one in found.deployments] == ["good"]
    assert found.resources == []
    assert {name for _, name in found.unusable} >= {"keyless", "fileless", "newer", "torn", "a"}
    assert "which is not set" in found.unusable["deployment", "keyless"]
    assert "cannot be read" in found.unusable["deployment", "fileless"]
    assert "remove it and add it again" in found.unusable["deployment", "torn"]


def test_a_loop_over_settings_and_added_ones_is_broken_where_it_was_added(tmp_path: Path) -> None:
    text = BY_MODEL.replace("{own: {model: fixed}}", "{own: {model: fixed, fallbacks: [other]}, other: {model: fixed}}")
    found = read(settings(tmp_path, text), ("resource", "late", {"model": "fixed", "fallbacks": ["own"]}))
    assert [one.name for one in found.resources] == ["late"]


@pytest.mark.parametrize(
    ("kind", "name", "document", "says"),
    [
        ("deployment", "d", {**PLACE, "name": "e"}, "name is given beside the document"),
        ("deployment", "d", {**PLACE, "metrics_url": "ftp://h/metrics"}, "metrics_url must be a URL"),
        ("deployment", "d", {**PLACE, "metrics_url": "http://user:key@h/metrics"}, "metrics_url must be a URL"),
        ("deployment", "d", {"model": "m"}, "url"),
        ("deployment", " d", PLACE, "1 to 255 printable characters"),
        ("deployment", "d" * 256, PLACE, "1 to 255 printable characters"),
        ("resource", "r", {"model": "m", "total_timeout_s": -1}, "total_timeout_s"),
        ("resource", "r", {"model": "m", "weight": 1}, "weight"),
        ("model", "m", {"allowed_fields": ["no field"]}, "allowed_fields"),
    ],
)
def test_what_could_be_used_with_no_settings_is_refused_before_it_is_kept(
    kind: str, name: str, document: dict[str, Any], says: str, tmp_path: Path
) -> None:
    with pytest.raises(SettingsError, match=says):
        check(kind, name, document)
    check(kind, "d" * 255, {"deployment": PLACE, "resource": {"model": "m"}, "model": {}}[kind])
    if name == name.strip()[:255]:
        assert says in read(settings(tmp_path), (kind, name, document)).unusable[kind, name]


@pytest.mark.parametrize("secret", [CANARY, f"file://{CANARY}", ""])
def test_a_secret_itself_is_refused_and_not_repeated(secret: str) -> None:
    with pytest.raises(SettingsError, match="env:NAME") as refused:
        check("deployment", "d", {**PLACE, "api_key": secret})
    assert CANARY not in str(refused.value)


@pytest.mark.parametrize("place", ["env:ANY", "os.environ/ANY", "file:/run/key"])
def test_a_reference_is_not_looked_up_when_it_is_only_noted(place: str) -> None:
    check("deployment", "d", {**PLACE, "api_key": place})


@pytest.mark.parametrize("name", ["HOME", "KEYS", "UP", "TIDEGATE_STORE_URL", "up_key"])
@pytest.mark.parametrize("way", ["env:", "os.environ/"])
@pytest.mark.parametrize("looks_up", [True, False])
def test_only_variables_that_the_operator_allows_are_read(tmp_path: Path, name: str, way: str, looks_up: bool) -> None:
    text = json.dumps({**PLACE, "api_key": f"{way}{name}"})
    for may in ("", MAY_READ, "\nadded: {env_names: ['*']}"):
        if may.endswith("['*']}") and name != "TIDEGATE_STORE_URL":
            continue
        entries = [("deployment", "d", text)]
        found = added(settings(tmp_path, BY_MODEL + may), entries, looks_up=looks_up, renewal=Renewal({name: CANARY}))
        assert found.deployments == []
        assert "added.env_names" in found.unusable["deployment", "d"]
        assert CANARY not in found.unusable["deployment", "d"]


def test_variables_are_allowed_by_their_name_or_their_beginning(tmp_path: Path) -> None:
    may = settings(tmp_path, BY_MODEL + "\nadded: {env_names: [UP_*, TIDEGATE_MINE]}")
    for name in ("UP_ONE", "TIDEGATE_MINE"):
        found = read(may, ("deployment", "d", {**PLACE, "api_key": f"env:{name}"}), **{name: "k"})
        assert [one.api_key for one in found.deployments] == [Secret("k")]


class Folders:
    """A folder that is allowed, one beside it that is not, and links between them."""

    def __init__(self, tmp_path: Path) -> None:
        self.allowed, self.other = tmp_path / "keys", tmp_path / "keys-of-others"
        for folder in (self.allowed, self.other):
            (folder / "inner").mkdir(parents=True)
            (folder / "key").write_text(CANARY)
        (self.allowed / "out").symlink_to(self.other / "key")
        (self.allowed / "elsewhere").symlink_to(self.other)
        (self.allowed / "within").symlink_to(self.allowed / "key")
        (tmp_path / "keys-by-another-name").symlink_to(self.allowed)
        self.settings = settings(tmp_path, f"{BY_MODEL}\nadded: {{folders: ['{self.allowed}']}}")

    def refused(self, field: dict[str, Any], *, looks_up: bool = True) -> str:
        entries = [("deployment", "d", json.dumps({"model": "m", "url": "https://h/v1", **field}))]
        found = added(self.settings, entries, looks_up=looks_up, renewal=Renewal({}))
        return found.unusable.get(("deployment", "d"), "")


BESIDE = (
    "../keys-of-others/key",
    "inner/../../keys-of-others/key",
    "/etc/hostname",
    "../keys-of-others",
    "../keys-by-another-name/key",
)
LINKED = ("out", "elsewhere/key", "elsewhere/../keys-of-others/key")
FIELDS: list[Any] = [
    lambda path: {"api_key": f"file:{path}"},
    lambda path: {"queue": {"url": f"file:{path}"}},
    lambda path: {"tls": {"ca_file": str(path)}},
    lambda path: {"tls": {"cert_file": str(path), "key_file": str(path)}},
]


@pytest.mark.parametrize("field", FIELDS)
def test_only_files_in_folders_that_the_operator_allows_are_read(tmp_path: Path, field: Any) -> None:
    folders = Folders(tmp_path)
    for name in (*BESIDE, *LINKED):
        reason = folders.refused(field(folders.allowed / name))
        assert "added.folders" in reason
        assert CANARY not in reason
    # A command that reads nothing itself knows nothing of links, but of names.
    for name in BESIDE:
        assert "added.folders" in folders.refused(field(folders.allowed / name), looks_up=False)
    assert "added.folders" not in folders.refused(field(folders.allowed / "out"), looks_up=False)
    assert "added.folders" in folders.refused(field("relative/key"))


def test_files_in_allowed_folders_are_read_also_through_links_within(tmp_path: Path) -> None:
    folders = Folders(tmp_path)
    os.mkfifo(folders.allowed / "pipe")
    for name in ("key", "within", "inner/../key"):
        assert folders.refused({"api_key": f"file:{folders.allowed / name}"}) == ""
        assert folders.refused({"tls": {"ca_file": str(folders.allowed / name)}}) == ""
    for name in ("pipe", "inner", "."):
        assert "not a plain file" in folders.refused({"api_key": f"file:{folders.allowed / name}"})
    assert "cannot be read" in folders.refused({"api_key": f"file:{folders.allowed / 'missing'}"})


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
