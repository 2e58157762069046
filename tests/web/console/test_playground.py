"""The console's playground: one call to a model server, with its answer, its refusals and whatever hostile text comes back."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.web.console.world import HOSTILE, Console, csrf_of
from tests.web.server import model_at
from tests.web.upstream import Upstream, answers, chat_with
from tidegate.core.budgets.budget import Limit, Period

PAGE = "/console/playground"


@pytest.fixture
def upstream() -> Iterator[Upstream]:
    with Upstream(answers(chat_with(f"repeated {HOSTILE}"))) as server:
        yield server


@pytest.fixture
def console(start_web: Any, upstream: Upstream) -> Console:
    return Console(start_web(models={"m": model_at(upstream.url, name="gpu")}))


def test_a_call_is_made_shown_and_noted(console: Console, upstream: Upstream) -> None:
    writer = console.signed_in(console.writer_key)
    form = {"csrf": csrf_of(writer, PAGE), "model": "m", "system": "be brief", "prompt": HOSTILE, "max_tokens": "9"}
    shown = writer.post(PAGE, data=form)
    assert (shown.status_code, "repeated &#34;&gt;&lt;script&gt;" in shown.text) == (200, True), shown.text
    assert "<script>alert" not in shown.text
    assert b'"max_tokens":9' in upstream.posts[0].body
    assert b"be brief" in upstream.posts[0].body
    noted = console.web.client(console.reader_key).get("/admin/v1/audit").json()["data"][0]
    assert (noted["action"], noted["target"], HOSTILE in str(noted)) == ("playground.call", "m", False)
    upstream.becomes(answers(b'{"error": {"message": "<script>alert(1)</script>"}}', 400))
    refused = writer.post(PAGE, data=form)
    assert (refused.status_code < 500, "<script>alert" in refused.text) == (True, False)
    upstream.becomes(answers(b"\xff\x00 no json"))
    assert writer.post(PAGE, data=form).status_code < 600


def test_a_call_is_held_to_what_the_key_allows(console: Console, upstream: Upstream) -> None:
    key = console.web.make_key("ops", scopes=["admin:write"], models=["another"])
    limits = (Limit(Period.DAY, requests=1),)
    limited = console.web.make_key("ops", scopes=["admin:write"], limits=limits)
    one = console.signed_in(key)
    refused = one.post(PAGE, data={"csrf": csrf_of(one, PAGE), "model": "m", "prompt": "hi"})
    assert (refused.status_code, "does not allow the model" in refused.text) == (404, True), refused.text
    two = console.signed_in(limited)
    form = {"csrf": csrf_of(two, PAGE), "model": "m", "prompt": "hi"}
    assert "repeated" in two.post(PAGE, data=form).text
    spent = two.post(PAGE, data=form)
    assert (spent.status_code, "budget_spent" in spent.text) == (429, True)
    assert len(upstream.posts) == 1


def test_what_is_wrong_is_a_page(console: Console, upstream: Upstream) -> None:
    writer, reader = console.signed_in(console.writer_key), console.signed_in(console.reader_key)
    assert "Send</button>" not in reader.get(PAGE).text
    form = {"csrf": csrf_of(writer, PAGE), "model": "m", "prompt": "hi"}
    wrongs: dict[str, list[str]] = {
        "model": ["", "nope", HOSTILE],
        "prompt": [""],
        "max_tokens": ["many", 400 * "9"],
        "temperature": ["hot", "nan", "1e999"],
    }
    for field, values in wrongs.items():
        for value in values:
            again = writer.post(PAGE, data={**form, field: value})
            assert (again.status_code in (400, 404), 'role="alert"' in again.text) == (True, True), (field, value)
            assert "<script>alert" not in again.text
    assert writer.get(f"{PAGE}?mood=1").status_code == 400
    assert upstream.posts == []
