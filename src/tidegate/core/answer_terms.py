"""The terms that a caller sets for the answers of a job, and the text that the store keeps of
them."""

from functools import lru_cache

import msgspec


class AnswerTerms(msgspec.Struct, frozen=True):
    """The schema that answers of a job must fit, and what to do with an answer that does not fit.

    `schema` is a JSON schema as text; without one, each request's own format counts. A bad answer
    is asked for again `tries_max` times, with what is wrong with it if `feedback`, and then once
    from the model `escalate_to`.
    """

    schema: str | None = None
    tries_max: int = 2
    feedback: bool = False
    escalate_to: str | None = None


_decode = msgspec.json.Decoder(AnswerTerms).decode


@lru_cache(maxsize=1024)
def answers_from(text: str | None) -> AnswerTerms | None:
    """Return the terms for the answers of a job; None: any answer will do."""
    return _decode(text) if text is not None else None


def answers_text(terms: AnswerTerms | None) -> str | None:
    return msgspec.json.encode(terms).decode() if terms is not None else None
