"""Inputs for benchmarks, made on the spot."""

import json
from collections.abc import Iterator


def chat_line(number: int, line_bytes: int = 1500) -> bytes:
    """One chat line of about this many bytes: a shared system prompt and a question of its own."""
    request = {
        "custom_id": f"request-{number:06}",
        "method": "POST",
        "url": "/v1/chat/completions",
        "body": {
            "model": "llama-3-8b",
            "messages": [
                {"role": "system", "content": ""},
                {"role": "user", "content": f"Question {number}: what is the capital of the {number}th country?"},
            ],
            "max_tokens": 64,
        },
    }
    bare = len(json.dumps(request)) + 1
    messages = request["body"]["messages"]  # type: ignore[index]
    messages[0]["content"] = ("You are a careful assistant. " * 200)[: max(0, line_bytes - bare)]
    return json.dumps(request).encode() + b"\n"


def chat_lines(count: int, line_bytes: int = 1500) -> Iterator[bytes]:
    for number in range(count):
        yield chat_line(number, line_bytes)
