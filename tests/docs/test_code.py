"""What the pages say of commands, routes, fields, states, failpoints, errors and benchmarks is what the code says."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache

import msgspec
import pytest

from bench import __main__ as benchmarks
from docs import generate
from tests.docs.pages import (
    PAGES,
    REPOSITORY,
    SOURCE,
    blocks,
    codes,
    first_codes,
    page,
    roads_drawn,
    rows,
    section,
    without_blocks,
)
from tidegate import failpoints
from tidegate.core import errors, hooks, states
from tidegate.core.answers import outcome_lines
from tidegate.core.policy import policy_rules
from tidegate.judge import rules_items, rules_lines
from tidegate.store.database.queries import statements
from tidegate.web.openai import schemas
from tidegate.web.requests import requests

API = page("docs/reference/api.md")
ARCHITECTURE = page("docs/architecture.md")
ERRORS = page("docs/reference/errors.md")
BY_NAME = 1000
# Rules that no call meets yet.
UNTOLD = {
    policy_rules.DenialCode.BUDGET_EXCEEDED,
    policy_rules.DenialCode.BUDGET_RESERVED,
    policy_rules.DenialCode.PARALLEL_EXCEEDED,
    policy_rules.DenialCode.RATE_EXCEEDED,
}


# ---- commands and routes


def test_commands_on_pages_exist() -> None:
    known = {" ".join(path): command for path, command in generate.every_command()}
    groups = {path.split()[0] for path in known if " " in path}
    # The list of stumbles also names what was wrong.
    for path in (one for one in PAGES if one.name != "stumbles.md"):
        text = path.read_text(encoding="utf-8")
        texts = [block.text for block in blocks(text) if block.language in ("sh", "text")] + codes(text)
        for line in "\n".join(texts).splitlines():
            # `helm install tidegate` is no command of ours.
            for call in re.findall(r"(?<!install )(?<![\w./-])tidegate ((?:[a-z]+ ?)+)([^\n#|>&]*)", line):
                words = call[0].split()
                named = next((" ".join(words[:count]) for count in (2, 1) if " ".join(words[:count]) in known), "")
                assert named or words[0] in groups, line
                options = (
                    {name for one in known[named].params for name in (*one.opts, *one.secondary_opts)}
                    if named
                    else set()
                )
                for option in re.findall(r"(?<!\S)--[a-z-]+", call[1]):
                    assert option in options | {"--help", "--version"}, line
        # A page may leave out the program's name before a group of commands.
        for short in codes(without_blocks(text)):
            shortened = re.match(r"([a-z]+) ([a-z]+)(?: |$)", short)
            if shortened is not None and shortened[1] in groups:
                assert shortened[0].strip() in known, short


def test_every_route_is_explained_below_the_table() -> None:
    explained = " ".join(codes(API.replace("<!-- generated: routes -->", "", 1).split("<!-- /generated -->")[1]))
    for method, path, _ in generate.every_route():
        if path.startswith("/v1/"):
            assert path.removeprefix("/v1/batches/{batch_id}") in explained or f"{method} {path}" in explained, path


@pytest.mark.parametrize(
    ("head", "struct"),
    [
        ("field of a file", schemas.FileObject),
        ("field of create", requests.BatchCreate),
        ("field of a batch", schemas.Batch),
    ],
)
def test_every_field_is_on_the_page_and_no_other(head: str, struct: type[msgspec.Struct]) -> None:
    table = re.search(rf"^\| {head} \|.*\n(?:\|.*\n)+", API, re.M)
    assert table
    assert set(first_codes(table[0])) == set(struct.__struct_fields__)


@pytest.mark.parametrize(
    "struct",
    [schemas.RequestCounts, schemas.Extras, schemas.BatchUsage, schemas.BatchError],
    ids=lambda one: one.__name__,
)
def test_the_fields_of_parts_are_on_the_page(struct: type[msgspec.Struct]) -> None:
    named = {part.strip('{}"[] ') for code in codes(API) for part in re.split(r"[.,:]", code)}
    assert set(struct.__struct_fields__) <= named


def test_endpoints_and_purposes_are_on_the_page() -> None:
    assert set(requests.ENDPOINTS) | set(requests.LISTED_PURPOSES) <= set(codes(API))


# ---- rooms and states


def test_every_room_is_in_the_table_with_a_duty() -> None:
    found = {row[0].strip("`"): row[1] for row in rows(section(ARCHITECTURE, "## The rooms")) if len(row) == 2}
    rooms = {
        path.parent.relative_to(SOURCE).as_posix() + "/"
        for path in SOURCE.rglob("__init__.py")
        if path.parent != SOURCE
    } | {path.name for path in SOURCE.glob("*.py") if not path.name.startswith("__")}
    assert rooms <= found.keys()
    assert all(len(found[room]) > 20 and found[room].endswith(".") for room in rooms), "a duty is a sentence"


@pytest.mark.parametrize("road", ["item", "call"])
def test_the_roads_are_drawn_through_files_that_exist(road: str) -> None:
    drawn = roads_drawn()[road]
    assert len(drawn) >= 8
    assert [one for one in drawn if not (SOURCE / one).is_file()] == []


def test_modules_named_on_the_page_exist() -> None:
    for code in codes(ARCHITECTURE):
        if re.fullmatch(r"[a-z_]+/[a-z_/]+(\.(py|sql))?/?", code) and not code.startswith("tests/"):
            assert (SOURCE / code).exists(), code


@pytest.mark.parametrize("noun", generate.MOVES)
def test_diagrams_are_the_table_of_moves(noun: str) -> None:
    moves = {(str(start), str(end)) for start, ends in generate.MOVES[noun].items() for end in ends}
    drawn = set(re.findall(r"^    (\w+) --> (\w+)$", section(ARCHITECTURE, f"### {noun}"), re.M))
    assert drawn == moves


def test_outcomes_are_named() -> None:
    assert set(codes(section(ARCHITECTURE, "### outcomes"))) == {outcome.value for outcome in states.Outcome}


def test_statements_make_only_moves_that_are_drawn() -> None:
    for statement in statements().values():
        for noun, start, end in statement.moves:
            assert f"    {start} --> {end}" in section(ARCHITECTURE, f"### {noun}"), statement.name


def test_a_batch_shows_a_state_for_each_of_a_jobs() -> None:
    shown = {code for row in rows(section(page("docs/concepts.md"), "## What a batch shows")) for code in codes(row[0])}
    assert shown == {state.value for state in states.JobState}


# ---- failpoints


def test_every_border_has_a_failpoint_and_a_row() -> None:
    named = first_codes(section(ARCHITECTURE, "## What a crash does at each border"))
    assert named == list(failpoints.NAMES)
    hit = {
        name
        for path in SOURCE.rglob("*.py")
        for name in re.findall(r"\bhit\(\s*\"(\w+)\"", path.read_text(encoding="utf-8"))
    }
    assert hit == set(failpoints.NAMES)


# ---- errors


@cache
def codes_in_the_program() -> frozenset[str]:
    return frozenset(_codes_in_the_program())


def _codes_in_the_program() -> Iterator[str]:
    """Every literal that is given for a parameter or a field called `code`, and the reasons of upstream errors.

    The simulated engine, the judge and the commands are left out: theirs are not on our wire.
    """
    trees = [
        ast.parse(path.read_text(encoding="utf-8"))
        for path in SOURCE.rglob("*.py")
        if path.relative_to(SOURCE).parts[0] not in ("simulate", "judge", "cli")
    ]
    places: dict[str, int] = {}
    for tree in trees:
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                fields = [
                    one.target.id
                    for one in node.body
                    if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name)
                ]
                if "code" in fields:
                    places[node.name] = fields.index("code")
                made = [one for one in node.body if isinstance(one, ast.FunctionDef) and one.name == "__init__"]
                if made and (place := _place(made[0], skip=1)) is not None:
                    places[node.name] = place
            elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and (place := _place(node)) is not None:
                places.setdefault(node.name, place)
    places |= {one.__name__: BY_NAME for one in _family(errors.UpstreamError)}
    for tree in trees:
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name | ast.Attribute):
                called = node.func.id if isinstance(node.func, ast.Name) else node.func.attr
                if called in places:
                    given = [one.value for one in node.keywords if one.arg == "code"]
                    given += node.args[places[called] : places[called] + 1]
                    yield from (
                        one.value for one in given if isinstance(one, ast.Constant) and isinstance(one.value, str)
                    )
    yield from (code for code, _ in outcome_lines.NEVER_RAN.values())
    yield from (code.value for code in policy_rules.DenialCode if code not in UNTOLD)
    yield from hooks.CODES
    yield from (one.reason for one in _family(errors.UpstreamError))


def _place(function: ast.FunctionDef | ast.AsyncFunctionDef, skip: int = 0) -> int | None:
    """Where `code` stands among the positional parameters, BY_NAME when it goes by name alone, None when there is none."""
    if any(one.arg == "code" for one in function.args.kwonlyargs):
        return BY_NAME
    names = [one.arg for one in function.args.args]
    return names.index("code") - skip if "code" in names else None


def _family(kind: type[errors.UpstreamError]) -> list[type[errors.UpstreamError]]:
    return [kind, *(one for child in kind.__subclasses__() for one in _family(child))]


def test_every_code_is_on_the_page_and_no_other() -> None:
    assert set(first_codes(ERRORS)) == codes_in_the_program()


def test_the_judge_knows_the_codes_of_items() -> None:
    of_items = set(first_codes(section(ERRORS, "## Why an item failed: the error file")))
    of_batches = set(first_codes(section(ERRORS, "## Why a batch failed: `errors.data`")))
    assert of_items <= rules_lines.ITEM_CODES
    assert of_batches >= rules_lines.LINE_CODES
    waited = set(first_codes(section(ERRORS, "## What is waited out")))
    waits = {*(one.value for one in policy_rules.RETRYABLE), *hooks.RETRYABLE}
    assert waited & waits <= rules_items.FREE_REASONS
    assert waits <= rules_items.FREE_REASONS
    assert set(hooks.CODES) - set(hooks.RETRYABLE) == rules_items.JUDGED_CODES


def test_the_judge_knows_why_items_are_tried_again() -> None:
    """Every error of a call but those that fail the item at once is a reason to try again, which `verify` finds on record."""
    final = {"upstream_refused", "budget_exceeded", "max_tokens_required", "surcharge_unpriced"}
    reasons = {one.reason for one in _family(errors.UpstreamError)[1:]} - final
    assert reasons <= rules_items.FREE_REASONS | rules_items.BILLED_REASONS


def test_the_collection_of_codes_is_not_blind() -> None:
    found = codes_in_the_program()
    assert {
        "quota_exceeded",
        "url_mismatch",
        "duplicate_custom_id",
        "worker_lost",
        "retry_budget_spent",
        "batch_expired",
    } <= found


def test_troubleshooting_names_codes_and_messages_that_exist() -> None:
    text = page("docs/how-to/troubleshooting.md")
    failing = first_codes(section(text, "## Lines fail"))
    assert {code for code in failing if not code.endswith("…")} <= set(first_codes(ERRORS))
    program = "".join(path.read_text(encoding="utf-8") for path in SOURCE.rglob("*.py")).replace("`", "")
    quoted = [re.findall(r'"([^"]+)"', row[0]) for row in rows(section(text, "## It does not start"))]
    assert sum(map(len, quoted)) >= 4
    assert [words for found in quoted for words in found if words not in program] == []


def test_statuses_on_the_page_are_those_of_the_code() -> None:
    statuses = {code: row[1] for row in rows(section(ERRORS, "## Refusals of the API")) for code in codes(row[0])}
    for path in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "ApiProblem":
                status, code = node.args[:2]
                if isinstance(status, ast.Constant) and isinstance(code, ast.Constant):
                    assert statuses[str(code.value)] == str(status.value), code.value


# ---- benchmarks and make


def test_every_benchmark_is_on_the_page_and_no_other() -> None:
    named = re.findall(r"python -m bench (\w+)$", page("docs/performance.md"), re.M)
    assert sorted(named) == sorted(benchmarks.NAMES)
    assert all((REPOSITORY / "bench" / f"{one}.py").is_file() for one in named)


def test_make_targets_on_pages_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):.*## ", page("Makefile"), re.M))
    for where in ("README.md", "docs/quickstart.md", "docs/performance.md"):
        text = page(where)
        commands = "\n".join([*(block.text for block in blocks(text) if block.language == "sh"), *codes(text)])
        assert set(re.findall(r"\bmake ([a-z-]+)", commands)) <= targets
