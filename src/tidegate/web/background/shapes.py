"""The shape of a background response for OpenAI's clients, at each stage of its job."""

from collections.abc import Mapping

import msgspec

from tidegate.core.answers.outcome_lines import ItemError
from tidegate.core.nouns import Job
from tidegate.core.states import JOB_ENDED, JobState
from tidegate.web.jobs.stored_lines import is_whole

# Background responses run in the gaps of interactive traffic, which OpenAI calls flex.
TIER = "flex"
EXPIRED = "response_expired"
_PREFIX, _JOB_PREFIX = "resp_", "batch_"
# The fields of the request that a response repeats, with their defaults.
_ECHOED: Mapping[str, object] = {
    "instructions": None,
    "max_output_tokens": None,
    "max_tool_calls": None,
    "metadata": {},
    "parallel_tool_calls": True,
    "previous_response_id": None,
    "prompt_cache_key": None,
    "reasoning": None,
    "safety_identifier": None,
    "temperature": None,
    "text": {"format": {"type": "text"}},
    "tool_choice": "auto",
    "tools": [],
    "top_logprobs": None,
    "top_p": None,
    "truncation": "disabled",
    "user": None,
}
_members = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode


class ResponseError(msgspec.Struct):
    code: str
    message: str


class ResponseDeleted(msgspec.Struct):
    id: str
    object: str
    deleted: bool


def response_id(job_id: str) -> str:
    """Return the id of the response that a job makes: the job `batch_X` makes the response
    `resp_X`.
    """
    return _PREFIX + job_id.removeprefix(_JOB_PREFIX)


def job_id_of(text: str) -> str:
    """Return the id of the job that makes a response."""
    return _JOB_PREFIX + text.removeprefix(_PREFIX)


def is_final(job: Job) -> bool:
    """Return whether the response will not change any more.

    A cancel is final at once, whatever an open call still brings.
    """
    return job.closing is JobState.CANCELLED or bool(job.done_count) or job.state in JOB_ENDED


def unfinished_status(job: Job) -> str:
    return "queued" if job.begun_at is None else "in_progress"


def unanswered(job: Job, request: bytes, status: str, error: ResponseError | None = None) -> bytes:
    """Return a response without output, with the fields of its request if that can be read."""
    asked = _members(request) if is_whole(request) else {}
    shown = {
        "id": response_id(job.id),
        "object": "response",
        "created_at": job.created_at // 1000,
        "status": status,
        "background": True,
        "error": error,
        "incomplete_details": None,
        "model": asked.get("model"),
        "output": [],
        "service_tier": TIER,
        "store": True,
        "usage": None,
    }
    return msgspec.json.encode(shown | {name: asked.get(name, default) for name, default in _ECHOED.items()})


def answered(job: Job, answer: bytes, tier: str | None) -> bytes:
    """Return the model server's answer with our id and the tier that served it; the bytes of all
    other values stay.
    """
    ours = {
        "id": response_id(job.id),
        "created_at": job.created_at // 1000,
        "background": True,
        "service_tier": tier or TIER,
        "store": True,
    }
    return msgspec.json.encode(_members(answer) | ours)


def error_of(failure: ItemError | None) -> ResponseError:
    """Return why there is no answer, as an error of OpenAI's API."""
    if failure is None or failure.code == "batch_expired":
        return ResponseError(EXPIRED, "The response was not run within 24 hours.")
    return ResponseError(failure.code or "server_error", failure.message or "The model server refused the request.")
