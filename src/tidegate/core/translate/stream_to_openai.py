"""Translate a stream of Anthropic's events to chat completion chunks: bytes in, bytes out; only its
state is kept.

Events of new kinds are skipped, as Anthropic asks of its clients. Content of new kinds is not
skipped, because it would be lost: it becomes an error chunk and ends the stream.
"""

from typing import Any

import msgspec

from tidegate.core.translate.problems import openai_error_object, status_of
from tidegate.core.translate.sse import EVENT_BYTES_MAX, EventReader, StreamBroken
from tidegate.core.translate.usage import STOP_TO_OPENAI, id_to_openai, usage_to_openai

_DONE = b"data: [DONE]\n\n"


class StreamToOpenai:
    """The translation of one stream.

    It takes the upstream's bytes and returns those for the client. `ended`: no more will come.

    `created_s` is the time in the chunks; with `include_usage` the last chunk has the usage, as
    OpenAI's has when asked.
    """

    def __init__(self, created_s: int, *, include_usage: bool = False, event_bytes_max: int = EVENT_BYTES_MAX) -> None:
        self._events = EventReader(event_bytes_max)
        self._created_s = created_s
        self._include_usage = include_usage
        self._id = ""
        self._model = ""
        self._tool = -1
        self._open = ""
        self._has_arguments = False
        self._usage: dict[str, Any] = {}
        self._finished = False
        self.ended = False

    def feed(self, chunk: bytes) -> bytes:
        out: list[bytes] = []
        if self.ended:
            return b""
        try:
            for event in self._events.feed(chunk):
                if event.name != ":" and event.data:
                    self._event(msgspec.json.decode(event.data), out)
                if self.ended:
                    break
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            self._fail(out, "the upstream's stream has an event that is not JSON")
        except StreamBroken as wrong:
            self._fail(out, str(wrong))
        return b"".join(out)

    def end_stream(self) -> bytes:
        """Return the chunks that close the stream, after the upstream closed its own."""
        out: list[bytes] = []
        if not self.ended:
            self._fail(out, "the upstream's stream ended before it was finished")
        return b"".join(out)

    def _event(self, event: Any, out: list[bytes]) -> None:
        if not isinstance(event, dict):
            raise StreamBroken("the upstream's stream has an event that is no object")
        kind = event.get("type")
        if kind == "message_start":
            self._start(_object(event, "message"), out)
        elif kind == "content_block_start":
            self._start_block(_object(event, "content_block"), out)
        elif kind == "content_block_delta":
            self._delta(_object(event, "delta"), out)
        elif kind == "content_block_stop":
            if self._open == "tool_use" and not self._has_arguments:
                self._say({"tool_calls": [{"index": self._tool, "function": {"arguments": "{}"}}]}, out)
            self._open = ""
        elif kind == "message_delta":
            self._finish(event, out)
        elif kind == "message_stop":
            self._close(out)
        elif kind == "ping":
            out.append(b": ping\n\n")
        elif kind == "error":
            self._error(event.get("error"), out)

    def _start(self, message: dict[str, Any], out: list[bytes]) -> None:
        self._id = id_to_openai(str(message.get("id") or ""))
        self._model = str(message.get("model") or "")
        self._count(message.get("usage"))
        self._say({"role": "assistant", "content": ""}, out)

    def _start_block(self, block: dict[str, Any], out: list[bytes]) -> None:
        self._open = str(block.get("type"))
        if self._open == "text":
            if isinstance(text := block.get("text"), str) and text:
                self._say({"content": text}, out)
        elif self._open == "tool_use":
            self._tool += 1
            given = block.get("input")
            arguments = msgspec.json.encode(given).decode() if given else ""
            self._has_arguments = bool(arguments)
            function = {"name": str(block.get("name")), "arguments": arguments}
            call = {"index": self._tool, "id": str(block.get("id")), "type": "function", "function": function}
            self._say({"tool_calls": [call]}, out)
        elif self._open not in ("thinking", "redacted_thinking"):
            raise StreamBroken("the upstream streams content of a kind that OpenAI's chunks have no place for")

    def _delta(self, delta: dict[str, Any], out: list[bytes]) -> None:
        kind = delta.get("type")
        if kind == "text_delta":
            self._say({"content": str(delta.get("text", ""))}, out)
        elif kind == "input_json_delta":
            if arguments := str(delta.get("partial_json", "")):
                self._has_arguments = True
                self._say({"tool_calls": [{"index": self._tool, "function": {"arguments": arguments}}]}, out)
        elif kind == "thinking_delta":
            self._say({"reasoning_content": str(delta.get("thinking", ""))}, out)
        elif kind != "signature_delta":
            raise StreamBroken("the upstream streams content of a kind that OpenAI's chunks have no place for")

    def _finish(self, event: dict[str, Any], out: list[bytes]) -> None:
        self._count(event.get("usage"))
        delta = _object(event, "delta")
        reason = delta.get("stop_reason")
        if reason is None:
            return
        if not isinstance(reason, str) or reason not in STOP_TO_OPENAI:
            raise StreamBroken("the upstream's stream ended for a reason that OpenAI's chunks have no word for")
        self._finished = True
        sequence = delta.get("stop_sequence")
        extra = {"stop_reason": sequence} if reason == "stop_sequence" and isinstance(sequence, str) else {}
        self._say({}, out, STOP_TO_OPENAI[reason], extra)

    def _count(self, usage: Any) -> None:
        # Each count is cumulative; one that is not repeated keeps its value.
        if isinstance(usage, dict):
            self._usage |= {name: value for name, value in usage.items() if value is not None}

    def _close(self, out: list[bytes]) -> None:
        if not self._finished:
            raise StreamBroken("the upstream's stream ended without saying why")
        if self._include_usage:
            out.append(self._chunk([], usage_to_openai(self._usage)))
        out.append(_DONE)
        self.ended = True

    def _say(
        self,
        delta: dict[str, Any],
        out: list[bytes],
        finish: str | None = None,
        extra: dict[str, Any] | None = None,
    ) -> None:
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish, **(extra or {})}
        out.append(self._chunk([choice], None))

    def _chunk(self, choices: list[dict[str, Any]], usage: dict[str, Any] | None) -> bytes:
        chunk: dict[str, Any] = {
            "id": self._id,
            "object": "chat.completion.chunk",
            "created": self._created_s,
            "model": self._model,
            "choices": choices,
        }
        if self._include_usage:
            chunk["usage"] = usage
        return b"data: %b\n\n" % msgspec.json.encode(chunk)

    def _error(self, error: Any, out: list[bytes]) -> None:
        inner = error if isinstance(error, dict) else {"message": error}
        out.append(b"data: %b\n\n" % msgspec.json.encode(openai_error_object(status_of(inner), inner)))
        self.ended = True

    def _fail(self, out: list[bytes], message: str) -> None:
        self._error({"type": "api_error", "message": message}, out)


def _object(event: dict[str, Any], name: str) -> dict[str, Any]:
    value = event.get(name)
    if not isinstance(value, dict):
        raise StreamBroken(f"the upstream's stream has an event without `{name}`")
    return value
