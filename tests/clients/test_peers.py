"""What the end-to-end suites of LiteLLM, AIBrix and llm-d call and expect, asked of one `tidegate serve` by the `openai` SDK.

vLLM's run-batch inputs are asked of `tidegate run`, in tests/cli/run/test_run.py. The originals run with `make clients PEERS=DIR`; every
difference that we keep is a row of docs/clients.md.
"""

from __future__ import annotations

import io
import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.engine import Engine
from tests.support.processes import Processes, wait_until
from tests.support.sdks import openai
from tests.support.tidegate import ENDED, IN_FLIGHT, Site, behaving, chat_line

MODELS = ("model-a", "model-b")
METADATA = {"key1": "value1", "key2": "value2"}


def chats(count: int, text: str = "Hello world!", model: str = "model-a") -> list[str]:
    return [chat_line(f"request-{number + 1}", text, model) for number in range(count)]


class Gateway:
    """A server with two models, and the calls that the suites make."""

    def __init__(self, processes: Processes, directory: Path) -> None:
        engine = Engine(processes, directory / "engine")
        site = Site("embedded", processes, directory, engine, {"TIDEGATE_LIMITS_WINDOW_MIN_S": "1"})
        site.configure(models={name: {"deployments": [{"url": engine.url}]} for name in MODELS})
        site.serve()
        self.client = openai.OpenAI(base_url=f"{site.url}/v1", api_key="of no meaning on this machine", max_retries=0)

    def upload(self, lines: list[str], end: str = "", name: str = "input.jsonl") -> Any:
        content = io.BytesIO(("\n".join(lines) + end).encode())
        return self.client.files.create(file=(name, content, "application/jsonl"), purpose="batch")

    def create(self, file_id: str, **more: Any) -> Any:
        wanted = {"endpoint": "/v1/chat/completions", "completion_window": "24h", **more}
        return self.client.batches.create(input_file_id=file_id, **wanted)

    def submit(self, lines: list[str], end: str = "", **more: Any) -> Any:
        return self.create(self.upload(lines, end).id, **more)

    def until(self, batch_id: str, true_of: Callable[[Any], bool]) -> Any:
        def there() -> Any:
            batch = self.client.batches.retrieve(batch_id)
            return batch if true_of(batch) else None

        return wait_until(there, 60, f"{batch_id}", poll_s=0.05)

    def ended(self, batch_id: str, *counts: int) -> tuple[Any, list[dict[str, Any]], list[dict[str, Any]]]:
        """Return the batch at its end and the lines of its two files: what llm-d's suite demands of every end holds."""
        batch = self.until(batch_id, lambda batch: batch.status in ENDED)
        output, errors = self.lines(batch.output_file_id), self.lines(batch.error_file_id)
        found = batch.request_counts
        assert (found.total, found.completed, found.failed) == (
            counts or (len(output + errors), len(output), len(errors))
        )
        assert (len(output), len(errors)) == (found.completed, found.failed)
        assert getattr(batch, f"{batch.status}_at") >= batch.created_at
        asked = Counter(line["custom_id"] for line in self.lines(batch.input_file_id))
        if batch.status == "completed":
            assert Counter(line["custom_id"] for line in output + errors) == asked
        for line in output:
            body = line["response"]["body"]
            assert line["id"]
            assert line["response"]["status_code"] == 200
            assert line["response"]["request_id"]
            assert body["model"]
            assert body["choices"]
            assert {"prompt_tokens", "completion_tokens", "total_tokens"} <= body["usage"].keys()
        return batch, output, errors

    def lines(self, file_id: str | None) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.client.files.content(file_id).text.splitlines()] if file_id else []


@pytest.fixture(scope="module")
def gateway(module_processes: Processes, module_directory: Path) -> Gateway:
    return Gateway(module_processes, module_directory)


def test_litellms_create_batch(gateway: Gateway) -> None:
    lines = chats(2)
    file = gateway.upload(lines)
    batch = gateway.create(file.id, metadata=METADATA, extra_body={"custom_llm_provider": "openai"})
    assert (batch.endpoint, batch.input_file_id, batch.metadata) == ("/v1/chat/completions", file.id, METADATA)
    assert gateway.client.batches.retrieve(batch.id).id == batch.id
    assert len(gateway.client.batches.list(limit=2).data) <= 2
    assert gateway.client.files.content(file.id).content == "\n".join(lines).encode()
    gateway.ended(batch.id)
    with pytest.raises(openai.ConflictError, match="Cannot cancel a batch with status 'completed'"):
        gateway.client.batches.cancel(batch.id)


def test_aibrixs_batch_from_upload_to_list(gateway: Gateway) -> None:
    """But for `status`, which is `processed` here as at OpenAI, and the order of the output, which `ordered` gives."""
    file = gateway.upload(chats(3), name="batch_input.jsonl")
    assert (file.object, file.purpose, file.status) == ("file", "batch", "processed")
    batch = gateway.create(file.id, extra_body={"ordered": True})
    assert (batch.object, batch.input_file_id) == ("batch", file.id)
    _, output, _ = gateway.ended(batch.id, 3, 3, 0)
    assert [line["custom_id"] for line in output] == ["request-1", "request-2", "request-3"]
    assert {one.id: one.status for one in gateway.client.batches.list().data}[batch.id] == "completed"


def test_llm_ds_lifecycle_shared_input_and_last_newline(gateway: Gateway) -> None:
    file = gateway.upload(chats(2), "\n", name="lifecycle.jsonl")
    assert file.filename == "lifecycle.jsonl"
    made = [gateway.create(file.id, metadata=METADATA) for _ in range(2)]
    ends = [gateway.ended(batch.id, 2, 2, 0)[0] for batch in made]
    for batch in ends:
        assert (batch.status, batch.completion_window, batch.metadata) == ("completed", "24h", METADATA)
        assert batch.in_progress_at >= batch.created_at
        assert batch.error_file_id is None
    assert ends[0].output_file_id != ends[1].output_file_id


def test_llm_ds_models_some_of_them_unknown(gateway: Gateway) -> None:
    both = [chat_line(f"{model}-{number}", "Hello", model) for model in MODELS for number in range(2)]
    _, output, _ = gateway.ended(gateway.submit(both).id, 4, 4, 0)
    assert Counter(line["response"]["body"]["model"] for line in output) == {"model-a": 2, "model-b": 2}
    mixed = [*chats(2), chat_line("bad", "Hello", "nonexistent-model")]
    _, _, errors = gateway.ended(gateway.submit(mixed).id, 3, 2, 1)
    assert [line["custom_id"] for line in errors] == ["bad"]
    batch, _, errors = gateway.ended(gateway.submit(chats(2, model="nonexistent-model")).id, 2, 0, 2)
    assert batch.status == "completed"
    assert all("model_not_found" in json.dumps(line) for line in errors)


def test_llm_ds_progress_and_cancel(gateway: Gateway) -> None:
    """A cancel asked twice is no error; what was done stays, and the rest says `batch_cancelled`."""
    # Fewer than the worker's slots: items of one job run in no promised order, and slots full of calls that hang let nothing else through.
    slow = [chat_line(f"slow-{number}", behaving("hang"), "model-a") for number in range(IN_FLIGHT - 1)]
    batch = gateway.submit([*chats(4), *slow])
    gateway.until(batch.id, lambda batch: batch.request_counts.completed >= 1)
    assert gateway.client.batches.retrieve(batch.id).status == "in_progress"
    assert gateway.client.batches.cancel(batch.id).status == "cancelling"
    assert gateway.client.batches.cancel(batch.id).status in ("cancelling", "cancelled")
    batch, output, errors = gateway.ended(batch.id)
    assert (batch.status, batch.request_counts.total) == ("cancelled", 4 + len(slow))
    assert output
    assert {line["error"]["code"] for line in errors} == {"batch_cancelled"}
    at_once = gateway.submit(slow)
    assert gateway.client.batches.cancel(at_once.id).status in ("cancelling", "cancelled")
    batch, output, _ = gateway.ended(at_once.id)
    assert (batch.status, batch.request_counts.completed, output) == ("cancelled", 0, [])


def test_llm_ds_expiration(gateway: Gateway) -> None:
    slow = [chat_line(f"slow-{number}", behaving("hang"), "model-a") for number in range(8)]
    batch, _, errors = gateway.ended(gateway.submit(slow, completion_window="3s").id)
    assert (batch.status, batch.request_counts.total) == ("expired", 8)
    assert {line["error"]["code"] for line in errors} == {"batch_expired"}


def test_llm_ds_pages(gateway: Gateway) -> None:
    """By the id of the last one, as at OpenAI; llm-d counts."""
    file = gateway.upload(chats(1))
    made = [gateway.create(file.id).id for _ in range(3)]
    first = gateway.client.batches.list(limit=2)
    assert ([one.id for one in first.data], first.has_more) == (made[:0:-1], True)
    second = gateway.client.batches.list(limit=2, after=made[1])
    assert second.data[0].id == made[0]


def test_llm_ds_inputs_that_fail(gateway: Gateway) -> None:
    twice = [chat_line("same", "Hello", "model-a"), chat_line("same", "World", "model-a")]
    batch = gateway.until(gateway.submit(twice).id, lambda batch: batch.status in ENDED)
    assert (batch.status, batch.errors.data[0].line) == ("failed", 2)
    streamed = json.loads(chat_line("stream", "Hello", "model-a"))
    streamed["body"]["stream"] = True
    batch = gateway.until(gateway.submit([json.dumps(streamed)]).id, lambda batch: batch.status in ENDED)
    assert batch.status == "failed"
    file = gateway.upload(chats(1))
    for wanted in ({"input_file_id": ""}, {"input_file_id": file.id, "endpoint": "/v1/invalid"}):
        with pytest.raises(openai.BadRequestError):
            gateway.client.batches.create(**{"endpoint": "/v1/chat/completions", "completion_window": "24h", **wanted})
    with pytest.raises(openai.APIStatusError, match="No such File object: file-does-not-exist-12345"):
        gateway.create("file-does-not-exist-12345")
