"""The audio file of a call."""

import msgspec


class AudioFile(msgspec.Struct, frozen=True, gc=False):
    """A file of speech; its name tells servers its format."""

    name: str
    media_type: str
    data: bytes
