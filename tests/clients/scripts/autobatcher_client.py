"""autobatcher: single calls that it collects into batches, read as they grow, or sends as background responses."""

import asyncio
import os
from typing import Any

from autobatcher import BatchOpenAI


def client_of(**more: Any) -> Any:
    return BatchOpenAI(
        base_url=os.environ["OPENAI_BASE_URL"],
        api_key=os.environ["OPENAI_API_KEY"],
        poll_interval_seconds=0.3,
        **more,
    )


def chats(client: Any, count: int) -> list[Any]:
    return [
        client.chat.completions.create(model="m", messages=[{"role": "user", "content": f"Say {number}."}])
        for number in range(count)
    ]


async def main() -> None:
    batching = client_of(batch_size=12, completion_window="24h")
    vectors = [batching.embeddings.create(model="m", input=f"Text {number}") for number in range(4)]
    answers = await asyncio.gather(*chats(batching, 8), *vectors)
    assert all(one.choices[0].message.content for one in answers[:8])
    assert all(len(one.data) == 1 for one in answers[8:])
    # With this header its file is there while the batch runs, and it reads each answer when it has come.
    growing = client_of(batch_size=6, completion_window="24h", default_headers={"Prefer": "growing-output"})
    assert all(one.choices[0].message.content for one in await asyncio.gather(*chats(growing, 6)))
    flex = client_of()
    assert all(one.choices[0].message.content for one in await asyncio.gather(*chats(flex, 4)))
    for client in (batching, growing, flex):
        await client.close()
    print("8 chats and 4 embeddings sent as batches, 6 chats read from a growing file, 4 as background responses")


asyncio.run(main())
