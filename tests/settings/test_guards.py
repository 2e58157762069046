"""Hooks and guardrails in a configuration: what is understood, and what is refused at start with a sentence that helps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.conftest import OwnModule
from tests.settings.conftest import load_text
from tidegate.core.errors import SettingsError
from tidegate.core.hooks import Streams
from tidegate.core.policy.guardrails import AnswerShape, Length, Patterns
from tidegate.settings import call_rules

OWN = """\
number = 5
def fine(body, about): return None
async def waits(body, about): return None
def one(body): return None
def three(body, about, more): return None
def with_default(body, about, more=1): return None
def yields(body, about): yield body
async def yields_async(body, about): yield body
class Rules:
    def check(self, body, about): return None
rules = Rules()
check = rules.check
"""


@pytest.fixture
def own(own_module: OwnModule) -> str:
    return own_module(OWN)


def written(tmp_path: Path, text: str) -> Any:
    return load_text(tmp_path, text).settings


def test_rules_are_read_in_order_hooks_first(tmp_path: Path, own: str) -> None:
    settings = written(
        tmp_path,
        f"""
guardrails:
  long: {{prompt_bytes_max: 10, tenants: [acme], keys: [k1], models: [m]}}
  words: {{patterns: ["a+b"], action: redact, applies_to: answers, streams: pass}}
  shape:
    schema:
      type: object
      properties: {{name: {{const: null}}, list: {{type: array, items: {{type: integer}}}}}}
  own: {{use: "{own}:waits", timeout_ms: 7, retry_ms: 9}}
hooks:
  house: {{before: "{own}:fine", after: "{own}:with_default"}}
  bound: {{before: "{own}:check"}}
""",
    )
    rules = {rule.name: rule for rule in call_rules(settings)}
    assert list(rules) == ["house", "bound", "long", "words", "shape", "own"]
    long, words, shape, mine = (rules[name] for name in ("long", "words", "shape", "own"))
    assert isinstance(long.guardrail, Length)
    assert (long.on_requests, long.on_answers) == (True, False)
    assert long.bounds.bind("acme", "k1", ("m",))
    assert not long.bounds.bind("acme", "k2", ("m",))
    assert isinstance(words.guardrail, Patterns)
    assert (words.on_requests, words.on_answers, words.streams) == (False, True, Streams.PASS)
    assert isinstance(shape.guardrail, AnswerShape)
    assert (shape.on_requests, shape.on_answers, shape.streams) == (False, True, Streams.REFUSE)
    assert (mine.before, mine.timeout_ms, mine.retry_ms) == (mine.after, 7, 9)
    assert mine.refusal == "guardrail_refused"
    assert rules["house"].refusal == "hook_refused"


@pytest.mark.parametrize(
    ("unseen", "code"), [("", "guardrail_unseen"), (", unseen: refuse", "guardrail_unseen"), (", unseen: pass", None)]
)
def test_what_a_guardrail_cannot_look_at_passes_only_where_it_may(
    tmp_path: Path, unseen: str, code: str | None
) -> None:
    [rule] = call_rules(written(tmp_path, f'guardrails: {{words: {{patterns: ["a+b"]{unseen}}}}}'))
    assert isinstance(rule.guardrail, Patterns)
    verdict = rule.guardrail.check_prompt(b'{"messages":[{"content":"x","content":"y"}]}')
    assert getattr(verdict, "code", None) == code


@pytest.mark.parametrize(
    ("entry", "says"),
    [
        ("{}", "it has nothing to check: give exactly one of"),
        ('{patterns: ["a"], answer_bytes_max: 5}', "it has lengths and patterns: give exactly one of"),
        ('{patterns: ["("]}', "is not a regular expression"),
        ('{patterns: ["(?=a)b"]}', "looks ahead or behind"),
        ('{patterns: ["a*"]}', "is in every text"),
        ('{patterns: ["a"], unseen: maybe}', "must be pass or refuse"),
        ('{patterns: ["(a)\\\\1"]}', "refers back to a group"),
        ("{schema: {type: thing}}", 'schema.type: "thing" is not valid'),
        ("{schema: {unknown: 1}}", "JSON Schema has no word 'unknown'"),
        ("{schema: {type: object}, applies_to: requests}", "a schema is for answers"),
        ("{schema: [1]}", "must be a mapping"),
        ('{patterns: ["a"], action: drop}', "must be deny or redact"),
        ('{patterns: ["a"], pattern: b}', "did you mean `patterns`?"),
        ('{use: "no_colon"}', "must be text"),
        ('{use: "OWN:absent"}', "has no 'absent'"),
        ('{use: "OWN:number"}', "is a int, not a function"),
        ('{use: "OWN:one"}', "takes 1 arguments; write it as hook(body, about)"),
        ('{use: "OWN:three"}', "takes 3 arguments"),
        ('{use: "OWN:yields"}', "yields; write it with return"),
        ('{use: "OWN:yields_async"}', "yields; write it with return"),
        ('{use: "OWN_broken:fine"}', "No module named 'nothing_of_this_name'"),
        ('{use: "no_such_module_at_all:x"}', "put the directory that holds no_such_module_at_all on PYTHONPATH"),
        ('{use: "OWN:fine", timeout_ms: 0}', "must be a whole number from 1"),
    ],
)
def test_a_guardrail_that_cannot_work_is_refused_at_start(tmp_path: Path, own: str, entry: str, says: str) -> None:
    with pytest.raises(SettingsError) as refused:
        written(tmp_path, f"guardrails:\n  house: {entry.replace('OWN', own)}\n")
    assert says in str(refused.value)
    assert "guardrails.house" in str(refused.value)
    assert "tidegate.yaml:2" in str(refused.value), "it says where"


@pytest.mark.parametrize(
    ("entry", "says"),
    [
        ("{}", "it does nothing: give it before, after or both"),
        ('{before: "OWN:one"}', "write it as hook(body, about)"),
        ('{after: "OWN:absent"}', "has no 'absent'"),
    ],
)
def test_a_hook_that_cannot_work_is_refused_at_start(tmp_path: Path, own: str, entry: str, says: str) -> None:
    with pytest.raises(SettingsError) as refused:
        written(tmp_path, f"hooks:\n  house: {entry.replace('OWN', own)}\n")
    assert says in str(refused.value)
    assert "hooks.house" in str(refused.value)


def test_everything_that_is_wrong_is_reported_at_once(tmp_path: Path) -> None:
    with pytest.raises(SettingsError) as refused:
        written(tmp_path, 'guardrails:\n  one: {patterns: ["("]}\n  two: {}\nhooks:\n  three: {}\n')
    for name in ("guardrails.one", "guardrails.two", "hooks.three"):
        assert name in str(refused.value)
