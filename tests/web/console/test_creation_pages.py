"""A batch from a file in the console: taken in as a plain form, checked without sending anything, and created when that is wanted."""

from __future__ import annotations

import json
from typing import Any
from urllib.parse import parse_qs, urlsplit

import httpx2
import pytest

from tests.web.console.world import HOSTILE, Console, csrf_of
from tests.web.server import model_at

NEW, UPLOAD, CHECK = "/console/batches/new", "/console/batches/upload", "/console/batches/check"


def line(number: int, model: str = "m", **more: Any) -> str:
    body = {"model": model, "messages": [{"role": "user", "content": "hi"}]}
    return json.dumps(
        {"custom_id": f"c{number}", "method": "POST", "url": "/v1/chat/completions", "body": body, **more}
    )


INPUT = "\n".join(line(number) for number in range(3)).encode()


@pytest.fixture(scope="module")
def web_settings() -> dict[str, Any]:
    return {"models": {"m": model_at(name="gpu")}, "limits": {"file_bytes_max": 300_000}}


def sent(client: httpx2.Client, data: bytes = INPUT, name: str = "in.jsonl", **fields: str) -> httpx2.Response:
    form = {"csrf": csrf_of(client, "/console"), "org": "ops", "endpoint": "/v1/chat/completions", **fields}
    return client.post(UPLOAD, data=form, files={"file": (name, data)})


def test_a_file_is_checked_and_then_made_a_batch(console: Console) -> None:
    writer = console.signed_in(console.writer_key)
    assert 'enctype="multipart/form-data"' in writer.get(NEW).text
    taken = sent(writer, name=f"{HOSTILE}.jsonl", org=f"org {HOSTILE}", priority="7", ordered="1")
    assert taken.status_code == 303, taken.text
    target = taken.headers["location"]
    assert target.startswith(CHECK)
    before = console.web.client(console.reader_key).get("/admin/v1/batches").json()["data"]
    shown = writer.get(target)
    assert (shown.status_code, "It can be run" in shown.text, "<script>alert" in shown.text) == (200, True, False)
    assert console.web.client(console.reader_key).get("/admin/v1/batches").json()["data"] == before, "only a look"
    asked = {name: values[0] for name, values in parse_qs(urlsplit(target).query).items()}
    made = writer.post(NEW, data={"csrf": csrf_of(writer, "/console"), **asked})
    assert made.status_code == 303, made.text
    job = console.web.job(made.headers["location"].rpartition("/")[2])
    assert (job.input_file_id, job.ordered, job.endpoint) == (asked["file"], True, "/v1/chat/completions")
    noted = console.web.client(console.reader_key).get("/admin/v1/audit", params={"target": asked["file"]}).json()
    assert [(one["action"], one["kind"]) for one in noted["data"]] == [
        ("batch.create", "input"),
        ("file.upload", "file"),
    ]
    assert noted["data"][0]["after"]["batch"] == job.id


def test_what_cannot_be_run_is_shown_and_not_made(console: Console) -> None:
    writer = console.signed_in(console.writer_key)
    bad = b'{"custom_id": "<script>alert(1)</script>", "method": "POST", "url": "/v1/x", "body": {}}\nnot json\n'
    shown = writer.get(sent(writer, bad).headers["location"])
    assert (shown.status_code, "This cannot be run" in shown.text) == (200, True)
    assert "cost, likely" not in shown.text, "it would cost nothing, because it cannot be run"
    assert "Create the batch" not in shown.text
    assert "<script>alert" not in shown.text
    unknown = writer.get(sent(writer, line(1, "no-such-model").encode()).headers["location"])
    assert (unknown.status_code, "<script>alert" in unknown.text) == (200, False)


def test_a_form_is_refused_before_a_byte_is_kept(console: Console) -> None:
    writer, reader = console.signed_in(console.writer_key), console.signed_in(console.reader_key)
    assert (reader.get(NEW).status_code, reader.get(f"{CHECK}?file=x").status_code) == (403, 403)
    refusals = {
        "only looks": sent(reader),
        "no token": sent(writer, csrf=""),
        "another's token": sent(writer, csrf=csrf_of(reader, "/console")),
        "no such owner": sent(writer, org=HOSTILE),
        "empty": sent(writer, b""),
        "too large": sent(writer, b"x" * 400_000),
        "no file": writer.post(UPLOAD, data={"csrf": csrf_of(writer, "/console")}),
    }
    found = {name: answer.status_code for name, answer in refusals.items()}
    assert found == {
        "only looks": 403,
        "no token": 403,
        "another's token": 403,
        "no such owner": 404,
        "empty": 400,
        "too large": 413,
        "no file": 415,
    }
    for answer in refusals.values():
        assert answer.headers["content-type"] == "text/html; charset=utf-8"
        assert "<script>alert" not in answer.text
    form = {"csrf": csrf_of(writer, "/console"), "org": "ops"}
    foreign = writer.post(UPLOAD, data=form, files={"file": INPUT}, headers={"Origin": "https://evil.example"})
    late = writer.post(
        UPLOAD, content=late_token("0" * 64), headers={"Content-Type": "multipart/form-data; boundary=x"}
    )
    assert (foreign.status_code, late.status_code) == (403, 403)
    for query in ("file=x", "file=" + "file-" + 22 * "0", "mood=1", f"file={HOSTILE}"):
        assert writer.get(f"{CHECK}?{query}").status_code in (400, 404)
    theirs = sent(writer).headers["location"].replace("org=ops", "org=" + "org%20%22")
    assert writer.get(theirs).status_code == 404
    for window, priority in (("<b>", "many"), ("24h", "--5"), ("24h", "-")):
        wrong = sent(writer, completion_window=window, priority=priority).headers["location"]
        assert writer.get(wrong).status_code == 400
    assert sent(writer, org="ops\0").status_code in (400, 404)


def late_token(csrf: str) -> bytes:
    parts = (
        '--x\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\n{}\r\n'
        f'--x\r\nContent-Disposition: form-data; name="csrf"\r\n\r\n{csrf}\r\n--x--\r\n'
    )
    return parts.encode()
