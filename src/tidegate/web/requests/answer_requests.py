"""The check of a job's terms for answers: a schema of bounded cost, and the number of tries."""

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from tidegate.core.answer_terms import AnswerTerms
from tidegate.core.answers.answer_checks import CHECKED_ENDPOINTS, InvalidSchema, check_schema
from tidegate.core.errors import ApiProblem

TRIES_MAX = 10
OWN_SCHEMA = "response_format"
MIXED = "mixed"
ANSWERS_ALLOWED = {
    "answers": "an object with `schema` and, if you like, `tries_max`, `feedback` and `escalate_to`",
    "answers.tries_max": f"a whole number from 0 to {TRIES_MAX}",
    "answers.feedback": "true or false",
    "answers.escalate_to": "the name of a model",
}


class AnswersFields(msgspec.Struct, forbid_unknown_fields=True):
    """The `answers` of a batch.

    `schema` is a JSON Schema, or "response_format" for the schema of each request.
    """

    schema: Any
    tries_max: Annotated[int, Meta(ge=0, le=TRIES_MAX)] = 2
    feedback: bool = False
    escalate_to: Annotated[str, Meta(min_length=1, max_length=255)] | None = None


def job_answers(ask: AnswersFields | None, endpoint: str) -> AnswerTerms | None:
    """Check a batch's `answers` and return its terms; None without them."""
    if ask is None:
        return None
    if endpoint not in (*CHECKED_ENDPOINTS, MIXED):
        raise _bad("answers", f"`answers` can be checked only for: {', '.join(CHECKED_ENDPOINTS)}.")
    schema = None
    if ask.schema != OWN_SCHEMA:
        if not isinstance(ask.schema, dict | bool):
            raise _bad("answers.schema", f'`answers.schema` must be a JSON Schema or "{OWN_SCHEMA}".')
        schema = msgspec.json.encode(ask.schema).decode()
        try:
            check_schema(schema)
        except InvalidSchema as error:
            message = f"`answers.schema` cannot be used: {error}."
            raise ApiProblem(400, "invalid_schema", message, param="answers.schema") from None
    return AnswerTerms(schema, ask.tries_max, ask.feedback, ask.escalate_to)


def _bad(param: str, message: str) -> ApiProblem:
    return ApiProblem(400, "invalid_parameter", message, param=param)
