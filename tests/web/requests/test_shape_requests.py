"""What a batch may ask of all its lines and files: what is refused, and with which words."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from msgspec import UNSET, UnsetType

from tidegate.core import ids
from tidegate.core.errors import ApiProblem
from tidegate.core.job_shape import JobRetry
from tidegate.web.requests.shape_requests import (
    SHAPE_ALLOWED,
    OutputBytes,
    RetryFields,
    checked_parameters,
    earlier_batch,
    input_files,
    job_retry,
)

ONE, OTHER = (ids.make("file", bytes([number]) * ids.RANDOM_BYTES) for number in (1, 2))


@pytest.mark.parametrize(
    ("one", "several", "status", "code", "param"),
    [
        (UNSET, None, 400, "missing_required_parameter", "input_file_id"),
        ("", None, 400, "invalid_parameter", "input_file_id"),
        ("file-x", None, 404, "file_not_found", "input_file_id"),
        (ONE, [OTHER], 400, "invalid_parameter", "input_file_ids"),
        (UNSET, [ONE, "file-x"], 404, "file_not_found", "input_file_ids"),
        (UNSET, [ONE, OTHER, ONE], 400, "invalid_parameter", "input_file_ids"),
    ],
)
def test_input_files_are_named_once_and_in_one_way(
    one: str | UnsetType, several: list[str] | None, status: int, code: str, param: str
) -> None:
    with pytest.raises(ApiProblem) as refused:
        input_files(one, several)
    assert (refused.value.status, refused.value.code, refused.value.param) == (status, code, param)


def test_input_files_keep_their_order() -> None:
    assert input_files(ONE, None) == [ONE]
    assert input_files(UNSET, [OTHER, ONE]) == [OTHER, ONE]


def test_result_files_are_split_within_the_bounds_that_a_refusal_names() -> None:
    assert SHAPE_ALLOWED["output_file_bytes_max"] == "a whole number from 1,024 to 1,099,511,627,776"
    for size_bytes in (1_024, 1_099_511_627_776):
        assert msgspec.convert(size_bytes, OutputBytes) == size_bytes
    for size_bytes in (1_023, 1_099_511_627_777):
        with pytest.raises(msgspec.ValidationError):
            msgspec.convert(size_bytes, OutputBytes)


def test_an_earlier_batch_is_named_by_its_id() -> None:
    batch_id = ids.make("batch", bytes(ids.RANDOM_BYTES))
    assert earlier_batch(None) == ""
    assert earlier_batch(batch_id) == batch_id
    with pytest.raises(ApiProblem) as refused:
        earlier_batch("batch_x")
    assert (refused.value.status, refused.value.param) == (404, "reuse_from")


def test_retries_wait_at_most_as_long_as_the_longest_wait() -> None:
    assert job_retry(None) is None
    assert job_retry(RetryFields()) is None
    assert job_retry(RetryFields(3, 5, 5, ["timeout"])) == JobRetry(3, 5, 5, ("timeout",))
    with pytest.raises(ApiProblem) as refused:
        job_retry(RetryFields(backoff_ms=6, backoff_ms_max=5))
    assert (refused.value.status, refused.value.code) == (400, "invalid_parameter")
    assert refused.value.param == "retry.backoff_ms"


@pytest.mark.parametrize("values", [None, {}])
def test_no_parameters_are_none(values: dict[str, Any] | None) -> None:
    assert checked_parameters("defaults", values, "/v1/chat/completions") == {}


def test_a_parameter_that_no_line_may_have_is_refused_by_its_path() -> None:
    with pytest.raises(ApiProblem) as refused:
        checked_parameters("overrides", {"temperature": 0.5, "stream": True}, "/v1/chat/completions")
    assert (refused.value.status, refused.value.code) == (400, "invalid_parameter")
    assert refused.value.param == "overrides.stream"
