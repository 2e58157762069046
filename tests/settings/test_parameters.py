"""Parameters that an operator puts into requests: which are refused and where, and in which order they count."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.settings.conftest import load_text
from tidegate.core.errors import SettingsError
from tidegate.core.job_shape import ParameterLevel

CHAT = "/v1/chat/completions"


@pytest.mark.parametrize("place", [(), ("endpoints", CHAT), ("models", "gpt")], ids=["all", "endpoint", "model"])
@pytest.mark.parametrize("kind", ["defaults", "overrides"])
def test_a_parameter_that_no_request_may_have_is_refused_where_it_is_set(
    place: tuple[str, ...], kind: str, tmp_path: Path
) -> None:
    steps = ("parameters", *place, kind)
    text = "{" + ": {".join(steps) + ": {model: other}" + "}" * len(steps)
    with pytest.raises(SettingsError) as refused:
        load_text(tmp_path, text)
    [problem] = str(refused.value).splitlines()
    assert problem.startswith(f"{'.'.join(steps)}.model may not set 'model': each line says it [")


def test_a_fault_of_all_parameters_together_is_reported_without_one(tmp_path: Path) -> None:
    text = f"parameters: {{models: {{gpt: {{defaults: {{user: {'x' * 70_000}}}}}}}}}"
    with pytest.raises(SettingsError, match=r"^parameters\.models\.gpt\.defaults has 70,011 bytes"):
        load_text(tmp_path, text)


def test_levels_are_for_all_then_by_endpoint_then_by_model_and_only_those_that_set_something(tmp_path: Path) -> None:
    text = f"""\
parameters:
  overrides: {{seed: 1}}
  endpoints: {{{CHAT}: {{defaults: {{seed: 2}}}}, /v1/embeddings: {{}}}}
  models: {{gpt: {{defaults: {{seed: 3}}, overrides: {{user: x}}}}, other: {{}}}}
"""
    assert load_text(tmp_path, text).settings.parameters.levels() == (
        ParameterLevel({}, {"seed": 1}),
        ParameterLevel({"seed": 2}, {}, endpoint=CHAT),
        ParameterLevel({"seed": 3}, {"user": "x"}, model="gpt"),
    )
    assert load_text(tmp_path, "").settings.parameters.levels() == ()
