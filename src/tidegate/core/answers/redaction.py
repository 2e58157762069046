"""What a model server says that is the operator's alone: our key, and the account that pays.

A server may quote our key in an answer, in an error, or in the middle of a stream, and providers name the organization in their errors.
Both are replaced before anything else reads the answer. Nothing here knows a connection.
"""

import re
from urllib.parse import quote

REPLACEMENT = b"***"
# Shorter keys are placeholders such as EMPTY or none, which answers may well say.
KEY_CHARS_MIN = 6
WORD_CHARS_MIN = 16

_UUID = rb"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}"
_ACCOUNT = re.compile(
    # org-AbC123 and proj_AbC123: the others must look like an id, because words of an error may begin like one.
    rb"\b(?P<kind>org[-_]|(?:proj|acct|ws|wrkspc|user)[-_](?=[a-z0-9_-]*[0-9]|[a-z0-9]{16}))[a-z0-9][a-z0-9_-]{5,}"
    # organization (1f0c…), "project_number": 1234567890, projects/1234567890, arn:aws:…:123456789012:…
    rb"|\b(?P<word>(?:organi[sz]ation|workspace|project|account|tenant|subscription)[a-z_]*[^a-z0-9]{1,6}(?:id[^a-z0-9]{1,6})?"
    rb"|arn:[a-z-]+:[a-z0-9-]*:[a-z0-9-]*:)(?:" + _UUID + rb"|(?P<number>[0-9]{6,}))",
    re.IGNORECASE,
)


def without_account(words: bytes) -> bytes:
    """Return a server's error without the ids of the account that pays."""
    return _ACCOUNT.sub(_shortened, words)


def _shortened(found: re.Match[bytes]) -> bytes:
    if found["kind"] is not None:
        return found["kind"] + REPLACEMENT
    # Where a number stands by itself, only a number is JSON.
    return found["word"] + (REPLACEMENT if found["number"] is None else b"0")


class KeyRedactor:
    """Replaces one key, as it is and as JSON and URLs may write it."""

    __slots__ = ("_forms", "_letters")

    def __init__(self, key: str) -> None:
        plain = key.encode()
        forms = {plain, plain.replace(b"/", b"\\/"), quote(key, safe="").encode()} if _is_secret(key) else set()
        self._forms = tuple(sorted(forms, key=len, reverse=True))
        self._letters = frozenset(b"".join(forms))

    def __bool__(self) -> bool:
        return bool(self._forms)

    def whole(self, body: bytes) -> bytes:
        """Return a whole body without the key."""
        for form in self._forms:
            if form in body:
                body = body.replace(form, REPLACEMENT)
        return body

    def begun(self, data: bytes) -> int:
        """Return how many bytes at the end of the data may be the beginning of a key."""
        most = 0
        if not data or data[-1] not in self._letters:
            # The end of an event, nearly always.
            return most
        for form in self._forms:
            tail = data[1 - len(form) :]
            at = tail.find(form[0])
            while at >= 0:
                if form.startswith(tail[at:]):
                    most = max(most, len(tail) - at)
                    break
                at = tail.find(form[0], at + 1)
        return most


class StreamRedactor:
    """Redact a body that comes in parts: a key that two parts share is found too."""

    __slots__ = ("_kept", "_key")

    def __init__(self, key: KeyRedactor) -> None:
        self._key = key
        self._kept = b""

    def feed(self, chunk: bytes) -> bytes:
        """Return what may be passed on; what could be the beginning of a key is kept until more comes."""
        data = self._key.whole(self._kept + chunk if self._kept else chunk)
        kept = self._key.begun(data)
        self._kept = data[len(data) - kept :] if kept else b""
        return data[: len(data) - kept] if kept else data

    def end(self) -> bytes:
        """Return what was kept."""
        kept, self._kept = self._kept, b""
        return kept


def _is_secret(key: str) -> bool:
    return len(key) >= WORD_CHARS_MIN or (len(key) >= KEY_CHARS_MIN and any(letter.isdigit() for letter in key))
