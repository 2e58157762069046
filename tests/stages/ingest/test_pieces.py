"""An input becomes the same plan and the same work file, byte for byte, in whatever pieces it is read and written."""

import hashlib
import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from tests.stages.ingest import test_corpus
from tidegate.core.input import scan
from tidegate.core.input.lines import LineRules
from tidegate.core.input.prefix_tree import PrefixFamily
from tidegate.core.nouns import IngestPlan
from tidegate.stages.ingest import ingest_file as ingest_file_module
from tidegate.stages.ingest import ingest_write
from tidegate.stages.ingest.ingest_file import ingest_file

RULES = LineRules("/v1/chat/completions", slice_count_max=7, slice_bytes_max=4000)
CASES = ("lines.jsonl", "files.jsonl")

beginnings = st.sampled_from(["", "You are kind. ", "You are kind. " * 9, 'say "no" \\' * 4, "\u20ac\U0001f600" * 8])
texts = st.builds("".join, st.lists(st.one_of(beginnings, st.text('ab\u20ac"\\{', max_size=8)), max_size=4))

# Each strategy is made once: making and checking one costs Hypothesis more than drawing from it.
line_counts = st.integers(1, 40)
models = st.sampled_from(["m", "m", "m", "other"])
one_in_ten, one_in_twenty = st.integers(0, 9), st.integers(0, 19)
tool_names = st.sampled_from("fg")
role_counts = st.sampled_from([2, 2, 4])
# What is done to a line: mostly nothing.
changes = st.sampled_from(
    [
        *[lambda line: line] * 12,
        lambda line: line + b"\r",
        lambda line: b"",
        lambda line: b"nonsense",
        lambda line: line[:-3],
        lambda line: line.replace(b"m", b""),
    ]
)
file_ends = st.sampled_from([b"", b"\n", b"\n\n"])


@st.composite
def inputs(draw: st.DrawFn) -> bytes:
    """Good lines in a few shapes, with bad, blank and repeated ones among them."""
    lines = []
    for number in range(draw(line_counts)):
        body: dict[str, Any] = {"model": draw(models)}
        if draw(one_in_ten) == 0:
            body["tools"] = [{"type": "function", "function": {"name": draw(tool_names)}}]
        roles = ["system", "user", "assistant", "user"][: draw(role_counts)]
        body["messages"] = [{"role": role, "content": draw(beginnings)} for role in roles]
        body["messages"][-1]["content"] += draw(texts)
        custom_id = f"id-{number if draw(one_in_twenty) else 0}"
        line = json.dumps({"custom_id": custom_id, "body": body}).encode()
        lines.append(draw(changes)(line))
    return b"\n".join(lines) + draw(file_ends)


def ingest(data: bytes, rules: LineRules) -> tuple[IngestPlan, bytes | None]:
    with TemporaryDirectory() as directory:
        path, work = Path(directory, "in"), Path(directory, "work")
        path.write_bytes(data)
        plan = ingest_file(path, work, rules)
        return plan, work.read_bytes() if work.exists() else None


def same(data: bytes, rules: LineRules, read_bytes: int = 600, window_bytes: int = 300) -> None:
    whole = ingest(data, rules)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ingest_file_module, "READ_BYTES", read_bytes)
        patch.setattr(ingest_write, "WINDOW_BYTES", window_bytes)
        patch.setattr(ingest_write, "WINDOW_BYTES_IN_ORDER", window_bytes)
        assert ingest(data, rules) == whole


@settings(deadline=None, suppress_health_check=list(HealthCheck))
@given(inputs(), st.data())
def test_any_input(data: bytes, choice: st.DataObject) -> None:
    draw = choice.draw
    rules = replace(
        RULES,
        invalid_lines=draw(st.sampled_from(["fail", "error_file"])),
        prefix_order=draw(st.integers(0, 4)) > 0,
        single_model=draw(st.integers(0, 4)) == 0,
        errors_max=draw(st.sampled_from([1, 2, 100])),
        item_count_max=draw(st.sampled_from([5, 1000])),
        line_bytes_max=draw(st.sampled_from([250, 1 << 20])),
        input_sha256=draw(st.sampled_from(["", hashlib.sha256(data).hexdigest(), "0" * 64])),
    )
    same(data, rules, draw(st.sampled_from([1, 7, 600])), draw(st.sampled_from([300, 1 << 22])))


@pytest.mark.parametrize("name", CASES)
def test_the_corpus(name: str) -> None:
    for param in test_corpus.cases(name):
        case: Any = param.values[0]
        rules, data = test_corpus.rules_of(case), test_corpus.bytes_of(case)
        if name == "lines.jsonl":
            good = [test_corpus.good_line(f"good-{number}", rules) for number in range(4)]
            data = b"\n".join([*good[:2], data, *good[2:]])
        same(data, rules)
        same(data, replace(rules, invalid_lines="error_file"))


@pytest.mark.parametrize("bound", ["FAMILIES_MAX", "MODELS_MAX", "REFERENCES_BYTES_MAX"])
def test_bounds_of_the_whole(bound: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"tidegate.core.input.scan.{bound}", 3 if bound != "REFERENCES_BYTES_MAX" else 70_000)
    lines = [
        {
            "custom_id": str(number),
            "body": {"model": f"m{number % 6}", "instructions": f"do {number % 5}", "input": "text " * 400},
        }
        for number in range(60)
    ]
    data = b"".join(json.dumps(line).encode() + b"\n" for line in lines)
    same(data, replace(RULES, endpoint="/v1/responses"))
    same(data, replace(RULES, endpoint="/v1/responses", invalid_lines="error_file"))


def test_references_of_all_families_stay_within_their_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """Callers choose how many tools and instructions an input has: what is kept to compare prompts with is bounded over all of them."""
    families, bound = list[PrefixFamily](), 7_000

    def noted(reference: bytes) -> PrefixFamily:
        families.append(PrefixFamily(reference))
        return families[-1]

    monkeypatch.setattr(scan, "PrefixFamily", noted)
    monkeypatch.setattr(scan, "REFERENCES_BYTES_MAX", bound)
    messages = [{"role": "user", "content": word * 400} for word in ("text", "more")]
    lines = [
        {"custom_id": str(number), "body": {"model": "m", "tools": [{"name": f"t{number}"}], "messages": messages}}
        for number in range(12)
    ]
    ingest(b"".join(json.dumps(line).encode() + b"\n" for line in lines), RULES)
    assert len(families) == len(lines)
    assert bound - 2_000 < sum(len(family.reference) for family in families) <= bound


def test_inputs_are_counted_over_all_pieces() -> None:
    lines = [{"custom_id": str(number), "body": {"model": "m", "input": ["a", "b", "c"]}} for number in range(40)]
    data = b"".join(json.dumps(line).encode() + b"\n" for line in lines)
    for most in (119, 120):
        same(data, replace(RULES, endpoint="/v1/embeddings", inputs_max=most))


def test_changed_bytes_leave_no_work_file() -> None:
    lines = [{"custom_id": str(number), "body": {"model": "m", "messages": [{}]}} for number in range(100)]
    data = b"".join(json.dumps(line).encode() + b"\n" for line in lines)
    plan, work = ingest(data, replace(RULES, input_sha256="0" * 64))
    assert [error.code for error in plan.errors] == ["input_changed"]
    assert work is None
    assert ingest(data, replace(RULES, input_sha256=hashlib.sha256(data).hexdigest()))[1]


def test_every_piece_is_compared_with_what_was_uploaded(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = [{"custom_id": str(number), "body": {"model": "m", "messages": [{}]}} for number in range(40)]
    data = b"".join(json.dumps(line).encode() + b"\n" for line in lines)
    monkeypatch.setattr(ingest_file_module, "READ_BYTES", len(data) // 4)
    rules = replace(RULES, input_sha256=hashlib.sha256(data).hexdigest())
    assert ingest(data, rules)[0].errors == []
    for number in (0, 15, 39):
        changed = data.replace(b'"custom_id": "%d"' % number, b'"custom_id": "x%d"' % number)
        assert [error.code for error in ingest(changed, rules)[0].errors] == ["input_changed"]
