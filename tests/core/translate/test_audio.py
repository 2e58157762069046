"""Audio requests of batches: what may be sent, and the form that a model server gets."""

from __future__ import annotations

import base64
import json
from email import message_from_bytes
from typing import Any

import pytest

from tidegate.core.audio_file import AudioFile
from tidegate.core.translate.audio import FILE_BYTES_MAX, AudioFault, file_from, file_in, form_of, read_request

WAV = base64.b64encode(b"RIFF\r\n--x").decode()


def parts_of(header: bytes, form: bytes) -> dict[str, Any]:
    message = message_from_bytes(header + b"\r\n" + form)
    return {
        str(part.get_param("name", header="content-disposition")): (part.get_filename(), part.get_payload(decode=True))
        for part in message.walk()
        if not part.is_multipart()
    }


def test_every_member_becomes_a_field_and_the_file_comes_last() -> None:
    body = {
        "model": "w", "file_url": f"data:audio/wav;codecs=1;base64,{WAV}", "prompt": 'é "quoted"\r\n', "temperature": 0.2, "user": None,
        "timestamp_granularities": ["word", "segment"], "diarize": True,
    }  # fmt: skip
    request = read_request(json.dumps(body).encode())
    assert request.holds_file
    file = file_in(request.file_url)
    assert file == AudioFile("audio.wav", "audio/wav", b"RIFF\r\n--x")
    parts = parts_of(*form_of(request.fields, file, "batch_x-1"))
    assert list(parts) == ["model", "prompt", "temperature", "timestamp_granularities[]", "diarize", "file"]
    assert parts["prompt"][1].decode() == 'é "quoted"\r\n'
    assert (parts["temperature"][1], parts["diarize"][1]) == (b"0.2", b"true")
    assert parts["file"] == ("audio.wav", b"RIFF\r\n--x")


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"file_url": None}, "file_url"),
        ({"file_url": 5}, "file_url"),
        ({"file_url": ""}, "file_url"),
        ({"response_format": "srt"}, "response_format"),
        ({"response_format": {"type": "json"}}, "response_format"),
        ({'a"\r\nX: y': "1"}, ""),
        ({"name\u0000": "1"}, ""),
    ],
)
def test_what_cannot_be_sent_is_refused_by_name(change: dict[str, Any], param: str) -> None:
    body = {"model": "w", "file_url": f"data:audio/wav;base64,{WAV}", **change}
    with pytest.raises(AudioFault) as wrong:
        read_request(json.dumps(body).encode())
    assert wrong.value.param == param


@pytest.mark.parametrize("body", [b"", b"[]", b"{", b"null", b"[" * 10_000])
def test_garbage_is_no_request(body: bytes) -> None:
    with pytest.raises(AudioFault):
        read_request(body)


@pytest.mark.parametrize(
    "url",
    [
        "data:",
        "data:audio/wav,RIFF",
        "data:audio/wav;base64",
        "data:audio/wav;base64,",
        "data:audio/wav;base64,a===",
        "data:audio/wav;base64,ab cd",
    ],
)
def test_a_data_url_without_a_file_is_refused(url: str) -> None:
    with pytest.raises(AudioFault) as wrong:
        file_in(url)
    assert wrong.value.code == "invalid_file_url"


def test_a_file_larger_than_a_server_takes_is_refused_as_such() -> None:
    letters = 4 * (FILE_BYTES_MAX // 3 + 3)
    with pytest.raises(AudioFault) as wrong:
        file_in("data:audio/wav;base64," + "A" * letters)
    assert wrong.value.code == "file_too_large"


@pytest.mark.parametrize(
    ("url", "media_type", "name", "sent_type"),
    [
        ("https://h.example/a/talk.mp3?x=1", "audio/mpeg; q=1", "talk.mp3", "audio/mpeg"),
        ("https://h.example/a", "audio/ogg", "audio.ogg", "audio/ogg"),
        ("https://h.example/%22%0d%0a.mp3", "audio/mpeg", "audio.mp3", "audio/mpeg"),
        ("https://h.example/a.wav", "evil\r\nX: y", "a.wav", "application/octet-stream"),
    ],
)
def test_a_fetched_file_has_a_plain_name_and_type(url: str, media_type: str, name: str, sent_type: str) -> None:
    assert file_from(url, media_type, b"x") == AudioFile(name, sent_type, b"x")
    with pytest.raises(AudioFault):
        file_from(url, media_type, b"")
