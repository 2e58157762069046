"""The corpus of bad inputs: every line and file in it is refused with its code, its place and words that help, or accepted."""

import base64
import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from tidegate.core.input.line_faults import BodyFault, LineFault
from tidegate.core.input.lines import LineRules, check_line
from tidegate.core.nouns import IngestPlan
from tidegate.stages.ingest.ingest_file import ingest_file

CORPUS = Path(__file__).parents[2] / "corpus"


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


def bad_items(plan: IngestPlan, work: Path) -> list[Any]:
    """The bad lines as the work file carries them."""
    data = work.read_bytes()
    slices = [data[one.work_at : one.work_at + one.work_bytes] for one in plan.slices if not one.model]
    return [json.loads(line) for line in b"".join(slices).splitlines()]


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
        assert isinstance(fault, BodyFault) == bool(case.get("item"))
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
    elif case.get("item"):
        assert plan.errors == []
        assert (plan.item_count, bad_items(plan, work)[0]["line"]) == (5, 4)
    else:
        assert [(error.code, error.line, error.param) for error in plan.errors] == [
            (case["code"], 4, case.get("param"))
        ]
        assert not work.exists()


@pytest.mark.parametrize("case", [case for case in cases("lines.jsonl") if case.values[0]["code"]])
def test_bad_line_becomes_an_item(case: dict[str, Any], tmp_path: Path) -> None:
    rules = LineRules(
        **{
            **{name: getattr(rules_of(case), name) for name in LineRules.__struct_fields__},
            "invalid_lines": "error_file",
        }
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
    param = case["param"].removeprefix("body.") if case.get("item") else None
    assert (record["status"], record["param"]) == (400 if case.get("item") else None, param)
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


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-32-le", "utf-32-be"])
def test_text_in_another_encoding_is_named(encoding: str, tmp_path: Path) -> None:
    (tmp_path / "in").write_bytes('{"custom_id": "a"}\n'.encode(encoding))
    [error] = ingest_file(tmp_path / "in", tmp_path / "work", rules_of({})).errors
    assert f"{encoding[:6].upper()} text: save it as UTF-8" in error.message


BAD_BODIES: dict[str, dict[str, Any]] = {
    "below": {"max_tokens": -1},
    "type": {"n": "many"},
    "missing": {"messages": None},
    "empty": {"messages": []},
    "tools": {"tools": {"type": "mcp"}},
    "stream": {"stream": "yes"},
}
WHOLE_FAULTS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "method": ("invalid_method", {"method": "GET"}, {}),
    "url": ("url_mismatch", {"url": "/v1/embeddings"}, {}),
    "custom_id": ("invalid_custom_id", {"custom_id": "a\u0007"}, {}),
    "model": ("model_not_found", {}, {"model": "other"}),
    "no model": ("missing_required_parameter", {}, {"model": None}),
}


@pytest.mark.parametrize("bad", BAD_BODIES)
@pytest.mark.parametrize("whole", WHOLE_FAULTS)
def test_what_fails_the_batch_is_reported_before_what_fails_one_item(bad: str, whole: str) -> None:
    code, frame, body = WHOLE_FAULTS[whole]
    rules = LineRules("/v1/chat/completions", models=frozenset({"m"}))
    good = {"model": "m", "messages": [{"role": "user", "content": "x"}]}
    line = {"custom_id": "a", **frame, "body": {**good, **BAD_BODIES[bad], **body}}
    with pytest.raises(LineFault) as caught:
        check_line(json.dumps(line).encode(), rules)
    assert (type(caught.value), caught.value.code) == (LineFault, code)


@pytest.mark.parametrize(
    ("extra", "code"),
    [
        (b'"stream":true,"n":0', "unsupported_parameter"),
        (b'"n":0,"tools":[{"type":"mcp"}]', "unsupported_parameter"),
        (b'"n":0,"seed":1,"seed":2', "invalid_request"),
        (b'"n":0,"n":1', "invalid_request"),
        (b'"n":0,"x":1e999', "invalid_json_line"),
        (b'"n":0,"x":' + b"[" * 70 + b"]" * 70, "invalid_json_line"),
    ],
)
def test_a_wrong_parameter_hides_no_fault_of_the_batch(extra: bytes, code: str, tmp_path: Path) -> None:
    line = b'{"custom_id":"a","body":{"model":"m","messages":[{"role":"user","content":"x"}],' + extra + b"}}"
    (tmp_path / "in").write_bytes(line)
    plan = ingest_file(tmp_path / "in", tmp_path / "work", LineRules("/v1/chat/completions"))
    assert [(error.code, error.line) for error in plan.errors] == [(code, 1)]


def test_an_id_is_unique_also_among_lines_with_a_wrong_body(tmp_path: Path) -> None:
    rules = LineRules("/v1/chat/completions")
    bad = good_line("same", rules).replace(b'"model"', b'"n": 0, "model"')
    for lines in ([bad, good_line("same", rules)], [good_line("same", rules), bad], [bad, bad]):
        (tmp_path / "in").write_bytes(b"\n".join([good_line("other", rules), *lines]))
        plan = ingest_file(tmp_path / "in", tmp_path / "work", rules)
        assert [(error.code, error.line) for error in plan.errors] == [("duplicate_custom_id", 3)]
        assert "Line 2" in plan.errors[0].message


def test_an_id_belongs_to_its_first_line_also_where_bad_lines_become_errors(tmp_path: Path) -> None:
    rules = LineRules("/v1/chat/completions", invalid_lines="error_file")
    good = good_line("same", rules)
    wrong_body = good.replace(b'"model"', b'"n": 0, "model"')
    wrong_url = good.replace(b'"body"', b'"url": "/v1/embeddings", "body"')
    unreadable = b"not a request"
    for first, second in itertools.product((good, wrong_body, wrong_url), repeat=2):
        lines = [unreadable, first, unreadable, second, good_line("other", rules)]
        (tmp_path / "in").write_bytes(b"\n".join(lines))
        plan = ingest_file(tmp_path / "in", tmp_path / "work", rules)
        found = {item["line"]: item for item in bad_items(plan, tmp_path / "work")}
        assert plan.item_count == 5
        assert (found[4]["code"], found[4]["custom_id"]) == ("duplicate_custom_id", "same")
        assert "Line 2" in found[4]["message"]
        assert (2 in found) == (first != good)
        assert {found[number]["code"] for number in (1, 3)} == {"invalid_json_line"}
        assert set(found) - {2} == {1, 3, 4}


def test_one_model_holds_also_for_lines_with_a_wrong_body(tmp_path: Path) -> None:
    rules = LineRules("/v1/chat/completions", single_model=True)
    bad = good_line("a", rules).replace(b'"model": "m"', b'"n": 0, "model": "other"')
    for lines in ([bad, good_line("b", rules)], [good_line("b", rules), bad]):
        (tmp_path / "in").write_bytes(b"\n".join(lines))
        plan = ingest_file(tmp_path / "in", tmp_path / "work", rules)
        assert [(error.code, error.line) for error in plan.errors] == [("model_mismatch", 2)]


def test_every_wrong_body_in_a_large_input_is_an_item_error(tmp_path: Path) -> None:
    rules = LineRules("/v1/chat/completions")
    lines = [
        good_line(f"id-{number}", rules).replace(
            b'"model"', b'"max_tokens": -1, "model"' if number % 7 == 3 else b'"model"'
        )
        for number in range(500)
    ]
    (tmp_path / "in").write_bytes(b"\n".join(lines))
    plan = ingest_file(tmp_path / "in", tmp_path / "work", rules)
    found = bad_items(plan, tmp_path / "work")
    assert [(item["line"], item["status"], item["param"]) for item in found] == [
        (number + 1, 400, "max_tokens") for number in range(500) if number % 7 == 3
    ]
