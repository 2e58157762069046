"""The turning of rows into nouns. This module knows only the names of columns."""

from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any

import msgspec

from tidegate.core.answer_terms import answers_from
from tidegate.core.budgets.budget import Limit
from tidegate.core.files import File
from tidegate.core.job_controls import Canary, JobControls, MaxErrors, RetryChoice
from tidegate.core.job_shape import CopiedItems, parts_from, shape_from
from tidegate.core.nouns import AnswerTry, Job, JobWebhook, LineError, Usage
from tidegate.core.states import FileState, JobKind, JobState

_PLAIN_JOB_COLUMNS = (
    "id", "tenant_id", "key_id", "endpoint", "input_file_id", "window_text", "created_at", "expires_at", "in_progress_at",
    "finalizing_at", "completed_at", "failed_at", "expired_at", "cancelling_at", "cancelled_at", "output_expires_after_s",
    "invalid_lines", "model", "item_count", "answered_count", "failed_count", "expired_count", "cancelled_count", "unused_count",
    "output_file_id", "error_file_id", "output_bytes", "error_bytes", "work_blob_id", "work_bytes", "prompt_bytes",
    "shared_prefix_bytes", "share_owner", "queue", "begin_by", "cost_nano", "paused_at", "stopped_by", "begun_at", "door",
    "schema_invalid_count", "unsent_count",
    "retry_of", "retry_file_id", "merged_file_id", "traceparent",
)  # fmt: skip
_ERRORS = msgspec.json.Decoder(list[LineError])
_METADATA = msgspec.json.Decoder(dict[str, str])
_WEBHOOK = msgspec.json.Decoder(JobWebhook)
_LIMITS = msgspec.json.Decoder(list[Limit])
_TRIES = msgspec.json.Decoder(tuple[AnswerTry, ...])
_CHOICE = msgspec.json.Decoder(RetryChoice)
_IDS = msgspec.json.Decoder(tuple[str, ...])


def job_from(row: dict[str, Any]) -> Job:
    return Job(
        state=JobState(row["state"]),
        kind=JobKind(row["kind"]),
        closing=JobState(row["closing"]) if row["closing"] else None,
        metadata=_METADATA.decode(row["metadata"]) if row["metadata"] is not None else None,
        ordered=bool(row["ordered"]),
        prefix_order=bool(row["prefix_order"]),
        errors=tuple(_ERRORS.decode(row["errors"])),
        limits=limits_from(row["limits"]),
        webhook=_WEBHOOK.decode(row["webhook"]) if row["webhook"] is not None else None,
        controls=_controls_from(row),
        shape=shape_from(row["shape"]),
        parts=parts_from(row["parts"]),
        answers=answers_from(row["answers"]),
        canary=_canary_from(row) if row["canary_state"] is not None else None,
        retry_choice=_CHOICE.decode(row["retry_choice"]) if row["retry_choice"] is not None else None,
        retried_by=_IDS.decode(row["retried_by"]) if row["retried_by"] is not None else (),
        copied=CopiedItems(row["deduplicated_count"], row["reused_count"], row["copies_at"]),
        usage=Usage(row["input_tokens"], row["cached_tokens"], row["output_tokens"], row["reasoning_tokens"]),
        **{name: row[name] for name in _PLAIN_JOB_COLUMNS},
    )


def _canary_from(row: dict[str, Any]) -> Canary:
    # If the job closes while its sample runs, the sample did not pass.
    is_cut_off = row["canary_state"] == "running" and row["closing"] is not None
    return Canary(
        row["canary_items"], row["canary_ppm"], row["canary_then"], "failed" if is_cut_off else row["canary_state"]
    )


def _controls_from(row: dict[str, Any]) -> JobControls:
    after = row["max_errors_after"]
    errors = None if after is None else MaxErrors(row["max_errors_count"], row["max_errors_ppm"], after)
    return JobControls(row["priority"], row["not_before"], row["max_cost_nano"], errors)


def controls_columns(controls: JobControls) -> dict[str, int | None]:
    """Return the columns of a job's row that its caller may change."""
    errors = controls.max_errors
    return {
        "priority": controls.priority,
        "not_before": controls.not_before,
        "max_cost_nano": controls.max_cost_nano,
        "max_errors_count": errors.count if errors else None,
        "max_errors_ppm": errors.share_ppm if errors else None,
        "max_errors_after": errors.after if errors else None,
    }


def file_from(row: dict[str, Any]) -> File:
    return File(
        id=row["id"],
        tenant_id=row["tenant_id"],
        purpose=row["purpose"],
        filename=row["filename"],
        state=FileState(row["state"]),
        size_bytes=row["size_bytes"],
        line_count=row["line_count"],
        sha256=row["sha256"],
        created_at=row["created_at"],
        expires_at=row["expires_at"],
        job_id=row["job_id"],
    )


@lru_cache(maxsize=1024)
def limits_from(text: str | None) -> tuple[Limit, ...]:
    """Return the limits of a job or a key."""
    return tuple(_LIMITS.decode(text)) if text is not None else ()


def tries_from(text: str) -> tuple[AnswerTry, ...]:
    """Return the answers of an item that did not fit."""
    return _TRIES.decode(text) if text else ()


def tries_text(tries: tuple[AnswerTry, ...]) -> str:
    return msgspec.json.encode(tries).decode() if tries else ""


def limits_text(limits: Sequence[Limit]) -> str:
    return msgspec.json.encode(limits).decode()


def errors_text(errors: list[LineError]) -> str:
    return msgspec.json.encode(errors).decode()


def searched_text(parts: Iterable[str]) -> str:
    """Return texts in the form of a job's `words`, each with a newline.

    They have no differences of case, and no U+0000, which PostgreSQL cannot store in text.
    """
    return "".join(f"{part}\n" for part in parts).replace("\0", "").casefold()
