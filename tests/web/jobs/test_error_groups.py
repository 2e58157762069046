"""Errors by fingerprint: messages that differ only in numbers, ids and quotes are one group."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest

from tidegate.core.answers.error_kinds import FINGERPRINT_CHARS_MAX, ErrorKind, fingerprint
from tidegate.core.errors import BlobMissing
from tidegate.web.jobs import error_groups as module
from tidegate.web.jobs.error_groups import ErrorGroups


@pytest.mark.parametrize(
    ("one", "two"),
    [
        ("Rate limit reached for 'gpt-4' after 37 tokens", "Rate limit reached for 'llama 3' after 9,999 tokens"),
        ("request req_0AbC9 timed out after 30.5s", "request req_zz81 timed out after 2s"),
        ('Invalid value: "<b>secret</b>".', 'Invalid value: "other".'),
        ("cannot reach http://10.0.0.7:8000/v1/x?y", "cannot reach https://example.com/"),
        ("at 2026-11-16T16:00:00Z  it\nfailed", "at 2025-01-01T00:00:00Z it failed"),
    ],
)
def test_what_differs_between_requests_is_taken_out(one: str, two: str) -> None:
    assert fingerprint(one) == fingerprint(two)
    assert not any(letter.isdigit() for letter in fingerprint(one))


def test_other_words_are_other_groups_and_none_is_long() -> None:
    assert fingerprint("the model is overloaded") != fingerprint("the model is unknown")
    assert len(fingerprint("x " * 100_000)) <= FINGERPRINT_CHARS_MAX
    assert fingerprint("'" * 100_000) is not None
    assert fingerprint("") == ""


def test_so_much_of_a_message_is_read_and_so_much_is_shown() -> None:
    assert fingerprint("x" * 1_000) == "x" * 200
    assert fingerprint("12345 " * 100) == "# " * 49 + "#", "the first 300 characters are read"
    assert fingerprint(f"no '{'b' * 200}' here") == "no … here"
    assert fingerprint(f"no '{'b' * 201}' here") == f"no '{'b' * 196}", "a longer quote is not taken for one"
    assert fingerprint(f"a{'b' * 20}://c d") == "# d"
    assert fingerprint(f"a{'b' * 21}://c d") == f"a{'b' * 21}://c d", "no scheme is so long"


@pytest.mark.anyio
async def test_lines_are_grouped_with_examples(monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[dict[str, Any]] = [
        {
            "id": f"r{n}",
            "custom_id": f"c{n}",
            "response": {"status_code": 400, "body": {"error": {"code": "bad", "message": m}}},
        }
        for n, m in enumerate(["max is 5 tokens", "max is 77 tokens", "no 'images' here"])
    ]
    lines += [{"id": "rx", "custom_id": "x", "error": {"code": "batch_expired", "message": "late"}, "response": None}]
    data = b"not json\n" + b"".join(json.dumps(one).encode() + b"\n" for one in lines)

    async def file_bytes(*_: Any) -> Any:
        yield data

    monkeypatch.setattr(module, "file_bytes", file_bytes)
    job: Any = SimpleNamespace(error_file_id="file-1", error_bytes=len(data))
    groups: ErrorGroups = await module.error_groups(None, None, job)  # type: ignore[arg-type]
    assert groups.counts.most_common(1) == [(("bad", 400, "max is # tokens"), 2)]
    assert groups.examples[ErrorKind("bad", 400, "max is # tokens")] == [("r0", "c0"), ("r1", "c1")]
    assert [(kind.code, kind.status) for kind in groups.counts] == [
        ("result_unreadable", 0),
        ("bad", 400),
        ("bad", 400),
        ("batch_expired", 0),
    ]
    assert not any(groups.is_rest(kind) for kind in groups.counts)
    reader = module.ErrorReader(None, None)  # type: ignore[arg-type]
    job.id = "batch_1"
    assert (await reader.groups_of(job)).counts == groups.counts
    assert await reader.groups_of(job) is await reader.groups_of(job), "it has not grown"
    monkeypatch.setattr(module, "GROUPS_MAX", 1)
    fewer: ErrorGroups = await module.error_groups(None, None, job)  # type: ignore[arg-type]
    assert sum(fewer.counts.values()) == 5
    assert [fewer.is_rest(kind) for kind in fewer.counts] == [False, True, True]


@pytest.mark.anyio
async def test_a_line_that_is_cut_where_its_bytes_end_is_no_group(monkeypatch: pytest.MonkeyPatch) -> None:
    late = {"id": "r", "custom_id": "c", "error": {"code": "batch_expired", "message": "late"}, "response": None}
    data = json.dumps(late).encode() + b"\n"

    async def file_bytes(store: Any, blobs: Any, file_id: str, start: int, end: int) -> Any:
        yield (data + data)[:end]
        if end == 2 * len(data):
            raise BlobMissing("they were deleted with their file")

    monkeypatch.setattr(module, "file_bytes", file_bytes)
    monkeypatch.setattr(module, "READ_BYTES_MAX", 2 * len(data))
    for size_bytes in (2 * len(data), 3 * len(data)):
        job: Any = SimpleNamespace(error_file_id="file-1", error_bytes=size_bytes)
        groups = await module.error_groups(None, None, job)  # type: ignore[arg-type]
        assert (groups.is_partial, list(groups.counts.values())) == (True, [2])
    monkeypatch.setattr(module, "READ_BYTES_MAX", 2 * len(data) - 1)
    groups = await module.error_groups(None, None, job)  # type: ignore[arg-type]
    assert (groups.is_partial, list(groups.counts)) == (True, [ErrorKind("batch_expired", 0, "late")])
    assert groups.counts.total() == 1
