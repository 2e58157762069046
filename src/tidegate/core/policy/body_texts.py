"""Collect the texts of a request or an answer, for guardrails that look for patterns in them; and
say what cannot be looked at.

Looked at are all strings, names of fields that the APIs do not have, long numbers, texts inside
`data:` URLs and Base64 files, and texts that only come together when parts of one list are read
after one another. Not looked at are the APIs' own words, each a fixed one, so that nothing can hide
there. Parts that cannot be looked at are named: images and other files, content that lies
elsewhere, token ids, fields that are named twice. `readings` are the forms in which one text may be
read. This module knows no pattern.
"""

import binascii
import json
import re
import unicodedata
import urllib.parse
from collections.abc import Iterator
from typing import Any

import msgspec

from tidegate.core.api_words import FIELDS, KINDS, NUMBERED, WORDS
from tidegate.core.json_limits import has_too_many_values

UNESCAPED_TIMES_MAX = 4
# Work on one piece at a time: while Python processes a long text, no other thread runs.
STRIPPED_CHARS = 16_384
# Putting the marks of one letter in order takes time that grows with the square of their number, so
# these pieces are short.
NORMALIZED_CHARS = 256
# A letter with more marks than this may be cut (Unicode's own bound, UAX #15).
MARKS_MAX = 30
DIGITS_MIN = 5
# How often the whole body may be repeated in joined texts, two times for each list within a list;
# no API needs more than six.
JOINED_TIMES_MAX = 8
# How many parts may be read to join texts, also such without a text: each list within a list reads
# its parts once more. A body with as many parts as a body may have needs 200,000.
JOINED_PARTS_MAX = 300_000
# The letters of a file without text mean nothing; a short file might be a text that only claims to
# be a file.
FILE_CHARS_MIN = 512

_KEY = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"(\s*+:)?', re.DOTALL)
_KEY_END = re.compile(rb'"\s*+:')
_ESCAPE = re.compile(
    r"\\(?:u([dD][89abAB][0-9a-fA-F]{2})\\u([dD][c-fC-F][0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|x([0-9a-fA-F]{2})|([\"\\/bfnrt]))"
)
# An escape after any number of backslashes: JSON within JSON, many times over.
_DEEP_ESCAPE = re.compile(r"(?<!\\)\\++(?:u([0-9a-fA-F]{4})|x([0-9a-fA-F]{2}))")
_SHORT = {"b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t"}
_BASE64 = re.compile(r"[A-Za-z0-9+/_\r\n-]{16,}=*\s*")
_NOT_BASE64 = re.compile(r"[^A-Za-z0-9+/]")
_INVISIBLE = re.compile(
    "[\0-\x08\x0b\x0c\x0e-\x1f\x7f-\x84\x86-\x9f\u00ad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180b-\u180f\u200b-\u200f\u202a-\u202e\u2060-\u206f\u2800\u3164\ufe00-\ufe0f\ufeff\uffa0\ufff0-\ufffb\ud800-\udfff"
    "\U00013430-\U0001345f"
    "\U0001bca0-\U0001bca3\U0001d173-\U0001d17a\U000e0000-\U000e001f\U000e007f-\U000e0fff]"
)
_CONTROLS = bytes((*range(0x09), 0x0B, 0x0C, *range(0x0E, 0x20), 0x7F))
# Letters that are invisible, but that models read.
_TAGS = {0xE0000 + code: code for code in range(0x20, 0x7F)}
_TEXT_TYPE = re.compile(r"text/|application/(?:[\w.+-]*(?:json|xml|yaml|javascript|csv|x-ndjson|jsonl))")
_PLAIN_CHARSETS = frozenset(("", "utf-8", "utf8", "us-ascii", "ascii"))
_FILES = frozenset(
    ("data", "file_data", "b64_json", "image", "audio", "video", "bytes", "prompt_embeds", "input_embeds")
)
_ELSEWHERE = frozenset(("image_url", "audio_url", "video_url", "file_url"))
_STORED = frozenset(("file_id", "file_ids", "previous_response_id", "conversation", "vector_store_ids"))
_TOKENS = frozenset(("prompt", "input", "inputs", "prompt_token_ids", "input_ids", "token_ids", "tokens", "prompts"))
# Fields of texts that are compared; elsewhere a caller may use these names for lists of numbers.
_COMPARED = frozenset(("query", "queries", "items", "documents", "text_1", "text_2", "data_1", "data_2"))
_JOINED = frozenset(
    ("content", "system", "input", "messages", "output", "outputs", "parts", "summary", "tokens", "instructions")
) | {"reasoning_details", "segments", "words"}
_SPECIAL = _FILES | _ELSEWHERE | _STORED
# What may precede a `data:` URL, or its first letter: URL parsers drop spaces and control
# characters.
_BEFORE_DATA = frozenset((*"dD\x85\xa0\u2028\u2029\u3000", *map(chr, range(0x21)), ""))
# Objects whose field names a caller or a model chooses.
_FREE = frozenset(("input", "arguments", "metadata", "output", "default", "examples", "const", "enum"))
_ONLY_FILES = frozenset(("file_data", "b64_json", "prompt_embeds", "input_embeds"))
_NUMBERS = frozenset((int, float))
_INEXACT = 1e15
_LONG_NUMBER = re.compile(rb"\d{15,}")
# URL parsers also drop tabs and line breaks inside a URL.
_DATA_URL = re.compile(r"[\0-\x20\s]*+d[\t\r\n]*+a[\t\r\n]*+t[\t\r\n]*+a[\t\r\n]*+:([^,]*+),", re.IGNORECASE)
_BROKEN_UP = re.compile(r"[\t\r\n]")
# A sentence may begin with `Data:` too.
_DATA_HEAD = re.compile(r"[\w.+-]*(?:/[\w.+*-]+)?\s*(?:;[^,;\s]*\s*)*|[^,]*;\s*base64\s*", re.IGNORECASE)
_TOO_DEEPLY = "its parts lie too deeply within one another"
# Files that look like text but have an encoding of their own.
_CODED_FILE = re.compile(r"%PDF-|%!PS|\{\\rtf")
_CODED_FILE_WITHIN = 1_024
_RARE_TEXT_NAMES = ("summary", "value", "word", "logs")
_TEXT_NAMES = ("text", "content", "token", "thinking", "refusal", "input_text", "output", "source", *_RARE_TEXT_NAMES)
# The fields that may hold the text of a document.
_TEXT_DATA = ("data", *_TEXT_NAMES)
_RIVALS = frozenset(_TEXT_DATA)
# Servers, and our own translation, leave a model's thoughts out of what is read again, so that the
# texts around them meet.
_THOUGHTS = frozenset(("thinking", "redacted_thinking", "reasoning"))
# Servers take both roles for the operator's words.
SAME_ROLES = {"developer": "system"}
# Fields that the model server writes about its answer, and never the model.
OF_ANSWER = frozenset(("id", "object", "created", "created_at", "model", "system_fingerprint", "usage", "service_tier"))


class _TooManyParts(Exception):
    """The parts of a body lie so deeply within one another that joining them takes too long."""


class BodyTexts:
    """The texts of a body that can be looked at; `unseen` says what could not be, and is empty when
    all could.
    """

    __slots__ = ("_body", "_is_answer", "_joined_chars", "_keys", "_parts_left", "_rivals", "texts", "unseen")

    def __init__(self, body: bytes, *, is_answer: bool) -> None:
        self.texts: list[str] = []
        self.unseen = ""
        self._body = body
        self._is_answer = is_answer
        self._keys = 0
        self._joined_chars = 0
        self._parts_left = JOINED_PARTS_MAX
        # Names of texts beside one another in one part: it is unknown which of them a server reads.
        self._rivals: set[str] = set()
        if has_too_many_values(body):
            self.texts.append(body.decode("utf-8", "replace"))
            self.unseen = "it has too many values"
            return
        try:
            fields = _decoded(body)
            if type(fields) is dict:
                self._top(fields)
            else:
                self._list("", [fields], is_free=False)
        except (ValueError, RecursionError):
            self.texts.append(body.decode("utf-8", "replace"))
            self.unseen = "it is not JSON, or nested too deeply"
            return
        if has_more_names(body, self._keys):
            self.unseen = self.unseen or "a field is named twice"
            self.texts += [_plain(token) for token in re.findall(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"', body)]

    def _top(self, fields: dict[str, Any]) -> None:
        looked_at = dict(fields)
        for name in OF_ANSWER & fields.keys() if self._is_answer else ():
            self._keys += 1 + count_keys(looked_at.pop(name))
        if type(looked_at.get("model")) is str:
            self._keys += 1
            del looked_at["model"]
        self._object("", looked_at, is_free=False)

    def _object(self, name: str, value: dict[str, Any], *, is_free: bool) -> None:
        """Look at an object.

        In a free one, a caller or a model chose the fields, whatever their names are.
        """
        self._keys += len(value)
        if not value.keys() <= FIELDS:
            self.texts += value.keys() - FIELDS
        if len(rivals := value.keys() & _RIVALS) > 1 and len(rivals := {one for one in rivals if value[one]}) > 1:
            self._rivals |= rivals
        if not self._is_answer and (name in _ELSEWHERE or value.get("type") == "url"):
            self._elsewhere(value.get("url"))
        for key, one in value.items():
            kind = type(one)
            if kind is str:
                if key in _SPECIAL or one[:1] in _BEFORE_DATA:
                    self._text(key, one, value, is_free=is_free)
                elif key not in KINDS or one not in WORDS:
                    self.texts.append(one)
            elif kind is dict:
                self._object(key, one, is_free=is_free or key in _FREE)
            elif kind is list:
                self._list(key, one, is_free=is_free or key in _FREE)
            elif (kind is int or kind is float) and (is_free or key not in NUMBERED):
                self._number(one)

    def _list(self, name: str, value: list[Any], *, is_free: bool) -> None:
        if name == "embedding" and self._is_answer and not is_free and _NUMBERS.issuperset(map(type, value)):
            return
        may_be_tokens = name in _TOKENS or (name in _COMPARED and not is_free)
        if not self._is_answer and may_be_tokens and _has_tokens(value):
            self.unseen = self.unseen or "it has token ids in the place of a text"
        if name in _STORED and value:
            self.unseen = self.unseen or "it refers to what is stored elsewhere"
        for one in value:
            kind = type(one)
            if kind is dict:
                self._object(name, one, is_free=is_free)
            elif kind is str:
                self._text(name, one, {}, is_free=is_free)
            elif kind is list:
                self._list(name, one, is_free=is_free)
            elif (kind is int or kind is float) and (is_free or name not in NUMBERED):
                self._number(one)
        # Texts to be embedded are read one by one.
        if name in _JOINED and len(value) > 1 and (name != "input" or dict in map(type, value)):
            self._join(value)

    def _number(self, value: float) -> None:
        if len(number := str(value)) >= DIGITS_MIN:
            self.texts.append(number)
        if type(value) is float and abs(value) >= _INEXACT:
            # The float was rounded when it was read, so take the digits from the body.
            self.texts += [token.decode() for token in _LONG_NUMBER.findall(self._body)]

    def _join(self, parts: list[Any]) -> None:
        """Add texts that are read one after another, with the thoughts between them and without."""
        if self._parts_left < 0:
            return
        try:
            self._join_neighbours(parts)
            if (spoken := self._without_thoughts(parts)) is not parts:
                self._join_neighbours(spoken)
        except _TooManyParts:
            self.unseen = self.unseen or _TOO_DEEPLY

    def _join_neighbours(self, parts: list[Any]) -> None:
        """Add the texts of neighbours in one list that share a role."""
        roles = list(map(_role_of, parts))
        begin = 0
        for end in range(1, len(parts) + 1):
            if end < len(parts) and roles[end] == roles[begin]:
                continue
            neighbours, begin = parts[begin:end], end
            known: list[list[str]] = []
            for first in ("", *self._rivals):
                texts = [text for part in neighbours if (text := self._text_of(part, first))]
                if len(texts) < 2 or texts in known:
                    continue
                known.append(texts)
                self._joined_chars += 2 * sum(map(len, texts))
                if self._joined_chars > JOINED_TIMES_MAX * len(self._body):
                    self.unseen = self.unseen or _TOO_DEEPLY
                    return
                self.texts += ["".join(texts), "\n".join(texts)]

    def _text_of(self, part: Any, first: str = "") -> str:
        """Return the text of a part: under this name, or the first other name that has one."""
        self._count_part()
        if isinstance(part, str):
            return part
        if isinstance(part, list):
            return "".join(self._text_of(one, first) for one in part)
        if isinstance(part, dict):
            names = _TEXT_DATA if part.get("type") == "text" else _TEXT_NAMES
            if first in part and first in names:
                names = (first, *names)
            return next((text for name in names if name in part and (text := self._text_of(part[name], first))), "")
        return ""

    def _without_thoughts(self, parts: list[Any]) -> list[Any]:
        """Return parts without a model's thoughts, also within them.

        Return the same list where there are none.
        """
        spoken: list[Any] = []
        is_same = True
        for part in parts:
            self._count_part()
            if type(part) is dict and _is_thought(part):
                is_same = False
                continue
            content = part.get("content") if type(part) is dict else None
            if type(content) is list and (kept := self._without_thoughts(content)) is not content:
                part, is_same = {**part, "content": kept}, False
            spoken.append(part)
        return parts if is_same else spoken

    def _count_part(self) -> None:
        self._parts_left -= 1
        if self._parts_left < 0:
            raise _TooManyParts

    def _text(self, name: str, text: str, beside: dict[str, Any], *, is_free: bool) -> None:
        if name in KINDS and text in WORDS:
            return
        if name in _STORED and text:
            self.unseen = self.unseen or "it refers to what is stored elsewhere"
        if not self._is_answer and name in _ELSEWHERE:
            self._elsewhere(text)
        is_file = False
        if (found := _DATA_URL.match(text)) and _is_data_head(name, head := _BROKEN_UP.sub("", found[1])):
            is_file = self._data_url(head, text[found.end() :])
        elif name in _FILES and _is_file(name, text, beside, is_free=is_free):
            must_see = len(text) >= FILE_CHARS_MIN or name in _ONLY_FILES or _is_declared(beside)
            is_file = self._file(text, str(beside.get("media_type") or ""), must_see=must_see)
        if not is_file or len(text) < FILE_CHARS_MIN:
            self.texts.append(text)

    def _elsewhere(self, url: Any) -> None:
        if isinstance(url, str) and url and not _DATA_URL.match(url):
            self.unseen = self.unseen or "it refers to a file elsewhere"

    def _data_url(self, head: str, payload: str) -> bool:
        """Look at what a URL itself holds; return whether that is no text."""
        kind, *more = [part.strip().lower() for part in head.split(";")]
        charset = next((part[8:].strip('"') for part in more if part.startswith("charset=")), "")
        payload = urllib.parse.unquote(payload)
        if "base64" in more:
            return self._file(payload, kind, charset)
        self.texts.append(payload)
        if (kind and not _TEXT_TYPE.match(kind)) or charset not in _PLAIN_CHARSETS:
            self.unseen = self.unseen or "it has an image or another file"
        return False

    def _file(self, payload: str, kind: str, charset: str = "", *, must_see: bool = True) -> bool:
        """Look at a file in Base64; return whether it is no text, which cannot be looked at."""
        letters = _NOT_BASE64.sub("", payload.replace("-", "+").replace("_", "/"))
        try:
            text = binascii.a2b_base64(letters + "=" * (-len(letters) % 4)).decode()
            is_text = "\0" not in text and not _CODED_FILE.search(text, 0, _CODED_FILE_WITHIN)
        except ValueError:
            is_text, text = False, ""
        if text:
            self.texts.append(text)
        is_seen = is_text and (not kind or _TEXT_TYPE.match(kind.lower())) and charset in _PLAIN_CHARSETS
        if must_see and not is_seen:
            self.unseen = self.unseen or "it has an image or another file"
        return not is_text


def has_more_names(body: bytes, count: int) -> bool:
    """Return whether a body has more than so many names of fields."""
    # A text may contain a colon or the end of a name too: only then all names are read.
    return (
        body.count(b":") > count and len(_KEY_END.findall(body)) > count and sum(map(bool, _KEY.findall(body))) > count
    )


def is_data_url(text: str) -> bool:
    """Return whether a text may be read as a `data:` URL, which holds another text or a file."""
    return text[:1] in _BEFORE_DATA and _DATA_URL.match(text) is not None


def is_api_word(name: str, text: str, *, is_answer: bool) -> bool:
    """Return whether this value of this field is one of the API's own, which no guardrail
    changes."""
    return name == "model" or (name in KINDS and text in WORDS) or (is_answer and name in OF_ANSWER)


def readings(text: str) -> Iterator[str]:
    """Yield this text, and the other forms in which it may be read: without escapes, and with
    letters in their plain shape.
    """
    yield text
    plain = text
    if "\\" in text:
        for _ in range(UNESCAPED_TIMES_MAX):
            before, plain = plain, _ESCAPE.sub(_unescaped, plain)
            if plain == before:
                break
            yield plain
        else:
            before, plain = plain, _DEEP_ESCAPE.sub(lambda found: chr(int(found[1] or found[2], 16)), plain)
            if plain != before:
                yield plain
    for one in (text, plain) if plain != text else (text,):
        if (shaped := _without_controls(one) if one.isascii() else _shaped(one)) != one:
            yield shaped


def _without_controls(text: str) -> str:
    """Return a text in ASCII without control characters, but with its line breaks and tabs."""
    letters = text.encode()
    shown = letters.translate(None, _CONTROLS)
    return text if len(shown) == len(letters) else shown.decode()


def _shaped(text: str) -> str:
    """Return the text with compatible letters as plain ones (NFKC) and without invisible
    characters.
    """
    chunks = (text[at : at + STRIPPED_CHARS] for at in range(0, len(text), STRIPPED_CHARS))
    shown = "".join(_INVISIBLE.sub("", one.translate(_TAGS)) for one in chunks)
    return "".join(unicodedata.normalize("NFKC", one) for one in _pieces(shown))


def _pieces(text: str) -> Iterator[str]:
    """Yield the text in pieces that can be normalized alone: none begins with a part of the
    character before it.
    """
    begin = 0
    while begin < len(text):
        end = begin + NORMALIZED_CHARS
        while end < min(len(text), begin + NORMALIZED_CHARS + MARKS_MAX) and _goes_on(text[end - 2 : end], text[end]):
            end += 1
        yield text[begin:end]
        begin = end


def _goes_on(before: str, letter: str) -> bool:
    """Return whether this letter changes the two before it, as in a syllable of Hangul."""
    if letter.isascii():
        return False
    plain = unicodedata.normalize("NFKC", letter)
    if unicodedata.combining(plain[0]):
        return True
    return unicodedata.normalize("NFKC", before + letter) != unicodedata.normalize("NFKC", before) + plain


def _unescaped(found: re.Match[str]) -> str:
    if found[1]:
        return chr(0x10000 + ((int(found[1], 16) & 0x3FF) << 10) + (int(found[2], 16) & 0x3FF))
    code = found[3] or found[4]
    return chr(int(code, 16)) if code else _SHORT.get(found[5], found[5])


def _decoded(body: bytes) -> Any:
    try:
        return msgspec.json.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        # Half a character, or a number outside 64 bits: a lenient reader may still accept it.
        return json.loads(body.decode("utf-8", "replace"))


def _plain(token: bytes) -> str:
    return str(json.loads(token.decode("utf-8", "replace")))


def _is_data_head(name: str, head: str) -> bool:
    """Return whether the text between `data:` and the first comma makes this field's text a URL."""
    return name in _FILES or name in _ELSEWHERE or _DATA_HEAD.fullmatch(head) is not None


def _is_file(name: str, text: str, beside: dict[str, Any], *, is_free: bool) -> bool:
    """Return whether a server may take a text for a file in Base64.

    Readers of Base64 skip all other characters.
    """
    if beside.get("type") == "base64":
        return True
    if name == "data" and beside.get("type") == "text" and "format" not in beside and "filename" not in beside:
        # A document given as a text.
        return False
    if not is_free and (name in _ONLY_FILES or _is_declared(beside)):
        return True
    letters = "".join(text.split()) if name in _ONLY_FILES else text
    return _BASE64.fullmatch(letters) is not None


def _is_declared(beside: dict[str, Any]) -> bool:
    return beside.get("type") == "base64" or any(
        name in beside for name in ("media_type", "format", "filename", "b64_json")
    )


def _is_thought(part: dict[str, Any]) -> bool:
    return type(kind := part.get("type")) is str and kind in _THOUGHTS


def _role_of(part: Any) -> Any:
    role = part.get("role") if type(part) is dict else None
    return SAME_ROLES.get(role := role.strip().lower(), role) if isinstance(role, str) else role


def _has_tokens(value: list[Any]) -> bool:
    return any(_has_tokens(one) if isinstance(one, list) else _is_whole(one) for one in value)


def _is_whole(value: Any) -> bool:
    """Return whether a server may take a number for a token, also one like 42.0."""
    return type(value) is int or (type(value) is float and value.is_integer())


def count_keys(value: Any) -> int:
    """Return how many names of fields a decoded value has, with all values in it."""
    is_object = type(value) is dict
    total = len(value) if is_object else 0
    for one in value.values() if is_object else value if type(value) is list else ():
        if type(one) is dict or type(one) is list:
            total += count_keys(one)
    return total
