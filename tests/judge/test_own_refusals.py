"""The judge knows every refusal that the gateway gives in the model server's place, so it misses no call for one."""

from __future__ import annotations

import ast
from pathlib import Path

import tidegate
from tidegate.judge.rules_calls import OWN_REFUSALS


def test_every_fault_of_an_audio_request_is_a_refusal_of_our_own() -> None:
    codes = {
        str(call.args[0].value)
        for path in Path(tidegate.__file__).parent.rglob("*.py")
        if "AudioFault" in (text := path.read_text())
        for call in ast.walk(ast.parse(text))
        if isinstance(call, ast.Call)
        and ast.unparse(call.func).endswith("AudioFault")
        and isinstance(call.args[0], ast.Constant)
    }
    assert {"invalid_file_url", "file_too_large"} <= codes <= OWN_REFUSALS
