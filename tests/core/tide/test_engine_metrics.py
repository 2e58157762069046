"""Engines' own metrics: vLLM's and SGLang's pages, the simulated engine's, an operator's mapping, and hostile text."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tidegate.core.errors import SettingsError
from tidegate.core.tide.engine_metrics import (
    SGLANG,
    TEXT_BYTES_MAX,
    VLLM,
    MetricNames,
    Reading,
    metric_names,
    read,
    sample,
)
from tidegate.simulate.engine import meters
from tidegate.simulate.engine.board import Board

# What vLLM 0.32.0 showed three seconds apart while it served a batch: the lines that matter, and some of their neighbours.
VLLM_PAGE = """\
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="meta-llama/Meta-Llama-3-8B-Instruct"} %s
vllm:num_requests_waiting{engine="0",model_name="meta-llama/Meta-Llama-3-8B-Instruct"} 0.0
vllm:num_requests_waiting_by_reason{engine="0",model_name="meta-llama/Meta-Llama-3-8B-Instruct",reason="capacity"} 5.0
vllm:kv_cache_usage_perc{engine="0",model_name="meta-llama/Meta-Llama-3-8B-Instruct"} %s
vllm:prompt_tokens_total{engine="0",model_name="meta-llama/Meta-Llama-3-8B-Instruct"} %s
vllm:prompt_tokens_created{engine="0",model_name="meta-llama/Meta-Llama-3-8B-Instruct"} 1.7949662765353932e+09
vllm:prompt_tokens_by_source_total{engine="0",model_name="meta-llama/Meta-Llama-3-8B-Instruct",source="local_compute"} 704.0
vllm:time_to_first_token_seconds_bucket{engine="0",le="+Inf",model_name="meta-llama/Meta-Llama-3-8B-Instruct"} 47.0
vllm:time_to_first_token_seconds_count{engine="0",model_name="meta-llama/Meta-Llama-3-8B-Instruct"} %s
vllm:time_to_first_token_seconds_sum{engine="0",model_name="meta-llama/Meta-Llama-3-8B-Instruct"} %s
vllm:inter_token_latency_seconds_count{engine="0",model_name="meta-llama/Meta-Llama-3-8B-Instruct"} %s
vllm:inter_token_latency_seconds_sum{engine="0",model_name="meta-llama/Meta-Llama-3-8B-Instruct"} %s
"""
VLLM_FIRST = ("14.0", "0.010744810744810707", "4544.0", "16.0", "0.9991884231567383", "4351.0", "75.53533578001952")
VLLM_NEXT = ("31.0", "0.015628815628815684", "13344.0", "47.0", "9.918925762176514", "10134.0", "131.761001240935")
SGLANG_PAGE = b"""\
# HELP sglang:prompt_tokens_total Number of prefill tokens processed.
# TYPE sglang:prompt_tokens_total counter
sglang:prompt_tokens_total{model_name="llama"} 8.128902e+06
sglang:token_usage{model_name="llama"} 0.28
sglang:cache_hit_rate{model_name="llama"} 0.0075
sglang:time_to_first_token_seconds_sum{model_name="llama"} 120.5
sglang:time_to_first_token_seconds_bucket{le="0.001",model_name="llama"} 0.0
sglang:time_to_first_token_seconds_count{model_name="llama"} 100.0
sglang:inter_token_latency_seconds_sum{model_name="llama"} 30.0
sglang:inter_token_latency_seconds_count{model_name="llama"} 3000.0
sglang:num_running_reqs{model_name="llama",tp_rank="0"} 12.0
sglang:num_running_reqs{model_name="llama",tp_rank="1"} 12.0
sglang:num_queue_reqs{model_name="llama"} 3.0
"""


@pytest.fixture
def board() -> Iterator[Board]:
    with tempfile.TemporaryFile() as file:
        yield Board(file.fileno(), 1, 0)


def test_the_simulated_engine_is_read_as_vllm(board: Board) -> None:
    counters = board.counters
    counters[meters.RUNNING], counters[meters.WAITING], counters[meters.KV_USAGE_MILLIONTHS] = 7, 2, 250_000
    counters[meters.PROMPT_TOKENS] = 1_000
    meters.observe(counters, meters.FIRST_TOKEN_AT, 0.5)
    before = read(meters.exposition(board), VLLM, 1_000.0)
    counters[meters.PROMPT_TOKENS] += 400
    for seconds in (0.01, 0.03):
        meters.observe(counters, meters.FIRST_TOKEN_AT, seconds)
        meters.observe(counters, meters.BETWEEN_TOKENS_AT, seconds / 2)
    found = sample(before, read(meters.exposition(board), VLLM, 1_200.0, ["other", "simulated"]), known=4)
    assert (found.at_ms, found.known, found.running, found.waiting, found.kv_use) == (1_200.0, 4, 7.0, 2.0, 0.25)
    assert found.ttft_ms == pytest.approx(20.0)
    assert found.between_tokens_ms == pytest.approx(10.0)
    assert found.prompt_tokens_per_s == pytest.approx(2_000.0)


def test_what_a_real_vllm_showed() -> None:
    model = ["meta-llama/Meta-Llama-3-8B-Instruct"]
    first = read((VLLM_PAGE % VLLM_FIRST).encode(), VLLM, 1_000.0, model)
    assert (first.running, first.waiting, first.prompt_tokens) == (14.0, 0.0, 4_544.0)
    found = sample(first, read((VLLM_PAGE % VLLM_NEXT).encode(), VLLM, 4_000.0, model), known=31)
    assert (found.running, found.waiting) == (31.0, 0.0)
    assert found.kv_use == pytest.approx(0.0156, abs=1e-4)
    assert found.ttft_ms == pytest.approx(287.7, abs=0.1)
    assert found.between_tokens_ms == pytest.approx(9.72, abs=0.01)
    assert found.prompt_tokens_per_s == pytest.approx(2_933.3, abs=0.1)


def test_sglang_and_the_parts_of_one_engine() -> None:
    reading = read(SGLANG_PAGE, SGLANG, 5.0)
    # Both ranks speak of the same twelve requests.
    assert (reading.running, reading.waiting, reading.kv_use) == (12.0, 3.0, 0.28)
    assert (reading.ttft_sum_s, reading.ttft_count, reading.between_count) == (120.5, 100.0, 3000.0)
    assert reading.prompt_tokens == 8.128902e06


def test_older_names_count_where_the_newer_are_missing() -> None:
    page = b'vllm:gpu_cache_usage_perc 0.5\nvllm:time_per_output_token_seconds_count{engine="0"} 4\n'
    reading = read(page, VLLM, 0.0)
    assert (reading.kv_use, reading.between_count) == (0.5, 4.0)


def test_engines_behind_one_page_are_added_up_and_other_models_left_out() -> None:
    page = b"""\
vllm:num_requests_running{engine="0",model_name="a"} 3
vllm:num_requests_running{engine="1",model_name="a"} 4
vllm:num_requests_running{engine="0",model_name="b"} 100
vllm:kv_cache_usage_perc{engine="0",model_name="a"} 0.2
vllm:kv_cache_usage_perc{engine="1",model_name="a"} 0.9
"""
    mine = read(page, VLLM, 0.0, ["a"])
    assert (mine.running, mine.kv_use) == (7.0, 0.9)
    assert read(page, VLLM, 0.0).running == 107.0
    assert read(page, VLLM, 0.0, ["unknown to it"]).running == 107.0


def test_an_operators_own_names() -> None:
    names = metric_names({"running": "tgi_batch_current_size", "waiting": "tgi_queue_size"})
    reading = read(b"tgi_batch_current_size 5\ntgi_queue_size 1 1700000000000\n", names, 0.0)
    assert (reading.running, reading.waiting, reading.kv_use) == (5.0, 1.0, None)
    with pytest.raises(SettingsError, match="use one of running, waiting, kv_use"):
        metric_names({"runing": "x"})
    with pytest.raises(SettingsError, match="name that the engine's /metrics page shows"):
        metric_names({"running": 'x{a="b"}'})


@pytest.mark.parametrize(
    "line",
    [
        b"vllm:num_requests_running NaN",
        b"vllm:num_requests_running +Inf",
        b"vllm:num_requests_running -3",
        b"vllm:num_requests_running 1e300",
        b"vllm:num_requests_running",
        b"vllm:num_requests_running ",
        b'vllm:num_requests_running{a="b" 3',
        b'vllm:num_requests_running{a="b"}',
        b"vllm:num_requests_running three",
        b"vllm:num_requests_running{" + b"a" * 10_000 + b"} 3",
        b"\xff\xfe vllm:num_requests_running 3",
        b"# vllm:num_requests_running 3",
    ],
)
def test_what_cannot_be_is_unknown(line: bytes) -> None:
    assert read(line + b"\nvllm:kv_cache_usage_perc 1.7\n", VLLM, 0.0) == Reading(0.0)


def test_exemplars_duplicates_and_strange_labels() -> None:
    page = (
        b'vllm:num_requests_running{a="x"} 3 # {trace_id="7"} 0.5\n'
        b'vllm:num_requests_running{a="x"} 3\n'
        b'vllm:num_requests_running{a="}",b="1,2"} 4 1700000000000\n'
    )
    assert read(page, VLLM, 0.0).running == 7.0


def test_a_page_that_is_too_large_says_nothing() -> None:
    page = b"vllm:num_requests_running 3\n"
    assert read(page + b"x" * TEXT_BYTES_MAX, VLLM, 0.0) == Reading(0.0)
    many = b"".join(b'vllm:num_requests_running{a="%d"} 1\n' % number for number in range(20_000))
    assert read(many, VLLM, 0.0).running == 10_000.0


def test_an_engine_that_restarted_reports_only_its_gauges() -> None:
    before = Reading(0.0, 5.0, 1.0, 0.5, 100.0, 50.0, 20.0, 2_000.0, 9_000.0)
    after = Reading(200.0, 1.0, 0.0, 0.1, 0.1, 2.0, 0.0, 0.0, 30.0)
    found = sample(before, after, 0)
    assert (found.running, found.waiting, found.kv_use) == (1.0, 0.0, 0.1)
    assert found.ttft_ms is found.between_tokens_ms is found.prompt_tokens_per_s is None
    assert sample(None, after, 0) == found
    # Twice the same moment is no interval.
    assert sample(after, after, 0) == found


NAMES = ["vllm:num_requests_running", "vllm:prompt_tokens_total", "vllm:time_to_first_token_seconds_sum", "other"]
LINES = st.builds(
    "{}{} {}".format,
    st.sampled_from(NAMES),
    st.sampled_from(["", "{}", '{a="b"}', '{a="', '{model_name="m"}', "}{"]),
    st.one_of(st.floats().map(str), st.integers().map(str), st.text(max_size=8)),
)


@settings(max_examples=100, deadline=None)
@given(st.one_of(st.binary(max_size=500), st.lists(LINES, max_size=20).map(lambda lines: "\n".join(lines).encode())))
def test_no_text_raises_or_gives_what_is_no_number(text: bytes) -> None:
    reading = read(text, VLLM, 1.0, ["m"])
    for value in (reading.running, reading.prompt_tokens, reading.ttft_sum_s):
        assert value is None or value >= 0.0
    sample(Reading(0.0, prompt_tokens=1.0, ttft_sum_s=1.0, ttft_count=0.0), reading, 0)
    assert read(text, MetricNames(), 1.0) == Reading(1.0)
