"""Pay for the same request once, with the official openai SDK: identical lines of a file share an answer, and a file that was edited
runs only the lines that changed.

Install the SDK with `pip install openai`, and start a server, for example:

    tidegate simulate --port 8001 &
    tidegate serve --upstream http://localhost:8001/v1

then run this with `python examples/same_and_changed_lines.py`. OPENAI_BASE_URL and OPENAI_API_KEY name another server.
"""

import json
import os
import time
from typing import Any

from openai import OpenAI
from openai.types import Batch

ENDED = ("completed", "failed", "expired", "cancelled")


def request(custom_id: str, text: str) -> str:
    body = {"model": "m", "messages": [{"role": "user", "content": text}], "max_tokens": 8, "temperature": 0}
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": "/v1/chat/completions", "body": body})


def run(client: OpenAI, lines: list[str], **asked: Any) -> Batch:
    file = client.files.create(file=("lines.jsonl", "\n".join(lines).encode()), purpose="batch")
    batch = client.batches.create(
        input_file_id=file.id,
        endpoint="/v1/chat/completions",
        completion_window="24h",
        # What OpenAI's API does not have goes into extra_body.
        extra_body=asked,
    )
    while batch.status not in ENDED:
        time.sleep(0.5)
        batch = client.batches.retrieve(batch.id)
    return batch


def main() -> None:
    client = OpenAI(
        base_url=os.environ.get("OPENAI_BASE_URL", "http://localhost:8080/v1"),
        api_key=os.environ.get("OPENAI_API_KEY", "none"),
    )
    words = ["tide", "gate", "tide", "sea", "tide", "gate"]
    first = run(client, [request(f"line-{number}", word) for number, word in enumerate(words)], dedupe=True)
    print(first.status, f"{first.tidegate['deduplicated']} of {len(words)} requests were not run")  # type: ignore[attr-defined]

    words[3] = "moon"
    edited = [request(f"line-{number}", word) for number, word in enumerate(words)]
    second = run(client, edited, reuse_from=first.id)
    print(second.status, f"{second.tidegate['reused']} answers were taken from {first.id}")  # type: ignore[attr-defined]


if __name__ == "__main__":
    main()
