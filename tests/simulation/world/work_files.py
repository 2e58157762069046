"""Which item of a job a tag names: its place in the job's work file."""

import re
from typing import Any

import apsw

from tests.simulation.world.disk import Disk

TAG = re.compile(rb'"(?:content|input)":"(j[0-9]+-[0-9]+)')
_PLACES = """
select s.first, s.count, s.read_first, j.work_blob_id, s.work_at, s.work_bytes
from slices s join jobs j on j.id = s.job_id where j.id = ?
"""


class WorkFiles:
    def __init__(self, connection: apsw.Connection, disk: Disk) -> None:
        self._connection = connection
        self._disk = disk
        self._numbers: dict[str, dict[str, int]] = {}

    def number_of(self, job_id: str, tag: str) -> int:
        self.remember(job_id)
        return self._numbers[job_id][tag]

    def remember(self, job_id: str) -> None:
        """Read the places of a job's items, as long as they can be read."""
        if job_id not in self._numbers:
            self._numbers[job_id] = dict(self._read(job_id))

    def _read(self, job_id: str) -> list[tuple[str, int]]:
        found = []
        rows: list[Any] = self._connection.execute(_PLACES, (job_id,)).fetchall()
        for first, count, read_first, blob_id, at, size in rows:
            lines = self._disk.read(blob_id, at, size).split(b"\n")[first - read_first :][:count]
            for number, line in enumerate(lines, start=first):
                if tag := TAG.search(line):
                    found.append((tag[1].decode(), number))
        return found
