"""Requests that the gateway refuses in the model server's place: the judge asks no witness for them."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import tidegate
from tidegate.judge.rules_calls import OWN_REFUSALS

# What carries the code of such a refusal, as its first argument.
FAULTS = ("AudioFault", "BodyFault", "FieldFault")


def codes_of(fault: str) -> set[str]:
    texts = [path.read_text(encoding="utf-8") for path in Path(tidegate.__file__).parent.rglob("*.py")]
    calls = [
        node
        for text in texts
        if fault in text
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] == fault
    ]
    return {str(call.args[0].value) for call in calls if isinstance(call.args[0], ast.Constant)}


@pytest.mark.parametrize("fault", FAULTS)
def test_the_judge_knows_every_code(fault: str) -> None:
    codes = codes_of(fault)
    assert "invalid_request" in codes, "this test would see nothing"
    assert codes - OWN_REFUSALS == set()
