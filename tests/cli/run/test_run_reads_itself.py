"""A run has no callers who would wait, so it reads its input in its own process: a process for that takes longer to start than to read."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from bench.throughput import submit
from tidegate.core.states import JOB_ENDED
from tidegate.service import working
from tidegate.settings import load

LINE = (
    b'{"custom_id": "%d", "method": "POST", "url": "/v1/chat/completions", "body": {"model": "m", "messages": "%s"}}\n'
)


async def test_a_run_reads_a_large_input_without_another_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin, begun = asyncio.create_subprocess_exec, []

    async def note(*args: Any, **named: Any) -> Any:
        begun.append(args)
        return await begin(*args, **named)

    monkeypatch.setattr(asyncio, "create_subprocess_exec", note)
    settings = load(None, tmp_path, {"upstream.url": "http://127.0.0.1:9/v1"}, {}).settings
    lines = [LINE % (number, b"x" * 1_000) for number in range(2_000)]
    async with working(settings) as service, service.running():
        job_id = await submit(service, [*lines, b"not a request\n"])
        service.parts.wakes.inputs.notify()
        news = service.parts.wakes.jobs.listen()
        while (job := await service.parts.store.any_job(job_id)) is None or job.state not in JOB_ENDED:
            await news.wait(0.05)
    assert [(error.code, error.line) for error in job.errors] == [("invalid_json_line", 2_001)]
    assert begun == []
