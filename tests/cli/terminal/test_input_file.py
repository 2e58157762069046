"""What a run is about: the same input, upstream and options are the same batch, and impossible targets are refused first."""

import asyncio
import gzip
import hashlib
import os
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace

from tidegate.cli.terminal import input_file, results
from tidegate.core import ids
from tidegate.core.errors import SettingsError
from tidegate.core.input.lines import MIXED
from tidegate.settings import load

OPTIONS = input_file.RunOptions(endpoint="/v1/chat/completions", ordered=False, prefix_order=True, invalid_lines="fail")
LINE = b'{"custom_id": "a", "method": "POST", "url": "/v1/embeddings", "body": {}}\n'


def read(tmp_path: Path, data: bytes, bytes_max: int = 1_000) -> input_file.Input:
    (tmp_path / "in.jsonl").write_bytes(data)
    return input_file.read_input(str(tmp_path / "in.jsonl"), tmp_path, bytes_max)


def test_an_input_is_known_by_its_bytes(tmp_path: Path) -> None:
    source = read(tmp_path, LINE * 3)
    assert source.sha256 == hashlib.sha256(LINE * 3).hexdigest()
    assert (source.size_bytes, source.endpoint, source.name) == (3 * len(LINE), "/v1/embeddings", "in.jsonl")


@pytest.mark.parametrize("data", [b"\xef\xbb\xbf" + LINE, b"\r\n\n  " + LINE, LINE.strip()])
def test_the_endpoint_is_that_of_the_first_line(tmp_path: Path, data: bytes) -> None:
    assert read(tmp_path, data).endpoint == "/v1/embeddings"


def test_a_first_line_may_be_as_long_as_any(tmp_path: Path) -> None:
    """Pictures in it, say. What lies behind its first pieces is read, too."""
    long = LINE.replace(b'"body"', b'"padding": "' + b"x" * (9 << 20) + b'", "body"')
    assert read(tmp_path, long + LINE, 1 << 30).endpoint == "/v1/embeddings"


@pytest.mark.parametrize("data", [b"not json\n", b'{"url": 5}\n', b"[]\n", b'{"url": "\xff"}', b"\x00" * 100])
def test_a_first_line_that_is_no_request_names_no_endpoint(tmp_path: Path, data: bytes) -> None:
    assert read(tmp_path, data).endpoint is None


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"\n \n", "no requests"),
        (b"[" + LINE.strip() + b"]", "JSON array"),
        (b'{\n  "url": "/v1/embeddings"\n}', "pretty-printed"),
        (gzip.compress(LINE, mtime=0), "gzip data"),
        (LINE.decode().encode("utf-16"), "UTF-16"),
        (LINE[:-5] + b"\n", "not valid JSON"),
        (b'{"custom_id": "a", "body": {}}\n', "--endpoint"),
        (b'{"custom_id": "a", "url": "embeddings", "body": {}}\n', '"embeddings", is no path'),
        (b'{"custom_id": "a", "url": "https://api.example/v1/embeddings", "body": {}}\n', "is no path"),
    ],
    ids=["blank", "array", "pretty", "gzip", "utf-16", "cut", "without url", "no path", "address"],
)
def test_what_is_wrong_with_the_first_line_is_reported(tmp_path: Path, data: bytes, says: str) -> None:
    source = read(tmp_path, data)
    assert source.endpoint is None
    assert says in source.trouble


def test_lines_that_name_different_endpoints_make_a_mixed_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(input_file, "PIECE_BYTES", 16)
    other = LINE.replace(b"/v1/", b"/v1/other/")
    assert read(tmp_path, LINE + other).endpoint == MIXED
    assert read(tmp_path, LINE + LINE).endpoint == read(tmp_path, LINE).endpoint != MIXED
    # A url inside a body is none of a line's, and a line that cannot be read names none.
    inside = LINE.replace(b'"body": {', b'"body": {"x": {"url": "/v1/other"}, ')
    assert inside != LINE
    assert read(tmp_path, LINE + inside + b'{"url": "/v1/other", \n').endpoint == read(tmp_path, LINE).endpoint


def test_inputs_that_cannot_be(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="is larger than 1,000 bytes"):
        read(tmp_path, b"x" * 1_001)
    for name, says in (("absent", "There is no file"), (".", "is a directory")):
        with pytest.raises(SettingsError, match=says):
            input_file.read_input(str(tmp_path / name), tmp_path, 1_000)


def test_a_pipe_is_spooled_because_it_cannot_be_read_twice(tmp_path: Path) -> None:
    reader, writer = os.pipe()
    os.write(writer, LINE)
    os.close(writer)
    source = input_file.read_input(f"/dev/fd/{reader}", tmp_path, 1_000)
    os.close(reader)
    assert source.is_spooled
    assert source.path.read_bytes() == LINE
    assert input_file.targets(None, None, source).results is None


def test_the_same_input_upstream_and_options_are_the_same_batch(tmp_path: Path) -> None:
    source = read(tmp_path, LINE)
    here = load(None, tmp_path, {"upstream.url": "http://a/v1"}, {}).settings
    faster = load(
        None, tmp_path, {"upstream.url": "http://a/v1", "worker.in_flight_max": 200, "upstream.api_key": "k"}, {}
    ).settings
    there = load(None, tmp_path, {"upstream.url": "http://b/v1"}, {}).settings
    ordered = input_file.RunOptions(
        endpoint="/v1/chat/completions", ordered=True, prefix_order=True, invalid_lines="fail"
    )
    name = input_file.job_id(source, here, OPTIONS, 0)
    assert ids.is_valid("batch", name)
    assert name == input_file.job_id(source, faster, OPTIONS, 0)
    assert name == input_file.job_id(source, here, ordered, 0), "how results look makes no other run"
    others = {
        input_file.job_id(source, there, OPTIONS, 0),
        input_file.job_id(source, here, replace(OPTIONS, model="other"), 0),
        input_file.job_id(source, here, OPTIONS, 1),
        input_file.job_id(read(tmp_path, LINE * 2), here, OPTIONS, 0),
    }
    assert len(others | {name}) == 5
    for spelling in ("http://a", "http://a/", "http://a/v1/"):
        same = load(None, tmp_path, {"upstream.url": spelling}, {}).settings
        assert input_file.job_id(source, same, OPTIONS, 0) == name


def test_failed_lines_go_beside_the_results(tmp_path: Path) -> None:
    source = read(tmp_path, LINE)
    for output, errors in (("r.jsonl", "r.errors.jsonl"), ("r", "r.errors.jsonl"), ("a.b.jsonl", "a.b.errors.jsonl")):
        found = input_file.targets(str(tmp_path / output), None, source)
        assert found == input_file.Targets(tmp_path / output, tmp_path / errors)
    assert input_file.targets(None, None, source).results == Path("in.results.jsonl")
    assert input_file.targets("-", None, source) == input_file.Targets(None, None)
    assert input_file.targets("/dev/null", None, source) == input_file.Targets(Path("/dev/null"), None)


def test_targets_that_cannot_be_written_are_refused_before_any_work(tmp_path: Path) -> None:
    source = read(tmp_path, LINE)
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    for output, errors, says in (
        (str(tmp_path), None, "is a directory"),
        (str(tmp_path / "no" / "r"), None, "There is no directory"),
        (str(source.path), None, "is the input itself"),
        (str(tmp_path / "r"), str(tmp_path / "r"), "same file"),
        (str(loop), None, "Too many levels of symbolic links"),
        (str(tmp_path / ("r" * 300)), None, "File name too long"),
        (str(tmp_path / "r.jsonl.gz"), None, "leave .gz out"),
        (str(tmp_path / "r.jsonl"), str(tmp_path / "e.jsonl.ZST"), "leave .ZST out"),
    ):
        with pytest.raises(SettingsError, match=says):
            input_file.targets(output, errors, source)


async def pieces(*data: bytes, fails: bool = False) -> AsyncIterator[bytes]:
    for one in data:
        yield one
    if fails:
        raise SettingsError("the disk is gone")


def test_results_appear_whole_or_not_at_all(tmp_path: Path) -> None:
    target = tmp_path / "r.jsonl"
    target.write_bytes(b"old")
    with pytest.raises(SettingsError):
        asyncio.run(results.save(pieces(b"ne", fails=True), target))
    assert target.read_bytes() == b"old"
    assert asyncio.run(results.save(pieces(b"ne", b"w"), target)) == 3
    assert target.read_bytes() == b"new"
    assert [path.name for path in tmp_path.iterdir()] == ["r.jsonl"]


def test_a_disk_without_room_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="The results are kept"):
        asyncio.run(results.save(pieces(b"x"), tmp_path / "no" / "r"))


def test_a_pipe_or_a_device_is_written_through_and_stays_what_it_is(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    assert asyncio.run(results.save(pieces(b"ne", b"w"), pipe)) == 3
    assert os.read(reader, 10) == b"new"
    os.close(reader)
    results.remove(pipe)
    assert pipe.is_fifo()
    assert asyncio.run(results.save(pieces(b"x"), Path("/dev/null"))) == 1
    results.remove(Path("/dev/null"))
    assert Path("/dev/null").is_char_device()
    with pytest.raises(SettingsError, match="/dev/full cannot be written: No space left"):
        asyncio.run(results.save(pieces(b"x"), Path("/dev/full")))


def test_files_in_memory_are_ordinary_files() -> None:
    assert not results.is_stream(Path("/dev/shm/results.jsonl"))
    assert results.is_stream(Path("/dev/stdout"))
    assert results.is_stream(Path("/dev/fd/7"))


def test_a_link_stays_and_its_file_is_written(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    link, file = tmp_path / "link.jsonl", tmp_path / "elsewhere" / "r.jsonl"
    link.symlink_to(file)
    asyncio.run(results.save(pieces(b"new"), link))
    assert link.is_symlink()
    assert file.read_bytes() == b"new"


ODD_LINES = (
    b'{"custom_id": "plain-%d", "url": "/v1/x"}',
    b'{"url": "/v1/x", "custom_id": "later-%d"}',
    b'{"custom_id":"\\u00e9-%d","body":{"custom_id":"another"}}',
    '{{"custom_id": "ü-{}", "body": {{"text": "\\"custom_id\\": \\"in a prompt\\""}}}}'.format("%d").encode(),
    b'  {"custom_id": "indented-%d"}',
    b'{"body": {"custom_id": "inside-%d"}, "custom_id": "top-%d"}',
)


@pytest.mark.parametrize("kinds", [ODD_LINES[:1], ODD_LINES, ODD_LINES[::-1]], ids=["plain", "odd", "odd reversed"])
@pytest.mark.parametrize("chunk_bytes", [7, 100, 1 << 20])
def test_result_lines_are_put_into_the_order_of_any_input(
    tmp_path: Path, kinds: tuple[bytes, ...], chunk_bytes: int
) -> None:
    lines = []
    for number in range(600):
        kind = kinds[number % len(kinds)]
        lines.append(kind % ((number,) * kind.count(b"%d")))
    asked = tmp_path / "in.jsonl"
    asked.write_bytes(b"\n".join([*lines[:50], b"", b"not json", *lines[50:]]) + b"\n")
    names = [msgspec.json.decode(line)["custom_id"] for line in lines]
    order = input_file.order_of(asked)
    assert sorted(names, key=order.__getitem__) == names
    answers = [b'{"id":"batch_req_%d","custom_id":%b}\n' % (i, msgspec.json.encode(n)) for i, n in enumerate(names)]
    unplaced = b'{"id":"batch_req_x","custom_id":null}\n'
    written = b"".join([unplaced, *answers[300:], *answers[:300:7], *(a for i, a in enumerate(answers[:300]) if i % 7)])

    async def chunks() -> AsyncIterator[bytes]:
        for start in range(0, len(written), chunk_bytes):
            yield written[start : start + chunk_bytes]

    async def placed() -> bytes:
        return b"".join([chunk async for chunk in results.in_order(chunks(), order)])

    assert asyncio.run(placed()) == b"".join([*answers, unplaced])
