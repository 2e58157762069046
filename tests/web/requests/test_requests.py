"""Bodies that are not what was asked for: the answer names the field and says what it should be."""

from __future__ import annotations

import pytest
from msgspec.structs import replace
from starlette.requests import Request

from tidegate.core import ids
from tidegate.core.errors import ApiProblem
from tidegate.settings import Settings
from tidegate.web.requests.requests import BatchCreate, anthropic_betas, decoded, job_request


@pytest.mark.parametrize(
    ("body", "code", "param", "message"),
    [
        (b"{", "invalid_json", None, "The body is not valid JSON."),
        (b'{"endpoint":"\xff"}', "invalid_json", None, "The body is not valid JSON."),
        (b'{"endpoint":"e","defaults":{"a":' + b"[" * 100_000, "invalid_json", None, "The body is not valid JSON."),
        (b"[]", "invalid_parameter", None, "The body must be a JSON object."),
        (b"{}", "missing_required_parameter", "endpoint", "`endpoint` is missing."),
        (
            b'{"endpoint":"e","output_expires_after":{"anchor":"created_at"}}',
            "missing_required_parameter",
            "output_expires_after.seconds",
            "`output_expires_after.seconds` is missing.",
        ),
        (b'{"endpoint":5}', "invalid_parameter", "endpoint", "`endpoint`: expected `str`, got `int`."),
        (b'{"endpoint":"e","ordered":1}', "invalid_parameter", "ordered", "`ordered` must be true or false."),
        (
            b'{"endpoint":"e","input_file_ids":["a",2]}',
            "invalid_parameter",
            "input_file_ids[1]",
            "`input_file_ids` must be a list of 1 to 100 ids of files.",
        ),
        (b'{"endpoint":"e","orderd":true}', "unknown_parameter", "orderd", "Unknown parameter `orderd`. Did you mean `ordered`?"),
    ],
)  # fmt: skip
def test_a_body_is_refused_with_the_field_at_fault(body: bytes, code: str, param: str | None, message: str) -> None:
    with pytest.raises(ApiProblem) as refused:
        decoded(body, BatchCreate)
    assert (refused.value.status, refused.value.code) == (400, code)
    assert (refused.value.param, refused.value.message) == (param, message)


def test_a_window_lies_between_the_bounds_that_its_refusal_names() -> None:
    base = Settings()
    settings = replace(base, limits=replace(base.limits, window_min_s=3_600, window_max_s=7_200))
    body = BatchCreate(endpoint="/v1/embeddings", input_file_id=ids.make("file", bytes(ids.RANDOM_BYTES)))
    for text, window_ms in (("1h", 3_600_000), ("2h", 7_200_000)):
        assert job_request(replace(body, completion_window=text), settings).window_ms == window_ms
    for text in ("59m59s", "2h1s"):
        with pytest.raises(ApiProblem) as refused:
            job_request(replace(body, completion_window=text), settings)
        assert refused.value.message == "`completion_window` must lie between 1h and 2h."


@pytest.mark.parametrize(
    ("sent", "betas"),
    [
        (["a-1, b_2.0"], "a-1, b_2.0"),
        (["a", "b"], "a,b"),
        ([], ""),
        (['a"; b'], ""),
        (["a", "\u00e9"], ""),
        (["x" * 512], "x" * 512),
        (["x" * 513], ""),
    ],
)
def test_betas_are_passed_on_only_if_they_look_like_betas(sent: list[str], betas: str) -> None:
    headers = [(b"anthropic-beta", one.encode("latin-1")) for one in sent]
    assert anthropic_betas(Request({"type": "http", "headers": headers})) == betas
