"""What a caller asks of the answers of a job, and the text that the store keeps of it."""

from functools import lru_cache

import msgspec


class AnswerTerms(msgspec.Struct, frozen=True):
    """What answers of a job must fit: a JSON schema as its text, or, without one, what each request itself asks for. An answer that does
    not fit is asked for again `tries_max` times, with what is wrong with it if `feedback`, and then once from the model `escalate_to`."""

    schema: str | None = None
    tries_max: int = 2
    feedback: bool = False
    escalate_to: str | None = None


_decode = msgspec.json.Decoder(AnswerTerms).decode


@lru_cache(maxsize=1024)
def answers_from(text: str | None) -> AnswerTerms | None:
    """What the answers of a job must fit; None: anything."""
    return _decode(text) if text is not None else None


def answers_text(terms: AnswerTerms | None) -> str | None:
    return msgspec.json.encode(terms).decode() if terms is not None else None
