"""Reads the fields of the API that `tidegate run` takes with `--field`: request parameters,
retries, and rules for answers."""

from collections.abc import Sequence
from typing import Any

import msgspec
from msgspec.structs import replace

from tidegate.cli.batches import batch_fields
from tidegate.cli.terminal.input_file import RunOptions
from tidegate.core.input.lines import MIXED
from tidegate.web.requests import requests
from tidegate.web.requests.answer_requests import AnswersFields, job_answers
from tidegate.web.requests.shape_requests import RetryFields, checked_parameters, job_retry


class RunFields(msgspec.Struct, forbid_unknown_fields=True):
    """The fields that may be given. A batch's other fields have options of their own,
    or no meaning for a run."""

    defaults: dict[str, Any] | None = None
    overrides: dict[str, Any] | None = None
    retry: RetryFields | None = None
    answers: AnswersFields | None = None


def with_fields(run_options: RunOptions, pairs: Sequence[str]) -> RunOptions:
    """Return the options with the fields of `--field`, checked for their endpoint."""
    fields = batch_fields.read(pairs)
    terms = run_options.answers
    if terms is not None and "answers" in fields:
        schema = batch_fields.OWN_SCHEMA if terms.schema is None else msgspec.Raw(terms.schema.encode())
        batch_fields.put(fields, "answers.schema", schema)
    asked = requests.decoded(msgspec.json.encode(fields), RunFields)
    endpoint = "" if run_options.endpoint == MIXED else run_options.endpoint
    if asked.answers is not None:
        found = job_answers(asked.answers, run_options.endpoint)
        # The schema keeps the bytes of its file, because they are part of the run's identity.
        terms = found if terms is None or found is None else replace(found, schema=terms.schema)
    return replace(
        run_options,
        defaults=checked_parameters("defaults", asked.defaults, endpoint),
        overrides=checked_parameters("overrides", asked.overrides, endpoint),
        retry=job_retry(asked.retry),
        answers=terms,
    )
