"""The pages as tests read them: blocks, tables, links, and the tests that they name. It knows nothing of what a page says."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
DOCS = REPOSITORY / "docs"
SOURCE = REPOSITORY / "src" / "tidegate"
PAGES = [
    *(REPOSITORY / where for where in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")),
    *sorted(DOCS.rglob("*.md")),
]

_FENCE = re.compile(
    r"(?:^<!-- tested(?:: (?P<how>[^>]*?))? -->\n)?^```(?P<language>\w+)\n(?P<text>.*?)^```$", re.M | re.S
)
_NAMED_TEST = re.compile(r"`(tests/[\w/]+\.py)(?:::(\w+))?`")
_CODE = re.compile(r"`([^`]+)`")


def name(path: Path) -> str:
    return path.relative_to(REPOSITORY).as_posix()


def page(where: str) -> str:
    return (REPOSITORY / where).read_text(encoding="utf-8")


@dataclass(frozen=True)
class Block:
    """A fenced block; `how` is None for one that is only shown."""

    language: str
    text: str
    how: str | None


def blocks(text: str) -> list[Block]:
    found = []
    for match in _FENCE.finditer(text):
        is_tested = match[0].startswith("<!-- tested")
        found.append(Block(match["language"], match["text"], (match["how"] or "") if is_tested else None))
    return found


def without_blocks(text: str) -> str:
    return _FENCE.sub("", text)


def section(text: str, heading: str) -> str:
    """What stands under a heading, up to the next one of the same or a higher level."""
    level = heading.split()[0]
    start = re.search(rf"^{re.escape(heading)}$", text, re.M)
    assert start, f"there is no heading {heading!r}"
    rest = text[start.end() :]
    end = re.search(rf"^#{{1,{len(level)}}} ", rest, re.M)
    return rest[: end.start()] if end else rest


def rows(text: str) -> Iterator[list[str]]:
    """The rows of every table, without heads and rules."""
    lines = text.splitlines()
    for before, line in zip(["", *lines], lines, strict=False):
        is_row = line.startswith("|") and not re.fullmatch(r"\|[\s|:-]+\|", line)
        if is_row and before.startswith("|"):
            yield [part.strip().replace("\\|", "|") for part in re.split(r"(?<!\\)\|", line)[1:-1]]


def codes(text: str) -> list[str]:
    """What stands between backticks."""
    return _CODE.findall(text)


def first_codes(text: str) -> list[str]:
    """The words in backticks in the first column of the tables."""
    return [code for row in rows(text) for code in codes(row[0])]


def roads_drawn() -> dict[str, list[str]]:
    """The files on each road that the architecture page draws."""
    drawn = re.findall(r"<!-- road: (\w+) -->(.*?)<!-- /road -->", page("docs/architecture.md"), re.S)
    return {name: re.findall(r'\["([\w/]+\.py): ', text) for name, text in drawn}


def named_tests(text: str) -> list[tuple[str, str | None]]:
    """Every `tests/….py::name` in a text, and every `tests/….py` alone."""
    return [(match[1], match[2]) for match in _NAMED_TEST.finditer(text)]


@cache
def tests_of(where: str) -> frozenset[str]:
    """The names of the tests in a file, those in classes too; none when there is no such file."""
    path = REPOSITORY / where
    if not path.is_file():
        return frozenset()
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return frozenset(
        node.name
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_")
    )


@cache
def soak_tests_of(where: str) -> frozenset[str]:
    """The names of the tests in a file that run in the soak alone."""
    tree = ast.parse(page(where))
    marked = [
        node.value for node in tree.body if isinstance(node, ast.Assign) and _named(node.targets[0], "pytestmark")
    ]
    if any(_named(part, "soak") for one in marked for part in ast.walk(one)):
        return tests_of(where)
    return frozenset(
        node.name
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and any(_named(mark, "soak") for mark in node.decorator_list)
    )


def _named(node: ast.AST, word: str) -> bool:
    return getattr(node, "attr", getattr(node, "id", None)) == word


def missing_tests(text: str) -> list[str]:
    """The tests that a text names and that are not there."""
    return [
        f"{where}::{test}" if test else where
        for where, test in named_tests(text)
        if not tests_of(where) or (test is not None and test not in tests_of(where))
    ]
