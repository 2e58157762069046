"""What a deployment takes in one call, as an operator writes it."""

from pathlib import Path

import pytest

from tests.settings.conftest import load_text
from tidegate.core.deployments import Deployment
from tidegate.core.errors import SettingsError
from tidegate.core.grouping.chat import ChatAdapter, ChatBatching, ChatMode
from tidegate.settings import deployments, load
from tidegate.settings.models import slot_caps


def one(tmp_path: Path, settings: str) -> Deployment:
    text = f"models: {{m: {{deployments: [{{url: 'http://h', {settings}}}]}}}}"
    (found,) = deployments(load_text(tmp_path, text).settings)
    return found


def test_nothing_is_grouped_by_default(tmp_path: Path) -> None:
    found = one(tmp_path, "weight: 1")
    assert (found.upstream_max_batch_inputs, found.items_per_call_max) == (1, 1)
    assert found.chat_batching == ChatBatching(ChatMode.CONCURRENT)


def test_inputs_and_conversations_in_one_call(tmp_path: Path) -> None:
    found = one(tmp_path, "upstream_max_batch_inputs: 16, upstream_min_batch_inputs: 4")
    assert (found.upstream_max_batch_inputs, found.upstream_min_batch_inputs, found.items_per_call_max) == (16, 4, 16)
    batching = "chat_batching: {mode: sync_microbatch, adapter: results, upstream_max_batch_size: 8, max_total_input_tokens: 9}"
    found = one(tmp_path, batching)
    assert found.items_per_call_max == 8
    assert found.chat_batching == ChatBatching(
        ChatMode.SYNC_MICROBATCH,
        upstream_max_batch_size=8,
        max_total_input_tokens=9,
        adapter=ChatAdapter.RESULTS,
    )
    assert one(tmp_path, batching.replace("adapter: results, ", "")).items_per_call_max == 1, (
        "no adapter could send them"
    )


def test_the_most_chat_calls_in_flight_hold_over_all_processes(tmp_path: Path) -> None:
    batching = "max_in_flight: 64, chat_batching: {mode: concurrent, max_in_flight: 5}"
    assert one(tmp_path, batching).background_in_flight_max == 5
    assert slot_caps(load(tmp_path / "tidegate.yaml", None, {}, {}).settings)["m/1"] == 5


@pytest.mark.parametrize(
    ("settings", "answer"),
    [
        ("upstream_max_batch_inputs: 0", "upstream_max_batch_inputs"),
        ("upstream_min_batch_inputs: 1", "upstream_min_batch_inputs"),
        ("upstream_max_batch_input: 8", "upstream_max_batch_inputs"),
        ("chat_batching: {mode: native_async_batch}", "mode"),
        ("chat_batching: {mode: disabled, max_in_flight: 4}", "max_in_flight says nothing in mode disabled"),
        ("chat_batching: {require_homogeneous_params: false}", "can only be true"),
        ("chat_batching: {adapter: vllm}", "adapter"),
    ],
)
def test_what_cannot_be_meant_is_refused_by_its_key(tmp_path: Path, settings: str, answer: str) -> None:
    with pytest.raises(SettingsError, match=answer):
        one(tmp_path, settings)
