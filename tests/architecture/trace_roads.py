"""Count what a reader of the code has to follow: `python -m tests.architecture.trace_roads [--tree PATH] [--list]`.

Two roads are traced in a real `tidegate serve` in front of the simulated engine, after a warm-up: one plain item from the
choice of its slice to the commit of its outcome, and one interactive call from its arrival to its answer. A function
counts when all of several rounds pass through it, so periodic work that falls into one of them does not. The other
figures are read from the syntax. With `--tree` another checkout stands beside this one, run by this interpreter.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import json
import os
import re
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.machinery import repository, simulated_engine
from tests.architecture import shape
from tests.architecture.tracer import REPLY

ROUNDS = 5
PARAMETERS_MANY = 8
CLASSES_MANY = 8
END_S = 60.0
_TRACER = Path(__file__).with_name("tracer.py")


@dataclass(frozen=True)
class Road:
    """The functions that every round of one road passed through, each as `path qualified.name`."""

    functions: frozenset[str]

    @property
    def files(self) -> set[str]:
        return {one.split()[0] for one in self.functions}

    @property
    def lambdas(self) -> int:
        return sum("<lambda>" in one for one in self.functions)

    def lines(self, package: Path) -> int:
        return sum((package / one).read_text(encoding="utf-8").count("\n") for one in self.files)


# ---- the roads, traced


class _Served:
    """A traced `tidegate serve`: its address, its key and its tracer's commands."""

    def __init__(self, process: subprocess.Popen[str], url: str, key: str) -> None:
        self._process, self._url, self._key = process, url, key

    def trace(self, mode: str, act: Callable[[], None]) -> frozenset[str]:
        self._command(mode)
        act()
        return frozenset(self._command("end"))

    def _command(self, word: str) -> list[str]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(word + "\n")
        self._process.stdin.flush()
        for line in self._process.stdout:
            if line.startswith(REPLY):
                return list(json.loads(line.removeprefix(REPLY)))
        raise RuntimeError("the traced process ended")

    def _ask(self, path: str, body: bytes | None = None, kind: str = "application/json") -> dict[str, Any]:
        headers = {"Authorization": f"Bearer {self._key}", "Content-Type": kind}
        with urllib.request.urlopen(urllib.request.Request(self._url + path, body, headers), timeout=END_S) as answer:
            return dict(json.loads(answer.read()))

    def call(self) -> None:
        """Make one interactive call."""
        self._ask("/v1/chat/completions", json.dumps(_chat("an interactive call")).encode())

    def run_item(self) -> None:
        """Run one batch of one item to its end."""
        line = {"custom_id": "one", "method": "POST", "url": "/v1/chat/completions", "body": _chat("a plain item")}
        form = (
            '--cut\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
            '--cut\r\nContent-Disposition: form-data; name="file"; filename="one.jsonl"\r\n\r\n'
            f"{json.dumps(line)}\n\r\n--cut--\r\n"
        )
        file = self._ask("/v1/files", form.encode(), "multipart/form-data; boundary=cut")
        wanted = {"input_file_id": file["id"], "endpoint": "/v1/chat/completions", "completion_window": "24h"}
        batch = self._ask("/v1/batches", json.dumps(wanted).encode())
        end_s = time.monotonic() + END_S
        while batch["status"] != "completed":
            if time.monotonic() > end_s:
                raise TimeoutError(f"the batch is {batch['status']}")
            time.sleep(0.1)
            batch = self._ask(f"/v1/batches/{batch['id']}")


def _chat(text: str) -> dict[str, Any]:
    return {"model": "m", "max_tokens": 8, "messages": [{"role": "user", "content": text}]}


@contextlib.contextmanager
def _served(tree: Path, engine: str) -> Iterator[_Served]:
    # A failpoint that never acts: calls pass their borders only while one is armed.
    armed = {"TIDEGATE_FAILPOINTS": "stop_released=1000000*sleep:0"}
    environment = {**os.environ, "PYTHONPATH": str(tree / "src"), **armed}
    with tempfile.TemporaryDirectory() as directory:
        common = ["--data", f"{directory}/data"]
        make_key = [sys.executable, "-m", "tidegate", "keys", "create", "--org", "acme", "--json", *common]
        made = subprocess.run(make_key, env=environment, check=True, stdout=subprocess.PIPE)
        serve = [sys.executable, str(_TRACER), "serve", "--port", "0", "--upstream", engine, *common]
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
        with subprocess.Popen(serve, env=environment, text=True, **pipes) as process:
            try:
                for line in process.stdout or ():
                    if found := re.search(r"(http://127\.0\.0\.1:\d+)", line):
                        yield _Served(process, found[1], json.loads(made.stdout)["key"])
                        break
                else:
                    raise RuntimeError(f"`tidegate serve` of {tree} did not start")
            finally:
                process.terminate()
                process.wait()


def roads(tree: Path) -> tuple[Road, Road]:
    """Trace the road of one plain item and that of one interactive call."""
    with simulated_engine("--mode", "instant") as engine, _served(tree, engine) as served:
        for _ in range(3):
            served.run_item()
            served.call()
        items = [served.trace("item", served.run_item) for _ in range(ROUNDS)]
        calls = [served.trace("call", served.call) for _ in range(ROUNDS)]
    return Road(frozenset.intersection(*items)), Road(frozenset.intersection(*calls))


# ---- what the syntax tells


def _class_names(modules: list[shape.Module]) -> dict[str, int]:
    """Return the names that several classes have, private ones too, and how often."""
    found = Counter(
        node.name.lstrip("_") for module in modules for node in ast.walk(module.tree) if isinstance(node, ast.ClassDef)
    )
    return {name: count for name, count in found.most_common() if count > 1}


def _method_names(modules: list[shape.Module]) -> list[tuple[str, int]]:
    """Return the public method names of most classes, which a search for them does not tell apart."""
    found = Counter(
        method.name
        for module in modules
        for owner in ast.walk(module.tree)
        if isinstance(owner, ast.ClassDef)
        for method in owner.body
        if isinstance(method, shape.Function) and not method.name.startswith("_")
    )
    return [(name, count) for name, count in found.most_common() if count >= CLASSES_MANY]


def _files_by_folder(modules: list[shape.Module]) -> Counter[str]:
    folders = [module.path.rpartition("/")[0] for module in modules if not module.path.endswith("__init__.py")]
    return Counter(folder for folder in folders if folder)


def _arrows(modules: list[shape.Module]) -> set[tuple[str, str]]:
    """Return the imports between the rooms of `upstream`. A file outside of any room is a room by itself."""
    inside = {
        one.path.removesuffix(".py").replace("/", "."): one for one in modules if one.path.startswith("upstream/")
    }
    found = set()
    for name, module in inside.items():
        for node in ast.walk(module.tree):
            if isinstance(node, ast.ImportFrom) and node.module:
                wanted = node.module.removeprefix("tidegate.")
                for other in (wanted, *(f"{wanted}.{one.name}" for one in node.names)):
                    if other in inside and _room(other) != _room(name):
                        found.add((_room(name), _room(other)))
    return found


def _room(module: str) -> str:
    return module.split(".")[1]


def _floors(arrows: set[tuple[str, str]]) -> int:
    below: dict[str, set[str]] = defaultdict(set)
    for above, under in arrows:
        below[above].add(under)

    def depth(room: str, above: tuple[str, ...] = ()) -> int:
        return 1 + max((depth(one, (*above, room)) for one in below[room] if one not in above), default=0)

    return max((depth(room) for room in list(below)), default=1)


def _word_uses(modules: list[shape.Module], word: str) -> int:
    """Count the names of which this word is a part."""
    names = (
        getattr(node, field)
        for module in modules
        for node in ast.walk(module.tree)
        for field in ("id", "attr", "arg", "name")
        if isinstance(getattr(node, field, None), str)
    )
    return sum(word in re.split(r"_|(?<=[a-z])(?=[A-Z])", name) or word in name.lower().split("_") for name in names)


def figures(tree: Path, *, lists: bool = False) -> dict[str, str]:
    """Take every figure of one tree."""
    package = tree / "src" / "tidegate"
    modules = shape.modules(package)
    item, call = roads(tree)
    if lists:
        for title, road in (("an item", item), ("an interactive call", call)):
            print(f"\n{tree}: {title}", *sorted(road.functions), sep="\n  ")
    many = [one for module in modules for one in shape.wide_functions(module, PARAMETERS_MANY - 1, every=True)]
    back = [one for module in modules for one in shape.callbacks(module)]
    folders, arrows = _files_by_folder(modules), _arrows(modules)
    names = _class_names(modules)
    return {
        "a plain item, lease to commit: files": f"{len(item.files)}",
        "a plain item: lines of these files": f"{item.lines(package):,}",
        "a plain item: functions (lambdas among them)": f"{len(item.functions)} ({item.lambdas})",
        "an interactive call: files": f"{len(call.files)}",
        "an interactive call: lines of these files": f"{call.lines(package):,}",
        "an interactive call: functions (lambdas among them)": f"{len(call.functions)} ({call.lambdas})",
        "class names used more than once": f"{len(names)}",
        "functions with 8 or more parameters (constructors and commands too)": f"{len(many)}",
        "functions with more than 6 parameters (no constructors, no commands)": str(
            sum(1 for module in modules for _ in shape.wide_functions(module))
        ),
        "constructors with more than 7 collaborators": str(
            sum(1 for module in modules for _ in shape.wide_constructors(module))
        ),
        "callbacks into the maker, all and in `upstream`": f"{len(back)}, {sum('upstream/' in one for one in back)}",
        "attributes set by another module": f"{len(set(shape.outside_sets(modules)))}",
        "the largest folders, in files": ", ".join(f"{name} {count}" for name, count in folders.most_common(4)),
        "`upstream`: import floors of its rooms": f"{_floors(arrows)}",
        "`upstream`: arrows between its rooms": f"{len(arrows)}",
        f"public method names in {CLASSES_MANY} or more classes": ", ".join(
            f"{name} {count}" for name, count in _method_names(modules)
        ),
        "names with a retired word: lane, held, place, leave": ", ".join(
            str(_word_uses(modules, word)) for word in ("lane", "held", "place", "leave")
        ),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--tree", type=Path, help="another checkout, to stand beside this one")
    parser.add_argument("--list", action="store_true", help="print every function of both roads, too")
    options = parser.parse_args()
    trees = [*([options.tree.resolve()] if options.tree else []), repository()]
    columns = [figures(tree, lists=options.list) for tree in trees]
    print("\n| figure |" + "".join(f" {tree.name} |" for tree in trees) + "\n|---|" + "---|" * len(trees))
    for name in columns[0]:
        print(f"| {name} |" + "".join(f" {column[name]} |" for column in columns))


if __name__ == "__main__":
    main()
