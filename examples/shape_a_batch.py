"""Ask for more than the lines of a file, with the official openai SDK: one set of parameters for all requests, two
files in one batch, retries of its own, and answers in files of bounded size.

Install the SDK with `pip install openai`, and start a server, for example:

    tidegate simulate --port 8001 &
    tidegate serve --upstream http://localhost:8001/v1

then run this with `python examples/shape_a_batch.py`. OPENAI_BASE_URL and OPENAI_API_KEY name another server.
"""

import os
import time
from pathlib import Path

from openai import OpenAI, omit

INPUT = Path(__file__).with_name("requests.jsonl")
ENDED = ("completed", "failed", "expired", "cancelled")


def main() -> None:
    client = OpenAI(
        base_url=os.environ.get("OPENAI_BASE_URL", "http://localhost:8080/v1"),
        api_key=os.environ.get("OPENAI_API_KEY", "none"),
    )
    lines = INPUT.read_bytes().splitlines(keepends=True)
    halves = [b"".join(lines[::2]), b"".join(lines[1::2])]
    files = [client.files.create(file=("half.jsonl", half), purpose="batch") for half in halves]
    batch = client.batches.create(
        input_file_id=omit,  # type: ignore[arg-type]
        endpoint="/v1/chat/completions",
        completion_window="24h",
        # What OpenAI's API does not have goes into extra_body.
        extra_body={
            # For requests that say nothing about it, and for all requests.
            "defaults": {"temperature": 0, "seed": 7},
            "overrides": {"max_tokens": 16},
            "input_file_ids": [file.id for file in files],
            "retry": {"attempts_max": 5, "backoff_ms": 200},
            "output_file_bytes_max": 16_384,
        },
    )
    print(batch.id, batch.status, batch.tidegate["overrides"])

    while batch.status not in ENDED:
        time.sleep(0.5)
        batch = client.batches.retrieve(batch.id)
    counts = batch.request_counts
    print("answers are in", len(batch.tidegate["output_file_ids"]), "files")
    print(batch.status, f"{counts.completed} of {counts.total} answered")


if __name__ == "__main__":
    main()
