"""Translate a stream of chat completion chunks to Anthropic's events: bytes in, bytes out; only its
state is kept.

A chunk without a translation becomes an `error` event and ends the stream, because the client
already has its head. The usage comes with the last `message_delta`, because OpenAI's streams send
it last.
"""

from typing import Any

import msgspec

from tidegate.core.translate.problems import error_object, status_of
from tidegate.core.translate.sse import EVENT_BYTES_MAX, EventReader, StreamBroken
from tidegate.core.translate.usage import STOP_TO_ANTHROPIC, id_to_anthropic, usage_to_anthropic


class StreamToAnthropic:
    """The translation of one stream.

    It takes the upstream's bytes and returns those for the client. `ended`: no more will come.
    """

    def __init__(self, event_bytes_max: int = EVENT_BYTES_MAX) -> None:
        self._events = EventReader(event_bytes_max)
        self._started = False
        self._block = -1
        self._open = ""
        self._tool = -1
        self._tool_id = ""
        self._finish: str | None = None
        self._sequence: str | None = None
        self._called = False
        self._refused = False
        self._usage: Any = None
        self.ended = False

    def feed(self, chunk: bytes) -> bytes:
        out: list[bytes] = []
        if self.ended:
            return b""
        try:
            for event in self._events.feed(chunk):
                if event.name == ":" or not event.data:
                    out.append(_event("ping", {}))
                elif event.data.strip() == b"[DONE]":
                    self._close(out)
                else:
                    self._chunk(msgspec.json.decode(event.data), out)
                if self.ended:
                    break
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            self._fail(out, "the upstream's stream has a chunk that is not JSON")
        except StreamBroken as wrong:
            self._fail(out, str(wrong))
        return b"".join(out)

    def end_stream(self) -> bytes:
        """Return the events that close the stream, after the upstream closed its own."""
        out: list[bytes] = []
        if not self.ended:
            self._close(out)
        return b"".join(out)

    def _chunk(self, chunk: Any, out: list[bytes]) -> None:
        if not isinstance(chunk, dict):
            raise StreamBroken("the upstream's stream has a chunk that is no object")
        if chunk.get("error") is not None:
            self._error(chunk["error"], out)
            return
        if isinstance(chunk.get("usage"), dict):
            self._usage = chunk["usage"]
        if not self._started:
            self._start(chunk, out)
        choices = chunk.get("choices")
        for choice in choices if isinstance(choices, list) else ():
            if not isinstance(choice, dict) or choice.get("index", 0) != 0:
                raise StreamBroken("the upstream streams several choices, and a message has room for one")
            delta = choice.get("delta")
            self._delta(delta if isinstance(delta, dict) else {}, out)
            if isinstance(choice.get("finish_reason"), str):
                self._finish = choice["finish_reason"]
            if isinstance(choice.get("stop_reason"), str):
                self._sequence = choice["stop_reason"]

    def _start(self, chunk: dict[str, Any], out: list[bytes]) -> None:
        self._started = True
        message: dict[str, Any] = {
            "id": id_to_anthropic(str(chunk.get("id") or "")),
            "type": "message",
            "role": "assistant",
            "model": str(chunk.get("model") or ""),
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": {**usage_to_anthropic(self._usage), "output_tokens": 0},
        }
        out.append(_event("message_start", {"message": message}))

    def _delta(self, delta: dict[str, Any], out: list[bytes]) -> None:
        if delta.get("function_call") is not None or delta.get("audio") is not None:
            raise StreamBroken(
                "the upstream's stream calls a function or speaks in a way that Anthropic's events cannot"
            )
        for name in ("reasoning_content", "reasoning"):
            if isinstance(thought := delta.get(name), str) and thought:
                self._ensure("thinking", {"type": "thinking", "thinking": "", "signature": ""}, out)
                self._say({"type": "thinking_delta", "thinking": thought}, out)
                break
        for name in ("content", "refusal"):
            if isinstance(text := delta.get(name), str) and text:
                self._refused |= name == "refusal"
                self._ensure("text", {"type": "text", "text": ""}, out)
                self._say({"type": "text_delta", "text": text}, out)
        calls = delta.get("tool_calls")
        for call in calls if isinstance(calls, list) else ():
            self._call(call, out)

    def _call(self, call: Any, out: list[bytes]) -> None:
        function = call.get("function") if isinstance(call, dict) else None
        index = call.get("index", 0) if isinstance(call, dict) else None
        if type(index) is not int or not isinstance(function, dict):
            raise StreamBroken("the upstream's stream has a tool call without a function or an index")
        name, named = function.get("name"), call.get("id")
        # Some servers give each of several calls the number 0; some send an id with every part of a
        # call, but the name once.
        if index != self._tool or (name and named and named != self._tool_id):
            if index < self._tool or not isinstance(name, str) or not isinstance(named, str):
                raise StreamBroken("the upstream's stream goes on with a tool call that is over or never began")
            self._stop_block(out)
            self._tool, self._tool_id, self._called = index, named, True
            self._ensure("tool_use", {"type": "tool_use", "id": named, "name": name, "input": {}}, out)
        elif self._open != "tool_use":
            raise StreamBroken("the upstream's stream goes on with a tool call that is over")
        if isinstance(arguments := function.get("arguments"), str) and arguments:
            self._say({"type": "input_json_delta", "partial_json": arguments}, out)

    def _ensure(self, kind: str, block: dict[str, Any], out: list[bytes]) -> None:
        """Open a block of this kind, unless one is open: blocks come one after another."""
        if self._open != kind:
            self._stop_block(out)
            self._block += 1
            self._open = kind
            out.append(_event("content_block_start", {"index": self._block, "content_block": block}))

    def _say(self, delta: dict[str, Any], out: list[bytes]) -> None:
        out.append(_event("content_block_delta", {"index": self._block, "delta": delta}))

    def _stop_block(self, out: list[bytes]) -> None:
        if self._open:
            out.append(_event("content_block_stop", {"index": self._block}))
            self._open = ""

    def _close(self, out: list[bytes]) -> None:
        reason = STOP_TO_ANTHROPIC.get(self._finish or "")
        if reason is None:
            what = "ended before it was finished" if self._finish is None else "ended for a reason that we do not know"
            self._fail(out, f"the upstream's stream {what}")
            return
        sequence = self._sequence if self._finish == "stop" else None
        if self._finish == "stop":
            reason = (
                "refusal" if self._refused else "tool_use" if self._called else "stop_sequence" if sequence else reason
            )
        self._stop_block(out)
        delta = {"stop_reason": reason, "stop_sequence": sequence}
        out.append(_event("message_delta", {"delta": delta, "usage": usage_to_anthropic(self._usage)}))
        out.append(_event("message_stop", {}))
        self.ended = True

    def _error(self, error: Any, out: list[bytes]) -> None:
        inner = error if isinstance(error, dict) else {"message": error}
        out.append(_event("error", {"error": error_object(status_of(inner), inner)["error"]}))
        self.ended = True

    def _fail(self, out: list[bytes], message: str) -> None:
        self._error({"type": "api_error", "message": message}, out)


def _event(name: str, fields: dict[str, Any]) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (name.encode(), msgspec.json.encode({"type": name, **fields}))
