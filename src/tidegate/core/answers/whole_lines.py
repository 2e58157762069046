"""The whole lines of a file that arrives in pieces."""

from collections.abc import AsyncGenerator, AsyncIterator


async def whole_lines(pieces: AsyncIterator[bytes]) -> AsyncGenerator[bytes, None]:
    """Yield each line without its newline, also a last one that has none."""
    begun: list[bytes] = []
    async for piece in pieces:
        *ends, rest = piece.split(b"\n")
        for end in ends:
            yield b"".join((*begun, end))
            begun.clear()
        if rest:
            begun.append(rest)
    if begun:
        yield b"".join(begun)
