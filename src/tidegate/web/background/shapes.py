"""How a background response looks to OpenAI's clients at each moment of its job."""

from collections.abc import Mapping

import msgspec

from tidegate.core.answers.outcome_lines import ItemError
from tidegate.core.nouns import Job
from tidegate.core.states import JOB_ENDED, JobState
from tidegate.web.jobs.stored_lines import is_whole

# Background responses are served in the gaps of interactive traffic, which is what OpenAI calls flex.
TIER = "flex"
EXPIRED = "response_expired"
_PREFIX, _JOB_PREFIX = "resp_", "batch_"
# What a response repeats of its request, and what stands there when the request does not say.
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
    """A job's id as its caller knows it: `resp_X` is the job `batch_X`."""
    return _PREFIX + job_id.removeprefix(_JOB_PREFIX)


def job_id_of(text: str) -> str:
    """The job behind a response's id."""
    return _JOB_PREFIX + text.removeprefix(_PREFIX)


def is_final(job: Job) -> bool:
    """Whether the response will not change any more. A cancel decides at once, whatever an open call still brings."""
    return job.closing is JobState.CANCELLED or bool(job.done_count) or job.state in JOB_ENDED


def unfinished_status(job: Job) -> str:
    return "queued" if job.begun_at is None else "in_progress"


def unanswered(job: Job, request: bytes, status: str, error: ResponseError | None = None) -> bytes:
    """A response without output, made of its request, as far as that can be read."""
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
    """What the model server answered, under our id, and the tier that served it; every other value stays the bytes that it was."""
    ours = {
        "id": response_id(job.id),
        "created_at": job.created_at // 1000,
        "background": True,
        "service_tier": tier or TIER,
        "store": True,
    }
    return msgspec.json.encode(_members(answer) | ours)


def error_of(failure: ItemError | None) -> ResponseError:
    """Why there is no answer, as a client of OpenAI's reads it."""
    if failure is None or failure.code == "batch_expired":
        return ResponseError(EXPIRED, "The response was not run within 24 hours.")
    return ResponseError(failure.code or "server_error", failure.message or "The model server refused the request.")
