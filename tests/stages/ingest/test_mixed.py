"""An input whose lines name different endpoints: each slice has one endpoint and one model, and only MIXED allows it."""

import json
from pathlib import Path
from typing import Any

import pytest

from tidegate.core.input.line_faults import LineFault
from tidegate.core.input.lines import MIXED, LineRules, check_line
from tidegate.stages.ingest.ingest_file import ingest_file

CHAT, RESPONSES, EMBEDDINGS = "/v1/chat/completions", "/v1/responses", "/v1/embeddings"
RULES = LineRules(MIXED, slice_count_max=3)
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [{"role": "user", "content": "Say something about the weather in words"}]},
    RESPONSES: {"input": "Say something about the weather in words"},
    EMBEDDINGS: {"input": ["a", "b"]},
    "/v1/moderations": {"input": "x"},
    "/v1/of-an-operator": {"anything": 1},
}


def line(custom_id: str, url: str | None, **body: Any) -> bytes:
    known = {} if url == "/v1/moderations" else {"model": "m"}
    request = {"custom_id": custom_id, "url": url, "body": {**known, **BODIES.get(url or "", {}), **body}}
    return json.dumps({name: value for name, value in request.items() if value is not None}).encode()


@pytest.mark.parametrize("prefix_order", [True, False])
def test_a_slice_has_one_endpoint_and_one_model(prefix_order: bool, tmp_path: Path) -> None:
    urls = [*BODIES, *BODIES, *BODIES, *BODIES]
    lines = [line(f"id-{number:02}", url) for number, url in enumerate(urls)]
    (tmp_path / "in").write_bytes(b"\n".join(lines))
    rules = LineRules(MIXED, slice_count_max=3, prefix_order=prefix_order)
    plan = ingest_file(tmp_path / "in", tmp_path / "work", rules)
    work = (tmp_path / "work").read_bytes()
    assert plan.errors == []
    assert plan.item_count == len(urls)
    seen = []
    for one in plan.slices:
        items = [json.loads(text) for text in work[one.work_at : one.work_at + one.work_bytes].splitlines()]
        assert len(items) == one.count <= 3
        assert {(item["url"], item["body"].get("model", "omni-moderation-latest")) for item in items} == {
            (one.endpoint, one.model)
        }
        seen += [item["custom_id"] for item in items]
    assert sorted(seen) == [f"id-{number:02}" for number in range(len(urls))]


@pytest.mark.parametrize("url", [None, "", "v1/chat/completions", "http://elsewhere/v1/chat/completions"])
def test_each_line_must_name_a_path(url: str | None) -> None:
    with pytest.raises(LineFault) as caught:
        check_line(line("a", url, messages=[{"role": "user", "content": "x"}]), RULES)
    assert (caught.value.code, caught.value.param) == ("url_mismatch", "url")


def test_the_rules_of_each_line_are_those_of_its_endpoint(tmp_path: Path) -> None:
    lines = [line("chat", CHAT, background=True), line("background", RESPONSES, background=True), line("no", CHAT, n=0)]
    (tmp_path / "in").write_bytes(b"\n".join(lines))
    plan = ingest_file(tmp_path / "in", tmp_path / "work", RULES)
    assert [(one.endpoint, one.count) for one in plan.slices] == [(CHAT, 1), ("", 2)]


def test_only_inputs_to_embed_are_counted(tmp_path: Path) -> None:
    (tmp_path / "in").write_bytes(b"\n".join([line("a", EMBEDDINGS), line("b", RESPONSES), line("c", RESPONSES)]))
    for most, codes in ((2, []), (1, ["too_many_tasks"])):
        plan = ingest_file(tmp_path / "in", tmp_path / "work", LineRules(MIXED, inputs_max=most))
        assert [error.code for error in plan.errors] == codes
