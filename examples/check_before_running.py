"""Ask what a batch would take before it is created, with the official openai SDK. Nothing is sent to a model, and nothing is kept.

Install the SDK and start a server as in control_a_batch.py, then run this with `python examples/check_before_running.py`.
"""

import os
from pathlib import Path
from typing import Any

from openai import OpenAI

INPUT = Path(__file__).with_name("requests.jsonl")


def main() -> None:
    client = OpenAI(
        base_url=os.environ.get("OPENAI_BASE_URL", "http://localhost:8080/v1"),
        api_key=os.environ.get("OPENAI_API_KEY", "none"),
    )
    file = client.files.create(file=INPUT, purpose="batch")
    wanted = {"input_file_id": file.id, "endpoint": "/v1/chat/completions", "completion_window": "24h"}
    checked: Any = client.post("/batches", body={**wanted, "validate_only": True}, cast_to=object)
    for error in checked["errors"]["data"]:
        print("line", error["line"], error["code"], error["message"])
    print("tokens", checked["tokens"]["input"], "in,", checked["tokens"]["output"]["p95"], "out at the most")
    print("cost", checked["cost"]["p50"], "to", checked["cost"]["p95"], "; seconds", checked["eta_seconds"])
    for limit in checked["limits"]:
        print(limit["bound"], limit["period"], limit["remaining"], "too little" if limit["binds"] else "enough")
    for refusal in checked["refused"]:
        print("refused:", refusal["code"], refusal["message"])
    room: Any = client.get("/limits", cast_to=object)
    print("this key has left:", room["data"])
    client.files.delete(file.id)
    print("completed: the input can be run" if checked["valid"] else "the input cannot be run")


if __name__ == "__main__":
    main()
