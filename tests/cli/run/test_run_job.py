"""The batch of one run: what becomes its input, and whose batches it leaves alone."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import uvloop

from tests.support.tidegate import chat_line
from tidegate import service
from tidegate.cli.run import run_changed, run_job
from tidegate.cli.terminal import input_file
from tidegate.core.errors import SettingsError
from tidegate.settings import load


def test_an_input_that_changes_while_it_is_read_makes_no_batch_and_is_not_kept(tmp_path: Path) -> None:
    settings = load(None, tmp_path / "data", {"upstream.url": "http://127.0.0.1:9/v1"}, {}).settings
    path = tmp_path / "in.jsonl"
    path.write_text(chat_line("a", "hi") + "\n")
    source = input_file.read_input(str(path), tmp_path, 1 << 20)
    path.write_text(chat_line("a", "hi") + "\n" + chat_line("b", "hi") + "\n")
    options = input_file.RunOptions("/v1/chat/completions")
    begin = run_job.Begin(fresh=False, retry_failed=False, wait=False, is_checked=False)
    errand = run_job.Errand(settings, source, input_file.Targets(None, None), options, begin, "", "")

    async def send() -> list[Any]:
        async with service.estimating(settings) as estimating:
            parts = estimating.parts
            with pytest.raises(SettingsError, match="changed while it was read"):
                await run_job.send_in(errand, parts, estimating.reception)
            return (
                await parts.store.list_files(parts.tenant_id, after=None, count_max=9, order="desc", purpose=None) or []
            )

    assert uvloop.run(send()) == []


def test_where_other_processes_may_run_a_series_its_open_batches_are_left_alone() -> None:
    shared = load(None, None, {"store.url": "postgresql://u@127.0.0.1:1/d"}, {}).settings
    parts: Any = SimpleNamespace(settings=shared)
    assert uvloop.run(run_changed.find_outdated(parts, "series", None)) == []
