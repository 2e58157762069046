"""The reader of `queries/*.sql`: it makes named statements, and turns a statement into a dialect.

The statements are written in the intersection of SQLite and PostgreSQL.

- `-- name --` opens a statement. The comments under it explain it.
- `moves:` names the state moves that it makes (table: from -> to). A test compares them with
  core/states.py.
- Only PostgreSQL sees the text in /*! … */.
- `-- part name --` opens a text that later statements of the same page use as {name}.

This module does not know what any statement means.
"""

import re
from functools import cache
from importlib.resources import files

import msgspec

_HEADER = re.compile(r"^-- (part )?(\w+) --$")
_PART = re.compile(r"\{(\w+)\}")
_PARAMETER = re.compile(r"(?<![:\w]):([a-z_][a-z0-9_]*)")
_REVEALED = re.compile(r"/\*!(.*?)\*/", re.DOTALL)
_VALUES = re.compile(r"\bvalues\s*\((.*)\)(?=\s*(?:on conflict|returning|$))", re.DOTALL)
_OPEN_FILTER = re.compile(r"cast\(:\w+ as text\) is null or")
_MOVE = re.compile(r"^-- moves: (\w+): (\w+) -> (\w+)$")


class Statement(msgspec.Struct, frozen=True):
    """One text of SQL.

    With `is_insert` it adds one row. With `has_open_filters` some of its filters may be left out,
    so that no single plan is good for all uses.
    """

    name: str
    comment: str
    sql: str
    parameters: tuple[str, ...]
    moves: tuple[tuple[str, str, str], ...]
    has_open_filters: bool
    is_insert: bool


@cache
def statements() -> dict[str, Statement]:
    """Return all statements of `queries/*.sql` by name."""
    found: dict[str, Statement] = {}
    pages = sorted(files("tidegate.store").joinpath("queries").iterdir(), key=lambda page: page.name)
    name, is_part, comments, lines = "", False, list[str](), list[str]()
    parts: dict[str, str] = {}

    def close() -> None:
        if not name:
            return
        sql = _PART.sub(lambda match: parts[match.group(1)], "\n".join(lines).strip().removesuffix(";"))
        if is_part:
            parts[name] = sql
            return
        moves = tuple(match.groups() for line in comments if (match := _MOVE.match(line)))
        parameters = tuple(dict.fromkeys(_PARAMETER.findall(sql)))
        has_open_filters = _OPEN_FILTER.search(sql) is not None
        if name in found:
            raise ValueError(f"two statements are called {name}")
        is_insert = sql.startswith("insert")
        found[name] = Statement(name, "\n".join(comments), sql, parameters, moves, has_open_filters, is_insert)  # type: ignore[arg-type]

    for page in pages:
        for line in page.read_text("utf-8").splitlines():
            if header := _HEADER.match(line):
                close()
                is_part, name, comments, lines = header.group(1) is not None, header.group(2), [], []
            elif line.startswith("--"):
                comments.append(line)
            else:
                lines.append(line)
        close()
        name = ""
        parts.clear()
    return found


def for_postgres(statement: Statement) -> str:
    """Return the SQL for PostgreSQL, with its own parts and numbered parameters."""
    numbers = {parameter: index for index, parameter in enumerate(statement.parameters, start=1)}
    revealed = _REVEALED.sub(r"\1", statement.sql)
    return _PARAMETER.sub(lambda match: f"${numbers[match.group(1)]}", revealed)


def bulk_for_sqlite(statement: Statement, row_count: int) -> tuple[str, int]:
    """Return an insert of one row as an insert of several, without its `returning`.

    Return also which parameter the `returning` would have returned.
    """
    before, values, after = _split_values(statement.sql)
    inserted, _, returned = after.partition("returning")
    one = f"({_PARAMETER.sub('?', values)})"
    return f"{before}values {', '.join([one] * row_count)}{inserted}", statement.parameters.index(returned.strip())


def _split_values(sql: str) -> tuple[str, str, str]:
    before, values, after = _VALUES.split(sql, maxsplit=1)
    return before, values, after


def bulk_for_postgres(statement: Statement, types: tuple[str, ...]) -> str:
    """Return an insert of one row as one insert of many, with an array for each parameter."""
    revealed = _REVEALED.sub(r"\1", statement.sql)
    before, values, after = _split_values(revealed)
    arrays = ", ".join(f"${index}::{kind}[]" for index, kind in enumerate(types, start=1))
    named = _PARAMETER.sub(lambda match: f"given.{match.group(1)}", values)
    return f"{before}select {named} from unnest({arrays}) as given ({', '.join(statement.parameters)}){after}"  # noqa: S608 - our own text


def for_each_on_postgres(statement: Statement, given: tuple[str, ...]) -> tuple[str, tuple[str, ...]]:
    """Return a select as one that runs for each of many texts of these parameters, in their order.

    Return also the names of the other parameters.
    """
    shared = tuple(name for name in statement.parameters if name not in given)
    numbers = {name: f"${index}" for index, name in enumerate(shared, start=len(given) + 1)}
    places = numbers | {name: f"given.{name}" for name in given}
    select = _PARAMETER.sub(lambda match: places[match.group(1)], _REVEALED.sub(r"\1", statement.sql))
    arrays = ", ".join(f"${index}::text[]" for index in range(1, len(given) + 1))
    sql = (
        f"with given ({', '.join(given)}, given_at) as (select * from unnest({arrays}) with ordinality) select found.* "  # noqa: S608 - our own text
        f"from given cross join lateral ({select}) found order by given.given_at"
    )
    return sql, shared


def schema_for(dialect: str, text: str) -> str:
    """Return a schema or migration in one dialect, without the parts for the other.

    PostgreSQL gets a collation of text that sorts as SQLite does.
    """
    meant = re.sub(rf"/\*{dialect}:(.*?)\*/", r"\1", text, flags=re.DOTALL)
    meant = re.sub(r"/\*(?:sqlite|postgresql):.*?\*/", "", meant, flags=re.DOTALL)
    return (
        meant if dialect == "sqlite" else re.sub(r"(?m)(^\s+\w+ |add column \w+ )text\b", r'\1text collate "C"', meant)
    )
