"""Have every answer of a batch checked against a JSON schema, with the official openai SDK: what does not fit is asked for again, and then
of a stronger model.

Install the SDK with `pip install openai`, and start a server, for example:

    tidegate simulate --port 8001 --fault unfit=0.2 &
    tidegate serve --upstream http://localhost:8001/v1

then run this with `python examples/answers_that_validate.py`. OPENAI_BASE_URL and OPENAI_API_KEY name another server.
"""

import json
import os
import time

from openai import OpenAI

SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "population": {"type": "integer", "minimum": 0}},
    "required": ["city", "population"],
    "additionalProperties": False,
}
ENDED = ("completed", "failed", "expired", "cancelled")


def request(number: int) -> str:
    body = {
        "model": "llama-3-8b",
        "messages": [{"role": "user", "content": f"Name city number {number} and its population."}],
        "response_format": {"type": "json_schema", "json_schema": {"name": "city", "schema": SCHEMA}},
    }
    line = {"custom_id": f"city-{number}", "method": "POST", "url": "/v1/chat/completions", "body": body}
    return json.dumps(line) + "\n"


def main() -> None:
    client = OpenAI(
        base_url=os.environ.get("OPENAI_BASE_URL", "http://localhost:8080/v1"),
        api_key=os.environ.get("OPENAI_API_KEY", "none"),
    )
    lines = "".join(request(number) for number in range(50))
    file = client.files.create(file=("cities.jsonl", lines.encode()), purpose="batch")
    batch = client.batches.create(
        input_file_id=file.id,
        endpoint="/v1/chat/completions",
        completion_window="24h",
        # What OpenAI's API does not have goes into extra_body.
        extra_body={
            "answers": {"schema": "response_format", "tries_max": 2, "feedback": True, "escalate_to": "llama-3-70b"}
        },
    )
    while batch.status not in ENDED:
        time.sleep(0.5)
        batch = client.batches.retrieve(batch.id)
    output = client.files.content(batch.output_file_id or "").text.splitlines()
    tried = [line["tidegate"]["tries"] for line in map(json.loads, output) if "tries" in line.get("tidegate", {})]
    print(f"{len(output)} answers fit, {len(tried)} of them after another try")
    print(f"{batch.tidegate['schema_invalid']} never did: the batch is {batch.status}")


if __name__ == "__main__":
    main()
