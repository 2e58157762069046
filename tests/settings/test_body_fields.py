"""Which fields and hosts an operator allows, turned into the rules that bind callers."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.docs.pages import page, section
from tests.settings.conftest import load_text
from tidegate.core.body_rules.body_names import ENGINE_FIELDS, KNOWN_FIELDS
from tidegate.core.body_rules.caller_fields import FieldRules, field_fault, rules_for
from tidegate.core.deployments import EngineKind
from tidegate.core.errors import SettingsError
from tidegate.settings import added, deployments, resources
from tidegate.settings.body_fields import field_rules

YAML = """\
models:
  own:
    allowed_fields: [priority, file_id]
    media_hosts: ["Images.Example.com", "*.cdn.example.com", "10.0.0.9:8080"]
    deployments: [{url: "http://h1/v1", engine: vllm}, {url: "http://h2/v1", engine: sglang}]
  hosted:
    media_hosts: ["*"]
    allowed_fields: [file_id]
    deployments: [{url: "http://h3/v1", engine: openai}]
resources:
  both: {model: own, fallbacks: [hosted]}
"""


def rules_of(tmp_path: Path, text: str, environ: dict[str, str] | None = None) -> dict[str, FieldRules]:
    settings = load_text(tmp_path, text, environ).settings
    return field_rules(settings, deployments(settings), resources(settings))


def test_each_name_has_the_rules_of_all_that_it_may_come_to(tmp_path: Path) -> None:
    found = rules_of(tmp_path, YAML)
    hosts = frozenset({"images.example.com", "*.cdn.example.com", "10.0.0.9:8080"})
    engines = ENGINE_FIELDS[EngineKind.VLLM] | ENGINE_FIELDS[EngineKind.SGLANG]
    assert found["own"] == FieldRules(engines, frozenset({"priority", "file_id"}), hosts)
    assert found["hosted"] == FieldRules(frozenset(), frozenset({"file_id"}), frozenset({"*"}))
    assert found["both"] == FieldRules(engines, frozenset({"file_id"}), hosts)
    assert rules_for(found, "nosuch") == FieldRules(), "nothing is allowed to an unknown name"


def test_the_field_that_says_how_urgent_a_call_is_belongs_to_the_operator(tmp_path: Path) -> None:
    place = "deployments: [{url: 'http://h/v1', engine: openai, hints: {priority_field: nice}}, {url: 'http://i/v1', engine: openai}]"
    found = rules_of(
        tmp_path, f"models: {{m: {{{place}}}, n: {{{place.replace('://', '://n.')}, allowed_fields: [nice]}}}}"
    )
    body = b'{"model":"m","input":"hi","nice":-5}'
    assert field_fault(body, found["m"]) is not None
    assert field_fault(body, found["n"]) is None


def test_one_upstream_for_every_model_has_rules_too(tmp_path: Path) -> None:
    text = "upstream: {url: 'http://h/v1', engine: vllm, allowed_fields: [priority]}\nresources: {chat: {model: any}}"
    found = rules_of(tmp_path, text, {"TIDEGATE_UPSTREAM_MEDIA_HOSTS": "[a.example, b.example]"})
    expected = FieldRules(
        ENGINE_FIELDS[EngineKind.VLLM], frozenset({"priority"}), frozenset({"a.example", "b.example"})
    )
    assert rules_for(found, "any model") == rules_for(found, "chat") == expected


@pytest.mark.parametrize(
    "text",
    [
        "allowed_fields: [prioritty]",
        "allowed_fields: [temperature]",
        "allowed_fields: [Model]",
        "media_hosts: ['https://a.example']",
        "media_hosts: ['a.example/path']",
        "media_hosts: ['a.*.example']",
        "media_hosts: ['']",
        "media_hosts: a.example",
    ],
)
def test_what_means_nothing_is_refused(tmp_path: Path, text: str) -> None:
    key = text.partition(":")[0]
    with pytest.raises(SettingsError, match=key):
        rules_of(tmp_path, f"models: {{m: {{{text}, deployments: [{{url: 'http://h/v1'}}]}}}}")
    with pytest.raises(SettingsError, match=key):
        rules_of(tmp_path, f"upstream: {{url: 'http://h/v1', {text}}}")


def test_settings_of_a_model_at_run_time_are_held_to_the_same() -> None:
    added.check("model", "m", {"allowed_fields": ["priority"], "media_hosts": ["a.example"]})
    for wrong in ({"allowed_fields": ["prioritty"]}, {"media_hosts": ["https://a.example"]}):
        with pytest.raises(SettingsError, match=next(iter(wrong))):
            added.check("model", "m", wrong)


def test_every_field_that_is_refused_is_on_the_page() -> None:
    text = section(page("docs/deployments.md"), "## What callers may not send")
    assert {name for name in KNOWN_FIELDS if f"`{name}`" not in text} == set()
