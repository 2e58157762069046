"""Remove from a model server's words what only the operator may see: our key, and the account that
pays.

A server may quote our key in an answer, in an error, in the middle of a stream or spelled over
several events, and providers name the organization in their errors. Both are replaced before an
answer is passed on. This module knows no connection.
"""

import re
from urllib.parse import quote

REPLACEMENT = b"***"
# Shorter keys are placeholders such as EMPTY or none, which may well occur in answers.
KEY_CHARS_MIN = 6
WORD_CHARS_MIN = 16

_UUID = rb"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}"
_ACCOUNT = re.compile(
    # org-AbC123 and proj_AbC123: the others must look like an id, because words of an error may
    # begin like one.
    rb"\b(?P<kind>org[-_]|(?:proj|acct|ws|wrkspc|user)[-_](?=[a-z0-9_-]*[0-9]|[a-z0-9]{16}))[a-z0-9][a-z0-9_-]{5,}"
    # organization (1f0c…), "project_number": 1234567890, projects/1234567890,
    # arn:aws:…:123456789012:…
    rb"|\b(?P<word>(?:organi[sz]ation|workspace|project|account|tenant|subscription)[a-z_]*[^a-z0-9]{1,6}(?:id[^a-z0-9]{1,6})?"
    rb"|arn:[a-z-]+:[a-z0-9-]*:[a-z0-9-]*:)(?:" + _UUID + rb"|(?P<number>[0-9]{6,}))",
    re.IGNORECASE,
)


# An event that reports an error, in every dialect. Inside a text, quotes are escaped.
_ERROR_EVENT = re.compile(rb'"error"\s*:\s*[{"]|"type"\s*:\s*"error"')
# A text that an event adds to an answer, as written in JSON.
_EVENT_TEXT = re.compile(
    rb'"(?:content|text|delta|arguments|partial_json|reasoning|reasoning_content|thinking)"\s*:\s*"((?:[^"\\]|\\.)*)"'
)
# A text that ends with so many letters of a key is kept until the next event shows whether the key
# goes on.
BEGUN_CHARS_MIN = 6
# At most so many letters of a key are compared one by one.
LETTERS_MAX = 32
LINE_BYTES_MAX = 1 << 20


def without_account(words: bytes) -> bytes:
    """Return a server's error without the ids of the account that pays."""
    return _ACCOUNT.sub(_shortened, words)


def _shortened(found: re.Match[bytes]) -> bytes:
    if found["kind"] is not None:
        return found["kind"] + REPLACEMENT
    # Where a number stands alone, only another number keeps the JSON valid.
    return found["word"] + (REPLACEMENT if found["number"] is None else b"0")


class KeyRedactor:
    """The replacement of one key, also in the forms in which JSON and URLs may write it."""

    __slots__ = ("_forms", "_letters", "_text_ends")

    def __init__(self, key: str) -> None:
        plain = key.encode()
        forms = {plain, plain.replace(b"/", b"\\/"), quote(key, safe="").encode()} if _is_secret(key) else set()
        self._forms = tuple(sorted(forms))
        self._letters = frozenset(b"".join(forms))
        self._text_ends = _text_ends(self._forms)

    def __bool__(self) -> bool:
        return bool(self._forms)

    def whole(self, body: bytes) -> bytes:
        """Return a whole body without the key."""
        for form in self._forms:
            if form in body:
                body = body.replace(form, REPLACEMENT)
        return body

    def may_begin(self, events: bytes) -> bool:
        """Return whether a text of these events may end with the beginning of a key: most do not,
        and need no closer look.
        """
        return self._text_ends is not None and self._text_ends.search(events) is not None

    def begun(self, data: bytes) -> int:
        """Return how many bytes at the end of the data may be the beginning of a key."""
        if data and data[-1] not in self._letters:
            # Nearly always the end of an event.
            return 0
        most = 0
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
        """Return what may be passed on; keep a possible beginning of a key until more comes."""
        data = self._key.whole(self._kept + chunk if self._kept else chunk)
        kept = self._key.begun(data)
        self._kept = data[len(data) - kept :] if kept else b""
        return data[: len(data) - kept] if kept else data

    def end_stream(self) -> bytes:
        """Return the bytes that were kept."""
        kept, self._kept = self._kept, b""
        return kept


class EventRedactor:
    """Redact a stream of events: the account in error events, and a key that the texts of several
    events spell together.

    Lines are passed on whole. Events are kept only while their texts end with at least
    `BEGUN_CHARS_MIN` letters of a key.
    """

    __slots__ = ("_begun", "_kept", "_key", "_lines")

    def __init__(self, key: KeyRedactor) -> None:
        self._key = key
        self._kept = b""
        # The beginning of a key at the end of the texts so far.
        self._begun = b""
        # Kept lines: the bytes before, in and after their parts of a key.
        self._lines: list[tuple[bytes, bytes, bytes]] = []

    def feed(self, chunk: bytes) -> bytes:
        """Return the lines that may be passed on."""
        data = chunk if not self._kept and chunk.endswith(b"\n") else self._whole_lines(chunk)
        if b'"error"' not in data and not self._lines and self._is_harmless(data):
            return data
        return b"".join([self._read(line) for line in data.splitlines(keepends=True)])

    def end_stream(self) -> bytes:
        """Return the lines that were kept."""
        kept, self._kept = self._kept, b""
        return (self._read(kept) if kept else b"") + self._release()

    def _whole_lines(self, chunk: bytes) -> bytes:
        data = self._kept + chunk
        end = data.rfind(b"\n") + 1 or (len(data) if len(data) >= LINE_BYTES_MAX else 0)
        self._kept = data[end:]
        return data[:end]

    def _is_harmless(self, data: bytes) -> bool:
        """Return whether the texts of these lines neither end a key nor begin enough of one; note
        what they begin.
        """
        if not self._begun and not self._key.may_begin(data):
            return True
        joined = self._begun
        for text in _EVENT_TEXT.findall(data):
            joined += text
            begun = self._key.begun(joined)
            if begun >= BEGUN_CHARS_MIN or self._key.whole(joined) != joined:
                return False
            joined = joined[len(joined) - begun :]
        self._begun = joined
        return True

    def _read(self, line: bytes) -> bytes:
        if b'"error"' in line and _ERROR_EVENT.search(line):
            line = without_account(line)
        found = _EVENT_TEXT.search(line) if self._key else None
        if found is None:
            if not self._lines:
                return line
            self._lines.append((line, b"", b""))
            return b""
        before, text, after = line[: found.start(1)], found[1], line[found.end(1) :]
        joined = self._begun + text
        shown = self._key.whole(joined)
        begun = self._key.begun(shown)
        goes_on = bool(self._lines) and begun == len(joined)
        self._begun = shown[len(shown) - begun :]
        if goes_on:
            self._lines.append((before, text, after))
            return b""
        passed = self._release(is_key=shown != joined)
        if shown != joined:
            text = shown
        if begun < BEGUN_CHARS_MIN:
            return passed + before + text + after
        at = max(0, len(text) - begun)
        self._lines.append((before + text[:at], text[at:], after))
        return passed

    def _release(self, *, is_key: bool = False) -> bytes:
        """Return the lines that were kept; with `is_key`, without their parts of a key."""
        lines, self._lines = self._lines, []
        if is_key:
            lines = [(before, b"", after) for before, _, after in lines]
        return b"".join([part for line in lines for part in line])


def _text_ends(forms: tuple[bytes, ...]) -> re.Pattern[bytes] | None:
    """Return a pattern of JSON values that end with the beginning of one of these forms."""
    if not forms:
        return None
    ways = []
    for form in forms:
        begun = b""
        for at in reversed(range(min(len(form), LETTERS_MAX))):
            letter = re.escape(form[at : at + 1])
            begun = letter + (b"(?:%b)?" % begun if begun else b"")
        ways += [b'(?:%b)"\\s*[,}\\]]' % begun, re.escape(form[:LETTERS_MAX])]
    return re.compile(b"|".join(ways))


def _is_secret(key: str) -> bool:
    return len(key) >= WORD_CHARS_MIN or (len(key) >= KEY_CHARS_MIN and any(letter.isdigit() for letter in key))
