"""A retry of some items of an ended job, before it is made."""

import msgspec

from tidegate.core.answer_terms import AnswerTerms
from tidegate.core.job_controls import Canary, JobControls, RetryChoice
from tidegate.core.job_shape import JobRetry


class FollowUp(msgspec.Struct, frozen=True):
    """The job and the items that run again, and the ids of the new job.

    Absent fields are taken from the first job.
    """

    of: str
    choice: RetryChoice
    job_id: str
    retry_file_id: str
    merged_file_id: str
    webhook_secret: bytes
    controls: JobControls | None = None
    canary: Canary | None = None
    traceparent: str | None = None
    retry: JobRetry | None = None
    answers: AnswerTerms | None = None

    def __repr__(self) -> str:
        return f"FollowUp(of={self.of!r}, choice={self.choice!r}, job_id={self.job_id!r})"
