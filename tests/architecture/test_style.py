"""Style as a test: where effects may come from, how long things may be, and what must not be left lying about."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).resolve().parents[2] / "src" / "tidegate"
MODULES = sorted(SOURCE.rglob("*.py"))
SIMULATED = [
    path
    for path in MODULES
    if path.relative_to(SOURCE).parts[0] in ("flow", "upstream", "store", "core") or path.name == "worker/worker.py"
]
EFFECTS = {"time", "random", "uuid", "secrets"}
# Outside the simulator's loop on purpose: ingest is a process of its own, and aiohttp stamps idle connections with time.monotonic.
ALLOWED_EFFECTS = {"stages/ingest/ingest_file.py", "upstream/http/connections.py"}
LINES_MAX, FUNCTION_LINES_MAX = 700, 70


def relative(path: Path) -> str:
    return path.relative_to(SOURCE).as_posix()


def imports(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module.split(".")[0]


@pytest.mark.parametrize("path", SIMULATED, ids=relative)
def test_time_and_chance_come_through_ports(path: Path) -> None:
    if relative(path) not in ALLOWED_EFFECTS:
        assert not EFFECTS & set(imports(ast.parse(path.read_text())))


def test_only_settings_reads_the_environment() -> None:
    readers = [
        relative(path)
        for path in MODULES
        if re.search(r"os\.environ|os\.getenv", path.read_text()) and not relative(path).startswith("settings/")
    ]
    assert readers == []


@pytest.mark.parametrize("path", MODULES, ids=relative)
def test_a_module_says_what_it_is_for_and_stays_small(path: Path) -> None:
    text = path.read_text()
    tree = ast.parse(text)
    assert ast.get_docstring(tree), "a module opens with what it is for"
    assert text.count("\n") <= LINES_MAX
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert (node.end_lineno or 0) - node.lineno < FUNCTION_LINES_MAX, f"{node.name} is too long"


def test_nothing_is_left_unwritten() -> None:
    marked = [
        relative(path) for path in MODULES if re.search(r"\b(TODO|FIXME|XXX|NotImplementedError)\b", path.read_text())
    ]
    assert marked == []


def test_no_room_is_named_for_nothing() -> None:
    vague = {"utils", "util", "common", "helpers", "helper", "misc", "manager"}
    assert [relative(path) for path in MODULES if path.stem in vague or path.parent.name in vague] == []


def test_sql_lives_in_sql_files() -> None:
    """Outside of the drivers and the judge, which has statements of its own, no module spells out a statement."""
    spelled = re.compile(r'"\s*(select|insert into|update|delete from)\s', re.IGNORECASE)
    exceptions = {
        "store/sqlite.py",
        "store/postgres.py",
        "store/postgres_clock.py",
        "store/postgres_notices.py",
        "store/schema.py",
    }
    found = [
        relative(path)
        for path in MODULES
        if relative(path) not in exceptions
        and relative(path).split("/")[0] not in ("judge", "simulate")
        and spelled.search(path.read_text())
    ]
    assert found == []


def test_every_public_class_has_a_name_of_its_own() -> None:
    places: dict[str, list[str]] = {}
    for path in sorted(SOURCE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places.setdefault(node.name, []).append(relative(path))
    assert {name: found for name, found in places.items() if len(found) > 1} == {}
