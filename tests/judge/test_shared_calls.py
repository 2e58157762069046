"""Calls that several items share, as the judge reads them from the engine's log."""

import json
from pathlib import Path

import pytest

from tidegate.core.ids import group_id, item_id, job_part
from tidegate.judge.witness import read_witness

JOB = "batch_" + "a" * 22
PART = job_part(JOB)


def log_of(path: Path, *keys: str | None, call_path: str = "/v1/embeddings") -> Path:
    lines = [
        json.dumps({"at": 1.5 + at, "path": call_path, "model": "m", "status": 200, "idempotency_key": key})
        for at, key in enumerate(keys)
    ]
    path.write_text("\n".join([*lines, ""]))
    return path


def test_a_shared_call_is_a_call_of_each_of_its_items(tmp_path: Path) -> None:
    numbers = [0, 1, 2, 5, 9, 10]
    alone = f"{item_id(JOB, 5)}-{'0' * 16}"
    log = log_of(tmp_path / "calls.jsonl", f"{group_id(JOB, numbers)}_{'0' * 16}", alone)
    seen = read_witness(log, PART)
    assert sorted(seen.calls) == numbers
    assert (seen.call_count, seen.nameless_count) == (2, 0)
    assert [(call.shared, call.clean) for call in seen.calls[5]] == [(True, True), (False, True)]
    assert [call.line for call in seen.calls[9]] == [1]


def test_of_several_conversations_in_one_call_each_may_have_failed(tmp_path: Path) -> None:
    log = log_of(
        tmp_path / "calls.jsonl", f"{group_id(JOB, [3, 4])}_{'0' * 16}", call_path="/v1/chat/completions/batch"
    )
    assert [call.clean for calls in read_witness(log, PART).calls.values() for call in calls] == [False, False]


@pytest.mark.parametrize(
    "key",
    [
        None,
        f"batch_grp_{PART}__{'0' * 16}",
        f"batch_grp_{PART}_1-_{'0' * 16}",
        f"batch_grp_{PART}_1..2_{'0' * 16}",
        f"batch_grp_{PART}_1_xyz",
        f"batch_grp_short_1_{'0' * 16}",
    ],
)
def test_a_key_that_names_no_item_is_counted_as_nameless(tmp_path: Path, key: str | None) -> None:
    seen = read_witness(log_of(tmp_path / "calls.jsonl", key), PART)
    assert (seen.calls, seen.nameless_count) == ({}, 1)


def test_a_log_cannot_name_items_without_end(tmp_path: Path) -> None:
    seen = read_witness(log_of(tmp_path / "calls.jsonl", f"batch_grp_{PART}_0-999999999_{'0' * 16}"), PART)
    assert len(seen.calls) < 20_000


def test_calls_of_another_job_are_not_this_ones(tmp_path: Path) -> None:
    other = "batch_" + "b" * 22
    seen = read_witness(log_of(tmp_path / "calls.jsonl", f"{group_id(other, [0, 1])}_{'0' * 16}"), PART)
    assert (seen.calls, seen.nameless_count) == ({}, 0)
