"""autobatcher: single calls that it collects into batches."""

import asyncio
import os

from autobatcher import BatchOpenAI


async def main() -> None:
    client = BatchOpenAI(
        base_url=os.environ["OPENAI_BASE_URL"],
        api_key=os.environ["OPENAI_API_KEY"],
        batch_size=12,
        poll_interval_seconds=0.3,
        completion_window="24h",
    )
    chats = [
        client.chat.completions.create(model="m", messages=[{"role": "user", "content": f"Say {number}."}])
        for number in range(8)
    ]
    vectors = [client.embeddings.create(model="m", input=f"Text {number}") for number in range(4)]
    answers = await asyncio.gather(*chats, *vectors)
    assert all(one.choices[0].message.content for one in answers[:8])
    assert all(len(one.data) == 1 for one in answers[8:])
    await client.close()
    print(f"{len(chats)} chats and {len(vectors)} embeddings awaited one by one, sent as batches")


asyncio.run(main())
