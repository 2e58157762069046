"""A paged KV cache: blocks of 16 tokens, found again by the hash of all text up to their end.

A block without holders keeps its content until its place is needed; the least recently used one
goes first. This module knows no requests and no time: the scheduler in `model.py` takes and
releases blocks.
"""

from collections import OrderedDict
from collections.abc import Sequence as Many
from hashlib import blake2b

TOKEN_BYTES = 4
BLOCK_TOKENS = 16
BLOCK_BYTES = TOKEN_BYTES * BLOCK_TOKENS


def block_hashes(text: bytes) -> list[bytes]:
    """Return one hash for each full block of `text`.

    Each hash includes the one before it, so that equal hashes mean equal prefixes.
    """
    hashes: list[bytes] = []
    parent = b""
    for start in range(0, len(text) - BLOCK_BYTES + 1, BLOCK_BYTES):
        parent = blake2b(text[start : start + BLOCK_BYTES], digest_size=16, key=parent).digest()
        hashes.append(parent)
    return hashes


class KvCache:
    """The blocks of one engine: their holders, their contents, and the order of reuse."""

    def __init__(self, block_count: int) -> None:
        self.block_count = block_count
        self._holders = [0] * block_count
        self._content: list[bytes | None] = [None] * block_count
        self._found: dict[bytes, int] = {}
        # The keys are the blocks without a holder, least recently used first.
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(block_count))

    @property
    def free_count(self) -> int:
        """Return how many blocks have no holder; most of them still keep content."""
        return len(self._free)

    @property
    def usage(self) -> float:
        """Return the share of blocks that are held."""
        return 1.0 - len(self._free) / self.block_count

    def match(self, hashes: Many[bytes]) -> list[int]:
        """Return the blocks of the longest known prefix of `hashes`, without a new holder."""
        blocks: list[int] = []
        for content in hashes:
            block = self._found.get(content)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def idle(self, blocks: Many[int]) -> int:
        """Return how many of these blocks have no holder, so that holding them takes free ones."""
        return sum(1 for block in blocks if not self._holders[block])

    def hold(self, blocks: Many[int]) -> None:
        """Add one holder to each block."""
        for block in blocks:
            if not self._holders[block]:
                del self._free[block]
            self._holders[block] += 1

    def take_block(self) -> int:
        """Take a free block, with one holder, and forget its content.

        The caller checks `free_count`.
        """
        block, _ = self._free.popitem(last=False)
        content = self._content[block]
        if content is not None:
            del self._found[content]
            self._content[block] = None
        self._holders[block] = 1
        return block

    def publish(self, block: int, content: bytes) -> None:
        """Let a full block be found by its content, unless another block has the same content."""
        if content not in self._found:
            self._found[content] = block
            self._content[block] = content

    def release(self, blocks: Many[int]) -> None:
        """Take one holder off each block, the last first.

        The end of a prompt is the part that is least likely to be shared.
        """
        for block in reversed(blocks):
            self._holders[block] -= 1
            if not self._holders[block]:
                self._free[block] = None
