"""Kinds of errors: error lines of one code and status whose messages differ only in numbers, ids
and quoted text.
"""

import re
from hashlib import sha256
from typing import NamedTuple

MESSAGE_CHARS_MAX = 300
FINGERPRINT_CHARS_MAX = 200
_ID_CHARS = 16

# Each pattern is bounded, because a hostile server chooses the text.
_QUOTED = re.compile(r"'[^']{0,200}'|\"[^\"]{0,200}\"|`[^`]{0,200}`|“[^”]{0,200}”|‘[^’]{0,200}’")
_ADDRESS = re.compile(r"\b[a-z][a-z0-9+.-]{0,20}://\S+", re.IGNORECASE)
# A word with a digit in it is a number, an id, a date or a hash.
_WORD = re.compile(r"[\w.,:/@+-]+")
_SPACES = re.compile(r"\s+")


class ErrorKind(NamedTuple):
    """The code, status and text that errors of one kind share; `text` is empty where they had no
    message.
    """

    code: str
    status: int
    text: str

    @property
    def id(self) -> str:
        """Return a short name of the kind that is the same in every batch."""
        words = f"{self.code}\n{self.status}\n{self.text}"
        return sha256(words.encode("utf-8", "surrogatepass")).hexdigest()[:_ID_CHARS]


def fingerprint(message: str) -> str:
    """Return a message without the parts that differ from one request to the next."""
    text = _QUOTED.sub("…", message[:MESSAGE_CHARS_MAX])
    text = _WORD.sub(_without_digits, _ADDRESS.sub("#", text))
    return _SPACES.sub(" ", text).strip()[:FINGERPRINT_CHARS_MAX]


def _without_digits(word: re.Match[str]) -> str:
    return "#" if any(letter.isdigit() for letter in word[0]) else word[0]
