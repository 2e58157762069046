"""The image's tree, made by the Dockerfile's own steps without a container engine, and its command run in it.

`python -m tests.deploy.image SCRATCH`, in a mount namespace of its own, builds the tree in memory. The base is this machine's root under an
overlay that takes what the steps write. Then the tree becomes read-only but for /tmp and the data directory, and this process becomes the
image's command, as the image's user. Variables that begin with `TIDEGATE_` are passed on, as `docker run --env` would.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from tests.deploy.chart import ROOT

DOCKERFILE = ROOT / "deploy/Dockerfile"
PYTHON = Path(sys.base_prefix)


@dataclass
class Stage:
    """A tree while its steps run."""

    root: Path
    workdir: str = "/"
    variables: dict[str, str] = field(default_factory=lambda: {"PATH": f"{PYTHON}/bin:/usr/sbin:/usr/bin:/sbin:/bin"})
    user: str = ""
    words: dict[str, list[str]] = field(default_factory=dict)

    def inside(self, path: str) -> Path:
        return self.root / (Path(self.workdir) / path).relative_to("/")


def instructions(text: str) -> Iterator[tuple[str, str]]:
    """The instructions of a Dockerfile and what stands behind each."""
    for line in text.replace("\\\n", " ").splitlines():
        if line.strip() and not line.startswith("#"):
            word, _, rest = line.partition(" ")
            yield word, rest.strip()


def build(scratch: Path) -> Stage:
    """Run every step; return the last stage."""
    stages: dict[str, Stage] = {}
    stage = Stage(scratch)
    for word, rest in instructions(DOCKERFILE.read_text()):
        match word:
            case "FROM":
                name = rest.partition(" AS ")[2] or "last"
                stages[name] = stage = Stage(_base(scratch / name))
            case "WORKDIR":
                stage.workdir = rest
                stage.inside(".").mkdir(parents=True, exist_ok=True)
            case "RUN":
                _run(*_command(stage, ["/bin/sh", "-c", rest]))
            case "COPY":
                *sources, target = rest.split()
                copied = ROOT
                if sources[0].startswith("--from="):
                    copied = stages[sources.pop(0).removeprefix("--from=")].root
                for source in sources:
                    _copy(copied / source.lstrip("/"), stage.inside(target))
            case "ENV":
                for pair in rest.split():
                    key, _, value = pair.partition("=")
                    stage.variables[key] = value.replace(f"${key}", stage.variables.get(key, ""))
            case "USER":
                stage.user = rest
            case "ENTRYPOINT" | "CMD":
                stage.words[word] = json.loads(rest)
            case "ARG" | "EXPOSE":
                pass
            case _:
                raise ValueError(f"the Dockerfile has a step that this cannot run: {word}")
    return stage


def _base(place: Path) -> Path:
    """This machine's root as a tree that can be written to."""
    upper, work, root = (place / name for name in ("upper", "work", "root"))
    for one in (upper, work, root):
        one.mkdir(parents=True)
    _run("mount", "-t", "overlay", "-o", f"lowerdir=/,upperdir={upper},workdir={work}", "overlay", str(root))
    for name in ("dev", "proc"):
        _run("mount", "--rbind", f"/{name}", str(root / name))
    # A base image has its Python where every user can run it.
    for one in PYTHON.parents:
        directory = root / one.relative_to("/")
        directory.chmod(directory.stat().st_mode | 0o111)
    return root


def _copy(source: Path, target: Path) -> None:
    if source.is_dir():
        shutil.copytree(source, target, symlinks=True, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))
    else:
        shutil.copy(source, target)


def _command(stage: Stage, words: list[str], *options: str) -> list[str]:
    variables = [f"{name}={value}" for name, value in stage.variables.items()]
    passed = [f"{name}={value}" for name, value in os.environ.items() if name.startswith(("PIP_", "TIDEGATE_"))]
    return [
        "chroot",
        *options,
        str(stage.root),
        "/usr/bin/env",
        "-i",
        f"--chdir={stage.workdir}",
        *variables,
        *passed,
        *words,
    ]


def _run(*command: str) -> None:
    subprocess.run(command, check=True, stdout=sys.stderr)


def main() -> None:
    scratch = Path(sys.argv[1])
    _run("mount", "-t", "tmpfs", "tmpfs", str(scratch))
    stage = build(scratch)
    _run("mount", "-o", "remount,ro", str(stage.root))
    owner, _, group = stage.user.partition(":")
    for place, mode in (("/tmp", "1777"), (stage.variables["TIDEGATE_DATA"], "0700")):
        options = f"mode={mode},uid={owner},gid={group}"
        _run("mount", "-t", "tmpfs", "-o", options, "tmpfs", str(stage.root / place.lstrip("/")))
    command = _command(stage, [*stage.words["ENTRYPOINT"], *stage.words["CMD"]], f"--userspec={stage.user}")
    os.execvp(command[0], command)


if __name__ == "__main__":
    main()
