"""Lines that run again: found by the custom_ids of chosen error lines, and known by their own numbers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tidegate.core.answers.error_kinds import ErrorKind
from tidegate.core.answers.results import error_line, never_ran_line, response_line
from tidegate.core.ids import item_id
from tidegate.core.input.lines import ChosenLines, LineRules
from tidegate.core.nouns import IngestPlan
from tidegate.core.states import Outcome
from tidegate.stages.ingest.ingest_file import ingest_file

CHAT = "/v1/chat/completions"
JOB = "batch_0000000000000000000000"


def chat(custom_id: str, **more: object) -> bytes:
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], **more}
    line = {"custom_id": custom_id, "method": "POST", "url": CHAT, "body": body}
    return json.dumps(line, ensure_ascii=False).encode() + b"\n"


def refused(number: int, custom_id: str, status: int, body: dict[str, object]) -> bytes:
    return response_line(item_id(JOB, number), json.dumps(custom_id).encode(), status, json.dumps(body).encode())


ERRORS = b"".join(
    [
        error_line(JOB, 0, b'"a"', "worker_lost", "gone"),
        refused(1, "b", 400, {"error": {"code": "too_long", "message": "m"}}),
        refused(2, "\u00e9", 418, {"error": {"code": 400, "message": "m"}}),
        never_ran_line(JOB, 3, b'"d"', Outcome.EXPIRED),
        never_ran_line(JOB, 4, b'"e"', Outcome.CANCELLED),
        error_line(JOB, 5, b'"ok"', "duplicate_custom_id", "twice"),
        error_line(JOB, 6, b"null", "invalid_json_line", "what"),
    ]
)
INPUT = b"".join(
    [
        b"\xef\xbb\xbf" + chat("ok"),
        b"\n",
        chat("a"),
        b"no JSON\n",
        chat("\u00e9"),
        chat("ok"),
        chat("long", user="x" * 3000),
        chat("b"),
        chat("d"),
        chat("a"),
        chat("e").rstrip(b"\n"),
    ]
)


def chosen(
    tmp_path: Path, outcomes: tuple[str, ...], *codes: str, data: bytes = INPUT, kinds: tuple[str, ...] = ()
) -> tuple[IngestPlan, list[str]]:
    (tmp_path / "in").write_bytes(data)
    (tmp_path / "errors").write_bytes(ERRORS)
    rules = LineRules(
        CHAT,
        invalid_lines="error_file",
        prefix_order=False,
        line_bytes_max=1000,
        chosen=ChosenLines(str(tmp_path / "errors"), outcomes, codes, kinds),
    )
    plan = ingest_file(tmp_path / "in", tmp_path / "work", rules)
    if plan.errors:
        return plan, []
    work = (tmp_path / "work").read_bytes()[: plan.work_bytes]
    assert not (tmp_path / "work.chosen").exists()
    return plan, [json.loads(line.removeprefix(b"\xef\xbb\xbf"))["custom_id"] for line in work.splitlines()]


@pytest.mark.parametrize(
    ("outcomes", "codes", "wanted"),
    [
        (("failed",), (), ["a", "\u00e9", "b"]),
        (("expired", "cancelled"), (), ["d", "e"]),
        (("failed", "expired", "cancelled"), ("http_418", "too_long", "batch_expired"), ["\u00e9", "b", "d"]),
        (("failed",), ("batch_expired", "worker_lost"), ["a"]),
    ],
)
def test_lines_are_chosen_by_outcome_and_code(
    tmp_path: Path, outcomes: tuple[str, ...], codes: tuple[str, ...], wanted: list[str]
) -> None:
    plan, names = chosen(tmp_path, outcomes, *codes)
    assert names == wanted
    assert plan.item_count == len(wanted)


def test_the_first_line_is_found_behind_its_mark(tmp_path: Path) -> None:
    assert chosen(tmp_path, ("failed",), data=b"\xef\xbb\xbf" + chat("a") + chat("b"))[1] == ["a", "b"]


def test_a_line_without_a_name_is_not_chosen_and_one_that_is_too_long_stays_so(tmp_path: Path) -> None:
    """Of a long line only the beginning is read: it may be a whole request, and the rest of it spaces."""
    data = chat("a").rstrip(b"\n") + b" " * 2_000 + b"\n" + b"no JSON\n" + chat("b")
    plan, names = chosen(tmp_path, ("failed",), data=data)
    assert sorted((one.model, one.count) for one in plan.slices) == [("", 1), ("m", 1)]
    assert names[0] == "b"
    assert b"line_too_long" in (tmp_path / "work").read_bytes()


def test_lines_are_chosen_by_the_kind_of_their_error(tmp_path: Path) -> None:
    kind = ErrorKind("too_long", 400, "m").id
    assert chosen(tmp_path, ("failed",), kinds=(kind,))[1] == ["b"]
    assert chosen(tmp_path, ("failed",), kinds=(kind, ErrorKind("http_418", 418, "").id))[1] == ["\u00e9", "b"]
    assert chosen(tmp_path, ("failed",), "worker_lost", kinds=(kind,))[1] == []
    assert chosen(tmp_path, ("failed",), kinds=(ErrorKind("too_long", 500, "m").id,))[1] == []


def test_lines_keep_their_numbers(tmp_path: Path) -> None:
    plan, names = chosen(tmp_path, ("failed", "cancelled"))
    trailer = (tmp_path / "work").read_bytes()[plan.work_bytes :]
    numbers = [int.from_bytes(trailer[at : at + 4], "little") for at in range(0, len(trailer), 4)]
    assert dict(zip(names, numbers, strict=True)) == {"a": 3, "\u00e9": 5, "b": 8, "e": 11}


def test_a_line_that_is_bad_by_now_is_named_by_its_own_number(tmp_path: Path) -> None:
    (tmp_path / "in").write_bytes(chat("x") + chat("y", model="") + chat("a", model=""))
    (tmp_path / "errors").write_bytes(ERRORS)
    rules = LineRules(CHAT, chosen=ChosenLines(str(tmp_path / "errors"), ("failed",), (), ()))
    plan = ingest_file(tmp_path / "in", tmp_path / "work", rules)
    assert [error.line for error in plan.errors] == [3]


def test_nothing_that_fits_is_an_error_and_so_is_another_input(tmp_path: Path) -> None:
    plan, _ = chosen(tmp_path, ("failed",), "no_such_code")
    assert [error.code for error in plan.errors] == ["nothing_to_retry"]
    rules = LineRules(CHAT, input_sha256="0" * 64, chosen=ChosenLines(str(tmp_path / "errors"), ("failed",), (), ()))
    plan = ingest_file(tmp_path / "in", tmp_path / "work", rules)
    assert [error.code for error in plan.errors] == ["input_changed"]


@pytest.mark.parametrize("garbage", [b"", b"\0" * 40, b'{"id":', b"\xff\xfe"])
def test_a_damaged_error_line_chooses_its_request_where_it_still_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, garbage: bytes
) -> None:
    broken = refused(1, "b", 400, {"error": {}}).replace(b'"body":', b'"body"}') + garbage + b"\n"
    monkeypatch.setattr("tests.stages.ingest.test_chosen.ERRORS", ERRORS.splitlines(keepends=True)[0] + broken)
    assert chosen(tmp_path, ("failed",))[1] == ["a", "b"]
    assert chosen(tmp_path, ("failed",), "too_long")[0].errors
