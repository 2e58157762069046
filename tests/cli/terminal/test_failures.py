"""Why lines failed, as the summary of a run tells it: from error lines as servers answer them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping

import msgspec

from tidegate.cli.terminal.failures import causes

# The body's error as vLLM 0.32.0 answered it: the status stands in `code` once more.
VLLM = {
    "message": "temperature must be in [0, 2], got 5.0.",
    "type": "BadRequestError",
    "param": "temperature",
    "code": 400,
}
VLLM_ROUTE = {"message": "Not Found", "type": "not_found_error", "param": None, "code": None}
OPENAI = {"message": "No such model", "type": "invalid_request_error", "code": "model_not_found"}


def failed(custom_id: str, status: int, error: Mapping[str, object]) -> bytes:
    response = {"status_code": status, "request_id": "req_1", "body": {"error": error}}
    return msgspec.json.encode({"custom_id": custom_id, "response": response, "error": None}) + b"\n"


async def of(*chunks: bytes) -> AsyncIterator[bytes]:
    for chunk in chunks:
        yield chunk


async def test_a_code_that_repeats_the_status_gives_way_to_the_kind_of_the_error() -> None:
    lines = failed("request-4", 400, VLLM), failed("request-5", 404, VLLM_ROUTE), failed("a", 404, OPENAI)
    found = {one.words: (one.message, one.custom_id) for one in await causes(of(*lines))}
    assert list(found) == ["400 BadRequestError", "404 not_found_error", "404 model_not_found"]
    assert found["400 BadRequestError"] == ("temperature must be in [0, 2], got 5.0.", "request-4")
