"""Style as a test: where effects come from, how wide and long code may be, and what must not be left lying about."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from tests.architecture import shape

SOURCE = Path(__file__).resolve().parents[2] / "src" / "tidegate"
TESTS = Path(__file__).resolve().parents[1]
MODULES = sorted(SOURCE.rglob("*.py"))
SIMULATED = ("stages", "upstream", "store", "core", "worker")
EFFECTS = {"time", "random", "uuid", "secrets"}
# Outside the simulator's loop on purpose: ingest is a process of its own, and aiohttp stamps idle connections with time.monotonic.
ALLOWED_EFFECTS = {"stages/ingest/ingest_file.py", "upstream/http/connections.py"}
LINES_MAX, FUNCTION_LINES_MAX, PROSE_COLUMNS_MAX = 700, 70, 100


def relative(path: Path) -> str:
    return path.relative_to(SOURCE).as_posix()


def imports(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module.split(".")[0]


def test_time_and_chance_come_through_ports() -> None:
    simulated = [module for module in shape.modules(SOURCE) if module.path.split("/")[0] in SIMULATED]
    found = {module.path: EFFECTS & set(imports(module.tree)) for module in simulated}
    assert {path for path, effects in found.items() if effects} <= ALLOWED_EFFECTS


def test_only_settings_reads_the_environment() -> None:
    readers = [
        relative(path)
        for path in MODULES
        if re.search(r"os\.environ|os\.getenv", path.read_text()) and not relative(path).startswith("settings/")
    ]
    assert readers == []


def test_a_module_says_what_it_is_for_and_stays_small() -> None:
    assert [module.path for module in shape.modules(SOURCE) if not ast.get_docstring(module.tree)] == []
    assert [relative(path) for path in MODULES if path.read_text().count("\n") > LINES_MAX] == []
    long = [
        f"{module.path} {name}"
        for module in shape.modules(SOURCE)
        for name, node in shape.functions(module)
        if (node.end_lineno or 0) - node.lineno >= FUNCTION_LINES_MAX
    ]
    assert long == []


def test_prose_is_at_most_a_hundred_columns_wide() -> None:
    """A line of a table may be wider (its cells stand apart), and a command's help, whose paragraphs are one line each."""
    wide = [
        f"{module.path}:{number}"
        for module in shape.modules(SOURCE)
        for number in shape.prose_lines(module)
        if len(line := module.lines[number - 1]) > PROSE_COLUMNS_MAX and "  " not in line.strip()
    ]
    assert [one for one in wide if not one.startswith("cli/")] == []


def test_nothing_is_left_unwritten() -> None:
    marked = [
        relative(path) for path in MODULES if re.search(r"\b(TODO|FIXME|XXX|NotImplementedError)\b", path.read_text())
    ]
    assert marked == []


def test_no_room_is_named_for_nothing() -> None:
    vague = {"utils", "util", "common", "helpers", "helper", "misc", "manager"}
    assert [relative(path) for path in MODULES if path.stem in vague or path.parent.name in vague] == []


def test_the_tests_of_a_room_lie_in_a_folder_of_its_name() -> None:
    """Other folders hold what is tested over several rooms."""
    rooms = {path.name for path in SOURCE.iterdir() if path.is_dir()}
    folders = (path.parent.relative_to(TESTS) for path in TESTS.rglob("test_*.py"))
    assert [str(one) for one in folders if one.parts and one.parts[0] in rooms and not (SOURCE / one).is_dir()] == []


def test_sql_lives_in_sql_files() -> None:
    """Outside of the drivers and the judge, which has statements of its own, no module spells out a statement."""
    spelled = re.compile(r'"\s*(select|insert into|update|delete from)\s', re.IGNORECASE)
    exceptions = {
        "store/database/sqlite.py",
        "store/database/postgres.py",
        "store/database/postgres_clock.py",
        "store/database/postgres_notices.py",
        "store/database/schema.py",
    }
    found = [
        relative(path)
        for path in MODULES
        if relative(path) not in exceptions
        and relative(path).split("/")[0] not in ("judge", "simulate")
        and spelled.search(path.read_text())
    ]
    assert found == []


def test_every_class_and_type_has_a_name_of_its_own() -> None:
    """A leading underscore does not make a second name of it. A type is a name in CapWords at the top of a module."""
    capitalised = re.compile("_?[A-Z]+[a-z]")
    places: dict[str, list[str]] = {}
    for module in shape.modules(SOURCE):
        named = [node.name for node in ast.walk(module.tree) if isinstance(node, ast.ClassDef)]
        targets = (target for node in module.tree.body if isinstance(node, ast.Assign) for target in node.targets)
        named += [one.id for one in targets if isinstance(one, ast.Name) and capitalised.match(one.id)]
        for name in named:
            places.setdefault(name.lstrip("_"), []).append(module.path)
    assert {name: found for name, found in places.items() if len(found) > 1} == {}


# ---- shape


def test_no_modules_import_each_other_in_a_circle() -> None:
    """An import inside a function, or for types alone, counts too: who reads one module of a circle has to read them all."""
    assert shape.import_circle(SOURCE) == []
    assert shape.import_circle(SOURCE.parents[1] / "bench") == []


def test_a_function_has_at_most_six_parameters() -> None:
    assert [one for module in shape.modules(SOURCE) for one in shape.wide_functions(module)] == []


def test_a_constructor_has_at_most_seven_collaborators() -> None:
    assert [one for module in shape.modules(SOURCE) for one in shape.wide_constructors(module)] == []


def test_a_method_says_to_what_it_does_something() -> None:
    assert [one for module in shape.modules(SOURCE) for one in shape.vague_methods(module)] == []


def test_no_object_calls_back_into_its_maker() -> None:
    assert [one for module in shape.modules(SOURCE) for one in shape.callbacks(module)] == []


def test_no_attribute_is_set_from_outside() -> None:
    assert list(shape.outside_sets(shape.modules(SOURCE))) == []


def test_the_checks_of_shape_are_not_blind(tmp_path: Path) -> None:
    (tmp_path / "parts.py").write_text("class Part:\n    def __init__(self, done): self.done = done\n")
    (tmp_path / "owner.py").write_text(
        "def wide(a, b, c, d, e, f, *, g): ...\n"
        "class Owner:\n"
        "    def __init__(self, a, b, c, d, e, f, g, h):\n"
        "        self.one = Part(self.step)\n"
        "        self.two = Part(lambda: self.step())\n"
        "        self.three = Part(partial(self.step, 1))\n"
        "        self.one.done = None\n"
        "    def step(self):\n"
        "        mine = Part(None)\n"
        "        mine.done = 1\n"
        "    def take(self): ...\n"
    )
    found = shape.modules(tmp_path)
    owner = found[0]
    assert list(shape.wide_functions(owner)) == ["owner.py wide"]
    assert list(shape.wide_constructors(owner)) == ["owner.py Owner"]
    assert list(shape.vague_methods(owner)) == ["owner.py Owner.take"]
    assert list(shape.callbacks(owner)) == [f"owner.py Owner -> Part({given})" for given in ("step", "lambda", "step")]
    assert list(shape.outside_sets(found)) == ["owner.py .done"]
    circle = tmp_path / "circle"
    circle.mkdir()
    (circle / "here.py").write_text("def late():\n    from there import soon\n")
    (circle / "there.py").write_text("import here\n")
    assert shape.import_circle(circle) == ["here", "there", "here"]


# ---- log events


def test_log_events_are_nouns_with_a_verb_or_a_state() -> None:
    """An event is a literal of at least two words, so an operator can guess it and find it in the source."""
    events = {
        (node.args[0].value if isinstance(node.args[0], ast.Constant) else ast.unparse(node.args[0]), module.path)
        for module in shape.modules(SOURCE)
        for node in ast.walk(module.tree)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in ("debug", "info", "warning", "error", "exception")
        and ast.unparse(node.func.value).split(".")[-1] in ("log", "get_logger()")
    }
    # Both pass on one of a few literals.
    bad = {where for event, where in events if not re.fullmatch(r"[a-z]+(_[a-z]+)+", str(event))}
    assert bad == {"cli/server/serve.py", "guards/guard.py"}
    riddles = re.compile(r"_(waits|broke|lost_touch|unseen|away|back|begins|kept|hurry)$")
    assert [event for event, _ in events if riddles.search(str(event))] == []
