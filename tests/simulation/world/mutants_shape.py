"""Planted bugs of the shape of a job's work."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from tests.simulation.world.planting import Mutant, patch, sql
from tidegate.cli.run import run_table
from tidegate.cli.terminal import input_file
from tidegate.core import ids
from tidegate.core.job_shape import JobShape, ParameterLevel
from tidegate.web.jobs import validation
from tidegate.worker.call_rules import LeasedCallRules
from tidegate.worker.heartbeat import CloseGrace

_unusable = validation.JobValidation._unusable


async def _untold(self: validation.JobValidation, *asked: Any) -> validation.JobEstimate:
    return msgspec.structs.replace(await _unusable(self, *asked), errors=())


@contextmanager
def _left_behind(scratch: Path, count: int) -> Iterator[list[Path]]:
    yield [scratch / f"left-{number}-{len(list(scratch.iterdir()))}" for number in range(count)]


SHAPE: dict[str, Mutant] = {
    "defaults_replace": Mutant(
        "shaped",
        "a default replaces what a line says",
        patch(JobShape, "levels", lambda self: (ParameterLevel({}, {**self.defaults, **self.overrides}),)),
    ),
    "own_retries_ignored": Mutant(
        "shaped",
        "a worker does not look at what a job says of retries",
        patch(LeasedCallRules, "retry", lambda self, leased: self._policies.retry(leased.model)),
    ),
    "first_file_only": Mutant(
        "shaped",
        "only the first file of an input is read",
        sql("ingest_more", "where i.job_id = :id", "where i.job_id = :id and i.number < 1"),
    ),
    "parts_unshared": Mutant(
        "shaped",
        "parts of a result file do not count as users of its bytes",
        sql("blob_use", "uses = uses + :uses", "uses = uses + 0 * :uses"),
    ),
    "cancel_waits": Mutant(
        "cancelled_at_once",
        "calls of a cancelled job go on for as long as those of any other that closes",
        patch(CloseGrace, "of", lambda self, closing: self.closing_ms),
    ),
    "next_answer_taken": Mutant(
        "tables",
        "a row of a table takes the next line of a result file, whosever it is",
        patch(run_table._Lines, "take_line", lambda self, custom_id: next(self._lines, None)),
    ),
    "part_unknown": Mutant(
        "tables",
        "the same command does not find the job of a part of its table",
        patch(input_file, "job_id", lambda *_: ids.make("batch", os.urandom(16))),
    ),
    "faults_untold": Mutant(
        "checked",
        "a dry run does not tell what is wrong with an input",
        patch(validation.JobValidation, "_unusable", _untold),
    ),
    "passes_left": Mutant(
        "checked", "a dry run leaves the files of its pass behind", patch(validation, "_passing", _left_behind)
    ),
}
