"""instructor's BatchProcessor: typed results from a batch with `response_format`."""

import tempfile
import time
from pathlib import Path

from instructor.batch import BatchProcessor
from pydantic import BaseModel


class Person(BaseModel):
    name: str
    age: int


processor = BatchProcessor("openai/m", Person)
with tempfile.TemporaryDirectory() as directory:
    path = str(Path(directory) / "requests.jsonl")
    messages = [[{"role": "user", "content": f"Who is number {number}?"}] for number in range(8)]
    processor.create_batch_from_messages(messages, file_path=path)
    batch_id = processor.submit_batch(path, metadata={"from": "instructor"})
while (status := processor.get_batch_status(batch_id)["status"]) not in ("completed", "failed", "expired", "cancelled"):
    time.sleep(0.3)
assert status == "completed", status
results = processor.retrieve_results(batch_id)
people = [one.result for one in results if one.success]
assert len(people) == 8, results
assert all(isinstance(one, Person) for one in people)
assert batch_id in [one.id for one in processor.list_batches(limit=10)]
print(
    f"create_batch_from_messages, submit_batch, get_batch_status, retrieve_results ({len(people)} typed), list_batches"
)
