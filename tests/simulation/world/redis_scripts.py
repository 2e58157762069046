"""The Lua of the simulated Redis: the real scripts of `backends/lua`, run by the Lua version that Redis embeds.

Values cross the border as Redis converts them: a number that a script passes to a command becomes text, a missing value becomes `false`,
and a number that a script returns loses its fraction. `lupa` belongs to the development tools, so only the simulation may import this.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from lupa.lua51 import LuaRuntime, lua_type

# What a command answers: text, a number, nothing, or a list of these.
Answer = bytes | int | list[bytes | None] | None
Command = Callable[[str, list[bytes]], Answer]


class Scripts:
    """One Lua interpreter. `run` gives a script its commands for as long as it runs."""

    def __init__(self) -> None:
        self._lua = LuaRuntime(encoding=None, register_eval=False, register_builtins=False)
        self._compiled: dict[str, Any] = {}
        self._command: Command | None = None
        self._lua.globals()[b"redis"] = self._lua.table_from({b"call": self._call})

    def run(self, text: str, key: str, arguments: Sequence[Any], command: Command) -> Any:
        """Run a script on one key and return what a client would read."""
        if text not in self._compiled:
            self._compiled[text] = self._lua.compile(text.encode())
        given = self._lua.globals()
        given[b"KEYS"] = self._lua.table_from([key.encode()])
        given[b"ARGV"] = self._lua.table_from([str(argument).encode() for argument in arguments])
        self._command = command
        try:
            return _to_client(self._compiled[text]())
        finally:
            self._command = None

    def _call(self, verb: bytes, *arguments: bytes | float) -> Any:
        assert self._command is not None, "a script calls commands only while it runs"
        answer = self._command(verb.decode(), [_to_command(argument) for argument in arguments])
        if isinstance(answer, list):
            return self._lua.table_from([False if value is None else value for value in answer])
        return False if answer is None else answer


@lru_cache(maxsize=1)
def scripts() -> Scripts:
    """The interpreter of this process: scripts keep no state in it, so all runs may share it."""
    return Scripts()


@dataclass(slots=True)
class Hash:
    """A key that holds fields, and when it is forgotten."""

    fields: dict[bytes, bytes] = field(default_factory=dict)
    expires_ms: float = math.inf


class Keys:
    """What a server holds, and the commands that the scripts use on it."""

    def __init__(self, now_ms: Callable[[], int]) -> None:
        self._now_ms = now_ms
        self.hashes: dict[bytes, Hash] = {}

    def run_script(self, text: str, key: str, arguments: Sequence[Any]) -> Any:
        return scripts().run(text, key, arguments, self._carry_out)

    def _carry_out(self, verb: str, words: list[bytes]) -> Answer:
        if verb == "TIME":
            now_ms = self._now_ms()
            return [b"%d" % (now_ms // 1000), b"%d" % (now_ms % 1000 * 1000)]
        key, *rest = words
        if key in self.hashes and self.hashes[key].expires_ms <= self._now_ms():
            del self.hashes[key]
        held = self.hashes.get(key)
        match verb:
            case "HMGET":
                return [held.fields.get(name) if held else None for name in rest]
            case "HGET":
                return held.fields.get(rest[0]) if held else None
            case "DEL":
                return int(self.hashes.pop(key, None) is not None)
            case "PEXPIRE":
                if held is not None:
                    held.expires_ms = self._now_ms() + int(rest[0])
                return int(held is not None)
            case "HDEL":
                return sum(held.fields.pop(name, None) is not None for name in rest) if held else 0
        held = self.hashes.setdefault(key, Hash())
        match verb:
            case "HSET":
                held.fields.update(zip(rest[::2], rest[1::2], strict=True))
                return len(rest) // 2
            case "HINCRBY":
                total = int(held.fields.get(rest[0], b"0")) + int(rest[1])
                held.fields[rest[0]] = b"%d" % total
                return total
        raise ValueError(f"the simulated Redis does not know {verb}")


def _to_command(value: bytes | float) -> bytes:
    return value if isinstance(value, bytes) else b"%.17g" % value


def _to_client(value: Any) -> Any:
    if lua_type(value) == "table":
        # A list ends at the first value that is missing.
        found: list[Any] = []
        while (one := value[len(found) + 1]) is not None:
            found.append(_to_client(one))
        return found
    if isinstance(value, bool):
        return 1 if value else None
    return int(value) if isinstance(value, float) else value
