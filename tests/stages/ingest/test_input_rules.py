"""The rules of an input: every setting that bounds or shapes one is in them."""

from __future__ import annotations

from pathlib import Path

from tests.settings.conftest import load_text
from tidegate.core.input.lines import LineRules
from tidegate.core.job_shape import ParameterLevel
from tidegate.stages.ingest.input_rules import line_rules

TEXT = """\
ingest: {single_model: true, slice_count_max: 7, slice_bytes_max: 1MB, slice_units_max: 5000}
limits: {line_bytes_max: 100kB, items_max: 11, json_depth_max: 13}
parameters: {defaults: {seed: 1}}
"""


def test_the_rules_of_an_input_come_from_the_settings_and_its_job(tmp_path: Path) -> None:
    settings = load_text(tmp_path, TEXT).settings
    assert line_rules(settings, "/v1/embeddings", "error_file", prefix_order=False) == LineRules(
        endpoint="/v1/embeddings",
        single_model=True,
        invalid_lines="error_file",
        prefix_order=False,
        line_bytes_max=settings.limits.line_bytes_max,
        item_count_max=11,
        depth_max=13,
        slice_count_max=7,
        slice_bytes_max=settings.ingest.slice_bytes_max,
        slice_units_max=5_000,
        levels=(ParameterLevel({"seed": 1}, {}),),
    )
    assert (settings.limits.line_bytes_max, settings.ingest.slice_bytes_max) == (100_000, 1_000_000)
