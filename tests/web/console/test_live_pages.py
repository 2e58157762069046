"""The events that keep a page of the console up to date: what they bring, and everything that ends or interrupts them."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx2
import pytest

from tests.support.processes import wait_until
from tests.support.proxy import WiredDatabase
from tests.web import stages
from tests.web.console.world import Console, csrf_of
from tidegate.core import keys
from tidegate.core.ids import item_id
from tidegate.web.console import live_pages

ASKED = {"Accept": "text/event-stream"}
LIVE = ("", "/batches", "/operations", "/queues", "/deployments")


def events(answer: httpx2.Response) -> Iterator[tuple[str, str]]:
    """Each event with its text, split where a browser splits: a lone carriage return ends a line too."""
    rest, name, lines = "", "", list[str]()
    for text in answer.iter_text():
        *whole, rest = re.split(r"\r\n|\r|\n", rest + text)
        for line in whole:
            field, _, value = line.partition(": ")
            if not line and lines:
                yield name, "\n".join(lines)
                name, lines = "", []
            elif field == "event":
                name = value
            elif field == "data":
                lines.append(value)


@contextmanager
def followed(client: httpx2.Client, path: str) -> Iterator[Iterator[tuple[str, str]]]:
    with client.stream("GET", f"/console{path}", headers=ASKED) as answer:
        assert answer.status_code == 200
        assert answer.headers["content-type"].startswith("text/event-stream")
        assert answer.headers["cache-control"] == "no-store"
        yield events(answer)


def status_of(part: str) -> str:
    found = re.search(r'<p><b class="\w*">([a-z ]+)', part)
    assert found
    return found[1]


def test_a_page_and_its_events_show_the_same(console: Console) -> None:
    reader = console.signed_in(console.reader_key)
    for path in (*LIVE, "/batches?status=in_progress&q=", f"/batches/{console.batch}"):
        whole = reader.get(f"/console{path}").text
        assert f'sse-connect="/console{path.replace("&", "&amp;")}"' in whole
        with followed(reader, path) as events:
            name, part = next(events)
        assert name == "state"
        assert "<main" not in part
        assert "<script>" not in part
        seen = re.sub(r"\d+", "0", whole)
        for line in re.sub(r"\d+", "0", part).splitlines():
            assert line in seen


def test_a_batch_is_followed_to_its_end(console: Console) -> None:
    reader = console.signed_in(console.reader_key)
    with followed(reader, f"/batches/{console.batch}") as events:
        seen = [next(events)]
        assert status_of(seen[0][1]) == "in progress"
        for status in ("finalizing", "completed"):
            if status == "finalizing":
                stages.finish(console.web, console.batch, {2: b"{}\n"})
            else:
                stages.publish(console.web, console.batch)
            while status_of(seen[-1][1]) != status:
                seen.append(next(events))
        assert all(before != after for before, after in itertools.pairwise(seen)), "only what changed is sent"
        assert list(events) == [("end", "end")]
    assert "sse-connect" not in reader.get(f"/console/batches/{console.batch}").text


def test_no_text_of_a_tenant_ends_a_line_or_makes_an_event(console: Console) -> None:
    sly = rb"x\r\revent: signed-out\rdata: y\r\r"
    line = b'{"id":"%s","custom_id":"%s","response":{"status_code":400,"body":{}},"error":null}\n'
    stages.finish(console.web, console.batch, {}, {2: line % (item_id(console.batch, 2).encode(), sly)})
    reader = console.signed_in(console.reader_key)
    with followed(reader, f"/batches/{console.batch}") as events:
        name, text = next(events)
    assert name == "state"
    assert "event: signed-out" in text
    assert "Timeline" in text


def test_events_end_with_the_session_and_with_the_key(console: Console) -> None:
    reader, copy = console.signed_in(console.reader_key), console.signed_in(console.reader_key)
    with followed(reader, "") as events:
        assert next(events)[0] == "state"
        reader.post("/console/sign-out", data={"csrf": csrf_of(reader, "/console")})
        assert [name for name, _ in events if name != "state"] == ["signed-out", "end"]
    with followed(copy, "") as events:
        assert next(events)[0] == "state"
        public_id = keys.public_id_of(console.reader_key)
        assert public_id is not None
        console.web.run(console.web.store.revoke_key(public_id))
        assert [name for name, _ in events if name != "state"] == ["signed-out", "end"]
    for lost in (reader, copy, console.web.client()):
        with followed(lost, "/batches") as events:
            assert [name for name, _ in events] == ["signed-out", "end"], "and none begins without one"


def test_a_page_that_is_refused_says_why_and_ends(console: Console) -> None:
    reader = console.signed_in(console.reader_key)
    for path in ("/batches/batch_" + 22 * "0", "/batches?status=asleep", "/operations/op_" + 22 * "0"):
        with followed(reader, path) as events:
            assert [name for name, _ in events] == ["trouble", "end"]


def test_a_page_goes_on_when_a_store_that_was_gone_is_back(start_web: Any, wired_database: WiredDatabase) -> None:
    url, wire = wired_database
    console = Console(start_web(url))
    with followed(console.signed_in(console.reader_key), f"/batches/{console.batch}") as events:
        first = next(events)
        wire.cut(0)
        name, text = next(events)
        assert (name, "cannot reach its storage" in text) == ("trouble", True)
        wire.heal()
        again = next(events)
        assert (again[0], again[1].splitlines()[0]) == ("state", first[1].splitlines()[0])


def test_only_so_many_pages_are_followed_at_once(console: Console, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_pages, "LIVE_PAGES_MAX", 1)
    reader = console.signed_in(console.reader_key)
    with followed(reader, "/batches") as events:
        assert next(events)[0] == "state"
        with followed(reader, "/batches") as another:
            assert [name for name, _ in another] == ["trouble"], "its browser asks again later"

    def has_room() -> bool:
        with followed(reader, "/batches") as events:
            return next(events)[0] == "state"

    wait_until(has_room, 30, "the room of a page that was closed")


def test_events_end_when_the_server_is_asked_to_stop(console: Console) -> None:
    with followed(console.signed_in(console.reader_key), "/batches") as events:
        assert next(events)[0] == "state"
        console.web.stop_asked()
        assert list(events) == [], "nothing tells the browser not to come back"
