"""The parameters of a header, and the file name among them.

A name is data: it never becomes a path or a header unchanged.
"""

import unicodedata
from urllib.parse import quote, unquote_to_bytes

NAME_BYTES_MAX = 255
FALLBACK = "upload"
_PARAMETERS_MAX = 16
_BIDI = frozenset("\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069\ufeff")
_PLAIN = frozenset("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789 !#$&'()+,-.;=@[]^_`{}~")


def split_parameters(value: bytes) -> tuple[bytes, dict[bytes, bytes]]:
    """Split `form-data; name="a"` into its first word in lower case and its parameters.

    The first of a name counts.
    """
    word, _, rest = value.partition(b";")
    parameters: dict[bytes, bytes] = {}
    while rest and len(parameters) < _PARAMETERS_MAX:
        name, equals, rest = rest.partition(b"=")
        if not equals:
            break
        rest = rest.lstrip(b" \t")
        if rest.startswith(b'"'):
            text, rest = _quoted(rest[1:])
        else:
            text, _, rest = rest.partition(b";")
            text = text.strip()
        parameters.setdefault(name.strip(b" \t;").lower(), text)
    return word.strip().lower(), parameters


def _quoted(rest: bytes) -> tuple[bytes, bytes]:
    """Return the inside of a quoted string, and what follows the parameter."""
    text = bytearray()
    at = 0
    while at < len(rest) and rest[at : at + 1] != b'"':
        # Only a quote and a backslash are escaped; other backslashes come from Windows paths in
        # browsers.
        if rest[at : at + 1] == b"\\" and rest[at + 1 : at + 2] in (b'"', b"\\"):
            at += 1
        text += rest[at : at + 1]
        at += 1
    return bytes(text), rest[at + 1 :].partition(b";")[2]


def file_name(parameters: dict[bytes, bytes]) -> str:
    """Return the file name of a part's Content-Disposition, made harmless."""
    extended = parameters.get(b"filename*")
    if extended is not None and extended.count(b"'") >= 2:
        charset, _, escaped = extended.split(b"'", 2)
        raw = unquote_to_bytes(escaped)
        if charset.lower() in (b"utf-8", b"iso-8859-1"):
            return harmless(raw.decode(charset.decode().lower(), "replace"))
    raw = parameters.get(b"filename", b"")
    try:
        text = raw.decode()
    except UnicodeDecodeError:
        text = raw.decode("latin-1")
    # Browsers and HTTP clients escape these three, and only these.
    for escaped_text, plain in (("%22", '"'), ("%0D", "\r"), ("%0A", "\n")):
        text = text.replace(escaped_text, plain)
    return harmless(text)


def harmless(name: str) -> str:
    """Return the last component of a path, of bounded length and without characters that control a
    terminal or the direction of text.
    """
    visible = "".join(
        char for char in name if char not in _BIDI and unicodedata.category(char) not in ("Cc", "Cs", "Zl", "Zp")
    )
    last = visible.replace("\\", "/").rpartition("/")[2].strip()
    cut = last.encode()[:NAME_BYTES_MAX].decode(errors="ignore")
    return FALLBACK if cut in ("", ".", "..") else cut


def attachment(name: str) -> str:
    """Return a Content-Disposition that makes a browser save the bytes under this name (RFC
    6266)."""
    plain = "".join(char if char in _PLAIN else "_" for char in name)
    if plain == name:
        return f'attachment; filename="{name}"'
    return f"attachment; filename=\"{plain}\"; filename*=UTF-8''{quote(name, safe='')}"
