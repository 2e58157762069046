"""Cancel a batch, with the official openai SDK: what is done is kept, and calls in flight are aborted when their time is over.

Install the SDK with `pip install openai`, and start a server that aborts them at once, for example:

    tidegate simulate --port 8001 --mode fixed --latency-ms 2000 &
    TIDEGATE_WORKER_CANCEL_GRACE_MS=0 tidegate serve --upstream http://localhost:8001/v1

then run this with `python examples/cancel_a_batch.py`. OPENAI_BASE_URL and OPENAI_API_KEY name another server. Without the setting, calls
in flight have 30 s to end: they are paid for, so their answers are worth a wait.
"""

import os
import time
from pathlib import Path

from openai import APIStatusError, OpenAI

INPUT = Path(__file__).with_name("requests.jsonl")
ENDED = ("completed", "failed", "expired", "cancelled")


def main() -> None:
    client = OpenAI(
        base_url=os.environ.get("OPENAI_BASE_URL", "http://localhost:8080/v1"),
        api_key=os.environ.get("OPENAI_API_KEY", "none"),
    )
    file = client.files.create(file=INPUT, purpose="batch")
    batch = client.batches.create(input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h")
    while batch.status == "validating":
        time.sleep(0.1)
        batch = client.batches.retrieve(batch.id)
    try:
        batch = client.batches.cancel(batch.id)
    except APIStatusError as refused:
        print("it had ended by then:", refused.message)
    print(batch.id, batch.status)

    while batch.status not in ENDED:
        time.sleep(0.5)
        batch = client.batches.retrieve(batch.id)
    counts = batch.request_counts
    if batch.error_file_id:
        # One line with the code batch_cancelled for each request that was not answered.
        print("not answered:", len(client.files.content(batch.error_file_id).text.splitlines()))
    print(batch.status, f"with {counts.completed} of {counts.total} requests completed")


if __name__ == "__main__":
    main()
