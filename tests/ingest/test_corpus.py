"""The corpus of bad inputs: every line and file in it is refused with its code, its place and words that help, or accepted."""

import base64
import json
from pathlib import Path
from typing import Any

import pytest

from tidegate.core.line_faults import LineFault
from tidegate.core.lines import LineRules, check_line
from tidegate.flow.ingest_file import ingest_file

CORPUS = Path(__file__).parent.parent / "corpus"


def cases(name: str) -> list[Any]:
    found = [json.loads(line) for line in (CORPUS / name).read_text().splitlines()]
    return [pytest.param(case, id=case["name"]) for case in found]


def bytes_of(case: dict[str, Any]) -> bytes:
    return base64.b64decode(case["base64"]) if "base64" in case else case["line"].encode()


def rules_of(case: dict[str, Any]) -> LineRules:
    given = dict(case.get("rules", {}))
    if "models" in given:
        given["models"] = frozenset(given["models"])
    return LineRules(**{"endpoint": "/v1/chat/completions", **given})


def good_line(custom_id: str, rules: LineRules) -> bytes:
    model = "m" if rules.models is None else min(rules.models)
    body: dict[str, Any] = {"model": model, "messages": [{"role": "user", "content": "x"}], "input": "x", "prompt": "x"}
    return json.dumps({"custom_id": custom_id, "body": body}).encode()


@pytest.mark.parametrize("case", cases("lines.jsonl"))
def test_line(case: dict[str, Any], tmp_path: Path) -> None:
    line, rules = bytes_of(case), rules_of(case)
    if case["code"] is None:
        checked = check_line(line, rules)
        assert checked.model
    else:
        with pytest.raises(LineFault) as caught:
            check_line(line, rules)
        fault = caught.value
        assert (fault.code, fault.param) == (case["code"], case.get("param")), fault.message
        assert fault.message.endswith(".")
        assert len(fault.message) < 400
        assert fault.message.isprintable()

    # The same line in a file, between good ones, as the first of its shape and as one of many.
    before = [good_line(f"before-{number}", rules) for number in range(3)]
    path, work = tmp_path / "in", tmp_path / "work"
    path.write_bytes(b"\n".join([*before, line, good_line("after", rules)]))
    plan = ingest_file(path, work, rules)
    if case["code"] is None:
        assert plan.errors == []
        assert line in work.read_bytes()
    else:
        assert [(error.code, error.line, error.param) for error in plan.errors] == [
            (case["code"], 4, case.get("param"))
        ]
        assert not work.exists()


@pytest.mark.parametrize("case", [case for case in cases("lines.jsonl") if case.values[0]["code"]])
def test_bad_line_becomes_an_item(case: dict[str, Any], tmp_path: Path) -> None:
    rules = LineRules(
        **{**{name: getattr(rules_of(case), name) for name in LineRules.__slots__}, "invalid_lines": "error_file"}
    )
    path, work = tmp_path / "in", tmp_path / "work"
    path.write_bytes(b"\n".join([good_line("one", rules), bytes_of(case), good_line("two", rules)]))
    plan = ingest_file(path, work, rules)
    assert plan.errors == []
    assert plan.item_count == 3
    last = plan.slices[-1]
    assert (last.model, last.first, last.count, last.work_units) == ("", 2, 1, 0)
    record = json.loads(work.read_bytes()[last.work_at : last.work_at + last.work_bytes])
    assert (record["code"], record["line"]) == (case["code"], 2)
    assert record["message"]
    assert record["custom_id"] is None or len(record["custom_id"].encode()) <= 512


@pytest.mark.parametrize("case", cases("files.jsonl"))
def test_file(case: dict[str, Any], tmp_path: Path) -> None:
    path, work = tmp_path / "in", tmp_path / "work"
    path.write_bytes(bytes_of(case))
    plan = ingest_file(path, work, rules_of(case))
    assert [[error.code, error.line] for error in plan.errors] == case["errors"]
    if case["errors"]:
        assert plan.slices == []
        assert not work.exists()
    else:
        trailer = work.read_bytes()[plan.work_bytes :]
        lines = [int.from_bytes(trailer[at : at + 4], "little") for at in range(0, len(trailer), 4)]
        assert sorted(lines) == case["items"]


def test_wrong_kinds_of_file_say_what_they_seem_to_be(tmp_path: Path) -> None:
    words = {
        "gzip": "gzip",
        "UTF-16 with a mark": "UTF-16",
        "a JSON array": "array",
        "pretty-printed": "pretty-printed",
    }
    for param in cases("files.jsonl"):
        case: Any = param.values[0]
        if case["name"] in words:
            (tmp_path / "in").write_bytes(bytes_of(case))
            plan = ingest_file(tmp_path / "in", tmp_path / "work", rules_of(case))
            assert words[case["name"]] in plan.errors[0].message
