"""Files inside a request as Base64: a model reads what an image shows, not its letters.

Text counts as a file only in the places that the APIs have for files, under its own name in the
JSON. The text of a prompt cannot look like that, because its quotes are escaped. Text that is not
surely a file counts as text.
"""

import re
import string
from collections.abc import Iterator

from tidegate.core.usage.estimate import PROMPT_BYTES_PER_TOKEN

# The likely tokens of a file: those of a usual image, and a few more for longer recordings and
# documents.
FILE_TOKENS = 1_500
FILE_BYTES_PER_TOKEN = 1_000
# A shorter text holds no file that would count for less than its letters.
TEXT_BYTES_MAX = PROMPT_BYTES_PER_TOKEN * FILE_TOKENS

_BASE64 = f"{string.ascii_letters}{string.digits}+/=-_\\".encode()
# The text right before the letters: of a data URL, of a source of Anthropic's, of a recording.
_OPENING = re.compile(
    rb'"(?:url|image_url|image|file_data|audio_url|video_url)"\s*:\s*"data:[\w.+\\/;=-]{0,100};base64,'
    rb'|"base64"\s*,\s*(?:"media_type"\s*:\s*"[\w.+\\/-]{0,100}"\s*,\s*)?"data"\s*:\s*"'
    rb'|"input_audio"\s*:\s*\{\s*(?:"format"\s*:\s*"\w{0,10}"\s*,\s*)?"data"\s*:\s*"'
)


def unread_bytes(text: bytes) -> int:
    """Return how many bytes of this JSON are letters of files, beyond those that stand for each
    file's likely tokens.
    """
    if len(text) <= TEXT_BYTES_MAX:
        return 0
    return sum(
        max(0, stop - start - PROMPT_BYTES_PER_TOKEN * (FILE_TOKENS + (stop - start) // FILE_BYTES_PER_TOKEN))
        for start, stop in _files(text)
    )


def without_files(text: bytes) -> bytes:
    """Return this JSON with its files left empty."""
    at, kept = 0, []
    for start, stop in _files(text):
        kept.append(text[at:start])
        at = stop
    return b"".join((*kept, text[at:])) if kept else text


def is_base64(text: bytes) -> bool:
    return not text.translate(None, _BASE64)


def _files(text: bytes) -> Iterator[tuple[int, int]]:
    """Find where the letters of each file begin and end, in order.

    No byte is looked at for more than one file.
    """
    if len(text) <= TEXT_BYTES_MAX:
        return
    at = 0
    while opening := _OPENING.search(text, at):
        start = opening.end()
        at = text.find(b'"', start)
        if at < 0:
            return
        if is_base64(text[start:at]):
            yield start, at
