"""What is shown of a job that has ended: how, why, and what to do next."""

from typing import Any

from msgspec.structs import replace

from tests.core.schedule.test_explain import job_running
from tidegate.core.answers.error_kinds import ErrorKind
from tidegate.core.job_controls import Canary
from tidegate.core.nouns import Job, LineError
from tidegate.core.schedule.endings import NONE_FAILED, FailedItems, why_ended
from tidegate.core.states import JobState

AGAIN = "To run these requests again: `tidegate batches retry batch_1"
SERVER_ERROR = ErrorKind("server_error", 500, "Something broke.")
TOO_LONG = ErrorKind("http_400", 400, "")


def ended(state: JobState, **more: Any) -> Job:
    return replace(job_running(), state=state, created_at=0, begun_at=1, window_text="24h", **more)


def test_a_job_of_which_everything_was_answered_says_no_more() -> None:
    found = why_ended(ended(JobState.COMPLETED, answered_count=9), NONE_FAILED, [])
    assert found == ["It completed: all of its requests were answered."]


def test_failures_are_counted_by_cause_with_what_to_do() -> None:
    job = ended(JobState.COMPLETED, answered_count=6, failed_count=3)
    failed = FailedItems(((SERVER_ERROR, 2), (TOO_LONG, 1)))
    assert why_ended(job, failed, []) == [
        "It completed: 6 of 9 requests were answered, 3 failed.",
        "Why requests failed: 2 x 500 server_error (Something broke); 1 x http_400.",
        "The whole message of each: `tidegate batches output batch_1 --errors`.",
        f"{AGAIN} --outcome failed`.",
    ]
    many = FailedItems(tuple((ErrorKind(f"code_{number}", 0, ""), 2) for number in range(9)), is_partial=True)
    assert "Why requests failed (of the first ones): 2 x code_0" in why_ended(job, many, [])[1]
    assert why_ended(job, many, [])[1].endswith("; 8 x other errors.")
    wordy = FailedItems(((ErrorKind("wordy", 0, "seven chars " * 20), 3),))
    assert why_ended(job, wordy, [])[1].endswith("seven chars …)."), "a long message is cut between words"


def test_an_input_that_was_refused() -> None:
    errors = (
        LineError("invalid_json_line", "This is no JSON.", None, 4),
        LineError("invalid_json_line", "Nor is this."),
    )
    assert why_ended(ended(JobState.FAILED, item_count=0, errors=errors), NONE_FAILED, []) == [
        "It failed before anything was sent: its input was refused (2 x invalid_json_line).",
        "Line 4: This is no JSON. (invalid_json_line)",
        "Nor is this. (invalid_json_line)",
        "Correct the input, and create the batch again.",
    ]


def test_a_threshold_that_was_passed() -> None:
    unrun = ErrorKind("batch_failed", 0, "This request was not executed because the batch failed.")
    errors = (LineError("max_errors_exceeded", "3 of 5 requests failed.", "max_errors"),)
    job = ended(JobState.FAILED, answered_count=2, failed_count=7, stopped_by="max_errors", errors=errors)
    failed = FailedItems(((unrun, 4), (SERVER_ERROR, 3)))
    assert why_ended(job, failed, []) == [
        "It was stopped by max_errors: 2 of 9 requests were answered, 3 failed, 4 were not run.",
        "3 of 5 requests failed. (max_errors_exceeded)",
        "Why requests failed: 3 x 500 server_error (Something broke).",
        "The whole message of each: `tidegate batches output batch_1 --errors`.",
        f"{AGAIN} --outcome failed`.",
    ]
    assert "7 failed or were not run" in why_ended(job, FailedItems(failed.kinds, is_partial=True), [])[0]


def test_what_expired_says_what_kept_it() -> None:
    job = ended(JobState.EXPIRED, answered_count=4, failed_count=1, expired_count=4)
    waited = ["2 of those were tried and waited to be tried again: their upstream was away (upstream_unavailable)."]
    assert why_ended(job, NONE_FAILED, waited) == [
        "It expired, because its window of 24h was over before all of it had run: 4 of 9 requests were answered, 1 failed, "
        "4 were not done in time.",
        *waited,
        f"{AGAIN} --outcome failed --outcome expired`.",
    ]
    never = ended(JobState.EXPIRED, expired_count=9, paused_at=5)
    assert why_ended(replace(never, begun_at=None), NONE_FAILED, [])[1:3] == [
        "It was paused when it ended.",
        "Nothing of it was ever sent.",
    ]
    canary = replace(never, paused_at=None, canary=Canary(1, 0, "wait", "waiting"))
    assert why_ended(canary, NONE_FAILED, [])[1] == "Its canary was done, and it waited for a decision."
    unread = ended(JobState.EXPIRED, item_count=0)
    assert "its input had not been read." in why_ended(unread, NONE_FAILED, [])[0]


def test_what_was_cancelled_says_when() -> None:
    job = ended(JobState.CANCELLED, cancelling_at=65_000, answered_count=4, cancelled_count=5)
    assert why_ended(job, NONE_FAILED, []) == [
        "It was cancelled 1m5s after it was created: 4 of 9 requests were answered, 5 were not run.",
        f"{AGAIN} --outcome cancelled`.",
    ]
