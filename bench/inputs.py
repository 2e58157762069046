"""Inputs for benchmarks, made on the spot."""

import json
from collections.abc import Iterator

MODEL = "llama-3-8b"


def chat_line(number: int, line_bytes: int = 1500) -> bytes:
    """One chat line of about this many bytes: a shared system prompt and a question of its own."""
    system = ("You are a careful assistant. " * (line_bytes // 29 + 1))[: max(0, line_bytes - 300)]
    question = f"Question {number}: what is the capital of the {number}th country?"
    messages = [{"role": "system", "content": system}, {"role": "user", "content": question}]
    body = {"model": MODEL, "messages": messages, "max_tokens": 64}
    request = {"custom_id": f"request-{number:06}", "method": "POST", "url": "/v1/chat/completions", "body": body}
    return json.dumps(request).encode() + b"\n"


def chat_lines(count: int, line_bytes: int = 1500) -> Iterator[bytes]:
    for number in range(count):
        yield chat_line(number, line_bytes)
