"""Settings: each is on the page, each is read by something, the examples on the pages load, and every old name has an answer."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable
from functools import cache
from pathlib import Path

import msgspec
import pytest
import yaml

from docs import generate
from tests.docs.pages import PAGES, SOURCE, blocks, codes, first_codes, page, rows, section
from tidegate.settings import catalog, load
from tidegate.settings.capacity import (
    DeploymentChatBatching,
    DeploymentHints,
    DeploymentPrice,
    DeploymentQueue,
    DeploymentTls,
    LimitEntry,
    ModelDeployment,
    ModelRetry,
    ModelSettings,
    ResourceEntry,
    TenantEntry,
)
from tidegate.settings.groups import Settings
from tidegate.settings.guards import BoundSettings, GuardrailEntry, HookEntry

PAGE = page("docs/reference/settings.md")
KEYS = set(catalog.by_key())
DEPLOYMENT_KEYS = {
    *(
        field
        for field in ModelDeployment.__struct_fields__
        if field not in ("tls", "hints", "price", "queue", "chat_batching")
    ),
    *(f"tls.{field}" for field in DeploymentTls.__struct_fields__),
    *(f"hints.{field}" for field in DeploymentHints.__struct_fields__),
    *(f"price.{field}" for field in DeploymentPrice.__struct_fields__),
    *(f"chat_batching.{field}" for field in DeploymentChatBatching.__struct_fields__),
    *(f"queue.{field}" for field in DeploymentQueue.__struct_fields__),
}
ENTRY_KEYS = {
    "in_flight_max",
    *LimitEntry.__struct_fields__,
    *ResourceEntry.__struct_fields__,
    *TenantEntry.__struct_fields__,
}
MAPPINGS = {"models", "tenants", "resources", "tiers", "hooks", "guardrails"}
# Where settings become nouns of the core: reading there counts.
TURNED = {"models.py", "tenants.py", "policy.py", "added.py", "body_fields.py"}
# Groups that are handed on whole: their values are read from what they become.
HANDED_ON = {"http", "retry", "limits"}
WHOLE = {"limits", "policy", "quotas"}
OLD_NAMES = {"## Coming from DeltaLLM": "deltallm.txt", "## Coming from llm-d": "llm-d.txt"}


def test_what_tunes_the_inside_stands_apart() -> None:
    advanced = {setting.key for setting in catalog.settings() if setting.is_advanced}
    shown = set(first_codes(section(PAGE, "### advanced")))
    assert {"worker.poll_ms", "ingest.passes_max"} <= advanced == shown


def test_the_keys_of_a_deployment_are_on_the_page() -> None:
    assert set(first_codes(section(PAGE, "## models"))) == DEPLOYMENT_KEYS


def test_the_keys_of_limits_resources_and_tenants_are_on_the_page() -> None:
    assert first_codes(section(PAGE, "## limits")) == list(LimitEntry.__struct_fields__)
    text = section(PAGE, "## resources, tenants and tiers")
    for what, entry in (("resource", ResourceEntry), ("tenant", TenantEntry)):
        table = re.search(rf"^\| key of a {what} \|.*\n(?:\|.*\n)+", text, re.M)
        assert table
        assert set(first_codes(table[0])) == set(entry.__struct_fields__)


def test_the_keys_of_hooks_and_guardrails_are_on_their_page() -> None:
    text = page("docs/guardrails.md")
    shared = set(BoundSettings.__struct_fields__)
    for what, fields in (
        ("a guardrail", set(GuardrailEntry.__struct_fields__) - shared),
        ("a hook", set(HookEntry.__struct_fields__) - shared),
        ("both", shared),
    ):
        table = re.search(rf"^\| key of {what} \|.*\n(?:\|.*\n)+", text, re.M)
        assert table
        assert set(first_codes(table[0])) == fields


def test_the_example_of_a_hook_is_the_file_that_it_names() -> None:
    shown = [block.text for block in blocks(page("docs/guardrails.md")) if block.language == "python"]
    assert shown == [page("examples/house_rules.py")]


@pytest.mark.parametrize("heading", OLD_NAMES)
def test_every_old_name_has_an_answer(heading: str) -> None:
    names = (Path(__file__).parent / "old_names" / OLD_NAMES[heading]).read_text().split()
    assert sorted(first_codes(section(PAGE, heading))) == sorted(names)


@pytest.mark.parametrize("heading", OLD_NAMES)
def test_the_answers_are_settings_that_exist(heading: str) -> None:
    for old, here in rows(section(PAGE, heading)):
        named = [code for code in codes(here) if ":" not in code and " " not in code and code not in MAPPINGS]
        unknown = set(named) - KEYS - (DEPLOYMENT_KEYS if "deployment" in here else set())
        if MAPPINGS & set(codes(here)):
            unknown -= ENTRY_KEYS
        assert not unknown, f"{old} is answered with {unknown}"
        assert named or codes(here) == ["models"] or here.startswith("not needed: "), old


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_settings_named_on_pages_exist(path: Path) -> None:
    groups = {key.partition(".")[0] for key in KEYS if "." in key}
    text = path.read_text(encoding="utf-8")
    named = {
        code.partition(":")[0]
        for code in codes(text)
        if code.partition(".")[0] in groups and " " not in code.partition(":")[0]
    }
    dotted = {one for one in named if one.count(".") == 1 and one.isascii() and not one.endswith((".py", ".db"))}
    assert dotted - KEYS == set()


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_examples_of_configuration_load(path: Path, tmp_path: Path) -> None:
    for block in blocks(path.read_text(encoding="utf-8")):
        if block.language == "yaml":
            config = tmp_path / "tidegate.yaml"
            config.write_text(block.text)
            named = re.findall(r"env:(\w+)", block.text)
            secrets = {one: "postgresql://u:p@db/tidegate" if "URL" in one else "s" * 40 for one in named}
            assert load(config, tmp_path, environ=secrets).warnings == ()


# ---- the complete configuration


def _complete() -> str:
    [block] = blocks(page("docs/reference/configuration.md"))
    return block.text


def _loaded(text: str, tmp_path: Path) -> Settings:
    config = tmp_path / "tidegate.yaml"
    config.write_text(text)
    secrets = {
        name: "postgresql://u:p@db/t" if name == "STORE_URL" else "s" * 40 for name in re.findall(r"env:(\w+)", text)
    }
    secrets["REDIS_URL"] = "redis://cache:6379/0"
    return load(config, None, {}, secrets).settings


def test_the_complete_configuration_has_every_key() -> None:
    text = re.sub(r"^( *)#(?=[a-z]|  )", r"\1", _complete(), flags=re.M)
    shown = yaml.safe_load(text)
    [deployment] = shown["models"]["llama-3-8b"].pop("deployments")
    inner = {f"{key}.{one}" for key, value in deployment.items() if isinstance(value, dict) for one in value}
    assert inner | set(deployment) >= DEPLOYMENT_KEYS
    assert set(shown["models"]["llama-3-8b"]) | {"deployments"} == set(ModelSettings.__struct_fields__)
    assert set(shown["models"]["llama-3-8b"]["retry"]) == set(ModelRetry.__struct_fields__)
    for name, kind in (
        ("resources", ResourceEntry),
        ("tenants", TenantEntry),
        ("hooks", HookEntry),
        ("guardrails", GuardrailEntry),
    ):
        [entry] = shown[name].values()
        assert set(entry) == set(kind.__struct_fields__), name
    groups = {f"{group}.{key}" for group, members in shown.items() if isinstance(members, dict) for key in members}
    assert groups | set(shown) >= KEYS


def test_the_complete_configuration_loads_and_shows_defaults(tmp_path: Path) -> None:
    found = _loaded(_complete(), tmp_path)
    empty = load(None, None, {}, {}).settings
    mappings = {one: getattr(empty, one) for one in MAPPINGS}
    assert msgspec.structs.replace(found, **mappings) == empty


def test_the_examples_in_the_complete_configuration_can_be_used(tmp_path: Path) -> None:
    """All at once but for what does not go with `models`, what would be imported, and files that are not here."""
    left_out = {"upstream.url", "scheduler.rank", "upstream.ca_file", "upstream.cert_file", "upstream.key_file"}
    group, lines = "", []
    for line in _complete().splitlines():
        group = line.removesuffix(":") if re.fullmatch(r"[a-z]+:", line) else group
        shown = re.fullmatch(r"(?:  )?#([a-z_]+): .*", line)
        key = f"{group}.{shown[1]}" if shown and group else shown[1] if shown else ""
        lines.append(line.replace("#", "", 1) if key in generate.EXAMPLES.keys() - left_out else line)
    found = _loaded("\n".join(lines), tmp_path)
    for key in generate.EXAMPLES.keys() - left_out:
        group, _, name = key.rpartition(".")
        assert getattr(getattr(found, group), name) if group else getattr(found, name), key


# ---- nothing is set in vain


@cache
def chains() -> tuple[tuple[str, ...], ...]:
    """Every `a.b.c` that is read in the program outside of where settings are declared and loaded, without leading underscores."""
    found = []
    for path in sorted(SOURCE.rglob("*.py")):
        if path.parent.name == "settings" and path.name not in TURNED:
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
                parts: list[str] = []
                value: ast.expr = node
                while isinstance(value, ast.Attribute):
                    parts.append(value.attr.lstrip("_"))
                    value = value.value
                if isinstance(value, ast.Name):
                    parts.append(value.id.lstrip("_"))
                found.append(tuple(reversed(parts)))
    return tuple(found)


@cache
def shortcuts() -> frozenset[tuple[str, str, str]]:
    """(group, property, field that it reads): `store.location` is `store.url`."""
    found = set()
    pages = [SOURCE / "settings" / name for name in ("groups.py", "scheduling.py", "capacity.py", "parameters.py")]
    bodies = [node for page in pages for node in ast.parse(page.read_text(encoding="utf-8")).body]
    for owner in [node for node in bodies if isinstance(node, ast.ClassDef)]:
        for method in [node for node in owner.body if isinstance(node, ast.FunctionDef)]:
            for node in ast.walk(method):
                if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self":
                    found.add(((owner.name.removesuffix("Settings") or "Settings").lower(), method.name, node.attr))
    return frozenset(found)


def dead(keys: Iterable[str]) -> list[str]:
    """The settings that nothing reads, neither by themselves nor through a property nor handed on in a group."""
    read = {pair for chain in chains() for pair in zip(("", *chain), chain, strict=False)}
    names = {last for _, last in read}
    found = []
    for key in keys:
        group, _, field = key.rpartition(".")
        owner = group or "settings"
        ways = [way for one_owner, way, one in shortcuts() if (one_owner, one) == (owner, field)]
        by_itself = (owner, field) in read
        by_a_property = any((owner, way) in read for way in ways if way not in WHOLE)
        handed_on = group in HANDED_ON and field in names
        if not (by_itself or by_a_property or handed_on):
            found.append(key)
    return found


def test_every_setting_is_read_by_something() -> None:
    assert dead(KEYS) == []


def test_a_setting_that_nothing_reads_would_be_seen() -> None:
    assert dead(["worker.no_such_thing", "http.no_such_thing", "no_such_thing", "server.url"]) == [
        "worker.no_such_thing",
        "http.no_such_thing",
        "no_such_thing",
        "server.url",
    ]


def test_every_key_of_a_deployment_is_read_by_something() -> None:
    names = {chain[-1] for chain in chains()}
    assert {key for key in DEPLOYMENT_KEYS if key.rpartition(".")[2] not in names} == set()
