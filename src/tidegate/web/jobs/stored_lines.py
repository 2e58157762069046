"""Lines of result files for doors, also lines with damaged bytes.

A damaged line is an item with an error, never the end of a list: the store knows the place of each
item, so a line without its name or its end is still shown. Damage is logged once for each reader.
"""

from collections.abc import AsyncGenerator, AsyncIterator

import msgspec
import structlog

from tidegate.core.answers.outcome_lines import DAMAGE, OutcomeLine, read_line, readable_line
from tidegate.core.answers.whole_lines import whole_lines
from tidegate.core.ids import item_id
from tidegate.core.nouns import Job
from tidegate.store.store import Store

log = structlog.get_logger()

OUTPUT, ERRORS = "output", "errors"


_decode_any = msgspec.json.Decoder(msgspec.Raw).decode


def is_whole(text: bytes) -> bool:
    """Return whether these bytes are undamaged JSON."""
    try:
        if not text.isascii():
            text.decode()
        _decode_any(text)
    except DAMAGE:
        return False
    return True


class PlacedLine(msgspec.Struct, frozen=True):
    """A line, the place where it begins in its file, and its bytes without the line end."""

    file: str
    at: int
    text: bytes
    line: OutcomeLine


class StoredLines:
    """The reader of one result file of a job."""

    def __init__(self, store: Store, job: Job, name: str) -> None:
        """Create a reader. `name` is `output` or `errors`."""
        self._store = store
        self._job = job
        self._name = name
        self._is_logged = False

    async def read(self, at: int, text: bytes) -> list[PlacedLine]:
        """Return the line in these bytes, which begin at this place of the file and reach to a line
        end. Damaged bytes give all lines that were recorded there; none if they belong to the line
        before.
        """
        try:
            return [PlacedLine(self._name, at, text, read_line(text))]
        except DAMAGE as damage:
            self._note(at, damage)
        places = await self._store.outcomes_within(self._job.id, at, at + len(text) + 1, is_output=self._name == OUTPUT)
        found = []
        for place in places:
            own = text[place.at - at :][: place.size_bytes - 1]
            line = readable_line(own, item_id(self._job.id, place.number))
            found.append(PlacedLine(self._name, place.at, own, line))
        return found

    def one(self, name: str, text: bytes) -> OutcomeLine:
        """Return the line of one item. `name` is the item's id, for a line that lost it."""
        line = readable_line(text, name)
        if line.is_unreadable:
            self._note(0, None)
        return line

    async def all(self, at: int, pieces: AsyncIterator[bytes]) -> AsyncGenerator[PlacedLine, None]:
        """Yield the lines of a file from `at` on, which must be the beginning of a line."""
        async for text in whole_lines(pieces):
            for one in await self.read(at, text):
                yield one
            at += len(text) + 1

    def _note(self, at: int, damage: Exception | None) -> None:
        if not self._is_logged:
            self._is_logged = True
            log.error("result_unreadable", batch=self._job.id, file=self._name, byte=at, problem=str(damage or ""))
