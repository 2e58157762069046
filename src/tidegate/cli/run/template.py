"""Makes a request from a row, with a JSON template whose strings hold `{{column}}`.

A string that is only one placeholder becomes the column's own value, with its type. Within a longer
text a value is written as text, and an absent value is left out.
"""

import re
from pathlib import Path
from typing import Any

import msgspec

from tidegate.core.errors import SettingsError

InputRow = dict[str, Any]

_PLACEHOLDER = re.compile(r"\{\{\s*([^{}]+?)\s*\}\}")
_CHAT, _COMPLETIONS = "/v1/chat/completions", "/v1/completions"
_REQUEST_FIELDS = {"url", "method", "body"}


class _FilledText(msgspec.Struct, frozen=True):
    """A string of the template, cut alternately into texts and column names; the first
    part is a text."""

    parts: tuple[str, ...]

    def fill(self, row: InputRow) -> Any:
        if len(self.parts) == 3 and not self.parts[0] and not self.parts[2]:
            return row[self.parts[1]]
        return "".join(as_text(row[part]) if index % 2 else part for index, part in enumerate(self.parts))


class Template(msgspec.Struct, frozen=True):
    """A request's endpoint and body, with the columns that the body needs."""

    endpoint: str
    columns: frozenset[str]
    body: Any

    def line(self, custom_id: str, row: InputRow) -> bytes:
        """Return one line of a batch's input."""
        try:
            body = _filled(self.body, row)
        except KeyError as missing:
            raise SettingsError(
                f"The table's {custom_id.replace('-', ' ')} has no column {missing.args[0]}, which the template names: "
                "add it to that row (null is read as nothing), or leave it out of the template."
            ) from None
        request = {"custom_id": custom_id, "method": "POST", "url": self.endpoint, "body": body}
        return msgspec.json.encode(request, enc_hook=str) + b"\n"


def read(path: Path, endpoint: str | None) -> Template:
    """Read a template file: a request with `url` and `body`, or a body alone."""
    try:
        given = msgspec.json.decode(path.read_bytes())
    except FileNotFoundError:
        raise SettingsError(f"There is no template {path}; --template names a JSON file.") from None
    except OSError as error:
        raise SettingsError(f"The template {path} cannot be read: {error.strerror or error}.") from None
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise SettingsError(f"The template {path} is not JSON: {error}.") from None
    if not isinstance(given, dict):
        raise SettingsError(f"The template {path} must be a JSON object: a request's body, or url and body.")
    body = given
    if isinstance(given.get("body"), dict):
        strange = sorted(set(given) - _REQUEST_FIELDS)
        if strange:
            raise SettingsError(
                f"The template {path} has {', '.join(strange)} beside body; only url and method may stand there "
                "(rows get their custom_id by number)."
            )
        body, endpoint = given["body"], endpoint or given.get("url")
    endpoint = endpoint or _guessed(body)
    if not isinstance(endpoint, str) or not endpoint.startswith("/"):
        raise SettingsError(
            f'The template {path} names no endpoint: write "url" beside "body", or say --endpoint PATH.'
        )
    columns: set[str] = set()
    compiled = _compiled(body, columns)
    return Template(endpoint, frozenset(columns), compiled)


def _guessed(body: dict[str, Any]) -> str | None:
    if "messages" in body:
        return _CHAT
    return _COMPLETIONS if "prompt" in body else None


def _compiled(node: Any, columns: set[str]) -> Any:
    if isinstance(node, dict):
        return {key: _compiled(value, columns) for key, value in node.items()}
    if isinstance(node, list):
        return [_compiled(value, columns) for value in node]
    if isinstance(node, str) and len(parts := tuple(_PLACEHOLDER.split(node))) > 1:
        columns.update(parts[1::2])
        return _FilledText(parts)
    return node


def _filled(node: Any, row: InputRow) -> Any:
    if isinstance(node, _FilledText):
        return node.fill(row)
    if isinstance(node, dict):
        return {key: _filled(value, row) for key, value in node.items()}
    if isinstance(node, list):
        return [_filled(value, row) for value in node]
    return node


def as_text(value: Any) -> str:
    """Return a cell as part of a text: an absent value is empty, and a value that is no
    text is written as JSON."""
    if value is None:
        return ""
    return value if isinstance(value, str) else msgspec.json.encode(value, enc_hook=str).decode().strip('"')
