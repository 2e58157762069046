"""Read the shape of a source tree: parameters, constructors, callbacks, and attributes that another module sets.

It works on syntax alone, so it can read a tree that is not installed (`trace_roads` reads an older commit with it).
"""

from __future__ import annotations

import ast
import functools
import graphlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

PARAMETERS_MAX, COLLABORATORS_MAX = 6, 7
# Alone these do not say to what: a dozen classes had each of them, so that no search found the one that was meant.
_VAGUE_METHODS = {"begin", "end", "give_back", "settle", "take"}
# A route table and a thread take a method of their maker by nature: it is what they run.
_RUNNERS = {"Guarded", "Route", "Thread"}

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Module:
    """One module of a tree: its path below the tree's root, its syntax and its lines."""

    path: str
    tree: ast.Module
    lines: tuple[str, ...]


@functools.cache
def modules(source: Path) -> list[Module]:
    """Return every module below a package's folder."""
    texts = ((path, path.read_text(encoding="utf-8")) for path in sorted(source.rglob("*.py")))
    return [
        Module(path.relative_to(source).as_posix(), ast.parse(text), tuple(text.splitlines())) for path, text in texts
    ]


def prose_lines(module: Module) -> Iterator[int]:
    """Yield the number of each line of a docstring, and of each that is nothing but a comment."""
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Module | ast.ClassDef | Function) and ast.get_docstring(node, clean=False):
            yield from range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1)
    yield from (number for number, line in enumerate(module.lines, 1) if line.lstrip().startswith("# "))


def functions(module: Module) -> Iterator[tuple[str, Function]]:
    """Yield each function with its name, a method's with its class."""
    for scope, node in _scoped(module.tree, ""):
        if isinstance(node, Function):
            yield f"{scope}{node.name}", node


def parameters(function: Function) -> list[str]:
    """Return the names of what a function's callers give: without `self`, `cls`, and the transaction that a verb of the store gets."""
    arguments = function.args
    names = [one.arg for one in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]
    is_verb = any(
        isinstance(one, ast.Name) and one.id in ("reads", "writes", "beats") for one in function.decorator_list
    )
    return [name for name in names if name not in ("self", "cls") and not (is_verb and name == "tx")]


def wide_functions(module: Module, most: int = PARAMETERS_MAX, *, every: bool = False) -> Iterator[str]:
    """Yield functions with more parameters than `most`.

    Constructors have a rule of their own, and a command's parameters are its options: only with `every` they count too.
    """
    for name, function in functions(module):
        is_other = function.name == "__init__" or _is_command(function)
        if (every or not is_other) and len(parameters(function)) > most:
            yield f"{module.path} {name}"


def wide_constructors(module: Module) -> Iterator[str]:
    """Yield classes whose constructor takes too many collaborators."""
    for name, function in functions(module):
        if function.name == "__init__" and len(parameters(function)) > COLLABORATORS_MAX:
            yield f"{module.path} {name.removesuffix('.__init__')}"


def vague_methods(module: Module) -> Iterator[str]:
    """Yield methods whose name is a verb alone, where it should say to what it does something."""
    for owner in ast.walk(module.tree):
        if isinstance(owner, ast.ClassDef):
            for method in owner.body:
                if isinstance(method, Function) and method.name in _VAGUE_METHODS:
                    yield f"{module.path} {owner.name}.{method.name}"


def callbacks(module: Module) -> Iterator[str]:
    """Yield each method or lambda over `self`, or a partial of one, that a class passes into an object which it makes."""
    for owner in (node for node in ast.walk(module.tree) if isinstance(node, ast.ClassDef)):
        methods = {one.name for one in owner.body if isinstance(one, Function) and not _is_property(one)}
        for call in (node for node in ast.walk(owner) if isinstance(node, ast.Call)):
            made = _called(call)
            if made in _RUNNERS or not made.lstrip("_")[:1].isupper():
                continue
            for passed in (*call.args, *(one.value for one in call.keywords)):
                given = passed.args[0] if isinstance(passed, ast.Call) and _called(passed) == "partial" else passed
                if isinstance(given, ast.Lambda) and any(_is_self(one) for one in ast.walk(given.body)):
                    yield f"{module.path} {owner.name} -> {made}(lambda)"
                elif isinstance(given, ast.Attribute) and _is_self(given.value) and given.attr in methods:
                    yield f"{module.path} {owner.name} -> {made}({given.attr})"


def outside_sets(all_modules: list[Module]) -> Iterator[str]:
    """Yield each attribute that a module sets on an object whose class is declared in another module of the tree.

    A function may fill an object that it has just made, and a module may change records of its own classes.
    """
    declared = {module.path: _declared(module) for module in all_modules}
    everywhere = set().union(*declared.values())
    for module in all_modules:
        foreign = everywhere - declared[module.path]
        for _, function in functions(module):
            made = _made_here(function)
            for target in _targets(function):
                root = target.value
                if (
                    target.attr in foreign
                    and not _is_self(root)
                    and not (isinstance(root, ast.Name) and root.id in made)
                ):
                    yield f"{module.path} .{target.attr}"


def import_circle(source: Path) -> list[str]:
    """Return the names of modules that import each other in a circle, first and last the same; empty where there is none."""
    root = f"{source.name}." if (source / "__init__.py").exists() else ""
    names = {root + one.path.removesuffix(".py").replace("/", "."): one for one in modules(source)}
    graph = {name: {one for one in _imported(module.tree) if one in names} for name, module in names.items()}
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        return list(error.args[1])
    return []


def _imported(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _scoped(node: ast.AST, scope: str) -> Iterator[tuple[str, ast.AST]]:
    for child in ast.iter_child_nodes(node):
        yield scope, child
        inner = f"{scope}{child.name}." if isinstance(child, ast.ClassDef | Function) else scope
        yield from _scoped(child, inner)


def _is_command(function: Function) -> bool:
    """Tell a command by an option or an argument among the annotations of its parameters."""
    noted = (*function.args.args, *function.args.kwonlyargs)
    words = " ".join(ast.unparse(one.annotation) for one in noted if one.annotation is not None)
    return "typer." in words or "options." in words


def _is_property(function: Function) -> bool:
    return any(isinstance(one, ast.Name) and one.id.endswith("property") for one in function.decorator_list)


def _is_self(node: ast.AST) -> bool:
    return isinstance(node, ast.Name) and node.id in ("self", "cls")


def _called(call: ast.Call) -> str:
    match call.func:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name
    return ""


def _targets(function: Function) -> Iterator[ast.Attribute]:
    for node in ast.walk(function):
        match node:
            case ast.Assign(targets=targets):
                pass
            case ast.AugAssign(target=target) | ast.AnnAssign(target=target):
                targets = [target]
            case _:
                continue
        yield from (one for one in targets if isinstance(one, ast.Attribute))


def _made_here(function: Function) -> set[str]:
    """Return the local names that a function binds to what a call returned to it."""
    made = set()
    for node in ast.walk(function):
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call):
            name = _called(node.value)
            if name.lstrip("_")[:1].isupper() or name in ("__new__", "cls"):
                made |= {one.id for one in node.targets if isinstance(one, ast.Name)}
    return made


def _declared(module: Module) -> set[str]:
    """Return the attributes that the classes of a module declare or set on themselves."""
    found: set[str] = set()
    for owner in (node for node in ast.walk(module.tree) if isinstance(node, ast.ClassDef)):
        found |= {
            one.target.id for one in owner.body if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name)
        }
        for method in (one for one in owner.body if isinstance(one, Function)):
            found |= {one.attr for one in _targets(method) if _is_self(one.value)}
            found |= {method.name} if _is_property(method) else set()
    return found
