"""Write the parts of the docs that the code knows better: settings, commands, routes, metrics, states and rooms.

A page carries such a part between `<!-- generated: NAME -->` and `<!-- /generated -->`; everything else on it is written by
hand. `make docs` runs this, and a test fails while a page says anything else than this would write.
"""

import ast
import re
import sys
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast
from unittest import mock

import typer.main

from tidegate import metrics as measured
from tidegate.backends.system import LocalWake
from tidegate.cli.app import app as commands
from tidegate.core import states
from tidegate.core.ports import Wakes
from tidegate.settings import catalog
from tidegate.settings.groups import Settings
from tidegate.web import app as web
from tidegate.web import scrape
from tidegate.web.context import WebContext
from tidegate.web.http.routes import Guarded, guarded_routes

DOCS = Path(__file__).resolve().parent
SOURCE = DOCS.parent / "src" / "tidegate"
ADVANCED_INTRO = "These tune the inside. Leave them alone unless a measurement says that a default is wrong for you."
PART = re.compile(r"(<!-- generated: (?P<name>[\w-]+) -->\n)(.*?)(<!-- /generated -->)", re.DOTALL)


def cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def table(heads: tuple[str, ...], rows: Iterator[tuple[str, ...]]) -> str:
    lines = [heads, tuple("---" for _ in heads), *rows]
    return "".join(f"| {' | '.join(map(cell, line))} |\n" for line in lines)


# ---- settings


def settings() -> str:
    groups: dict[str, list[catalog.Setting]] = {}
    for setting in catalog.settings():
        group, dot, _ = setting.key.rpartition(".")
        if not setting.is_advanced:
            groups.setdefault(group if dot else "", []).append(setting)
    parts = [f"### {group or 'on their own'}\n\n{_settings_table(members)}" for group, members in groups.items()]
    advanced = [setting for setting in catalog.settings() if setting.is_advanced]
    return "\n".join([*parts, f"### advanced\n\n{ADVANCED_INTRO}\n\n{_settings_table(advanced)}"])


def _settings_table(members: list[catalog.Setting]) -> str:
    heads = ("key", "variable", "default", "may be", "what it is for")
    rows = ((f"`{one.key}`", f"`{one.variable}`", _default(one.default), one.allowed, one.about) for one in members)
    return table(heads, rows)


def _default(value: object) -> str:
    if value is None or value == "":
        return "none"
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if isinstance(value, int):
        return f"`{value}`"
    if isinstance(value, float):
        return f"`{value:g}`"
    return "none" if value in ((), {}) else f"`{value}`"


# ---- commands


def every_command(command: Any = None, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Each command by the words that call it."""
    command = command or typer.main.get_command(commands)
    for name, inner in command.commands.items():
        if hasattr(inner, "commands"):
            yield from every_command(inner, (*path, name))
        else:
            yield (*path, name), inner


def command_reference() -> str:
    return "\n".join(_one_command(path, command) for path, command in every_command())


def _one_command(path: tuple[str, ...], command: Any) -> str:
    said = [re.sub(r"\s+", " ", part).strip() for part in re.split(r"\n\s*\n", command.help.strip())]
    words = [part for part in said if not part.startswith("Example: ")]
    example = next(part.removeprefix("Example: ") for part in said if part.startswith("Example: "))
    arguments = [one for one in command.params if one.param_type_name == "argument"]
    usage = " ".join([f"tidegate {' '.join(path)}", *(one.metavar for one in arguments), "[options]"])
    rows = (_parameter(one) for one in command.params if one.name != "help")
    intro = "\n\n".join(words)
    heads = ("option", "default", "what it does")
    return f"### `tidegate {' '.join(path)}`\n\n{intro}\n\n```text\n{usage}\n{example}\n```\n\n{table(heads, rows)}"


def _parameter(one: Any) -> tuple[str, str, str]:
    if one.param_type_name == "argument":
        return f"`{one.metavar}`", "required", one.help
    names = ", ".join([*one.opts, *one.secondary_opts])
    value = "" if one.is_flag else f" {one.metavar or _choices(one)}"
    if one.required:
        default = "required"
    elif isinstance(one.show_default, str):
        default = one.show_default
    else:
        default = _default(getattr(one.default, "value", one.default))
    return f"`{names}{value}`", "off" if one.is_flag and not one.default else default, one.help


def _choices(one: Any) -> str:
    choices = getattr(getattr(one, "click_type", None) or getattr(one, "type", None), "choices", None)
    if not choices:
        choices = [member.value for member in type(one.default)]
    return "|".join(str(getattr(choice, "value", choice)) for choice in choices)


# ---- routes


class _Still:
    """A clock for an app that is never called."""

    def now_ms(self) -> int:
        return 0

    def monotonic_ms(self) -> float:
        return 0.0


def every_route() -> list[tuple[str, str, str]]:
    """(method, path, scope) of every route of the app; an empty scope is a route that needs no key."""
    # Parts are only taken hold of while the app is built, and never asked.
    nothing = cast(Any, mock.Mock())
    context = WebContext(
        mock.Mock(),
        mock.Mock(),
        Settings(),
        cast(Any, _Still()),
        nothing,
        Wakes(LocalWake(), LocalWake(), LocalWake()),
        lambda: "",
        b"",
        nothing,
        nothing,
        DOCS,
        control_token=None,
    )
    guarded: list[Guarded] = []

    def keep(authenticator: Any, limits: Any, entries: list[Guarded]) -> Any:
        guarded.extend(entries)
        return guarded_routes(authenticator, limits, entries)

    with mock.patch.object(web, "guarded_routes", keep):
        app = web.build_app(context)
    scopes = {(entry.method, entry.path): entry.scope for entry in guarded}
    found = []
    for route in app.routes:
        for method in sorted(getattr(route, "methods", None) or ()):
            if method != "HEAD":
                path = cast(Any, route).path
                found.append((method, path, scopes.get((method, path), "")))
    return found


def routes() -> str:
    def scope(path: str, name: str) -> str:
        if path == scrape.PATH:
            return "none, on this machine"
        return " or ".join(f"`{one}`" for one in name.split(" or ")) if name else "none"

    rows = ((f"`{method}`", f"`{path}`", scope(path, name)) for method, path, name in every_route())
    return table(("method", "path", "scope a key needs"), rows)


# ---- metrics


def metrics() -> str:
    rows = (
        (f"`{one.name}`", one.kind, ", ".join(f"`{label}`" for label in one.labels) or "none", one.about)
        for one in measured.declared()
    )
    return table(("metric", "kind", "labels", "what it counts"), rows)


# ---- states


MOVES: dict[str, dict[Any, frozenset[Any]]] = {
    "jobs": states.JOB_MOVES,
    "slices": states.SLICE_MOVES,
    "files": states.FILE_MOVES,
    "blobs": states.BLOB_MOVES,
    "workers": states.WORKER_MOVES,
    "job_models": states.JOB_MODEL_MOVES,
    "flows": states.FLOW_MOVES,
    "webhook_deliveries": states.DELIVERY_MOVES,
    "uploads": states.UPLOAD_MOVES,
    "operations": states.OPERATION_MOVES,
}


def diagram(name: str) -> Callable[[], str]:
    def draw() -> str:
        moves = MOVES[name]
        lines = ["```mermaid", "stateDiagram-v2", f"    [*] --> {next(iter(moves)).value}"]
        for state, targets in moves.items():
            # In the order of declaration, so that the same moves always give the same text.
            lines += [f"    {state.value} --> {target.value}" for target in type(state) if target in targets]
            if not targets:
                lines.append(f"    {state.value} --> [*]")
        return "\n".join([*lines, "```", ""])

    return draw


# ---- rooms


def rooms() -> str:
    """Every package and every module beside the packages, with the first paragraph of its docstring as its duty."""
    packages = {path.parent: f"{path.parent.relative_to(SOURCE).as_posix()}/" for path in SOURCE.rglob("__init__.py")}
    duties = {name: folder / "__init__.py" for folder, name in packages.items() if folder != SOURCE}
    duties |= {path.name: path for path in SOURCE.glob("*.py") if not path.name.startswith("__")}
    return table(("room", "duty"), ((f"`{name}`", _duty(duties[name])) for name in sorted(duties)))


def _duty(path: Path) -> str:
    docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return docstring.split("\n\n")[0].replace("\n", " ")


def layers() -> str:
    """The layers that import-linter holds, top to bottom."""
    contracts = tomllib.loads((DOCS.parent / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"]
    found = [one for one in contracts["contracts"] if one["type"] == "layers"]
    return table(
        ("in", "each knows only those after it"),
        ((f"`{one['containers'][0]}`", " → ".join(f"`{layer}`" for layer in one["layers"])) for one in found),
    )


PARTS: dict[str, Callable[[], str]] = {
    "rooms": rooms,
    "layers": layers,
    "settings": settings,
    "commands": command_reference,
    "routes": routes,
    "metrics": metrics,
    **{f"states-{name}": diagram(name) for name in MOVES},
}


def regenerated(page: str) -> str:
    """The page with every generated part as the code says it now."""
    return PART.sub(lambda found: f"{found[1]}\n{PARTS[found['name']]()}\n{found[4]}", page)


def main() -> None:
    for path in sorted(DOCS.rglob("*.md")):
        page = path.read_text(encoding="utf-8")
        current = regenerated(page)
        if current != page:
            path.write_text(current, encoding="utf-8")
            sys.stdout.write(f"wrote {path.relative_to(DOCS.parent)}\n")


if __name__ == "__main__":
    main()
