"""The columns that a result line adds to its row: the answer, or why there is none, and
the tokens."""

from collections.abc import Collection
from typing import Any

import msgspec

from tidegate.cli.run.template import InputRow
from tidegate.core.answers.failed_place import split_place
from tidegate.core.errors import SettingsError

EMBEDDINGS = "/v1/embeddings"
_TEXT = {"answer": "text", "error": "text", "finish_reason": "text", "input_tokens": "count", "output_tokens": "count"}
_VECTOR = {"embedding": "vector", "error": "text", "input_tokens": "count"}
_PREFIX = "tidegate_"


class AnswerColumns:
    """The result columns of one table. If the table already has one of their names, all of them
    begin with `tidegate_`."""

    def __init__(self, endpoint: str, taken: Collection[str]) -> None:
        kinds = _VECTOR if endpoint == EMBEDDINGS else _TEXT
        prefix = _PREFIX if any(name in taken for name in kinds) else ""
        self.kinds = {prefix + name: kind for name, kind in kinds.items()}
        again = sorted(name for name in self.kinds if name in taken)
        if again:
            raise SettingsError(f"The table has a column {again[0]} already, where a result belongs; rename it.")
        self._names = {name: prefix + name for name in kinds}

    def add(self, row: InputRow, line: bytes) -> InputRow:
        """Return the row with the result of this line."""
        result = msgspec.json.decode(line)
        found = _read(result)
        return {**row, **{column: found.get(name) for name, column in self._names.items()}}


def _read(result: dict[str, Any]) -> dict[str, Any]:
    response = result.get("response") or {}
    body = response.get("body")
    body = body if isinstance(body, dict) else {}
    usage = body.get("usage") or {}
    error = result.get("error") or (body.get("error") if response.get("status_code", 200) >= 400 else None)
    return {
        **(_answer(body) if error is None else {"error": _error_text(error)}),
        "input_tokens": usage.get("prompt_tokens", usage.get("input_tokens")),
        "output_tokens": usage.get("completion_tokens", usage.get("output_tokens")),
    }


def _error_text(error: Any) -> str:
    if not isinstance(error, dict):
        return str(error)
    # The place in the input is left out: the error stands in its row.
    code, message = error.get("code") or error.get("type"), split_place(error.get("message") or "")[0]
    return f"{code}: {message}" if code else message


def _answer(body: dict[str, Any]) -> dict[str, Any]:
    """Return the text or vector of an answer, from any of the endpoints' shapes;
    another shape is kept as JSON."""
    if choices := body.get("choices"):
        return _choice(choices[0])
    if (data := body.get("data")) and isinstance(data[0], dict) and "embedding" in data[0]:
        return {"embedding": data[0]["embedding"]}
    if isinstance(body.get("output"), list):
        texts = [_texts(item.get("content")) for item in body["output"] if isinstance(item, dict)]
        return {"answer": "".join(texts), "finish_reason": body.get("status")}
    if isinstance(body.get("content"), list):
        return {"answer": _texts(body["content"]), "finish_reason": body.get("stop_reason")}
    return {"answer": msgspec.json.encode(body).decode()}


def _choice(choice: dict[str, Any]) -> dict[str, Any]:
    message = choice.get("message") or {}
    text = message.get("content", choice.get("text"))
    if text is None and message.get("tool_calls"):
        text = msgspec.json.encode(message["tool_calls"]).decode()
    return {"answer": text, "finish_reason": choice.get("finish_reason")}


def _texts(content: Any) -> str:
    parts = content if isinstance(content, list) else []
    return "".join(part["text"] for part in parts if isinstance(part, dict) and isinstance(part.get("text"), str))
