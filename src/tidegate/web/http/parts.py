"""An answer in small parts for the HTTP server.

The server buffers a few parts for a client that does not read.
"""

from starlette.types import Message, Send

PART_BYTES_MAX = 32_768


async def send_parts(send: Send, chunk: bytes) -> None:
    """Send these bytes as fast as the server takes them; more follow."""
    for at in range(0, len(chunk), PART_BYTES_MAX):
        await send(body_part(chunk[at : at + PART_BYTES_MAX], more=True))


def body_part(body: bytes, *, more: bool) -> Message:
    return {"type": "http.response.body", "body": body, "more_body": more}
