"""An input that several processes read and write becomes the same plan and the same work file, byte for byte."""

import hashlib
import json
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NoReturn

import psutil
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.stages.ingest import test_corpus
from tidegate.core.input.lines import LineRules
from tidegate.core.nouns import IngestPlan
from tidegate.stages.ingest import ingest_scan, ingest_write
from tidegate.stages.ingest.ingest_file import ingest_file

RULES = LineRules("/v1/chat/completions", slice_count_max=7, slice_bytes_max=4000)
CASES = ("lines.jsonl", "files.jsonl")

beginnings = st.sampled_from(["", "You are kind. ", "You are kind. " * 9, 'say "no" \\' * 4, "\u20ac\U0001f600" * 8])
texts = st.builds("".join, st.lists(st.one_of(beginnings, st.text('ab\u20ac"\\{', max_size=8)), max_size=4))


@st.composite
def inputs(draw: st.DrawFn) -> bytes:
    """Good lines in a few shapes, with bad, blank and repeated ones among them."""
    lines = []
    for number in range(draw(st.integers(1, 40))):
        body: dict[str, Any] = {"model": draw(st.sampled_from(["m", "m", "m", "other"]))}
        if draw(st.integers(0, 9)) == 0:
            body["tools"] = [{"type": "function", "function": {"name": draw(st.sampled_from("fg"))}}]
        roles = ["system", "user", "assistant", "user"][: draw(st.sampled_from([2, 2, 4]))]
        body["messages"] = [{"role": role, "content": draw(beginnings)} for role in roles]
        body["messages"][-1]["content"] += draw(texts)
        custom_id = f"id-{number if draw(st.integers(0, 19)) else 0}"
        line = json.dumps({"custom_id": custom_id, "body": body}).encode()
        strange = draw(
            st.sampled_from([line] * 12 + [line + b"\r", b"", b"nonsense", line[:-3], line.replace(b"m", b"")])
        )
        lines.append(strange)
    return b"\n".join(lines) + draw(st.sampled_from([b"", b"\n", b"\n\n"]))


def no_fork() -> NoReturn:
    raise OSError("no process to be had")


@pytest.fixture(scope="module", autouse=True)
def _in_place() -> Iterator[None]:
    """Parts are divided and joined as ever, but one after another in this process, which has threads and must not fork."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("os.fork", no_fork)
        patch.setattr(ingest_scan, "_cores", lambda: 4)
        yield


def ingest(data: bytes, rules: LineRules, part_bytes_min: int) -> tuple[IngestPlan, bytes | None]:
    with TemporaryDirectory() as directory:
        path, work = Path(directory, "in"), Path(directory, "work")
        path.write_bytes(data)
        plan = ingest_file(path, work, rules, part_bytes_min=part_bytes_min)
        return plan, work.read_bytes() if work.exists() else None


def same(data: bytes, rules: LineRules) -> None:
    one = ingest(data, rules, 1 << 30)
    for part_bytes_min in (1, 1 + len(data) // 3, 1 + len(data) // 2):
        assert ingest(data, rules, part_bytes_min) == one


@settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck))
@given(inputs(), st.data())
def test_any_input(data: bytes, choice: st.DataObject) -> None:
    draw = choice.draw
    rules = replace(
        RULES,
        invalid_lines=draw(st.sampled_from(["fail", "error_file"])),
        prefix_order=draw(st.integers(0, 4)) > 0,
        single_model=draw(st.integers(0, 4)) == 0,
        errors_max=draw(st.sampled_from([1, 2, 100])),
        item_count_max=draw(st.sampled_from([5, 1000])),
        line_bytes_max=draw(st.sampled_from([250, 1 << 20])),
        input_sha256=draw(st.sampled_from(["", hashlib.sha256(data).hexdigest(), "0" * 64])),
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ingest_scan, "READ_BYTES", draw(st.sampled_from([600, 1 << 18])))
        patch.setattr(ingest_write, "WINDOW_BYTES", draw(st.sampled_from([300, 1 << 22])))
        patch.setattr(ingest_write, "WINDOW_BYTES_IN_ORDER", draw(st.sampled_from([300, 1 << 18])))
        same(data, rules)


@pytest.mark.parametrize("name", CASES)
def test_the_corpus(name: str) -> None:
    for param in test_corpus.cases(name):
        case: Any = param.values[0]
        rules, data = test_corpus.rules_of(case), test_corpus.bytes_of(case)
        if name == "lines.jsonl":
            good = [test_corpus.good_line(f"good-{number}", rules) for number in range(4)]
            data = b"\n".join([*good[:2], data, *good[2:]])
        same(data, rules)
        same(data, replace(rules, invalid_lines="error_file"))


@pytest.mark.parametrize("bound", ["FAMILIES_MAX", "MODELS_MAX", "REFERENCES_BYTES_MAX"])
def test_bounds_of_the_whole(bound: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("scan", "scan_parts"):
        monkeypatch.setattr(f"tidegate.core.input.{module}.{bound}", 3 if bound != "REFERENCES_BYTES_MAX" else 70_000)
    lines = [
        {
            "custom_id": str(number),
            "body": {"model": f"m{number % 6}", "instructions": f"do {number % 5}", "input": "text " * 400},
        }
        for number in range(60)
    ]
    data = b"".join(json.dumps(line).encode() + b"\n" for line in lines)
    same(data, replace(RULES, endpoint="/v1/responses"))
    same(data, replace(RULES, endpoint="/v1/responses", invalid_lines="error_file"))


def test_inputs_are_counted_over_all_parts() -> None:
    lines = [{"custom_id": str(number), "body": {"model": "m", "input": ["a", "b", "c"]}} for number in range(40)]
    data = b"".join(json.dumps(line).encode() + b"\n" for line in lines)
    for most in (119, 120):
        same(data, replace(RULES, endpoint="/v1/embeddings", inputs_max=most))


def mixture(count: int) -> Iterator[bytes]:
    chance = random.Random(5)
    systems = [f"System {number}: " + "word " * 90 for number in range(9)]
    for number in range(count):
        messages = [
            {"role": "system", "content": chance.choice(systems)},
            {"role": "user", "content": f"{chance.choice(['Example one. ', 'Example two. ']) * 9}{chance.random()}"},
        ]
        yield json.dumps({"custom_id": f"id-{number}", "body": {"model": "m", "messages": messages}}).encode() + b"\n"


REAL = """
import json, sys
from pathlib import Path
import msgspec
from tidegate.core.input.lines import LineRules
from tidegate.stages.ingest import forked, ingest_scan
from tidegate.stages.ingest.ingest_file import ingest_file
ingest_scan._cores = lambda: 4
begun = []
fork = forked.os.fork
forked.os.fork = lambda: begun.append(1) or fork()
path, work, sha256, part = sys.argv[1:]
plan = ingest_file(Path(path), Path(work), LineRules("/v1/chat/completions", input_sha256=sha256), part_bytes_min=int(part))
sys.stdout.buffer.write(msgspec.json.encode([len(begun), plan]))
"""


def in_processes(path: Path, work: Path, sha256: str, part_bytes_min: int) -> tuple[int, Any]:
    """How many helpers there were, and the plan."""
    command = [sys.executable, "-c", REAL, str(path), str(work), sha256, str(part_bytes_min)]
    child = subprocess.run(command, capture_output=True, check=True, timeout=110)
    count, plan = json.loads(child.stdout)
    return count, plan


def test_real_processes(tmp_path: Path) -> None:
    path = tmp_path / "in"
    path.write_bytes(b"".join(mixture(4000)))
    sha256 = hashlib.sha256(path.read_bytes()).hexdigest()
    none, one = in_processes(path, tmp_path / "one", sha256, 1 << 30)
    # Three to scan, of which one goes on to hash, and three to write.
    six, several = in_processes(path, tmp_path / "several", sha256, 1000)
    assert (none, six) == (0, 6)
    assert several == one
    assert (tmp_path / "several").read_bytes() == (tmp_path / "one").read_bytes()


def test_changed_bytes_leave_no_work_file(tmp_path: Path) -> None:
    path = tmp_path / "in"
    path.write_bytes(b"".join(mixture(100)))
    _, plan = in_processes(path, tmp_path / "work", "0" * 64, 1000)
    assert [error["code"] for error in plan["errors"]] == ["input_changed"]
    assert not (tmp_path / "work").exists()


FAILING = """
import os, sys
from tidegate.stages.ingest.forked import Forked
def task():
    {what}
with Forked(task) as forked:
    print(forked.answer())
"""


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("raise OSError(28, 'No space left on device')", "OSError: [Errno 28] No space left on device"),
        ("os.kill(os.getpid(), 9)", "RuntimeError: a forked task ended with -9"),
        ("return [][0]", "IndexError"),
        ("sys.exit(3)", "RuntimeError: a forked task ended with 1"),
    ],
)
def test_a_helper_that_fails_fails_its_owner(what: str, words: str) -> None:
    command = [sys.executable, "-c", FAILING.format(what=what)]
    child = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert child.returncode == 1
    assert words in child.stderr
    assert child.stdout == ""


SEVERAL = """
import os, sys
from tidegate.stages.ingest.forked import Forked
with Forked(lambda: "x" * 300_000, lambda: 2, lambda: os.kill(os.getpid(), 9)) as forked:
    print(len(forked.answer()), forked.answer(), flush=True)
    forked.answer()
"""


def test_tasks_of_one_helper_answer_one_by_one() -> None:
    child = subprocess.run([sys.executable, "-c", SEVERAL], capture_output=True, text=True, check=False, timeout=60)
    assert child.stdout == "300000 2\n"
    assert "RuntimeError: a forked task ended with -9" in child.stderr


ENDLESS = """
import os, time
from tidegate.stages.ingest.forked import Forked
def task():
    while True:
        sum(range(1000))
with Forked(task) as forked:
    print(forked._pid, flush=True)
    {then}
"""


@pytest.mark.parametrize("then", ["os.kill(os.getpid(), 9)", "raise SystemExit"])
def test_a_helper_does_not_outlive_its_owner(then: str) -> None:
    command = [sys.executable, "-c", ENDLESS.format(then=then)]
    child = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False, timeout=60)
    pid = int(child.stdout)
    deadline = time.monotonic() + 60
    while running(pid):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def running(pid: int) -> bool:
    """A process that ended may wait long for whoever adopts orphans here."""
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
