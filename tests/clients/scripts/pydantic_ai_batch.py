"""pydantic-ai: `model_request_batch` through both doors, OpenAI's responses and Anthropic's messages."""

import asyncio
from datetime import timedelta

from pydantic_ai import ModelRequest
from pydantic_ai.direct import model_request_batch
from pydantic_ai.messages import ModelResponse
from pydantic_ai.models.batch import BatchRequest

OFTEN = {"poll_interval": timedelta(seconds=0.3), "max_poll_interval": timedelta(seconds=2)}


async def answered(model: str, count: int) -> int:
    requests = [
        BatchRequest(custom_id=f"c{number}", messages=[ModelRequest.user_text_prompt(f"Say {number}.")])
        for number in range(count)
    ]
    answers = await model_request_batch(model, requests, **OFTEN)
    assert len(answers) == count, answers
    assert all(isinstance(one, ModelResponse) and one.text for one in answers), answers
    return count


async def main() -> None:
    responses = await answered("openai-responses:m", 10)
    messages = await answered("anthropic:m", 6)
    print(f"model_request_batch: {responses} lines of /v1/responses, {messages} Anthropic messages")


asyncio.run(main())
