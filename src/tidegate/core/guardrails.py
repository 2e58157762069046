"""The guardrails that come with the house: how long, which words, which shape. Each judges a body and passes, changes or refuses it.

    Length      bytes and estimated tokens of a prompt, bytes of an answer
    Patterns    an operator's regular expressions: what is found is refused (deny) or replaced (redact)
    AnswerShape the text of an answer is JSON that fits a schema

Patterns look at every text of a body but for the words of the API itself (roles, types, ids) and media; keys are not texts. A text longer
than the bound is refused rather than left unseen; what may take long to look through is for a process of its own. Bodies are changed in
place: every byte around a replaced text stays as it was. Own guardrails are anything with these two methods; who loads them is not this
module's affair.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Protocol

import msgspec

from tidegate.core.errors import SettingsError
from tidegate.core.estimate import prompt_tokens
from tidegate.core.json_schema import Schema
from tidegate.core.patterns import Needle, compile_pattern, loose_repeats, needle_of

TEXT_CHARS_MAX = 1_000_000
# Bodies up to these sizes can be looked through at once, by how many loose repeats the patterns have: a few milliseconds at the worst.
QUICK_BYTES_MAX = (16_000, 2_000, 200)
# A string token of JSON, and whether a colon behind it makes it a key. The repeats are possessive: there is nothing to take back.
_TOKEN = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"(\s*+:\s*+)?', re.DOTALL)
_API_WORDS = frozenset((b'"role"', b'"type"', b'"object"', b'"finish_reason"', b'"stop_reason"', b'"model"', b'"id"'))
_MEDIA = frozenset((b'"data"', b'"b64_json"', b'"embedding"'))
# A plain letter that is written as an escape: nobody honest does, and a search for plain text would not see it.
_ESCAPED_ASCII = re.compile(rb"\\u00[0-7]")
_BACKSLASH = ord("\\")
_decode_text = msgspec.json.Decoder(str).decode
_encode = msgspec.json.encode


class Code(StrEnum):
    """Why a body was refused, as the item's error line and the metrics say it."""

    LENGTH = "guardrail_length"
    PATTERN = "guardrail_pattern"
    SCHEMA = "guardrail_schema"
    REFUSED = "guardrail_refused"


class Pass(msgspec.Struct, frozen=True, gc=False):
    """Goes on as it is."""


class Transformed(msgspec.Struct, frozen=True, gc=False):
    """Goes on as this body instead."""

    body: bytes


class Refuse(msgspec.Struct, frozen=True, gc=False):
    """Does not go on. A refusal is final: the same body would be refused again. Own guardrails have codes of their own."""

    code: str
    message: str


Verdict = Pass | Transformed | Refuse
PASS = Pass()


class Guardrail(Protocol):
    """What judges bodies. Both methods are pure, and quick: they run for every item."""

    def check_prompt(self, body: bytes) -> Verdict:
        """Before a request is sent."""

    def check_answer(self, body: bytes) -> Verdict:
        """Before an answer is recorded or handed on."""


def run(checks: Sequence[Callable[[bytes], Verdict]], body: bytes) -> Verdict:
    """Each check in turn, on what the one before it left; the first refusal is the verdict."""
    now = body
    for check in checks:
        verdict = check(now)
        if isinstance(verdict, Refuse):
            return verdict
        if isinstance(verdict, Transformed):
            now = verdict.body
    return PASS if now is body else Transformed(now)


@dataclass(frozen=True, slots=True)
class Length:
    """Bounds of a prompt and of an answer; 0 lifts one. Tokens are the estimate that everything else goes by."""

    prompt_bytes_max: int = 0
    prompt_tokens_max: int = 0
    answer_bytes_max: int = 0

    def __post_init__(self) -> None:
        for name in ("prompt_bytes_max", "prompt_tokens_max", "answer_bytes_max"):
            if getattr(self, name) < 0:
                raise SettingsError(f"guardrail length: {name} is {getattr(self, name)}: use 0 to lift it, or more")

    def check_prompt(self, body: bytes) -> Verdict:
        if self.prompt_bytes_max and len(body) > self.prompt_bytes_max:
            return _too_long("request", f"{len(body)} bytes", f"{self.prompt_bytes_max} bytes")
        if self.prompt_tokens_max and (tokens := prompt_tokens(len(body))) > self.prompt_tokens_max:
            return _too_long("request", f"about {tokens} tokens", f"{self.prompt_tokens_max} tokens")
        return PASS

    def check_answer(self, body: bytes) -> Verdict:
        if self.answer_bytes_max and len(body) > self.answer_bytes_max:
            return _too_long("answer", f"{len(body)} bytes", f"{self.answer_bytes_max} bytes")
        return PASS


def _too_long(what: str, size: str, most: str) -> Refuse:
    return Refuse(Code.LENGTH, f"The {what} has {size}, and a guardrail allows {most}: make it shorter.")


class Action(StrEnum):
    DENY = "deny"
    REDACT = "redact"


class PatternSpec(msgspec.Struct, frozen=True):
    """All that makes a guardrail of patterns, as it can be told to another process."""

    name: str
    patterns: tuple[str, ...]
    action: Action
    replacement: str
    text_chars_max: int


class Patterns:
    """Regular expressions over the texts of prompts, answers or both. `replacement` is literal: it refers to no group."""

    def __init__(
        self,
        name: str,
        patterns: Sequence[str],
        action: Action = Action.DENY,
        *,
        replacement: str = "[redacted]",
        prompts: bool = True,
        answers: bool = True,
        text_chars_max: int = TEXT_CHARS_MAX,
    ) -> None:
        if not patterns:
            raise SettingsError(f"guardrail {name!r} has no patterns: give it one, or remove it")
        if text_chars_max < 1:
            raise SettingsError(f"guardrail {name!r}: text_chars_max is {text_chars_max}: use 1 or more")
        self._name = name
        self._patterns = [
            compile_pattern(text, f"guardrail {name!r}, pattern {number + 1}") for number, text in enumerate(patterns)
        ]
        needles = [needle_of(text) for text in patterns]
        self._searches = [
            (pattern, needle, needle.rarest if needle else 0)
            for pattern, needle in zip(self._patterns, needles, strict=True)
        ]
        self._action = action
        self._replacement = replacement
        self.spec = PatternSpec(name, tuple(patterns), action, replacement, text_chars_max)
        loose = max(loose_repeats(text) for text in patterns)
        self._quick_bytes_max = QUICK_BYTES_MAX[min(loose, len(QUICK_BYTES_MAX) - 1)]
        self._prompts = prompts
        self._answers = answers
        self._text_chars_max = text_chars_max

    def check_prompt(self, body: bytes) -> Verdict:
        return self._check(body, "request") if self._prompts else PASS

    def check_answer(self, body: bytes) -> Verdict:
        return self._check(body, "answer") if self._answers else PASS

    def quick_check(self, what: str) -> Callable[[bytes], Verdict | None]:
        """The same check of a request or an answer, but for bodies that may hold whoever looks them through: for these it says None."""

        def check(body: bytes) -> Verdict | None:
            patterns = self._candidates(body)
            if not patterns:
                return PASS
            return None if len(body) > self._quick_bytes_max else self._look(patterns, body, what)

        return check

    def _candidates(self, body: bytes) -> list[re.Pattern[str]]:
        """The patterns that may match something in this body: those whose needle is in it, or that have none."""
        if len(body) > self._text_chars_max or (_BACKSLASH in body and _ESCAPED_ASCII.search(body)):
            return self._patterns
        return [
            pattern
            for pattern, needle, rarest in self._searches
            if needle is None
            or (_may_fold(needle, body) if needle.folded else (rarest in body and needle.text in body))
        ]

    def _check(self, body: bytes, what: str) -> Verdict:
        patterns = self._candidates(body)
        return self._look(patterns, body, what) if patterns else PASS

    def _look(self, patterns: list[re.Pattern[str]], body: bytes, what: str) -> Verdict:
        pieces: list[bytes] = []
        done = 0
        for start, end, text in _texts(body):
            if len(text) > self._text_chars_max:
                return Refuse(
                    Code.LENGTH,
                    f"A text of the {what} has {len(text)} characters, more than the {self._text_chars_max} that the guardrail "
                    f"{self._name!r} can look at: split it.",
                )
            if self._action is Action.DENY:
                if any(pattern.search(text) for pattern in patterns):
                    return Refuse(
                        Code.PATTERN,
                        f"The guardrail {self._name!r} does not let this {what} pass: change its text.",
                    )
                continue
            redacted = text
            for pattern in patterns:
                redacted = pattern.sub(lambda _: self._replacement, redacted)
            if redacted != text:
                pieces += [body[done:start], _encode(redacted)]
                done = end
        return Transformed(b"".join([*pieces, body[done:]])) if pieces else PASS


def _may_fold(needle: Needle, body: bytes) -> bool:
    """Whether this needle may be in the body in some case. Some letters of other alphabets fold to plain ones: then nobody can say."""
    return not body.isascii() or needle.text in body.lower() or b"\\u" in body


def _texts(body: bytes) -> Iterator[tuple[int, int, str]]:
    """Each text of a JSON body that a person or a model may have written: where its token lies, and what it says."""
    key, key_end = b"", -1
    for found in _TOKEN.finditer(body):
        if found[1] is not None:
            key, key_end = body[found.start() : found.start(1)], found.end()
            continue
        # A string that follows no key is an element of a list, and the last key says nothing about it.
        named = key if found.start() == key_end else b""
        if named in _API_WORDS or named in _MEDIA:
            continue
        token = found[0]
        if named == b'"url"' and token.startswith(b'"data:'):
            continue
        try:
            text = _decode_text(token)
            text.encode()
        except (msgspec.MsgspecError, UnicodeError):
            # Half a character: the text is looked at as it was written.
            text = token[1:-1].decode("utf-8", "replace")
        yield found.start(), found.end(), text


class AnswerShape:
    """The text of every choice of an answer is JSON that fits this schema. An answer that only calls tools has no text to judge."""

    def __init__(self, name: str, schema: Any) -> None:
        self._name = name
        try:
            self._schema = Schema(schema)
        except SettingsError as wrong:
            raise SettingsError(f"guardrail {name!r}: {wrong}") from None

    def check_prompt(self, body: bytes) -> Verdict:
        return PASS

    def check_answer(self, body: bytes) -> Verdict:
        try:
            texts = answer_texts(msgspec.json.decode(body))
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            return self._refuse("it is not JSON")
        for text in texts:
            try:
                value = msgspec.json.decode(text)
            except (msgspec.MsgspecError, UnicodeError, RecursionError):
                return self._refuse("its text is not JSON")
            why = self._schema.problem(value)
            if why is not None:
                return self._refuse(why)
        return PASS

    def _refuse(self, why: str) -> Refuse:
        return Refuse(Code.SCHEMA, f"The answer does not fit the schema of the guardrail {self._name!r}: {why}.")


def answer_texts(answer: Any) -> list[str]:
    """What the model said, one text per choice, in whichever of the answer shapes it is."""
    if not isinstance(answer, dict):
        return []
    if isinstance(answer.get("choices"), list):
        return [text for choice in answer["choices"] if isinstance(choice, dict) for text in _choice_texts(choice)]
    if isinstance(answer.get("output"), list):
        messages = [one for one in answer["output"] if isinstance(one, dict) and one.get("type") == "message"]
        return [_joined(one.get("content"), "output_text") for one in messages]
    if isinstance(answer.get("content"), list):
        text = _joined(answer["content"], "text")
        return [text] if text else []
    return []


def _choice_texts(choice: dict[str, Any]) -> Iterator[str]:
    message = choice.get("message")
    text = message.get("content") if isinstance(message, dict) else choice.get("text")
    if isinstance(text, str):
        yield text


def _joined(blocks: Any, kind: str) -> str:
    return "".join(
        str(block.get("text", ""))
        for block in (blocks if isinstance(blocks, list) else ())
        if isinstance(block, dict) and block.get("type") == kind
    )
