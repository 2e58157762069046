"""Callers with a table: its rows become jobs by a template, part by part, and come back with their answers beside them.

Rows, parts and results pass through the code of `tidegate run --template`; its jobs run in the simulated world. There each line has a
custom_id of the world's own, so ids are exchanged on the way in and on the way out.
"""

import random
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from unittest import mock

import msgspec
from msgspec.structs import replace

from tests.simulation.world.customers import Order
from tests.simulation.world.estate import EMBEDDINGS
from tests.simulation.world.judge import Judge
from tests.simulation.world.plan import Plan
from tidegate.cli.run import run_table, tables, template
from tidegate.cli.run.answer_columns import AnswerColumns
from tidegate.cli.terminal import input_file
from tidegate.core import ids
from tidegate.core.input.lines import MIXED
from tidegate.core.job_shape import PLAIN
from tidegate.settings import Settings

_NEXT_PART_S = 2.0
_BYTES_MAX = 1 << 30


class Table(msgspec.Struct):
    """One table: where it lies, its rows as they were written, and the orders of its parts."""

    directory: Path
    path: Path
    endpoint: str
    rows_max: int
    target: Path
    rows: list[template.InputRow]
    ids: list[str]
    parts: list[Order] = msgspec.field(default_factory=list)


class Tables:
    def __init__(self, plan: Plan, directory: Path, breaks: Callable[[str], None]) -> None:
        self._plan = plan
        self._directory = directory
        self._breaks = breaks
        self._dice = random.Random(f"tables/{plan.seed}")
        self._tables: list[Table] = []

    def parts_of(self, order: Order) -> list[Order]:
        """Return what is sent in for an order: itself, or the parts of the table that its caller has instead."""
        actions = order.actions
        is_plain = order.shape == PLAIN and not self._plan.shaped and order.endpoint != MIXED and actions.door is None
        is_kept = not actions.is_edited and actions.deleted_after_s is None and not actions.deletes_s
        if self._dice.random() >= self._plan.strength("job_table") or not is_plain or not is_kept:
            return [order]
        if None in order.custom_ids:
            return [order]
        table = self._written(order)
        for number, (source, places) in enumerate(self._parts(table)):
            table.parts.append(self._part(table, order, number, (source, places)))
        self._tables.append(table)
        return table.parts

    def _written(self, order: Order) -> Table:
        """Write the table and its template; numbers survive in JSON alone."""
        directory = self._directory / order.name
        directory.mkdir(parents=True)
        is_vector = order.endpoint == EMBEDDINGS
        rows = [_row(body) for body in order.requests.values()]
        body: dict[str, object] = {"model": "{{model}}", "input": "{{text}}"}
        if not is_vector:
            messages = [{"role": "user", "content": "{{text}}"}]
            body = {"model": "{{model}}", "messages": messages, "max_tokens": "{{max_tokens}}"}
        (directory / "template.json").write_bytes(msgspec.json.encode({"url": order.endpoint, "body": body}))
        path = directory / f"table{'.csv' if is_vector else '.jsonl'}"
        writer = tables._CsvWriter(path, list(rows[0]), []) if is_vector else tables._JsonlWriter(path)
        writer.write(rows)
        writer.close()
        target = directory / self._dice.choice(("out.csv", "out.jsonl"))
        rows_max = self._dice.choice((2, 5, 1_000))
        return Table(directory, path, order.endpoint, rows_max, target, rows, [str(one) for one in order.custom_ids])

    def _parts(self, table: Table) -> Iterator[tuple[input_file.Input, list[bytes]]]:
        """The parts as one run of the command makes them, and their lines."""
        request = template.read(table.directory / "template.json", None)
        rows = enumerate(tables.RowTable([table.path]).rows(), 1)
        with mock.patch.object(run_table, "PART_ROWS_MAX", table.rows_max):
            while (part := run_table.write_part(rows, request, table.directory, _BYTES_MAX)) is not None:
                yield part[0], part[0].path.read_bytes().splitlines()

    def _part(self, table: Table, order: Order, number: int, made: tuple[input_file.Input, list[bytes]]) -> Order:
        source, lines = made
        part = replace(
            order,
            name=f"{order.name}p{number}",
            file_id=ids.make("file", self._dice.randbytes(16)),
            job_id=_job_id(table, source),
            begin_s=order.begin_s + number * _NEXT_PART_S,
            cancel_s=None if order.cancel_s is None else order.cancel_s + number * _NEXT_PART_S,
            ordered=True,
            invalid_lines="error_file",
            shape=msgspec.structs.replace(order.shape, places=source.places),
            custom_ids=[],
            tags=[],
            requests={},
            bodies=[],
            asked={},
            usages={},
            units={},
        )
        for line in lines:
            request = msgspec.json.decode(line)
            custom_id = table.ids[int(request["custom_id"].removeprefix("row-")) - 1]
            tag = custom_id.removeprefix("id-")
            if request["body"] != order.requests[tag] or request["url"] != order.endpoint:
                self._breaks(f"tables: a row of {order.name} became {request}, and asks for {order.requests[tag]}")
            part.custom_ids.append(custom_id)
            part.tags.append(tag)
            part.bodies.append(msgspec.json.encode({**request, "custom_id": custom_id}))
            part.requests[tag], part.asked[tag] = order.requests[tag], order.asked[tag]
            part.usages[tag], part.units[tag] = order.usages[tag], order.units[tag]
        return part

    # ---- what came of it

    def judge(self, judge: Judge) -> None:
        """The same command finds its jobs again, and every row comes back once, in its place, with its own answer."""
        for table in self._tables:
            again = [_job_id(table, source) for source, _ in self._parts(table)]
            if again != [part.job_id for part in table.parts]:
                self._breaks(f"tables: the same command does not find the jobs of {table.parts[0].name} again")
            ended = [judge.result_files(part.job_id) for part in table.parts]
            # A job that ended before its input was read has no lines, and its command no table.
            if all(good or bad for good, bad in ended):
                self._judge_rows(table, ended)

    def _judge_rows(self, table: Table, ended: list[tuple[bytes, bytes]]) -> None:
        source = tables.RowTable([table.path])
        columns = AnswerColumns(table.endpoint, list(table.rows[0]))
        writer = tables.open_writer(table.target, table.target.suffix, source, columns.kinds)
        rows = enumerate(source.rows(), 1)
        by_id: dict[str, dict[str, object]] = {}
        numbers = {custom_id: f"row-{number}" for number, custom_id in enumerate(table.ids, 1)}
        targets = input_file.Targets(table.directory / "good.jsonl", table.directory / "bad.jsonl")
        for part, files in zip(table.parts, ended, strict=True):
            for path, data in zip((targets.results, targets.errors), files, strict=True):
                lines = [msgspec.json.decode(line) for line in data.splitlines()]
                by_id |= {line["custom_id"]: line for line in lines}
                renamed = [{**line, "custom_id": numbers[line["custom_id"]]} for line in lines]
                assert path is not None
                path.write_bytes(b"".join(msgspec.json.encode(line) + b"\n" for line in renamed))
            run_table.join_rows(islice(rows, len(part.custom_ids)), targets, columns, writer)
        writer.close()
        back = list(tables.RowTable([table.target]).rows())
        if len(back) != len(table.rows):
            self._breaks(f"tables: {len(back)} rows came back of {len(table.rows)}")
        for custom_id, row, found in zip(table.ids, table.rows, back, strict=True):
            own = {name: _text(value) for name, value in found.items() if name in row}
            if own != {name: _text(value) for name, value in row.items()}:
                self._breaks(f"tables: the row of {custom_id} came back as {found}")
            self._judge_answer(table, custom_id, by_id[custom_id], found)

    def _judge_answer(self, table: Table, custom_id: str, line: dict[str, object], found: template.InputRow) -> None:
        """A row has the answer of its own line, or the reason why there is none."""
        response: dict[str, object] = line["response"] or {}  # type: ignore[assignment]
        is_answered = line["error"] is None and response.get("status_code") == 200
        if is_answered == bool(found["error"]):
            self._breaks(f"tables: {custom_id} came back as {found}, and its line is {line}")
        text = found.get("embedding" if table.endpoint == EMBEDDINGS else "answer")
        if is_answered and not _stands_in(text, response["body"]):
            self._breaks(f"tables: {custom_id} came back with {text!r}, and its line is {line}")


def _job_id(table: Table, source: input_file.Input) -> str:
    return input_file.job_id(source, Settings(), input_file.RunOptions(table.endpoint, ordered=True), 0)


def _row(body: dict[str, object]) -> template.InputRow:
    """The row of which the template makes this request."""
    if "input" in body:
        return {"model": body["model"], "text": body["input"]}
    messages: list[dict[str, str]] = body["messages"]  # type: ignore[assignment]
    return {"model": body["model"], "text": messages[0]["content"], "max_tokens": body["max_tokens"]}


def _text(value: object) -> str:
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()


def _stands_in(text: object, body: object) -> bool:
    """Whether an answer holds this text, or this vector, at some place."""
    if isinstance(body, dict):
        return any(_stands_in(text, one) for one in body.values())
    if isinstance(body, list) and body and not isinstance(body[0], int | float):
        return any(_stands_in(text, one) for one in body)
    return _text(text) == _text(body)
