"""Run a sample of a batch first, then the rest, and what failed once more, with the official openai SDK.

Install the SDK with `pip install openai`, and start a server, for example:

    tidegate simulate --port 8001 &
    tidegate serve --upstream http://localhost:8001/v1

then run this with `python examples/canary_and_retry.py`. OPENAI_BASE_URL and OPENAI_API_KEY name another server.
"""

import os
import time
from pathlib import Path

from openai import APIStatusError, OpenAI
from openai.types import Batch

INPUT = Path(__file__).with_name("requests.jsonl")
ENDED = ("completed", "failed", "expired", "cancelled")


def until_ended(client: OpenAI, batch: Batch) -> Batch:
    while batch.status not in ENDED:
        time.sleep(0.5)
        batch = client.batches.retrieve(batch.id)
    return batch


def main() -> None:
    client = OpenAI(
        base_url=os.environ.get("OPENAI_BASE_URL", "http://localhost:8080/v1"),
        api_key=os.environ.get("OPENAI_API_KEY", "none"),
    )
    file = client.files.create(file=INPUT, purpose="batch")
    batch = client.batches.create(
        input_file_id=file.id,
        endpoint="/v1/chat/completions",
        completion_window="24h",
        extra_body={"canary": {"items": 20, "max_error_share": 0.1, "then": "wait"}},
    )
    while batch.status not in ENDED and batch.tidegate["canary"]["state"] == "running":
        time.sleep(0.5)
        batch = client.batches.retrieve(batch.id)
    print("the canary is", batch.tidegate["canary"]["state"], batch.tidegate["canary"]["forecast"])
    if batch.status not in ENDED:
        client.post(f"/batches/{batch.id}/canary", body={"action": "continue"}, cast_to=Batch)
    batch = until_ended(client, batch)
    page = client.get(f"/batches/{batch.id}/items?outcome=failed&limit=5", cast_to=object)
    print("failed:", [item["custom_id"] for item in page["data"]])
    try:
        again = client.post(f"/batches/{batch.id}/retry", body={"outcomes": ["failed", "expired"]}, cast_to=Batch)
    except APIStatusError as error:
        print(error.message)
    else:
        again = until_ended(client, again)
        print("answers of both:", again.tidegate["merged_output_file_id"])
    print(batch.status, f"{batch.request_counts.completed} of {batch.request_counts.total} answered")


if __name__ == "__main__":
    main()
