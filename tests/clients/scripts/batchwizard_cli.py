"""batchwizard: its commands submit a file, watch it until its results are on disk, and list the jobs of the server."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

COMMAND = str(Path(sys.executable).with_name("batchwizard"))

with tempfile.TemporaryDirectory() as made:
    directory = Path(made)
    # It keeps a manifest of its jobs under the home directory.
    env = {**os.environ, "HOME": made, "XDG_CONFIG_HOME": made, "COLUMNS": "200"}

    def run(*arguments: str) -> str:
        done = subprocess.run(
            [COMMAND, *arguments], env=env, cwd=directory, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    with (directory / "in.jsonl").open("w") as lines:
        for number in range(10):
            body = {"model": "m", "messages": [{"role": "user", "content": f"Say {number}."}]}
            request = {"custom_id": f"c{number}", "method": "POST", "url": "/v1/chat/completions", "body": body}
            lines.write(json.dumps(request) + "\n")
    run("submit", "in.jsonl")
    run("watch", "--output-directory", "results", "--check-interval", "1")
    [output] = (directory / "results").glob("batch_*_results.jsonl")
    answers = [json.loads(line) for line in output.read_text().splitlines()]
    assert {one["custom_id"] for one in answers} == {f"c{number}" for number in range(10)}, answers
    batch_id = output.name.removesuffix("_results.jsonl")
    assert batch_id in run("list-jobs"), batch_id
print(f"submit, watch ({len(answers)} answers in its results file), list-jobs")
