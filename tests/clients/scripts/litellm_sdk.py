"""LiteLLM's SDK: files and batches by its asynchronous calls. It sends `custom_llm_provider` along."""

import asyncio
import json
import os
import tempfile

import litellm
import openai

WHERE = {
    "api_base": os.environ["OPENAI_BASE_URL"],
    "api_key": os.environ["OPENAI_API_KEY"],
    "custom_llm_provider": "openai",
    "max_retries": 8,
}


async def main() -> None:
    with tempfile.NamedTemporaryFile("w+b", suffix=".jsonl") as lines:
        for number in range(20):
            body = {"model": "m", "messages": [{"role": "user", "content": f"Say {number}."}]}
            request = {"custom_id": f"c{number}", "method": "POST", "url": "/v1/chat/completions", "body": body}
            lines.write(json.dumps(request).encode() + b"\n")
        lines.seek(0)
        file = await litellm.acreate_file(file=lines.file, purpose="batch", **WHERE)
    wanted = {"completion_window": "24h", "endpoint": "/v1/chat/completions", "input_file_id": file.id}
    batch = await litellm.acreate_batch(**wanted, metadata={"from": "litellm"}, **WHERE)
    while batch.status not in ("completed", "failed", "expired", "cancelled"):
        await asyncio.sleep(0.3)
        batch = await litellm.aretrieve_batch(batch_id=batch.id, **WHERE)
    assert batch.status == "completed", batch
    content = await litellm.afile_content(file_id=batch.output_file_id, **WHERE)
    answers = [json.loads(line) for line in content.content.splitlines()]
    assert {one["custom_id"] for one in answers} == {f"c{number}" for number in range(20)}
    assert batch.id in [one.id for one in (await litellm.alist_batches(limit=5, **WHERE)).data]
    second = await litellm.acreate_batch(**wanted, **WHERE)
    try:
        cancelled = await litellm.acancel_batch(batch_id=second.id, **WHERE)
        assert cancelled.status in ("cancelling", "cancelled"), cancelled
    except openai.ConflictError as late:
        # So short a batch may have ended before the cancel comes.
        if "Cannot cancel a batch with status" not in str(late):
            raise
    print(
        f"acreate_file, acreate_batch, aretrieve_batch, afile_content ({len(answers)} answers), alist_batches, acancel_batch"
    )


asyncio.run(main())
