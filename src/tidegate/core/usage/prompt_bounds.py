"""Bound what a model may have to read for one request where the bytes of its body do not show it.

To compare two sides, a model reads the one text again with each text of the other. An image or a
recording may have far more tokens than bytes, because it is compressed. What a server fetches,
remembers or finds with its own tools has no bytes in the body at all. The body is read as pairs, so
that both values of a repeated name count. This module knows no price.
"""

import json
import re
from typing import Any, NamedTuple

from tidegate.core.json_limits import has_too_many_values
from tidegate.core.nouns import Call
from tidegate.core.usage.estimate import prompt_tokens
from tidegate.core.usage.inline_files import TEXT_BYTES_MAX, is_base64, unread_bytes

# These read every text of one side together with one of the other.
COMPARED = ("/v1/score", "/v1/rerank")

# The most that a known server counts for one image, and the count for a usual one.
IMAGE_TOKENS_MAX = 50_000
IMAGE_TOKENS = 1_500
# The most that a model reads of anything else, and the tokens of a short file.
OTHER_TOKENS_MAX = 1 << 18
OTHER_TOKENS = 2_000
BODY_BYTES_MAX = 8 << 20
# Models take about ten tokens for a second of speech, which has 8 to 32 kB in the usual formats.
AUDIO_BYTES_PER_TOKEN = 1_000

# A body without any of these has only texts and settings. An escape may hide one. To look for each
# alone takes a hundredth of the time that one regular expression for all of them does.
_MAY_HOLD = (
    b"image", b"audio", b"video", b"file", b"document", b"media", b"screenshot", b"tools", b"search", b"mcp", b"plugin", b"container",
    b"conversation", b"response_id", b'"prompt"', b"\\u00",
)  # fmt: skip
# Tools that the caller runs.
_OWN_TOOLS = ("function", "custom")
# Parameters that let a server read what is not in the body.
_ELSEWHERE = frozenset(("container", "conversation", "mcpservers", "plugins", "previousresponseid", "websearchoptions"))
# The kinds and fields of prompt parts that hold or name a file. Names are compared without case,
# dashes and underscores.
_KINDS = frozenset(
    (
        "audio",
        "audiourl",
        "computerscreenshot",
        "document",
        "file",
        "fileurl",
        "image",
        "imageurl",
        "inputaudio",
        "inputfile",
    )
) | {"inputimage", "inputvideo", "media", "video", "videourl"}
_NAMES = (_KINDS - {"computerscreenshot"}) | {
    "audiodata", "filedata", "fileid", "fileids", "imagedata", "images", "screenshot", "videodata", "videos",
}  # fmt: skip
# Under these fields, the caller chooses the names.
_FREE = frozenset(
    ("arguments", "inputschema", "jsonschema", "metadata", "parameters", "responseformat", "schema", "toolchoice")
)


_IMAGE_URL = re.compile(r"data:image/[\w.+-]{1,50};base64,")
_NO_OPENING = re.compile("")


class Hidden(NamedTuple):
    """Tokens that the bytes of a body do not show: at most, and likely.

    `shown_bytes` are letters of images, which are not read.
    """

    most: int = 0
    likely: int = 0
    shown_bytes: int = 0


NOTHING_HIDDEN = Hidden()


class _PromptPairs(list[tuple[str, Any]]):
    """The members of an object, including those that share a name."""


def likely_prompt_tokens(call: Call) -> int:
    """Return how many tokens the prompt of a call likely has, by its bytes; a file's letters are
    not read.
    """
    read = compared_bytes(call.endpoint, call.body) - unread_bytes(call.body)
    return prompt_tokens(read) + audio_tokens(call)


def audio_tokens(call: Call) -> int:
    """Return how many tokens the recording of a call likely has."""
    return 0 if call.audio is None else -(-len(call.audio.data) // AUDIO_BYTES_PER_TOKEN)


def compared_bytes(endpoint: str, body: bytes) -> int:
    """Return how many bytes a model reads of a body: more than it has where one text is compared
    with each of many.
    """
    if endpoint not in COMPARED:
        return len(body)
    members = _members(body)
    if members is None:
        # An unreadable body may be a list of nothing but commas.
        return len(body) * (1 + body.count(b","))
    sides = [_listed(value) for _, value in members]
    count = max(map(len, sides), default=0)
    # Lists of one length may be compared text by text.
    listed = min(sum(_size(one) for side in sides if len(side) == count for one in side), len(body))
    return listed + max(1, count) * (len(body) - listed)


def hidden_tokens(body: bytes) -> Hidden:
    """Return what a model may read for this request beside its text."""
    lowered = body.lower()
    if not any(word in lowered for word in _MAY_HOLD):
        return NOTHING_HIDDEN
    members = _members(body)
    if members is None:
        return Hidden(OTHER_TOKENS_MAX, OTHER_TOKENS)
    images = shown = 0
    others = sum(_of_servers(_folded(name), value) for name, value in members)
    objects = [_PromptPairs((name, value) for name, value in members if _folded(name) != "audio")]
    while objects:
        value = objects.pop()
        kinds, found = _media(value)
        is_image = any("image" in one or "screenshot" in one for one in kinds)
        images, others = images + found * is_image, others + found * (not is_image)
        shown += _image_letters(value) if is_image else 0
        for name, one in value:
            # An object under `input` has the arguments of a tool's call.
            is_free = _folded(name) in _FREE or (name == "input" and isinstance(one, _PromptPairs))
            if not is_free and _folded(name) not in _NAMES:
                objects += _objects(one)
    most, likely = images * IMAGE_TOKENS_MAX + others * OTHER_TOKENS_MAX, images * IMAGE_TOKENS + others * OTHER_TOKENS
    return Hidden(most, likely, shown)


def _folded(name: str) -> str:
    return name.casefold().replace("_", "").replace("-", "")


def _members(body: bytes) -> "_PromptPairs | None":
    """Return the members of a body; None when it cannot be read."""
    if len(body) > BODY_BYTES_MAX or has_too_many_values(body):
        return None
    try:
        members = json.loads(body, object_pairs_hook=_PromptPairs)
    except (ValueError, RecursionError):
        return None
    return members if isinstance(members, _PromptPairs) else None


def _listed(value: Any) -> list[Any]:
    """Return the texts of one side; its parts, where one document is given as an object."""
    if isinstance(value, _PromptPairs):
        return max((_listed(one) for _, one in value if isinstance(one, list)), key=len, default=[])
    return value if isinstance(value, list) else []


def _size(value: Any) -> int:
    """Return how many bytes a value and its comma have at least."""
    if isinstance(value, str):
        return len(value.encode("utf-8", "replace")) + 3
    if isinstance(value, _PromptPairs):
        return 2 + sum(_size(name) + _size(one) for name, one in value)
    return 2 + sum(map(_size, value)) if isinstance(value, list) else 2


def _of_servers(name: str, value: Any) -> int:
    """Return how many things a parameter has a server read from elsewhere."""
    if name == "tools" and isinstance(value, list):
        return sum(not _is_callers_own(tool) for tool in value)
    # An empty object of options asks for a search too.
    is_asked = bool(value) or (name == "websearchoptions" and isinstance(value, _PromptPairs))
    return 1 if (name in _ELSEWHERE and is_asked) or (name == "prompt" and isinstance(value, _PromptPairs)) else 0


def _is_callers_own(tool: Any) -> bool:
    if not isinstance(tool, _PromptPairs):
        return True
    kinds = [kind for name, kind in tool if _folded(name) == "type"]
    return all(kind in _OWN_TOOLS for kind in kinds)


def _media(value: _PromptPairs) -> tuple[list[str], int]:
    """Return the kinds of the files that an object holds or names, and the number of files."""
    kinds = [_folded(one) for name, one in value if name == "type" and isinstance(one, str) and _folded(one) in _KINDS]
    if "document" in kinds and any(name == "source" and _is_text(one) for name, one in value):
        kinds.remove("document")
    named = [(_folded(name), one) for name, one in value if one and _folded(name) in _NAMES]
    count = sum(len(one) if isinstance(one, list) and not isinstance(one, _PromptPairs) else 1 for _, one in named)
    return [*kinds, *(name for name, _ in named)], max(len(kinds), count)


def _image_letters(value: _PromptPairs) -> int:
    """Return how many letters of Base64 the images of one object have, where the APIs have them."""
    letters = 0
    for name, one in value:
        if name == "source" and isinstance(one, _PromptPairs) and ("type", "base64") in one:
            letters += sum(_base64_size(text) for field, text in one if field == "data")
        elif _folded(name) in ("image", "imageurl"):
            urls = [text for field, text in one if field == "url"] if isinstance(one, _PromptPairs) else [one]
            letters += sum(_base64_size(text, _IMAGE_URL) for text in urls)
    return letters


def _base64_size(text: Any, opening: re.Pattern[str] = _NO_OPENING) -> int:
    """Return how many letters of Base64 a text has after its opening; 0 when there are few, or the
    text is anything else.
    """
    found = opening.match(text) if isinstance(text, str) and text.isascii() else None
    letters = text[found.end() :] if found else ""
    return len(letters) if len(letters) > TEXT_BYTES_MAX and is_base64(letters.encode()) else 0


def _is_text(source: Any) -> bool:
    """Return whether a document is given as text, or as parts that are looked at one by one."""
    return isinstance(source, _PromptPairs) and [one for name, one in source if name == "type"] in (
        ["text"],
        ["content"],
    )


def _objects(value: Any) -> list[_PromptPairs]:
    if isinstance(value, _PromptPairs):
        return [value]
    return [inner for one in value for inner in _objects(one)] if isinstance(value, list) else []
