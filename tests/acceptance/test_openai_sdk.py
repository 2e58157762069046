"""The official `openai` SDK, unchanged, against `tidegate serve` as a process: its own types and exceptions are the judge."""

from __future__ import annotations

import hashlib
import importlib
import io
import json
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.engine import Engine
from tests.support.processes import Processes, wait_until
from tests.support.sdks import openai
from tests.support.server import Server
from tests.support.tidegate import ENDED, TIDEGATE
from tidegate.web.openai import schemas


def line(custom_id: str, model: str = "any-model", **body: Any) -> bytes:
    request = {"model": model, "messages": [{"role": "user", "content": f"Say {custom_id}."}], **body}
    return json.dumps(
        {"custom_id": custom_id, "method": "POST", "url": "/v1/chat/completions", "body": request}
    ).encode()


def lines(count: int, model: str = "any-model") -> bytes:
    return b"".join(line(f"item-{number}", model) + b"\n" for number in range(count))


@pytest.fixture(scope="module")
def server(module_processes: Processes, module_directory: Path) -> Server:
    """One server for all tests that leave it as it was; it asks for keys."""
    engine = Engine(module_processes, module_directory / "engine")
    made = Server(module_processes, module_directory, engine=engine)
    made.start().close()
    made.key()
    made.until_it_asks_for_keys()
    return made


@pytest.fixture
def client(server: Server) -> Iterator[openai.OpenAI]:
    """A client whose tenant has nothing yet."""
    with server.openai(server.key(f"org-{secrets.token_hex(8)}")) as opened:
        yield opened


def ended(client: openai.OpenAI, batch_id: str) -> Any:
    def look() -> Any:
        batch = client.batches.retrieve(batch_id)
        return batch if batch.status in ENDED else None

    return wait_until(look, timeout_s=60, what=f"{batch_id} to end")


def strictly(model: Any) -> None:
    """The object fits the SDK's declared types, which the SDK itself does not check."""
    type(model).model_validate(model.model_dump(), strict=True)


def test_files(client: openai.OpenAI) -> None:
    data = lines(3)
    file = client.files.create(
        file=("requests.jsonl", data), purpose="batch", expires_after={"anchor": "created_at", "seconds": 3600}
    )
    assert isinstance(file, openai.types.FileObject)
    strictly(file)
    assert (file.filename, file.bytes, file.purpose) == ("requests.jsonl", len(data), "batch")
    assert file.expires_at == file.created_at + 3600
    assert client.files.retrieve(file.id) == file
    assert client.files.content(file.id).read() == data
    with client.files.with_streaming_response.content(file.id) as response:
        assert b"".join(response.iter_bytes(7)) == data
    assert [one.id for one in client.files.list(purpose="batch")] == [file.id]
    deleted = client.files.delete(file.id)
    assert isinstance(deleted, openai.types.FileDeleted)
    assert (deleted.id, deleted.deleted) == (file.id, True)
    assert list(client.files.list()) == []


def test_uploads(client: openai.OpenAI, tmp_path: Path) -> None:
    data = lines(40)
    path = tmp_path / "in.jsonl"
    path.write_bytes(data)
    done = client.uploads.upload_file_chunked(
        file=path, mime_type="application/jsonl", purpose="batch", part_size=1_000, md5=hashlib.md5(data).hexdigest()
    )
    assert isinstance(done, openai.types.Upload)
    strictly(done)
    assert done.status == "completed"
    assert done.file is not None
    assert client.files.content(done.file.id).read() == data
    batch = client.batches.create(input_file_id=done.file.id, endpoint="/v1/chat/completions", completion_window="24h")
    assert ended(client, batch.id).request_counts.completed == 40
    begun = client.uploads.create(
        bytes=len(data),
        filename="in.jsonl",
        mime_type="application/jsonl",
        purpose="batch",
        expires_after={"anchor": "created_at", "seconds": 3600},
    )
    strictly(begun)
    part = client.uploads.parts.create(begun.id, data=data)
    strictly(part)
    assert (part.object, part.upload_id) == ("upload.part", begun.id)
    with pytest.raises(openai.BadRequestError) as wrong:
        client.uploads.complete(begun.id, part_ids=[part.id], md5="0" * 32)
    assert wrong.value.code == "md5_mismatch"
    cancelled = client.uploads.cancel(begun.id)
    strictly(cancelled)
    assert cancelled.status == "cancelled"
    with pytest.raises(openai.NotFoundError):
        client.uploads.cancel("upload_nothing")


def test_no_field_of_the_sdks_types_is_missing() -> None:
    """A later SDK that knows a further field fails here."""
    part = importlib.import_module("openai.types.uploads").UploadPart
    shapes = {
        schemas.FileObject: openai.types.FileObject,
        schemas.UploadObject: openai.types.Upload,
        schemas.UploadPartObject: part,
        schemas.Batch: openai.types.Batch,
    }
    for shape, type_ in shapes.items():
        assert set(type_.model_fields) <= set(shape.__struct_fields__)


def test_every_way_to_hand_over_a_file(client: openai.OpenAI, tmp_path: Path) -> None:
    path = tmp_path / "ünï.jsonl"
    path.write_bytes(lines(2))
    by_path = client.files.create(file=path, purpose="batch")
    assert by_path.filename == "ünï.jsonl"
    with path.open("rb") as stream:
        assert client.files.create(file=stream, purpose="batch").bytes == by_path.bytes
    assert client.files.create(file=lines(2), purpose="batch").filename == "upload"
    assert client.files.create(file=io.BytesIO(lines(2)), purpose="user_data").purpose == "user_data"


def test_pages_follow_by_themselves(client: openai.OpenAI) -> None:
    file_ids = [client.files.create(file=("a.jsonl", lines(1)), purpose="batch").id for _ in range(5)]
    assert [file.id for file in client.files.list(limit=2, order="asc")] == file_ids
    assert [file.id for file in client.files.list(limit=2)] == file_ids[::-1]
    made = [
        client.batches.create(input_file_id=file_ids[0], endpoint="/v1/chat/completions", completion_window="24h").id
        for _ in range(5)
    ]
    assert [batch.id for batch in client.batches.list(limit=2)] == made[::-1]


def test_a_batch_to_its_end(client: openai.OpenAI, server: Server) -> None:
    count = 50
    file = client.files.create(file=("in.jsonl", lines(count, "counted")), purpose="batch")
    batch = client.batches.create(
        input_file_id=file.id,
        endpoint="/v1/chat/completions",
        completion_window="24h",
        metadata={"project": "x"},
        output_expires_after={"anchor": "created_at", "seconds": 7200},
    )
    assert isinstance(batch, openai.types.Batch)
    assert batch.status == "validating"
    strictly(batch)
    batch = ended(client, batch.id)
    strictly(batch)
    assert batch.status == "completed"
    assert batch.metadata == {"project": "x"}
    assert batch.model == "counted"
    assert batch.errors is None
    assert batch.error_file_id is None
    assert batch.request_counts is not None
    assert (batch.request_counts.total, batch.request_counts.completed, batch.request_counts.failed) == (
        count,
        count,
        0,
    )
    assert batch.usage is not None
    assert batch.usage.total_tokens == batch.usage.input_tokens + batch.usage.output_tokens > 0
    assert batch.created_at <= (batch.in_progress_at or 0) <= (batch.finalizing_at or 0) <= (batch.completed_at or 0)
    assert batch.output_file_id is not None
    output = client.files.retrieve(batch.output_file_id)
    assert output.purpose == "batch_output"
    assert output.expires_at == output.created_at + 7200
    answers = [json.loads(text) for text in client.files.content(batch.output_file_id).text.splitlines()]
    assert {answer["custom_id"] for answer in answers} == {f"item-{number}" for number in range(count)}
    for answer in answers:
        assert set(answer) == {"id", "custom_id", "response", "error"}
        assert answer["error"] is None
        assert answer["response"]["status_code"] == 200
        assert answer["response"]["body"]["object"] == "chat.completion"
    assert len([call for call in server.engine.calls() if call["model"] == "counted"]) == count


def test_a_batch_that_fails_names_its_lines(client: openai.OpenAI) -> None:
    file = client.files.create(file=("in.jsonl", line("a") + b"\nnot json\n" + line("a") + b"\n"), purpose="batch")
    batch = client.batches.create(input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h")
    batch = ended(client, batch.id)
    strictly(batch)
    assert batch.status == "failed"
    assert batch.errors is not None
    assert batch.errors.data is not None
    assert sorted(error.line or 0 for error in batch.errors.data) == [2, 3]
    assert all(error.code and error.message for error in batch.errors.data)


def test_cancel(processes: Processes, tmp_path: Path) -> None:
    engine = Engine(processes, tmp_path / "slow", latency_ms=200)
    server = Server(processes, tmp_path, engine=engine)
    server.start().close()
    with server.openai() as client:
        file = client.files.create(file=("in.jsonl", lines(2_000)), purpose="batch")
        batch = client.batches.create(input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h")

        def begun() -> bool:
            counts = client.batches.retrieve(batch.id).request_counts
            return counts is not None and counts.completed > 0

        wait_until(begun, timeout_s=60, what="the first answer")
        growing = client.get(f"/batches/{batch.id}/output", cast_to=openai.HttpxBinaryResponseContent).read()
        assert growing.endswith(b"\n")
        cancelled = client.batches.cancel(batch.id)
        assert cancelled.status == "cancelling"
        strictly(cancelled)
        batch = ended(client, batch.id)
        assert batch.status == "cancelled"
        assert batch.request_counts is not None
        assert batch.request_counts.completed + batch.request_counts.failed == batch.request_counts.total == 2_000
        assert batch.output_file_id is not None
        assert batch.error_file_id is not None
        output = client.files.content(batch.output_file_id).read()
        assert output.startswith(growing)
        errors = client.files.content(batch.error_file_id).read()
        assert output.count(b"\n") + errors.count(b"\n") == 2_000
        assert b"batch_cancelled" in errors


def test_errors_are_the_sdks_own(client: openai.OpenAI) -> None:
    file = client.files.create(file=("in.jsonl", lines(1)), purpose="batch")
    with pytest.raises(openai.NotFoundError) as missing:
        client.files.retrieve("file-nothing")
    assert missing.value.code == "file_not_found"
    assert missing.value.param == "file_id"
    assert missing.value.type == "invalid_request_error"
    assert missing.value.request_id is not None
    assert missing.value.request_id.startswith("req_")
    with pytest.raises(openai.NotFoundError):
        client.batches.retrieve("batch_nothing")
    with pytest.raises(openai.NotFoundError):
        client.files.content("file_0000000000000000000000")
    with pytest.raises(openai.BadRequestError) as refused:
        client.batches.create(input_file_id=file.id, endpoint="/v1/nonsense", completion_window="24h")  # type: ignore[arg-type]
    assert refused.value.param == "endpoint"
    with pytest.raises(openai.BadRequestError) as refused:
        client.batches.create(
            input_file_id=file.id,
            endpoint="/v1/chat/completions",
            completion_window="24h",
            extra_body={"prioritty": 1},
        )
    assert refused.value.code == "unknown_parameter"
    with pytest.raises(openai.BadRequestError) as refused:
        client.files.create(file=("a", b""), purpose="batch")
    assert refused.value.code == "empty_file"
    with pytest.raises(openai.BadRequestError):
        list(client.files.list(limit=0))
    batch = client.batches.create(input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h")
    ended(client, batch.id)
    with pytest.raises(openai.ConflictError) as conflict:
        client.batches.cancel(batch.id)
    assert conflict.value.code == "batch_not_cancellable"


def test_our_own_fields_fit_through_the_sdk(client: openai.OpenAI) -> None:
    file = client.files.create(file=("in.jsonl", lines(20)), purpose="batch", extra_headers={"Idempotency-Key": "f1"})
    again = client.files.create(file=("in.jsonl", lines(20)), purpose="batch", extra_headers={"Idempotency-Key": "f1"})
    assert again.id == file.id
    made = [
        client.batches.create(
            input_file_id=file.id,
            endpoint="/v1/chat/completions",
            completion_window="90m",  # type: ignore[arg-type]
            extra_body={"ordered": True, "begin_within": "1h"},
            extra_headers={"Idempotency-Key": "b1"},
        )
        for _ in range(2)
    ]
    assert made[0].id == made[1].id
    assert made[0].completion_window == "90m"
    batch = ended(client, made[0].id)
    answers = client.files.content(batch.output_file_id or "").text.splitlines()
    assert [json.loads(text)["custom_id"] for text in answers] == [f"item-{number}" for number in range(20)]


def test_keys(processes: Processes, tmp_path: Path, engine: Engine) -> None:
    server = Server(processes, tmp_path, engine=engine)
    server.start().close()

    def make_key(*options: str) -> str:
        """By the command, as an operator makes one."""
        command = [TIDEGATE, "keys", "create", "--org", "acme", "--data", str(server.data), "--json", *options]
        made = processes.completed(command)
        assert made.returncode == 0, made.stderr
        return str(json.loads(made.stdout)["key"])

    with server.openai("anything") as anyone:
        anyone.files.create(file=("in.jsonl", lines(1)), purpose="batch")
        key, reader = make_key(), make_key("--scopes", "files:read")
        server.until_it_asks_for_keys()
        with pytest.raises(openai.AuthenticationError) as refused:
            anyone.files.list()
        assert refused.value.code == "invalid_api_key"
    with server.openai(key) as acme, server.openai(reader) as only_reads:
        assert list(acme.files.list()) == []
        file = acme.files.create(file=("in.jsonl", lines(1)), purpose="batch")
        assert [one.id for one in only_reads.files.list()] == [file.id]
        with pytest.raises(openai.PermissionDeniedError):
            only_reads.files.delete(file.id)


@pytest.mark.anyio
async def test_the_asynchronous_client_too(client: openai.OpenAI, server: Server) -> None:
    async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key=client.api_key, max_retries=0) as own:
        file = await own.files.create(file=("in.jsonl", lines(2)), purpose="batch")
        assert [one.id async for one in own.files.list(limit=1)] == [file.id]
        assert (await own.files.content(file.id)).read() == lines(2)
        assert [model.id async for model in own.models.list()] == ["simulated"]
