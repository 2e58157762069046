"""openai-batch: its command creates a batch, and fetches its files when it has ended."""

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import openai

WHERE = ["--base-url", os.environ["OPENAI_BASE_URL"], "--api-key", os.environ["OPENAI_API_KEY"]]


def run(*arguments: str) -> str:
    command = [sys.executable, "-m", "openai_batch.run", *arguments, *WHERE]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


with tempfile.TemporaryDirectory() as directory:
    source, output = Path(directory) / "in.jsonl", Path(directory) / "out.jsonl"
    with source.open("w") as lines:
        for number in range(10):
            body = {"model": "m", "messages": [{"role": "user", "content": f"Say {number}."}]}
            request = {"custom_id": f"c{number}", "method": "POST", "url": "/v1/chat/completions", "body": body}
            lines.write(json.dumps(request) + "\n")
    found = re.search(r"batch_\w+", run(str(source), "--create"))
    assert found is not None
    client = openai.OpenAI()
    while client.batches.retrieve(found[0]).status not in ("completed", "failed", "expired", "cancelled"):
        time.sleep(0.3)
    run("--resume", found[0], "-o", str(output), "-e", str(Path(directory) / "errors.jsonl"))
    answers = [json.loads(line) for line in output.read_text().splitlines()]
    assert len(answers) == 10, answers
print(f"--create, --resume: {len(answers)} answers in its output file")
