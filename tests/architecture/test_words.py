"""The words of the glossary are the words of the code, and the retired ones are gone."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from functools import cache
from itertools import chain
from pathlib import Path

import pytest

from tests.docs.pages import PAGES, REPOSITORY, SOURCE, name, page, rows, without_blocks

TESTS, BENCHMARKS = REPOSITORY / "tests", REPOSITORY / "bench"
# What each retired word gave way to.
RETIRED = {
    "anew": "again",
    "bears": "can_take, allows",
    "bench": "waiting_group",
    "benches": "waiting_groups",
    "bill": "settlement",
    "bills": "settlements",
    "chooser": "scheduler",
    "ear": "subscription",
    "filler": "leaser",
    "hear": "notice",
    "heard": "reported",
    "hinter": "priority_hints",
    "knock": "probe",
    "landed": "mark_done",
    "lanes": "deployments",
    "lessons": "feedback",
    "notebook": "discovered_limits",
    "passage": "response",
    "presence": "fleet",
    "prospect": "forecast",
    "purse": "budget_client",
    "roster": "live_config",
    "said": "what it is: text, body, reason, value",
    "seat": "slot",
    "seats": "slots",
    "stems": "prefix_tree",
    "stranger": "unknown",
    "strangers": "unknown",
    "told": "reported",
    "went": "sent",
    "wish": "request, wanted, asked",
    "wished": "wanted",
    "wishes": "requests",
}
# Words that are right elsewhere: inputs and small jobs have lanes, and a process leaves the fleet.
RETIRED_IN_UPSTREAM = {"lane": "deployment state", "leave": "permit"}
# Tests hold things on purpose. A job may hold a model's items back: that is a state in the store.
RETIRED_IN_SOURCE = {"held": "what holds it and why: leased, waiting, stored"}
STATES = {"core/states.py HELD"}
# A field of OpenAI's API.
API_FIELDS = {"core/policy/chat_texts.py presence_penalty"}
# The socket module's own words for what to shut down.
SOCKET_WORDS = {"SHUT_RDWR", "SHUT_WR"}
# The fields of a syntax node that hold a name.
NAME_FIELDS = frozenset(("id", "attr", "arg", "name"))


def _parts(name: str) -> tuple[str, ...]:
    return tuple(part.lower() for part in re.split(r"_+|(?<=[a-z0-9])(?=[A-Z])", name) if part)


@cache
def _names_and_strings(path: Path) -> tuple[frozenset[str], tuple[str, ...]]:
    """Every name of a class, function, parameter, attribute and variable of a module, and every string."""
    names, strings = {path.stem}, []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Constant):
            if isinstance(node.value, str):
                strings.append(node.value)
            continue
        for field in NAME_FIELDS.intersection(node._fields):
            if isinstance(value := getattr(node, field), str):
                names.add(value)
    return frozenset(names), tuple(strings)


def _names(folder: Path) -> dict[str, frozenset[str]]:
    """The names in each module of a folder."""
    return {path.relative_to(folder).as_posix(): _names_and_strings(path)[0] for path in sorted(folder.rglob("*.py"))}


@cache
def _names_as_words() -> frozenset[str]:
    return frozenset(" ".join(_parts(name)) for names in _names(SOURCE).values() for name in names)


def _glossary() -> Iterator[str]:
    concepts = page("docs/concepts.md")
    for row in rows(concepts[: concepts.index("## How they hang together")]):
        yield from re.findall(r"\*\*([^*]+)\*\*", row[0])


def test_the_glossary_is_not_empty_and_says_each_word_once() -> None:
    words = list(_glossary())
    assert len(words) > 50
    assert len(words) == len(set(words))


@pytest.mark.parametrize("word", list(_glossary()))
def test_every_word_of_the_glossary_is_in_the_code(word: str) -> None:
    wanted = re.compile(rf"(^| ){word}s?( |$)")
    assert any(map(wanted.search, _names_as_words()))


@pytest.mark.parametrize("folder", [SOURCE, TESTS, BENCHMARKS], ids=name)
def test_retired_words_are_gone_from_names(folder: Path) -> None:
    retired = RETIRED | RETIRED_IN_SOURCE if folder == SOURCE else RETIRED
    found = {
        f"{path} {name}"
        for path, names in _names(folder).items()
        for name in names
        for part in _parts(name)
        if part in retired or (part in RETIRED_IN_UPSTREAM and folder == SOURCE and path.startswith("upstream/"))
    }
    assert sorted(found - STATES - API_FIELDS) == [], f"say instead: {retired | RETIRED_IN_UPSTREAM}"


@pytest.mark.parametrize("folder", [SOURCE, TESTS, BENCHMARKS], ids=name)
def test_names_are_no_riddles(folder: Path) -> None:
    names = ((path, name) for path, names in _names(folder).items() for name in names - SOCKET_WORDS)
    found = [f"{path} {name}" for path, name in names if RIDDLES.search(" ".join(_parts(name)))]
    assert sorted(found) == [], PLAIN


def test_the_page_and_the_list_agree_on_what_is_retired() -> None:
    """What the glossary says a thing is not called is not a word of the glossary."""
    concepts = page("docs/concepts.md")
    tables = concepts[: concepts.index("## How they hang together")]
    never = {word.strip() for row in rows(tables) for word in row[2].split(",") if word.strip()}
    assert not never & set(_glossary()) - {"file"}


# Words that hide who does what, and old words for fix, allow, obey, healthy, open circuit and permit.
RIDDLES = re.compile(
    r"\b(nobody|nobody's|whoever|whomever|said|told(?! apart)|(?:un)?heard|anew|mend(?:s|ed|ing)?"
    r"|bears?|bore|borne|heed(?:s|ed|ing)?|shuts?|at work|unwell|(?:is|are|was|were|be|all) well(?! as)"
    r"|(?:takes?|taking|its|whose|no|new) leave|leave (?:to send|for|is|was|ran))\b",
    re.IGNORECASE,
)
PLAIN = "name who does it, and say sent, reported, again, fix, allow, healthy, circuit open, permit"


def _prose(path: Path) -> Iterator[str]:
    """Every string and every comment of a module: docstrings, messages, help and log events."""
    for string in _names_and_strings(path)[1]:
        yield string.replace("_", " ")
    text = path.read_text(encoding="utf-8")
    # Reading the tokens takes long, and most files have no such word at all.
    if RIDDLES.search(text):
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            if token.type == tokenize.COMMENT:
                yield token.string


def _statement_comments(text: str) -> Iterator[str]:
    """Every comment of a file of SQL."""
    return (line for line in text.splitlines() if line.lstrip().startswith("--"))


def _riddles(prose: dict[Path, Iterator[str]]) -> list[str]:
    return [
        f"{name(path)}: {line.strip()}"
        for path, texts in sorted(prose.items())
        for text in texts
        for line in text.splitlines()
        if RIDDLES.search(line)
    ]


def test_the_program_speaks_plainly() -> None:
    prose = {path: _prose(path) for path in SOURCE.rglob("*.py")}
    prose |= {path: _statement_comments(path.read_text(encoding="utf-8")) for path in SOURCE.rglob("*.sql")}
    deployed = [path for ending in ("yaml", "txt", "json") for path in (REPOSITORY / "deploy").rglob(f"*.{ending}")]
    shown = [*SOURCE.rglob("*.html"), SOURCE / "web" / "static" / "console.js", *deployed]
    prose |= {path: iter((path.read_text(encoding="utf-8"),)) for path in shown}
    assert _riddles(prose) == [], PLAIN


def test_tests_and_benchmarks_speak_plainly() -> None:
    """Only this module may have the words, because they are its data."""
    modules = {*TESTS.rglob("*.py"), *BENCHMARKS.rglob("*.py")} - {Path(__file__)}
    prose = {path: _prose(path) for path in modules}
    others = chain(TESTS.rglob("*.c"), TESTS.rglob("*.mjs"))
    prose |= {path: iter((path.read_text(encoding="utf-8"),)) for path in others}
    assert _riddles(prose) == [], PLAIN


@pytest.mark.parametrize("path", PAGES, ids=name)
def test_pages_speak_plainly(path: Path) -> None:
    """Names of tests and old names of events may stand in backticks."""
    text = re.sub(r"`[^`]+`", "", without_blocks(path.read_text(encoding="utf-8")))
    assert [line for line in text.splitlines() if RIDDLES.search(line)] == [], PLAIN


def test_the_list_of_words_is_not_blind() -> None:
    for riddle in ("nobody asks", "when the server is well", "upstream shut", "waits for its leave", "as it is told"):
        assert RIDDLES.search(riddle), riddle
    for plain in ("Authorization: Bearer", "use it as well", "leave it out", "told apart", "leaves room"):
        assert not RIDDLES.search(plain), plain
