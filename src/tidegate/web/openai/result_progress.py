"""The progress of a job's two result files, for clients that read a growing file by lines."""

import msgspec

from tidegate.core.nouns import Job
from tidegate.core.states import JOB_ENDED


class ResultProgress(msgspec.Struct, frozen=True):
    """The progress of one result file of a job. Both figures are of the same moment."""

    job_id: str
    is_output: bool
    size_bytes: int
    line_count: int
    grows: bool


def result_progress(job: Job, file_id: str) -> ResultProgress | None:
    """Return the progress of a job in one of its result files; None for any other file."""
    grows = job.state not in JOB_ENDED
    if file_id == job.output_file_id:
        return ResultProgress(job.id, True, job.output_bytes, job.answered_count, grows)
    if file_id == job.error_file_id:
        return ResultProgress(job.id, False, job.error_bytes, job.done_count - job.answered_count, grows)
    return None
