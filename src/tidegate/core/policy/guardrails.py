"""The built-in guardrails: length, patterns and shape.

Each judges a body and passes, changes or refuses it.

    Length      bytes and estimated tokens of a prompt, bytes of an answer
    Patterns    an operator's regular expressions: what is found is refused (deny) or replaced (redact)
    AnswerShape the text of an answer is JSON that fits a schema

Patterns look at all texts of a body (`body_texts.py`). A body with a part that cannot be looked at
is refused, unless the operator lets it pass, and so is one with a text longer than the bound.
Bodies are changed in place: every byte around a replaced text stays as it was, and a body with a
match left after that is refused. An operator's own guardrail is anything with these two methods;
this module does not load it.
"""

import re
from collections.abc import Iterator, Sequence
from enum import StrEnum
from typing import Any, Protocol

import msgspec

from tidegate.core.errors import SettingsError
from tidegate.core.policy.body_texts import BodyTexts, is_api_word, readings
from tidegate.core.policy.chat_texts import chat_texts
from tidegate.core.policy.json_schema import Schema
from tidegate.core.policy.patterns import Finder
from tidegate.core.usage.estimate import prompt_tokens
from tidegate.core.wording import in_words

TEXT_CHARS_MAX = 1_000_000
# The most that is looked through at once, a few milliseconds at worst: in bytes, and in bytes times
# the weight of the patterns.
QUICK_BYTES_MAX = 16_000
QUICK_WORK_MAX = 1_000_000
# A string token of JSON, and the colon after it that makes it a key. The repeats are possessive:
# they need no backtracking.
_TOKEN = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"(\s*+:\s*+)?', re.DOTALL)
_decode_text = msgspec.json.Decoder(str).decode
_encode = msgspec.json.encode


class GuardrailCode(StrEnum):
    """The reasons why a body was refused, for the item's error line and the metrics."""

    LENGTH = "guardrail_length"
    PATTERN = "guardrail_pattern"
    UNSEEN = "guardrail_unseen"
    SCHEMA = "guardrail_schema"
    REFUSED = "guardrail_refused"


class Pass(msgspec.Struct, frozen=True, gc=False):
    """The body goes on unchanged."""


class Transformed(msgspec.Struct, frozen=True, gc=False):
    """The body is replaced by this one."""

    body: bytes


class GuardrailRefusal(msgspec.Struct, frozen=True, gc=False):
    """The body is refused.

    That is final: it would be refused again. Own guardrails have codes of their own.
    """

    code: str
    message: str


GuardVerdict = Pass | Transformed | GuardrailRefusal
PASS = Pass()


class Guardrail(Protocol):
    """A judge of bodies. Both methods are pure and quick, because they run for every item."""

    def check_prompt(self, body: bytes) -> GuardVerdict:
        """Judge a request before it is sent."""

    def check_answer(self, body: bytes) -> GuardVerdict:
        """Judge an answer before it is recorded or passed on."""


class Length(msgspec.Struct, frozen=True):
    """Bounds of a prompt and of an answer; 0 lifts one. Tokens are estimated as everywhere else."""

    prompt_bytes_max: int = 0
    prompt_tokens_max: int = 0
    answer_bytes_max: int = 0

    def __post_init__(self) -> None:
        for name in ("prompt_bytes_max", "prompt_tokens_max", "answer_bytes_max"):
            if getattr(self, name) < 0:
                raise SettingsError(f"guardrail length: {name} is {getattr(self, name)}: use 0 to lift it, or more")

    def check_prompt(self, body: bytes) -> GuardVerdict:
        if self.prompt_bytes_max and len(body) > self.prompt_bytes_max:
            return _too_long("request", f"{len(body)} bytes", f"{self.prompt_bytes_max} bytes")
        if self.prompt_tokens_max and (tokens := prompt_tokens(len(body))) > self.prompt_tokens_max:
            return _too_long("request", f"about {in_words(tokens, 'token')}", in_words(self.prompt_tokens_max, "token"))
        return PASS

    def check_answer(self, body: bytes) -> GuardVerdict:
        if self.answer_bytes_max and len(body) > self.answer_bytes_max:
            return _too_long("answer", f"{len(body)} bytes", f"{self.answer_bytes_max} bytes")
        return PASS


def _too_long(what: str, size: str, most: str) -> GuardrailRefusal:
    return GuardrailRefusal(
        GuardrailCode.LENGTH, f"The {what} has {size}, and a guardrail allows {most}: make it shorter."
    )


class Action(StrEnum):
    DENY = "deny"
    REDACT = "redact"


class Unseen(StrEnum):
    """What to do with a body of which a part cannot be looked at."""

    REFUSE = "refuse"
    PASS = "pass"


class Patterns:
    """Regular expressions over all texts of prompts and answers.

    `replacement` is literal: it refers to no group.
    """

    def __init__(
        self,
        name: str,
        patterns: Sequence[str],
        action: Action = Action.DENY,
        *,
        replacement: str = "[redacted]",
        unseen: Unseen = Unseen.REFUSE,
        text_chars_max: int = TEXT_CHARS_MAX,
    ) -> None:
        if not patterns:
            raise SettingsError(f"guardrail {name!r} has no patterns: give it one, or remove it")
        if text_chars_max < 1:
            raise SettingsError(f"guardrail {name!r}: text_chars_max is {text_chars_max}: use 1 or more")
        self._name = name
        self._finder = Finder(patterns, f"guardrail {name!r}")
        if self._finder.finds(""):
            raise SettingsError(
                f"guardrail {name!r} has a pattern that matches nothing at all, so it is in every text: ask for a character"
            )
        self._action = action
        self._replacement = replacement
        self._unseen = unseen
        self._text_chars_max = text_chars_max
        self._quick_bytes_max = min(QUICK_BYTES_MAX, QUICK_WORK_MAX // self._finder.weight)

    def is_quick(self, body: bytes) -> bool:
        """Return whether this body can be looked through without holding up others."""
        return len(body) <= self._quick_bytes_max

    def check_prompt(self, body: bytes) -> GuardVerdict:
        return self._check(body, "request")

    def check_answer(self, body: bytes) -> GuardVerdict:
        return self._check(body, "answer")

    def _check(self, body: bytes, what: str) -> GuardVerdict:
        refusal = self._look(body, what)
        if refusal is None:
            return PASS
        if self._action is Action.DENY or refusal.code != GuardrailCode.PATTERN:
            return refusal
        redacted = self._redacted(body, is_answer=what == "answer")
        return Transformed(redacted) if self._look(redacted, what) is None else refusal

    def _look(self, body: bytes, what: str) -> GuardrailRefusal | None:
        is_answer = what == "answer"
        texts = chat_texts(body, is_answer=is_answer)
        if texts is None:
            found = BodyTexts(body, is_answer=is_answer)
            texts, unseen = found.texts, found.unseen
        elif len(body) <= self._text_chars_max and self._finder.finds_nothing_in(body):
            # So it is with most items.
            return None
        else:
            unseen = ""
        may_find = any(map(self._finder.may_find_in, readings("\n".join(texts))))
        for text in dict.fromkeys(texts) if may_find or len(body) > self._text_chars_max else ():
            if len(text) > self._text_chars_max:
                return GuardrailRefusal(
                    GuardrailCode.LENGTH,
                    f"A text of the {what} has {len(text)} characters, more than the {self._text_chars_max} that the guardrail "
                    f"{self._name!r} can look at: split it.",
                )
            if any(map(self._finder.finds, readings(text))):
                return GuardrailRefusal(
                    GuardrailCode.PATTERN,
                    f"The guardrail {self._name!r} does not let this {what} pass: change its text.",
                )
        if unseen and self._unseen is Unseen.REFUSE:
            return GuardrailRefusal(
                GuardrailCode.UNSEEN,
                f"The guardrail {self._name!r} cannot look at all of this {what}, so it does not pass: {unseen}.",
            )
        return None

    def _redacted(self, body: bytes, *, is_answer: bool) -> bytes:
        """Return the body with every match in its values replaced."""
        chunks: list[bytes] = []
        done = 0
        for start, end, name, text in _values(body):
            if is_api_word(name, text, is_answer=is_answer):
                continue
            redacted = self._finder.replaced(text, self._replacement)
            if redacted != text:
                chunks += [body[done:start], _encode(redacted)]
                done = end
        return b"".join([*chunks, body[done:]])


def _values(body: bytes) -> Iterator[tuple[int, int, str, str]]:
    """Yield each string value of a JSON body: where its token begins and ends, its field, and its
    text.
    """
    key, key_end = "", 0
    for found in _TOKEN.finditer(body):
        if found[1] is not None:
            key, key_end = found[0][1 : found.start(1) - found.start() - 1].decode("utf-8", "replace"), found.end()
            continue
        try:
            text = _decode_text(found[0])
        except (msgspec.MsgspecError, UnicodeError):
            # Half a character: look at the text as it was written.
            text = found[0][1:-1].decode("utf-8", "replace")
        # A string that follows no key is an element of a list, and the last key says nothing about
        # it.
        yield found.start(), found.end(), key if found.start() == key_end else "", text


class AnswerShape:
    """The rule that the text of every choice is JSON that fits this schema; an answer that only
    calls tools has no text.
    """

    def __init__(self, name: str, schema: Any) -> None:
        self._name = name
        try:
            self._schema = Schema(schema)
        except SettingsError as wrong:
            raise SettingsError(f"guardrail {name!r}: {wrong}") from None

    def check_prompt(self, body: bytes) -> GuardVerdict:
        return PASS

    def check_answer(self, body: bytes) -> GuardVerdict:
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

    def _refuse(self, why: str) -> GuardrailRefusal:
        return GuardrailRefusal(
            GuardrailCode.SCHEMA, f"The answer does not fit the schema of the guardrail {self._name!r}: {why}."
        )


def answer_texts(answer: Any) -> list[str]:
    """Return the model's texts, one per choice, from an answer of any shape."""
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
