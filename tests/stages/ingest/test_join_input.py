"""Inputs that are put together first: lines keep their numbers and their files' names, and only what is touched is rewritten."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from tidegate.core.input.lines import LineRules
from tidegate.core.job_shape import InputPart, ParameterLevel
from tidegate.core.nouns import IngestPlan
from tidegate.stages.ingest import join_input
from tidegate.stages.ingest.ingest_file import ingest_file

CHAT = "/v1/chat/completions"


def line(custom_id: str, **body: Any) -> bytes:
    asked = {"model": "m", "messages": [{"role": "user", "content": custom_id}], **body}
    return json.dumps({"custom_id": custom_id, "body": asked}).encode()


def ingested(tmp_path: Path, *files: bytes, hashes: bool = True, **rules: Any) -> tuple[IngestPlan, list[bytes]]:
    parts = []
    for number, data in enumerate(files):
        path = tmp_path / f"part-{number}"
        path.write_bytes(data)
        parts.append(InputPart(f"file-{number}", str(path), hashlib.sha256(data).hexdigest() if hashes else ""))
    work = tmp_path / "work"
    plan = ingest_file(tmp_path / "joined", work, LineRules(CHAT, parts=tuple(parts), **rules))
    return plan, work.read_bytes()[: plan.work_bytes].splitlines() if not plan.errors else []


def test_only_touched_lines_are_rewritten(tmp_path: Path) -> None:
    own, bare = line("a", seed=7), line("b")
    plan, lines = ingested(tmp_path, own + b"\n\n" + bare, levels=(ParameterLevel({"seed": 1}),), prefix_order=False)
    assert plan.item_count == 2
    assert lines[0] == own
    assert json.loads(lines[1])["body"]["seed"] == 1


def test_several_files_are_one_input(tmp_path: Path) -> None:
    first, second = line("a") + b"\n" + line("b"), b"\xef\xbb\xbf" + line("c") + b"\n"
    plan, lines = ingested(tmp_path, first, second, b"\n" + line("d"), prefix_order=False)
    assert [json.loads(text)["custom_id"] for text in lines] == ["a", "b", "c", "d"]
    trailer = (tmp_path / "work").read_bytes()[plan.work_bytes :]
    assert [int.from_bytes(trailer[at : at + 4], "little") for at in range(0, 16, 4)] == [1, 2, 3, 5]


def test_errors_name_the_file_and_its_own_line(tmp_path: Path) -> None:
    good, bad = line("a") + b"\n", b'{"x\n' + line("a") + b"\n" + line("b", tools=[{"type": "mcp"}]) + b"\n"
    plan, _ = ingested(tmp_path, good, bad)
    assert [(error.code, error.line) for error in plan.errors] == [
        ("invalid_json_line", 1),
        ("duplicate_custom_id", 2),
        ("unsupported_parameter", 3),
    ]
    assert all(error.message.startswith("file-1: ") for error in plan.errors)
    assert "Line 1 of file-0 has this custom_id" in plan.errors[1].message
    lenient, lines = ingested(tmp_path, good, bad, invalid_lines="error_file")
    assert lenient.item_count == 4
    wrong = [json.loads(text) for text in lines[1:]]
    assert [(one["code"], one["line"]) for one in wrong] == [
        ("invalid_json_line", 1),
        ("duplicate_custom_id", 2),
        ("unsupported_parameter", 3),
    ]
    assert [(one["place"], one["file"]) for one in wrong] == [
        ("line 1 of file-1", "file-1"),
        ("line 2 of file-1", "file-1"),
        ("line 3 of file-1", "file-1"),
    ]


def test_limits_count_the_sum_and_each_file_must_be_what_was_uploaded(tmp_path: Path) -> None:
    files = [b"".join(line(f"{part}-{number}") + b"\n" for number in range(3)) for part in range(2)]
    plan, _ = ingested(tmp_path, *files, item_count_max=5)
    assert [error.code for error in plan.errors] == ["too_many_tasks"]
    (tmp_path / "other").write_bytes(files[1])
    part = InputPart("file-x", str(tmp_path / "other"), "0" * 64)
    changed = ingest_file(tmp_path / "joined", tmp_path / "work", LineRules(CHAT, parts=(part,)))
    assert [error.code for error in changed.errors] == ["input_changed"]
    zipped, _ = ingested(tmp_path, files[0], b"PK\x03\x04zip")
    assert [(error.code, error.line) for error in zipped.errors] == [("invalid_json_line", 1)]
    assert zipped.errors[0].message.startswith("file-1: ")


def test_what_a_parameter_made_wrong_says_so(tmp_path: Path) -> None:
    level = ParameterLevel({}, {"max_tokens": 7_000_000})
    _, lines = ingested(tmp_path, line("a"), levels=(level,))
    assert "defaults and overrides may have set it" in json.loads(lines[0])["message"]


def test_a_line_too_long_to_hold_passes_through(tmp_path: Path) -> None:
    long = line("long", user="x" * 700_000)
    level = ParameterLevel({"seed": 1})
    plan, _ = ingested(tmp_path, line("a") + b"\n" + long + b"\n" + line("b"), levels=(level,), line_bytes_max=1_000)
    assert [(error.code, error.line) for error in plan.errors] == [("line_too_long", 2)]


def test_a_line_that_two_reads_share_gets_its_parameters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(join_input, "READ_BYTES", len(line("a")) * 3 // 2)
    own = b"\n".join(line(name) for name in "abcd")
    _, lines = ingested(tmp_path, own, levels=(ParameterLevel({"seed": 1}),), prefix_order=False)
    assert [json.loads(text)["body"]["seed"] for text in lines] == [1] * 4


@pytest.mark.parametrize("start", ["\ufeff", "["], ids=["a byte order mark", "a bracket"])
def test_what_a_file_may_not_begin_with_may_stand_in_a_text(
    start: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = json.dumps({"custom_id": "a", "body": {"model": "m", "messages": [{"role": "user", "content": "<here>"}]}})
    own = text.replace("<here>", start).encode() + b"\n"
    monkeypatch.setattr(join_input, "READ_BYTES", text.index("<here>"))
    plan, lines = ingested(tmp_path, own, line("b"), prefix_order=False)
    assert not plan.errors
    assert lines[0] == own.rstrip()
