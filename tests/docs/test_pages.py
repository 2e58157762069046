"""Pages hang together: links lead somewhere, every page can be reached, nothing on them is of one machine, decisions have one form."""

from __future__ import annotations

import re
import xml.etree.ElementTree
from pathlib import Path

import pytest

from docs import generate
from tests.docs.pages import DOCS, PAGES, REPOSITORY, blocks, name, without_blocks

_LINK = re.compile(r"\]\((?P<target>[^)\s]+)\)")
_MACHINE = re.compile(r"/(?:work|home|root|Users|farm|tmp)/|[A-Z]:\\\\|file:///(?!PATH|\.)")
DECISIONS = sorted(path for path in (DOCS / "decisions").glob("*.md") if path.name != "README.md")


def links(path: Path) -> list[str]:
    return _LINK.findall(without_blocks(path.read_text(encoding="utf-8")))


def anchors(path: Path) -> set[str]:
    """The anchors that GitHub gives to a page's headings."""
    heads = re.findall(r"^#+ (.+)$", without_blocks(path.read_text(encoding="utf-8")), re.M)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


@pytest.mark.parametrize("path", PAGES, ids=name)
def test_every_link_leads_somewhere(path: Path) -> None:
    for link in links(path):
        if link.startswith(("http://", "https://")):
            continue
        where, _, anchor = link.partition("#")
        target = (path.parent / where).resolve() if where else path
        assert target.is_file(), f"{name(path)} links to {link}, which is not there"
        if anchor:
            assert anchor in anchors(target), f"{name(path)} links to {link}, which has no such heading"


def test_every_page_can_be_reached_from_the_readme() -> None:
    reached, waiting = set(), [REPOSITORY / "README.md"]
    while waiting:
        path = waiting.pop()
        if path in reached or path.suffix != ".md":
            continue
        reached.add(path)
        waiting += [
            (path.parent / link.partition("#")[0]).resolve() for link in links(path) if not link.startswith("http")
        ]
    assert {name(path) for path in PAGES} - {name(path) for path in reached} == set()


@pytest.mark.parametrize("path", PAGES, ids=name)
def test_nothing_is_of_one_machine(path: Path) -> None:
    assert not _MACHINE.findall(path.read_text(encoding="utf-8"))


@pytest.mark.parametrize("path", [path for path in PAGES if generate.PART.search(path.read_text())], ids=name)
def test_what_is_generated_is_current(path: Path) -> None:
    page = path.read_text(encoding="utf-8")
    assert generate.regenerated(page) == page, "run `make docs`"


def test_the_changelog_says_each_thing_once_and_compares_with_no_release() -> None:
    text = (REPOSITORY / "CHANGELOG.md").read_text(encoding="utf-8")
    entries = re.findall(r"^- .*$", text, re.M)
    assert sorted({one for one in entries if entries.count(one) > 1}) == []
    assert re.findall(r"no longer|\*\*Changed\*\*", text) == []


def test_every_part_that_can_be_generated_is_on_a_page() -> None:
    found = [match["name"] for path in PAGES for match in generate.PART.finditer(path.read_text(encoding="utf-8"))]
    assert sorted(found) == sorted(generate.PARTS)


@pytest.mark.parametrize("path", DECISIONS, ids=name)
def test_a_decision_says_what_was_known_decided_and_follows(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    number = path.name[:4]
    assert re.match(rf"# {number}: .+\n\n\*\*Context\.\*\* ", text)
    assert text.index("**Context.**") < text.index("\n**Decision.** ") < text.index("\n**Consequence.**")
    assert 12 <= text.count("\n") <= 40


def test_decisions_are_numbered_without_gaps_and_listed() -> None:
    assert [path.name[:4] for path in DECISIONS] == [f"{number:04}" for number in range(1, len(DECISIONS) + 1)]
    listed = links(DOCS / "decisions" / "README.md")
    assert sorted(listed) == [path.name for path in DECISIONS]


@pytest.mark.parametrize("path", sorted(DOCS.rglob("*.svg")), ids=name)
def test_a_picture_is_whole_and_says_what_it_shows(path: Path) -> None:
    tree = xml.etree.ElementTree.parse(path).getroot()
    space = "{http://www.w3.org/2000/svg}"
    assert tree.find(f"{space}title") is not None
    assert tree.find(f"{space}desc") is not None
    text = path.read_text(encoding="utf-8")
    assert "prefers-color-scheme: dark" in text
    assert "href=" not in text, "a picture asks no other host for anything"


@pytest.mark.parametrize("path", PAGES, ids=name)
def test_yaml_and_json_on_pages_can_be_read(path: Path) -> None:
    import json

    import yaml

    for block in blocks(path.read_text(encoding="utf-8")):
        if block.language == "yaml":
            assert isinstance(yaml.safe_load(block.text), dict)
        elif block.language == "json":
            json.loads(block.text)


def test_every_page_has_a_place_on_the_site() -> None:
    """Decisions are reached through their list."""
    text = (REPOSITORY / "mkdocs.yml").read_text(encoding="utf-8")
    named = re.findall(r": (\S+\.md)$", text.partition("\nnav:\n")[2], re.M)
    assert sorted(named) == sorted({name(path) for path in PAGES} - {name(path) for path in DECISIONS})


def test_the_package_says_that_it_is_typed() -> None:
    assert (REPOSITORY / "src" / "tidegate" / "py.typed").is_file()
    assert "Typing :: Typed" in (REPOSITORY / "pyproject.toml").read_text(encoding="utf-8")
