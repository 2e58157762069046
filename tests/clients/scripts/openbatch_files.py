"""openbatch: it writes the input files, for three endpoints; OpenAI's SDK sends them."""

import json
import tempfile
import time
from pathlib import Path

import openai
from openbatch import BatchCollector
from pydantic import BaseModel


class Person(BaseModel):
    name: str
    age: int


def write_chats(path: Path) -> None:
    collector = BatchCollector(batch_file_path=path)
    for number in range(5):
        collector.chat.completions.create(
            custom_id=f"c{number}", model="m", messages=[{"role": "user", "content": f"Say {number}."}]
        )


def write_responses(path: Path) -> None:
    collector = BatchCollector(batch_file_path=path)
    collector.responses.create(custom_id="text", model="m", instructions="Be short.", input="Say it.")
    collector.responses.parse(custom_id="typed", model="m", text_format=Person, input="Who is it?")


def write_embeddings(path: Path) -> None:
    collector = BatchCollector(batch_file_path=path)
    collector.embeddings.create(custom_id="vector", model="m", inp="A text.")


client = openai.OpenAI(max_retries=8)
writers = {
    "/v1/chat/completions": write_chats,
    "/v1/responses": write_responses,
    "/v1/embeddings": write_embeddings,
}
counts = {}
with tempfile.TemporaryDirectory() as directory:
    for number, (endpoint, write) in enumerate(writers.items()):
        path = Path(directory) / f"{number}.jsonl"
        write(path)
        with path.open("rb") as lines:
            file = client.files.create(file=lines, purpose="batch")
        batch = client.batches.create(input_file_id=file.id, endpoint=endpoint, completion_window="24h")
        while batch.status not in ("completed", "failed", "expired", "cancelled"):
            time.sleep(0.3)
            batch = client.batches.retrieve(batch.id)
        assert (batch.status, batch.errors, batch.request_counts.failed) == ("completed", None, 0), batch
        answers = [json.loads(line) for line in client.files.content(batch.output_file_id).text.splitlines()]
        assert {one["response"]["status_code"] for one in answers} == {200}, answers
        counts[endpoint] = len(answers)
print("BatchCollector: " + ", ".join(f"{count} of {endpoint}" for endpoint, count in counts.items()))
