"""Lines that are the same request: found only where asked for, and only where the answer does not depend on chance."""

from __future__ import annotations

import json
from array import array
from pathlib import Path
from typing import Any

import pytest

from tidegate.core.answers.results import response_line
from tidegate.core.input.lines import MIXED, EarlierJob, LineRules
from tidegate.core.job_shape import InputPart
from tidegate.core.nouns import IngestPlan
from tidegate.stages.ingest.ingest_file import ingest_file

CHAT = "/v1/chat/completions"


def chat(custom_id: str, text: str = "hi", url: str | None = CHAT, **more: Any) -> bytes:
    body = {"model": "m", "messages": [{"role": "user", "content": text}], "temperature": 0, **more}
    line = {"custom_id": custom_id, "body": body} | ({"url": url} if url else {})
    return json.dumps(line).encode() + b"\n"


def ingest(tmp_path: Path, *lines: bytes, dedupe: bool = True, **more: Any) -> tuple[IngestPlan, dict[str, str]]:
    """The plan, and of each item that is not run the custom_id of the one whose line it takes."""
    (tmp_path / "in").write_bytes(b"".join(lines))
    plan = ingest_file(tmp_path / "in", tmp_path / "work", LineRules(**{"endpoint": CHAT, "dedupe": dedupe, **more}))
    if plan.errors:
        return plan, {}
    data = (tmp_path / "work").read_bytes()
    work = [json.loads(line) for line in data[: plan.work_bytes].splitlines()]
    assert len(work) == plan.item_count
    run_count = plan.item_count - plan.copied.count
    assert sum(one.count for one in plan.slices) == run_count
    assert data[: plan.copied.work_at].count(b"\n") == (run_count if plan.copied.count else 0)
    # The numbers of all lines stand behind the work.
    order = array("I", data[plan.work_bytes :])
    ids = [json.loads(line)["custom_id"] if line.strip() else None for line in b"".join(lines).splitlines()]
    assert [ids[line - 1] for line in order] == [one["custom_id"] for one in work]
    return plan, {one["custom_id"]: work[one["of"]]["custom_id"] for one in work[run_count:]}


def test_identical_requests_take_the_line_of_the_first(tmp_path: Path) -> None:
    plan, copies = ingest(tmp_path, chat("a"), chat("b", "other"), chat("c"), b"\n", chat("d"), chat("e", "other"))
    assert copies == {"c": "a", "d": "a", "e": "b"}
    assert plan.copied.deduplicated == 3


def test_nothing_is_looked_for_where_it_was_not_asked_for(tmp_path: Path) -> None:
    plan, copies = ingest(tmp_path, chat("a"), chat("b"), dedupe=False)
    assert (copies, plan.copied.count, plan.item_count) == ({}, 0, 2)


@pytest.mark.parametrize("temperature", [1, 0.2, -1, None, "0", [], {}, 1e-9, True, False])
def test_what_chance_decides_is_run_each_time(tmp_path: Path, temperature: Any) -> None:
    assert ingest(tmp_path, chat("a", temperature=temperature), chat("b", temperature=temperature))[1] == {}


@pytest.mark.parametrize("temperature", [b"0", b"0.0", b"-0", b"0e3"])
def test_zero_is_written_in_several_ways(tmp_path: Path, temperature: bytes) -> None:
    lines = [chat(one).replace(b'"temperature": 0', b'"temperature": ' + temperature) for one in "ab"]
    assert ingest(tmp_path, *lines)[1] == {"b": "a"}


def test_no_temperature_is_chance(tmp_path: Path) -> None:
    lines = [chat(one).replace(b', "temperature": 0', b"") for one in "ab"]
    assert ingest(tmp_path, *lines)[1] == {}


def test_a_tool_that_names_a_temperature_makes_nothing_exact(tmp_path: Path) -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"temperature": 0}}}]
    lines = [chat(one, tools=tools).replace(b', "temperature": 0, "tools"', b', "tools"') for one in "ab"]
    assert ingest(tmp_path, *lines)[1] == {}


def test_white_space_between_tokens_does_not_count_and_inside_texts_it_does(tmp_path: Path) -> None:
    wide = chat("b").replace(b": ", b" :  ").replace(b", ", b" ,\t").replace(b"\n", b"\r\n")
    assert ingest(tmp_path, chat("a"), wide, chat("c", "hi "), chat("d", " hi"))[1] == {"b": "a"}


def test_the_order_of_keys_and_the_spelling_of_texts_count(tmp_path: Path) -> None:
    """An engine may render them into the prompt as they stand; to run twice costs more and is never wrong."""
    body = b'{"model": "m", "temperature": 0, "messages": [{"content": "hi", "role": "user"}]}'
    other = b'{"custom_id": "b", "body": %b}\n' % body
    spelled = chat("c").replace(b'"hi"', b'"h\\u0069"')
    assert ingest(tmp_path, chat("a"), other, spelled)[1] == {}


def test_models_endpoints_and_parameters_keep_requests_apart(tmp_path: Path) -> None:
    lines = [chat("a"), chat("b", model="other"), chat("c", seed=1), chat("d", max_tokens=5), chat("e", user="u")]
    assert ingest(tmp_path, *lines)[1] == {}
    mixed = [chat(one, url=url) for one, url in zip("abc", (CHAT, "/v1/messages", CHAT), strict=True)]
    assert ingest(tmp_path, *mixed, endpoint=MIXED)[1] == {"c": "a"}


def test_an_endpoint_that_generates_nothing_needs_no_temperature(tmp_path: Path) -> None:
    lines = [b'{"custom_id":"%b","body":{"model":"m","input":"x"}}\n' % one for one in (b"a", b"b")]
    assert ingest(tmp_path, *lines, endpoint="/v1/embeddings")[1] == {"b": "a"}


def test_bad_lines_and_repeated_ids_are_errors_of_their_own(tmp_path: Path) -> None:
    lines = [chat("a"), chat("a"), b'{"custom_id":"x"}\n', chat("b"), chat("c", max_tokens=-1)]
    plan, copies = ingest(tmp_path, *lines, invalid_lines="error_file")
    assert copies == {"b": "a"}
    assert [(one.model, one.count) for one in plan.slices] == [("m", 1), ("", 3)]
    assert next(error.code for error in ingest(tmp_path, *lines)[0].errors) == "duplicate_custom_id"


def test_a_canary_is_a_sample_of_what_runs(tmp_path: Path) -> None:
    plan, copies = ingest(tmp_path, *(chat(f"c{number}", str(number % 3)) for number in range(30)), sample=10)
    assert (plan.sample_count, len(copies)) == (3, 27)


def test_fifty_thousand_equal_lines_are_one_call(tmp_path: Path) -> None:
    lines = [chat(f"c{number}") for number in range(50_000)]
    plan, copies = ingest(tmp_path, *lines)
    assert (plan.item_count, plan.copied.deduplicated, len(plan.slices)) == (50_000, 49_999, 1)
    assert set(copies.values()) == {"c0"}


def reusing(
    tmp_path: Path, earlier: list[bytes], answered: list[str], *lines: bytes, endpoint: str = CHAT, **more: Any
) -> dict[str, str]:
    """Of each item that takes an answer of an earlier job, the id of that answer."""
    (tmp_path / "earlier").write_bytes(b"".join(earlier))
    answers = [response_line(f"batch_req_{one}", json.dumps(one).encode(), 200, b'{"n":1}') for one in answered]
    (tmp_path / "answers").write_bytes(b"".join(answers))
    parts = (InputPart("file-x", str(tmp_path / "earlier")),)
    known = EarlierJob(endpoint, parts, (), str(tmp_path / "joined"), str(tmp_path / "answers"))
    (tmp_path / "in").write_bytes(b"".join(lines))
    plan = ingest_file(tmp_path / "in", tmp_path / "work", LineRules(CHAT, earlier=known, **more))
    assert not plan.errors
    work = [json.loads(line) for line in (tmp_path / "work").read_bytes()[: plan.work_bytes].splitlines()]
    assert len(work) == plan.item_count
    copies = work[plan.item_count - plan.copied.count :]
    assert sum("source" in one for one in copies) == plan.copied.reused
    return {one["custom_id"]: one["source"] for one in copies if "source" in one}


def test_only_answered_lines_with_the_same_id_and_body_are_taken(tmp_path: Path) -> None:
    earlier = [chat("a", temperature=1), chat("b"), chat("c"), chat("d")]
    lines = [chat("d", "changed"), chat("a", temperature=1).replace(b": ", b":"), chat("c"), chat("new"), chat("x")]
    assert reusing(tmp_path, earlier, ["a", "b", "d"], *lines) == {"a": "batch_req_a"}


def test_a_request_whose_earlier_answer_is_damaged_is_run_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = response_line

    def damaged(name: str, custom_id: bytes, status: int, body: bytes) -> bytes:
        line = written(name, custom_id, status, body)
        return {b'"b"': line[:-9] + b"\n", b'"c"': line.replace(b'"n"', b'"\xff"')}.get(custom_id, line)

    monkeypatch.setattr("tests.stages.ingest.test_same_lines.response_line", damaged)
    lines = [chat(one) for one in "abcd"]
    assert reusing(tmp_path, lines, ["a", "b", "c", "d"], *lines) == {"a": "batch_req_a", "d": "batch_req_d"}


def test_garbage_in_the_earlier_input_takes_nothing(tmp_path: Path) -> None:
    """Of lines with one custom_id the first was run, so only that one has the answer."""
    long = chat("long", "x" * 5_000)
    earlier = [
        b"\xef\xbb\xbf" + chat("\u00e9"),
        b"no JSON\n",
        b"[1]\n",
        b'{"custom_id":7,"body":{}}\n',
        b"\xff\n",
        long,
    ]
    earlier += [chat("a", "first"), chat("a", "second"), b'{"custom_id":"b","body":' + b"[" * 5_000 + b"\n", chat("z")]
    answered = ["\u00e9", "a", "b", "long", "z"]
    lines = [
        chat("a", "second"),
        chat("b"),
        chat("\u00e9").replace(b"\\u00e9", "\u00e9".encode()),
        chat("z").rstrip(b"\n"),
    ]
    found = reusing(tmp_path, earlier, answered, *lines, line_bytes_max=2_000)
    assert found == {"\u00e9": "batch_req_\u00e9", "z": "batch_req_z"}


def test_what_is_reused_leads_no_identical_lines(tmp_path: Path) -> None:
    lines = [chat("a"), chat("b"), chat("c")]
    assert reusing(tmp_path, [chat("a")], ["a"], *lines, dedupe=True) == {"a": "batch_req_a"}
    assert b'{"custom_id":"c","of":0}' in (tmp_path / "work").read_bytes()


def test_an_answer_of_another_endpoint_is_not_taken(tmp_path: Path) -> None:
    assert reusing(tmp_path, [chat("a")], ["a"], chat("a"), endpoint="/v1/messages") == {}
    earlier = [chat("a", url="/v1/messages"), chat("b")]
    assert reusing(tmp_path, earlier, ["a", "b"], chat("a"), chat("b"), endpoint=MIXED) == {"b": "batch_req_b"}


def test_lines_that_are_refused_take_no_answer(tmp_path: Path) -> None:
    lines = [b"no JSON\n", chat("a"), chat("a"), chat("b", max_tokens=-1)]
    earlier = [chat("a"), chat("b", max_tokens=-1)]
    found = reusing(tmp_path, earlier, ["a", "b"], *lines, invalid_lines="error_file")
    assert found == {"a": "batch_req_a"}
    work = (tmp_path / "work").read_bytes()
    assert b"duplicate_custom_id" in work
    assert b'"messages"' not in work, "the first of the two takes it, so nothing runs"
