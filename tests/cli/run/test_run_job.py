"""The batch of one run: what becomes its input, and whose batches it leaves alone."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import uvloop
from msgspec.structs import replace

from tests.support.tidegate import chat_line
from tidegate import service
from tidegate.cli.run import run_changed, run_dry, run_job
from tidegate.cli.run.run_again import ALL_FAILED
from tidegate.cli.terminal import input_file
from tidegate.core.errors import ApiProblem, SettingsError
from tidegate.core.job_controls import JobControls, MaxErrors
from tidegate.core.nouns import JobRequest
from tidegate.settings import load


def errand_of(tmp_path: Path, *, fresh: bool = False) -> run_job.Errand:
    """A run of a file of one line."""
    settings = load(None, tmp_path / "data", {"upstream.url": "http://127.0.0.1:9/v1"}, {}).settings
    path = tmp_path / "in.jsonl"
    path.write_text(chat_line("a", "hi") + "\n")
    source = input_file.read_input(str(path), tmp_path, 1 << 20)
    options = input_file.RunOptions("/v1/chat/completions")
    begin = run_job.Begin(fresh=fresh, retry_failed=False, wait=False, is_checked=False)
    return run_job.Errand(settings, source, input_file.Targets(None, None), options, begin, "", "series")


@pytest.mark.parametrize("fresh", [False, True])
def test_open_batches_of_other_versions_are_ended_and_of_a_run_from_the_start_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fresh: bool
) -> None:
    """Otherwise the lines of an open batch of this version would be sent twice."""
    errand, asked = errand_of(tmp_path, fresh=fresh), list[tuple[str, str | None]]()

    async def end_outdated(parts: object, series: str, sha256: str | None) -> list[Any]:
        asked.append((series, sha256))
        raise SettingsError("so far")

    monkeypatch.setattr(run_changed, "end_outdated", end_outdated)
    with pytest.raises(SettingsError, match="so far"):
        uvloop.run(run_job.perform(errand))
    assert asked == [("series", None if fresh else errand.source.sha256)]


def test_of_an_input_that_cannot_be_read_to_its_end_nothing_is_kept(tmp_path: Path) -> None:
    errand = errand_of(tmp_path)
    errand.source.path.unlink()

    async def send() -> list[str]:
        async with service.estimating(errand.settings) as estimating:
            with pytest.raises(FileNotFoundError):
                await run_job.send_in(errand, estimating.parts, estimating.reception)
            return await estimating.parts.blobs.list_ids("", 9)

    assert uvloop.run(send()) == []


def test_an_input_that_changes_while_it_is_read_makes_no_batch_and_is_not_kept(tmp_path: Path) -> None:
    errand = errand_of(tmp_path)
    settings = errand.settings
    errand.source.path.write_text(chat_line("a", "hi") + "\n" + chat_line("b", "hi") + "\n")

    async def send() -> list[Any]:
        async with service.estimating(settings) as estimating:
            parts = estimating.parts
            with pytest.raises(SettingsError, match="changed while it was read"):
                await run_job.send_in(errand, parts, estimating.reception)
            return (
                await parts.store.list_files(parts.tenant_id, after=None, count_max=9, order="desc", purpose=None) or []
            )

    assert uvloop.run(send()) == []


@pytest.mark.parametrize(
    ("line_count", "is_checked", "is_bounded"), [(20, True, False), (21, True, True), (21, False, False)]
)
def test_a_run_in_which_everything_fails_stops_while_lines_are_left_and_its_server_was_checked(
    tmp_path: Path, line_count: int, is_checked: bool, is_bounded: bool
) -> None:
    errand = errand_of(tmp_path)
    errand = replace(errand, begin=replace(errand.begin, is_checked=is_checked))
    assert run_job._controls(errand, line_count).max_errors == (ALL_FAILED if is_bounded else None)
    own = replace(errand.run_options, controls=JobControls(max_errors=MaxErrors(3)))
    assert run_job._controls(replace(errand, run_options=own), line_count).max_errors == MaxErrors(3)


@pytest.mark.parametrize(("param", "asked"), [("reuse_from", ["batch_1", None]), ("input_file_id", ["batch_1"])])
def test_earlier_answers_that_cannot_be_kept_are_left_out_and_any_other_refusal_stands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, param: str, asked: list[str | None]
) -> None:
    earlier, seen = SimpleNamespace(id="batch_1"), list[str | None]()

    async def find_answered(*_: object) -> Any:
        return earlier

    async def act(request: JobRequest) -> str:
        seen.append(request.shape.reuse_from)
        if request.shape.reuse_from:
            raise ApiProblem(409, "no", "It cannot be.", param=param)
        return "made"

    monkeypatch.setattr(run_changed, "find_answered", find_answered)
    parts: Any = SimpleNamespace()
    making = run_job.with_earlier_answers(errand_of(tmp_path), parts, JobRequest("/v1/x", "file", 1, "1s"), act)
    if param == "reuse_from":
        assert uvloop.run(making) == "made"
    else:
        with pytest.raises(ApiProblem, match="cannot be"):
            uvloop.run(making)
    assert [one or None for one in seen] == asked


def test_a_dry_run_keeps_no_copy_of_its_input(tmp_path: Path) -> None:
    errand = errand_of(tmp_path)
    estimate, before = uvloop.run(run_dry._estimate(errand))
    assert (estimate.item_count, before) == (1, None)

    async def kept_files() -> list[Any]:
        async with service.estimating(errand.settings) as estimating:
            parts = estimating.parts
            return (
                await parts.store.list_files(parts.tenant_id, after=None, count_max=9, order="desc", purpose=None) or []
            )

    assert uvloop.run(kept_files()) == []


@pytest.mark.parametrize("rejected_at", ["http://a", "http://b"])
def test_a_server_that_is_away_is_not_taken_for_one_that_rejects_our_key(rejected_at: str) -> None:
    def status(url: str) -> Any:
        return SimpleNamespace(url=url, is_key_rejected=url == rejected_at)

    working: Any = SimpleNamespace(router=SimpleNamespace(status=lambda: [status("http://a"), status("http://b")]))
    words = run_job._where_it_is(working, "", "http://a", "it is so")
    assert words.startswith("The model server refuses our key: it is so.") == (rejected_at == "http://a")
    assert run_job._where_it_is(working, "http://a", "", "").endswith("is back: http://a")


def test_where_other_processes_may_run_a_series_its_open_batches_are_left_alone() -> None:
    shared = load(None, None, {"store.url": "postgresql://u@127.0.0.1:1/d"}, {}).settings
    parts: Any = SimpleNamespace(settings=shared)
    assert uvloop.run(run_changed.find_outdated(parts, "series", None)) == []
