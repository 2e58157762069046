"""What one line is taken for, by its endpoint."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tidegate.core.input import scan as scan_module
from tidegate.core.input.line_faults import BodyFault, LineFault
from tidegate.core.input.lines import ENDPOINTS, MIXED, LineRules, check_line
from tidegate.core.input.scan import Scan

GENERATING = {
    "/v1/chat/completions",
    "/v1/messages",
    "/v1/responses",
    "/v1/completions",
    "/v1/audio/transcriptions",
    "/v1/audio/translations",
}


def line_of(url: str, **body: Any) -> bytes:
    return json.dumps({"custom_id": "a", "url": url, "body": body}).encode()


@pytest.mark.parametrize("endpoint", ENDPOINTS)
def test_only_an_endpoint_that_generates_is_given_tokens_for_its_answer(endpoint: str) -> None:
    messages = [{"role": "user", "content": "x"}]
    line = line_of(endpoint, model="m", messages=messages, input="x", prompt="x", max_tokens=7)
    checked = check_line(line, LineRules(endpoint))
    assert checked.output_tokens == (7 if endpoint in GENERATING else 0)


@pytest.mark.parametrize("endpoint", ["/v1/moderations", MIXED])
def test_a_line_that_needs_no_model_is_refused_for_its_real_fault(endpoint: str) -> None:
    with pytest.raises(BodyFault) as refused:
        check_line(line_of("/v1/moderations", input="x", stream=5), LineRules(endpoint))
    assert refused.value.param == "body.stream"


def test_the_first_byte_that_is_not_utf8_is_named_by_its_place() -> None:
    with pytest.raises(LineFault, match=r"^Byte 15 of this line is not UTF-8"):
        check_line(b'{"custom_id":"\xff"}', LineRules("/v1/chat/completions"))


@pytest.mark.parametrize(
    ("custom_id", "model", "param"), [("ä" * 257, "m", "custom_id"), ("a", "ä" * 129, "body.model")]
)
def test_names_are_bounded_in_bytes(custom_id: str, model: str, param: str) -> None:
    body = {"model": model, "messages": [{"role": "user", "content": "x"}]}
    with pytest.raises(LineFault) as refused:
        check_line(json.dumps({"custom_id": custom_id, "body": body}).encode(), LineRules("/v1/chat/completions"))
    assert refused.value.param == param


def test_a_batch_names_a_bounded_number_of_models(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scan_module, "MODELS_MAX", 2)
    scan = Scan(LineRules("/v1/completions"))
    scan.read_first(b"".join(line_of("/v1/completions", model=name, prompt="x") + b"\n" for name in "abac"))
    scan.finish()
    assert [(error.line, error.param) for error in scan.errors] == [(4, "body.model")]


def test_so_many_bad_lines_are_named_and_then_no_more_are_read() -> None:
    scan = Scan(LineRules("/v1/chat/completions", errors_max=3))
    scan.read_first(b"{}\n" * 9)
    scan.finish()
    assert (scan.stopped, [error.line for error in scan.errors]) == (True, [1, 2, 3])


@pytest.mark.parametrize(("size", "is_cut"), [(75, False), (76, True)])
def test_a_name_in_a_message_is_cut_when_it_is_long(size: int, is_cut: bool) -> None:
    name = "n" * size
    twice = f'{{"custom_id":"a","url":"/v1/chat/completions","body":{{"model":"m","{name}":1,"{name}":2}}}}'
    with pytest.raises(LineFault) as refused:
        check_line(twice.encode(), LineRules("/v1/chat/completions"))
    assert ("…" in refused.value.message) is is_cut
