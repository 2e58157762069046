"""Files that stand in a request as Base64 count as files, and not by their letters."""

import base64
import json
from typing import Any

import pytest

from tidegate.core.usage.estimate import prompt_tokens
from tidegate.core.usage.inline_files import FILE_BYTES_PER_TOKEN, FILE_TOKENS, unread_bytes, without_files
from tidegate.core.usage.prompt_bounds import IMAGE_TOKENS_MAX, hidden_tokens

PHOTO = base64.b64encode(bytes(range(256)) * 3_000).decode()
URL = "data:image/jpeg;base64," + PHOTO
TEXT = {"type": "text", "text": "What is this?"}
IMAGES = [
    {"type": "image_url", "image_url": {"url": URL}},
    {"type": "image_url", "image_url": {"detail": "low", "url": URL}},
    {"type": "input_image", "image_url": URL},
    {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": PHOTO}},
]
OTHERS = [
    {"type": "input_audio", "input_audio": {"data": PHOTO, "format": "wav"}},
    {"type": "input_audio", "input_audio": {"format": "mp3", "data": PHOTO}},
    {"type": "file", "file": {"filename": "a.pdf", "file_data": "data:application/pdf;base64," + PHOTO}},
    {"type": "video_url", "video_url": {"url": "data:video/mp4;base64," + PHOTO}},
]
NO_FILES = [
    {"type": "text", "text": URL},
    {"type": "text", "text": json.dumps(IMAGES[0])},
    {"type": "text", "text": '"url":"' + URL},
    {"type": "text", "text": 'base64","data":"' + PHOTO},
    {"type": "image_url", "image_url": {"url": URL.replace(PHOTO[:4], "a b ")}},
    {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": PHOTO}},
    {"type": "image_url", "image_url": {"url": "https://example.com/" + PHOTO}},
]


def body(*parts: Any, **dump: Any) -> bytes:
    return json.dumps({"model": "m", "messages": [{"role": "user", "content": [TEXT, *parts]}]}, **dump).encode()


@pytest.mark.parametrize("part", [*IMAGES, *OTHERS])
@pytest.mark.parametrize("dump", [{}, {"separators": (",", ":")}, {"indent": 2}])
def test_a_file_counts_with_what_it_likely_has_in_tokens(part: Any, dump: dict[str, Any]) -> None:
    text = body(part, **dump)
    of_file = FILE_TOKENS + len(PHOTO) // FILE_BYTES_PER_TOKEN
    around = len(text) - len(PHOTO)
    assert prompt_tokens(len(text) - unread_bytes(text)) == prompt_tokens(around) + of_file
    assert len(without_files(text)) == around


def test_each_of_several_files_counts() -> None:
    one = unread_bytes(body(IMAGES[0]))
    parts = [IMAGES[0], OTHERS[0], IMAGES[3], TEXT, OTHERS[2]]
    assert unread_bytes(body(*parts)) == 4 * one
    assert b"What is this?" in without_files(body(*parts))


def test_slashes_may_be_escaped() -> None:
    text = body(IMAGES[0]).replace(b"/", b"\\/")
    assert json.loads(text) == json.loads(body(IMAGES[0]))
    assert unread_bytes(text) >= unread_bytes(body(IMAGES[0]))


@pytest.mark.parametrize("part", NO_FILES)
def test_a_text_that_looks_like_a_file_is_text(part: Any) -> None:
    text = body(part)
    assert unread_bytes(text) == 0
    assert without_files(text) is text
    assert hidden_tokens(text).shown_bytes == 0


def test_small_files_count_by_their_letters() -> None:
    text = body({"type": "image_url", "image_url": {"url": URL[:4_000]}})
    assert unread_bytes(text) == 0


@pytest.mark.parametrize("end", ["", '"input_audio"', '"input_audio": {"data": "AAAA"}'])
def test_a_body_of_many_small_files_is_gone_through_once(end: str) -> None:
    """Were the rest of the body looked through for each of them, this would not end within the time of a test."""
    many = ('{"url":"data:image/png;base64,AA"},' * 300_000 + "[" + end).encode()
    assert unread_bytes(many) == 0


@pytest.mark.parametrize("cut", [1, 100, 400_000])
def test_a_file_without_an_end_is_text(cut: int) -> None:
    assert unread_bytes(body(IMAGES[0])[: -len(PHOTO) // 2 - cut]) == 0


@pytest.mark.parametrize("part", IMAGES)
def test_the_bound_of_an_image_is_without_its_letters(part: Any) -> None:
    hidden = hidden_tokens(body(part))
    assert hidden.shown_bytes == len(PHOTO)
    assert hidden.most == IMAGE_TOKENS_MAX


@pytest.mark.parametrize("part", OTHERS)
def test_the_bound_of_another_file_keeps_its_letters(part: Any) -> None:
    """It may be a text, whose tokens are as many as its bytes."""
    assert hidden_tokens(body(part)).shown_bytes == 0


@pytest.mark.parametrize(
    "source",
    [
        {"type": "base64", "media_type": "image/png", "data": "a text, " + PHOTO},
        {"type": "url", "url": "https://example.com/", "data": PHOTO},
        {"type": "base64", "data": 7},
    ],
)
def test_the_bound_of_an_image_that_is_written_otherwise_keeps_its_letters(source: dict[str, Any]) -> None:
    assert hidden_tokens(body({"type": "image", "source": source})).shown_bytes == 0
