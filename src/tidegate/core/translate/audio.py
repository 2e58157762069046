"""Translate audio requests of a batch: JSON that names a file by its address becomes the form that
model servers take.

`file_url` gives the file, as a `data:` URL or an address; every other member of the body becomes a
field of the form. Nothing is fetched here.
"""

import re
from base64 import b64decode
from hashlib import blake2b
from typing import Any, NamedTuple
from urllib.parse import unquote, urlsplit

import msgspec

from tidegate.core.audio_file import AudioFile

AUDIO_ENDPOINTS = ("/v1/audio/transcriptions", "/v1/audio/translations")
FILE_BYTES_MAX = 25 << 20
# Other formats are not JSON, and a result line holds JSON.
RESPONSE_FORMATS = ("json", "verbose_json", "diarized_json")

_EXTENSIONS = {
    "audio/flac": "flac", "audio/m4a": "m4a", "audio/mp3": "mp3", "audio/mp4": "mp4", "audio/mpeg": "mp3", "audio/ogg": "ogg",
    "audio/wav": "wav", "audio/wave": "wav", "audio/webm": "webm", "audio/x-m4a": "m4a", "audio/x-wav": "wav", "video/mp4": "mp4",
    "video/webm": "webm",
}  # fmt: skip
_ANY_TYPE = "application/octet-stream"
_TYPE = re.compile(r"[a-z0-9.+-]{1,64}/[a-z0-9.+-]{1,64}", re.ASCII)
_DATA = re.compile(r"data:([^;,]*)((?:;[^;,]*)*),", re.ASCII | re.IGNORECASE)
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}", re.ASCII)
_FIELD = re.compile(r"[A-Za-z0-9_.\-]{1,64}", re.ASCII)


class AudioFault(ValueError):
    """The fault of an audio request, in words for its author."""

    def __init__(self, code: str, message: str, param: str) -> None:
        super().__init__(message)
        self.code = code
        self.param = param


class AudioRequest(NamedTuple):
    """A request without its file: `fields` is the JSON of everything else."""

    file_url: str
    fields: bytes

    @property
    def holds_file(self) -> bool:
        return self.file_url[:5].lower() == "data:"


def read_request(body: bytes) -> AudioRequest:
    """Return where the file of a request is, and the rest of the request; AudioFault when it cannot
    be sent.
    """
    try:
        members = msgspec.json.decode(body, type=dict[str, Any])
    except (ValueError, RecursionError):
        raise AudioFault("invalid_request", "The body must be a JSON object.", "") from None
    file_url = members.pop("file_url", None)
    if not isinstance(file_url, str) or not file_url:
        message = (
            "Requests to this endpoint need body.file_url: a data: URL, or an https address that can be read by anyone."
        )
        raise AudioFault("missing_required_parameter", message, "file_url")
    wanted = members.get("response_format")
    if wanted is not None and wanted not in RESPONSE_FORMATS:
        message = f"In a batch, response_format must be one of: {', '.join(RESPONSE_FORMATS)}."
        raise AudioFault("unsupported_parameter", message, "response_format")
    for name in members:
        if not _FIELD.fullmatch(name):
            raise AudioFault("invalid_request", "A parameter's name cannot be sent in a form: check the names.", "")
    return AudioRequest(file_url, msgspec.json.encode(members))


def file_in(data_url: str) -> AudioFile:
    """Return the file inside a `data:` URL; AudioFault when it holds none."""
    head = _DATA.match(data_url)
    options = [] if head is None else head[2].lower().split(";")
    if head is None or "base64" not in options:
        raise AudioFault("invalid_file_url", "A data: URL must look like data:audio/wav;base64,…", "file_url")
    if len(data_url) - head.end() > FILE_BYTES_MAX * 4 // 3 + 4:
        raise too_large()
    try:
        data = b64decode(data_url[head.end() :], validate=True)
    except ValueError:
        raise AudioFault("invalid_file_url", "The data: URL is not valid base64.", "file_url") from None
    if not data:
        raise AudioFault("invalid_file_url", "The data: URL holds no bytes.", "file_url")
    media_type = _media_type(head[1])
    return AudioFile(f"audio.{_EXTENSIONS.get(media_type, 'bin')}", media_type, data)


def file_from(url: str, media_type: str, data: bytes) -> AudioFile:
    """Return a file that was fetched.

    Servers go by the extension, so a plain name in the address is kept.
    """
    if not data:
        raise AudioFault("invalid_file_url", "The file at file_url is empty.", "file_url")
    media_type = _media_type(media_type)
    name = unquote(urlsplit(url).path.rpartition("/")[2])
    if not _NAME.fullmatch(name) or "." not in name:
        name = f"audio.{_EXTENSIONS.get(media_type, 'bin')}"
    return AudioFile(name, media_type, data)


def too_large() -> AudioFault:
    return AudioFault("file_too_large", f"An audio file may have {FILE_BYTES_MAX:,} bytes: split it.", "file_url")


def form_of(fields: bytes, file: AudioFile, name: str) -> tuple[bytes, bytes]:
    """Return the header line of a form and the form.

    No file can foresee `name`, so none can contain the boundary.
    """
    boundary = blake2b(name.encode(), digest_size=16).hexdigest().encode()
    parts = []
    for key, value in msgspec.json.decode(fields, type=dict[str, Any]).items():
        is_list = isinstance(value, list)
        for one in value if is_list else (value,):
            if one is not None:
                label = f"{key}[]" if is_list else key
                head = b'--%b\r\nContent-Disposition: form-data; name="%b"\r\n\r\n' % (boundary, label.encode())
                parts += [head, one.encode() if isinstance(one, str) else msgspec.json.encode(one), b"\r\n"]
    parts.append(
        b'--%b\r\nContent-Disposition: form-data; name="file"; filename="%b"\r\nContent-Type: %b\r\n\r\n'
        % (boundary, file.name.encode(), file.media_type.encode())
    )
    parts += [file.data, b"\r\n--%b--\r\n" % boundary]
    return b"Content-Type: multipart/form-data; boundary=%b\r\n" % boundary, b"".join(parts)


def _media_type(text: str) -> str:
    given = text.partition(";")[0].strip().lower()
    return given if _TYPE.fullmatch(given) else _ANY_TYPE
