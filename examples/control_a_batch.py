"""Control a batch, with the official openai SDK: thresholds, priority, a later beginning, pause, resume, another deadline; find it
again, and delete it.

Install the SDK with `pip install openai`, and start a server, for example:

    tidegate simulate --port 8001 &
    tidegate serve --upstream http://localhost:8001/v1

then run this with `python examples/control_a_batch.py`. OPENAI_BASE_URL and OPENAI_API_KEY name another server.
"""

import os
import time
from pathlib import Path
from typing import Any

from openai import OpenAI
from openai.types import Batch

INPUT = Path(__file__).with_name("requests.jsonl")
ENDED = ("completed", "failed", "expired", "cancelled")


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
        # What OpenAI's API does not have goes into extra_body.
        extra_body={
            "priority": 10,
            "max_cost": "5.00",
            "max_errors": {"share": 0.05, "after": 20},
            "not_before": int(time.time()) + 3_600,
        },
        metadata={"example": "control"},
    )
    print(batch.id, batch.status, batch.tidegate["priority"])

    paused = client.post(f"/batches/{batch.id}/pause", cast_to=Batch)
    print("paused at", paused.tidegate["paused_at"])
    # The deadline may come later or sooner, and it may begin at once after all.
    for change in ({"completion_window": "36h", "priority": -10}, {"completion_window": "12h", "not_before": None}):
        client.post(f"/batches/{batch.id}", body=change, cast_to=Batch)
    client.post(f"/batches/{batch.id}/resume", cast_to=Batch)

    while batch.status not in ENDED:
        time.sleep(0.5)
        batch = client.batches.retrieve(batch.id)
    counts = batch.request_counts
    found: Any = client.get(f"/batches?status={batch.status}&metadata[example]=control", cast_to=object)
    print("found again:", batch.id in [one["id"] for one in found["data"]])
    print(batch.status, f"{counts.completed} of {counts.total} answered", "stopped by", batch.tidegate["stopped_by"])
    client.delete(f"/batches/{batch.id}", cast_to=object)


if __name__ == "__main__":
    main()
