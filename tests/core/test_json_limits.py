"""Values of a JSON text are counted at their bounds, and none that stands in a string."""

from __future__ import annotations

import json

import pytest

from tidegate.core import json_limits
from tidegate.core.json_limits import NODES_MAX, PIECE_BYTES, VALUES_MAX, has_too_many_values, outside_strings


@pytest.mark.parametrize(
    ("text", "is_above"),
    [
        (b"[" + b"{}," * (NODES_MAX - 2) + b"{}]", False),
        (b"[" + b"{}," * (NODES_MAX - 1) + b"{}]", True),
        (b"[" + b"[]," * (NODES_MAX - 1) + b"[]]", True),
        (b"{" + b'"a":0,' * (NODES_MAX - 2) + b'"a":0}', False),
        (b"{" + b'"a":0,' * (NODES_MAX - 1) + b'"a":0}', True),
        (b"[" + b"0," * VALUES_MAX + b"0]", False),
        (b"[" + b"0," * (VALUES_MAX + 1) + b"0]", True),
        (json.dumps('{[:,\\"' * VALUES_MAX).encode(), False),
        (json.dumps(["{[:" * NODES_MAX + "\\", {}]).encode(), False),
    ],
)
def test_names_objects_lists_and_values_are_counted_up_to_their_bounds(text: bytes, is_above: bool) -> None:
    assert has_too_many_values(text) is is_above


@pytest.mark.parametrize("piece_bytes", [1, 2, 3, PIECE_BYTES])
def test_strings_are_left_out_wherever_a_piece_ends(piece_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_limits, "PIECE_BYTES", piece_bytes)
    text = json.dumps({"a{": ["[", '\\"[', {"": "{"}], "\\": []}).encode()
    assert b"".join(outside_strings(text, b"{}[]")) == b"{[{}][]}"
