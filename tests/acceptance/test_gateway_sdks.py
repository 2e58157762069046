"""The official `openai` and `anthropic` SDKs, unchanged, against interactive calls of `tidegate serve` over the simulated engine."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
from pydantic import BaseModel

from tests.support.engine import Engine
from tests.support.processes import Processes, wait_until
from tests.support.sdks import anthropic, openai
from tests.support.server import Server
from tests.support.tidegate import write_config
from tests.upstream.raw_server import Peer, Request
from tests.web.upstream import STREAM_HEAD, Upstream, answers, chat_with, chunk, chunked, event, streams

MESSAGES: Any = [{"role": "user", "content": "Say hi."}]
TOOL = {
    "name": "weather",
    "description": "The weather in a town.",
    "parameters": {"type": "object", "properties": {"town": {"type": "string"}}, "required": ["town"]},
}
CALLS = [{"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"town":"Kiel"}'}}]


STATUSES = (400, 404, 422, 429, 500)


class Town(BaseModel):
    name: str
    people: int


@pytest.fixture(scope="module")
def scripted() -> Iterator[Upstream]:
    """A model server that says what a test wants it to say."""
    with Upstream(answers()) as made:
        yield made


@pytest.fixture(scope="module")
def slow(module_processes: Processes, module_directory: Path) -> Engine:
    return Engine(module_processes, module_directory / "slow", latency_ms=600_000)


@pytest.fixture(scope="module")
def server(module_processes: Processes, module_directory: Path, scripted: Upstream, slow: Engine) -> Server:
    """A server that asks for keys, with the simulated engine and scripted servers for the models that a test names."""
    engine = Engine(module_processes, module_directory / "engine")
    places = {
        "any": [{"url": engine.url}],
        "m": [{"url": engine.url}],
        "slow": [{"url": slow.url}],
        "gone": [{"url": "http://127.0.0.1:1/v1"}],
        "scripted": [{"url": scripted.url}],
        "scripted-anthropic": [{"url": scripted.url, "engine": "anthropic"}],
        "two": [{"url": "http://127.0.0.1:1/v1", "weight": 100.0}, {"url": engine.url, "weight": 0.01}],
    }
    # A refusal may make its deployment rest, so each has one to itself.
    places |= {f"{door}-{status}": [{"url": engine.url}] for door in ("openai", "anthropic") for status in STATUSES}
    config = {"models": {name: {"deployments": found} for name, found in places.items()}}
    made = Server(module_processes, module_directory, "serve", "--config", write_config(module_directory, config))
    made.start().close()
    assert made.key()
    made.until_it_asks_for_keys()
    return made


@pytest.fixture
def ours(server: Server) -> Iterator[openai.OpenAI]:
    with server.openai(server.key()) as client:
        yield client


@pytest.fixture
def theirs(server: Server) -> Iterator[anthropic.Anthropic]:
    with server.anthropic(server.key()) as client:
        yield client


def test_openai_chat(ours: openai.OpenAI) -> None:
    answer = ours.chat.completions.create(model="any", messages=MESSAGES)
    assert answer.choices[0].message.content
    assert answer.usage is not None
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert str(answer._request_id).startswith("req_")
    chunks = list(
        ours.chat.completions.create(
            model="any", messages=MESSAGES, stream=True, stream_options={"include_usage": True}
        )
    )
    text = "".join(one.choices[0].delta.content or "" for one in chunks if one.choices)
    assert text == answer.choices[0].message.content
    assert chunks[-1].usage == answer.usage
    assert ours.chat.completions.create(model="two", messages=MESSAGES).choices, "the first deployment is not there"


def test_openai_other_endpoints(ours: openai.OpenAI) -> None:
    completion = ours.completions.create(model="any", prompt="Say hi.")
    streamed = ours.completions.create(model="any", prompt="Say hi.", stream=True)
    assert "".join(one.choices[0].text for one in streamed) == completion.choices[0].text
    vectors = ours.embeddings.create(model="any", input=["a", "b"], encoding_format="float")
    assert [one.index for one in vectors.data] == [0, 1]
    assert len(ours.embeddings.create(model="any", input="a").data) == 1
    response = ours.responses.create(model="any", input="Say hi.", instructions="Be brief.")
    assert response.output_text
    events = list(ours.responses.create(model="any", input="Say hi.", instructions="Be brief.", stream=True))
    assert events[-1].type == "response.completed"
    assert events[-1].response.output_text == response.output_text
    assert ours.moderations.create(model="any", input="a").results
    assert {"any", "scripted"} <= {one.id for one in ours.models.list()}
    assert ours.models.retrieve("scripted").id == "scripted"


def test_openai_tools_and_structured_output_pass_through(ours: openai.OpenAI, scripted: Upstream) -> None:
    scripted.becomes(answers(chat_with("", tool_calls=CALLS)))
    tools: Any = [{"type": "function", "function": {**TOOL, "strict": True}}]
    called = ours.chat.completions.create(model="scripted", messages=MESSAGES, tools=tools, tool_choice="auto")
    assert called.choices[0].message.tool_calls is not None
    assert called.choices[0].message.tool_calls[0].to_dict() == CALLS[0]
    sent = json.loads(scripted.posts[-1].body)
    assert (sent["tools"], sent["tool_choice"]) == (tools, "auto")
    scripted.becomes(answers(chat_with('{"name":"Kiel","people":250000}')))
    parsed = ours.chat.completions.parse(model="scripted", messages=MESSAGES, response_format=Town)
    assert parsed.choices[0].message.parsed == Town(name="Kiel", people=250_000)
    assert json.loads(scripted.posts[-1].body)["response_format"]["json_schema"]["name"] == "Town"


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, "BadRequestError"),
        (404, "NotFoundError"),
        (422, "UnprocessableEntityError"),
        (429, "RateLimitError"),
        (500, "InternalServerError"),
    ],
)
def test_openai_errors(ours: openai.OpenAI, status: int, kind: str) -> None:
    content = json.dumps({"behave": str(status)})
    for stream in (False, True):
        with pytest.raises(getattr(openai, kind)) as refused:
            ours.chat.completions.create(
                model=f"openai-{status}", messages=[{"role": "user", "content": content}], stream=stream
            )
        assert refused.value.request_id is not None
        assert refused.value.request_id.startswith("req_")


def test_openai_refusals_of_ours(ours: openai.OpenAI, server: Server) -> None:
    with server.openai("wrong") as unknown:
        with pytest.raises(openai.AuthenticationError):
            unknown.chat.completions.create(model="any", messages=MESSAGES)
    narrow = server.openai(server.key(models=["other"]))
    with narrow, pytest.raises(openai.NotFoundError) as refused:
        narrow.chat.completions.create(model="any", messages=MESSAGES)
    assert refused.value.code == "model_not_found"


def test_openai_a_key_without_the_scope_is_a_permission_denied(server: Server) -> None:
    key = server.key(scopes=["files:read"])
    with server.openai(key) as reader:
        with pytest.raises(openai.PermissionDeniedError) as refused:
            reader.chat.completions.create(model="any", messages=MESSAGES)
    assert refused.value.code == "insufficient_scope"


def test_openai_a_server_that_is_away_is_an_internal_error_and_retried_by_the_sdk(
    ours: openai.OpenAI, scripted: Upstream
) -> None:
    with pytest.raises(openai.InternalServerError) as failed:
        ours.chat.completions.create(model="gone", messages=MESSAGES)
    assert (failed.value.status_code, failed.value.code) == (503, "upstream_unavailable")
    before = len(scripted.posts)
    broken = iter([answers(b"{}", 500), answers(chat_with("hi"))])

    async def second_time(request: Request, peer: Peer) -> None:
        await next(broken)(request, peer)

    scripted.becomes(second_time)
    answer = ours.with_options(max_retries=1).chat.completions.create(model="scripted", messages=MESSAGES)
    assert answer.choices[0].message.content == "hi"
    assert len(scripted.posts) == before + 2


def test_openai_tools_in_a_stream_and_their_results(ours: openai.OpenAI, scripted: Upstream) -> None:
    begun = {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "m"}
    parts: list[dict[str, Any]] = [
        {"index": 0, "id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"town":'}},
        {"index": 0, "function": {"arguments": '"Kiel"}'}},
    ]
    pieces = [
        event({**begun, "choices": [{"index": 0, "delta": {"tool_calls": [part]}, "finish_reason": None}]})
        for part in parts
    ]
    scripted.becomes(streams(*pieces, chunk("", "tool_calls"), b"data: [DONE]\n\n"))
    tools: Any = [{"type": "function", "function": {**TOOL, "strict": True}}]
    with ours.chat.completions.stream(model="scripted", messages=MESSAGES, tools=tools) as stream:
        message = stream.get_final_completion().choices[0].message
    assert message.tool_calls is not None
    assert json.loads(message.tool_calls[0].function.arguments) == {"town": "Kiel"}
    scripted.becomes(answers(chat_with("It rains.")))
    messages: Any = [
        *MESSAGES,
        {"role": "assistant", "content": None, "tool_calls": CALLS},
        {"role": "tool", "tool_call_id": "call_1", "content": "rain"},
    ]
    answer = ours.chat.completions.create(model="scripted", messages=messages, tools=tools)
    assert answer.choices[0].message.content == "It rains."
    assert json.loads(scripted.posts[-1].body)["messages"] == messages


def test_openai_structured_output_in_a_stream(ours: openai.OpenAI, scripted: Upstream) -> None:
    pieces = (chunk('{"name":"Kiel",'), chunk('"people":250000}'), chunk("", "stop"), b"data: [DONE]\n\n")
    scripted.becomes(streams(*pieces))
    with ours.chat.completions.stream(model="scripted", messages=MESSAGES, response_format=Town) as stream:
        assert stream.get_final_completion().choices[0].message.parsed == Town(name="Kiel", people=250_000)
    sent = json.loads(scripted.posts[-1].body)["response_format"]
    assert sent["json_schema"]["schema"]["required"] == ["name", "people"]


def test_openai_embeddings_as_the_sdk_asks_for_them(ours: openai.OpenAI) -> None:
    """Without a format the SDK asks for base64 and unpacks it; both ways give the same numbers, in the order of the inputs."""
    packed = ours.embeddings.create(model="any", input=["a", "b", "a"])
    plain = ours.embeddings.create(model="any", input=["a", "b", "a"], encoding_format="float")
    assert [one.index for one in packed.data] == [0, 1, 2]
    assert [one.embedding for one in packed.data] == [one.embedding for one in plain.data]
    assert packed.data[0].embedding == packed.data[2].embedding != packed.data[1].embedding
    assert packed.usage == plain.usage
    assert len(ours.embeddings.create(model="any", input="a", dimensions=8).data[0].embedding) == 8


def test_openai_a_stream_that_the_client_closes_ends_upstream(ours: openai.OpenAI, scripted: Upstream) -> None:
    gone = threading.Event()

    async def goes_on(request: Request, peer: Peer) -> None:
        await peer.send(STREAM_HEAD, chunked(chunk("a")))
        await peer.until_gone()
        gone.set()

    scripted.becomes(goes_on)
    with ours.chat.completions.create(model="scripted", messages=MESSAGES, stream=True) as stream:
        assert next(iter(stream)).choices[0].delta.content == "a"
    assert gone.wait(20), "the upstream must see that the caller has gone"


def test_async_clients(server: Server) -> None:
    """Many calls and streams at once from the asynchronous clients, each with the answer to its own question."""

    async def ask() -> None:
        key = server.key()
        async with (
            openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0) as theirs,
            anthropic.AsyncAnthropic(base_url=server.url, api_key=key, max_retries=0) as others,
        ):

            async def chat(number: int) -> tuple[str, str]:
                messages: Any = [{"role": "user", "content": f"Say {number}."}]
                whole = await theirs.chat.completions.create(model="any", messages=messages, max_tokens=20)
                pieces = []
                async for one in await theirs.chat.completions.create(
                    model="any", messages=messages, max_tokens=20, stream=True
                ):
                    pieces.append(one.choices[0].delta.content or "" if one.choices else "")
                return whole.choices[0].message.content or "", "".join(pieces)

            async def message(number: int) -> tuple[str, str]:
                messages: Any = [{"role": "user", "content": f"Say {number}."}]
                whole = await others.messages.create(model="any", max_tokens=20, messages=messages)
                async with others.messages.stream(model="any", max_tokens=20, messages=messages) as stream:
                    text = await stream.get_final_text()
                return str(whole.content[0].to_dict()["text"]), text

            answers = await asyncio.gather(*(chat(number) for number in range(8)), *(message(n) for n in range(8)))
            assert all(whole and whole == streamed for whole, streamed in answers)
            assert len({whole for whole, _ in answers[:8]}) == 8
            assert [whole for whole, _ in answers[:8]] == [whole for whole, _ in answers[8:]]

    asyncio.run(ask())


def test_openai_a_stream_that_breaks_off_is_an_error(ours: openai.OpenAI, scripted: Upstream) -> None:
    broken = chunk("a") + event({"error": {"message": "the engine died", "type": "server_error"}})
    scripted.becomes(streams(broken))
    with pytest.raises(openai.APIError, match="the engine died"):
        list(ours.chat.completions.create(model="scripted", messages=MESSAGES, stream=True))


def test_openai_a_client_that_leaves_is_seen_by_the_engine(ours: openai.OpenAI, slow: Engine) -> None:
    def aborted() -> bool:
        text = httpx2.get(f"{slow.root}/metrics", timeout=30).text
        return any('finished_reason="abort"' in line and line.endswith((" 1", " 1.0")) for line in text.splitlines())

    with pytest.raises(openai.APITimeoutError):
        ours.with_options(timeout=1).chat.completions.create(model="slow", messages=MESSAGES)
    wait_until(aborted, timeout_s=20, what="the engine to count an aborted call")
    assert [call["path"] for call in slow.calls() if call["model"]] == ["/v1/chat/completions"]


def test_anthropic_messages(theirs: anthropic.Anthropic) -> None:
    answer = theirs.messages.create(model="any", max_tokens=20, messages=MESSAGES, system="Be brief.")
    assert answer.content[0].type == "text"
    assert answer.usage.output_tokens == 20
    assert answer.stop_reason == "max_tokens"
    with theirs.messages.stream(model="any", max_tokens=20, messages=MESSAGES, system="Be brief.") as stream:
        final = stream.get_final_message()
    assert final.content[0].to_dict() == answer.content[0].to_dict()
    assert final.usage.output_tokens == 20


def test_anthropic_tools(theirs: anthropic.Anthropic, scripted: Upstream) -> None:
    scripted.becomes(answers(chat_with("", tool_calls=CALLS)))
    tools: Any = [{"name": "weather", "description": TOOL["description"], "input_schema": TOOL["parameters"]}]
    called = theirs.messages.create(model="scripted", max_tokens=20, messages=MESSAGES, tools=tools)
    assert called.stop_reason == "tool_use"
    assert called.content[0].to_dict() == {
        "type": "tool_use",
        "id": "call_1",
        "name": "weather",
        "input": {"town": "Kiel"},
    }
    first = {"tool_calls": [{"index": 0, **CALLS[0]}]}
    begun = {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "m"}
    choices = [{"index": 0, "delta": first, "finish_reason": None}]
    scripted.becomes(streams(event({**begun, "choices": choices}), chunk("", "tool_calls"), b"data: [DONE]\n\n"))
    with theirs.messages.stream(model="scripted", max_tokens=20, messages=MESSAGES, tools=tools) as stream:
        assert stream.get_final_message().content[0].to_dict()["input"] == {"town": "Kiel"}


def test_anthropic_tool_results_reach_an_openai_engine(theirs: anthropic.Anthropic, scripted: Upstream) -> None:
    scripted.becomes(answers(chat_with("It rains.")))
    use: Any = {"type": "tool_use", "id": "call_1", "name": "weather", "input": {"town": "Kiel"}}
    result: Any = {"type": "tool_result", "tool_use_id": "call_1", "content": "rain"}
    turns: Any = [*MESSAGES, {"role": "assistant", "content": [use]}, {"role": "user", "content": [result]}]
    tools: Any = [{"name": "weather", "description": TOOL["description"], "input_schema": TOOL["parameters"]}]
    answer = theirs.messages.create(model="scripted", max_tokens=20, messages=turns, tools=tools)
    assert answer.content[0].to_dict()["text"] == "It rains."
    sent = json.loads(scripted.posts[-1].body)["messages"]
    assert sent[1]["tool_calls"][0]["id"] == sent[2]["tool_call_id"] == "call_1"
    assert (sent[2]["role"], sent[2]["content"]) == ("tool", "rain")


def test_anthropic_a_stream_that_the_client_closes_ends_upstream(
    theirs: anthropic.Anthropic, scripted: Upstream
) -> None:
    gone = threading.Event()

    async def goes_on(request: Request, peer: Peer) -> None:
        await peer.send(STREAM_HEAD, chunked(chunk("a")))
        await peer.until_gone()
        gone.set()

    scripted.becomes(goes_on)
    with theirs.messages.stream(model="scripted", max_tokens=20, messages=MESSAGES) as stream:
        assert next(iter(stream.text_stream)) == "a"
    assert gone.wait(20), "the upstream must see that the caller has gone"


def test_anthropic_shapes_pass_through_to_an_anthropic_engine(
    theirs: anthropic.Anthropic, ours: openai.OpenAI, scripted: Upstream
) -> None:
    message = {
        "id": "msg_1", "type": "message", "role": "assistant", "model": "m", "stop_reason": "end_turn", "stop_sequence": None,
        "content": [{"type": "text", "text": "hi"}], "usage": {"input_tokens": 3, "output_tokens": 2},
    }  # fmt: skip
    scripted.becomes(answers(json.dumps(message).encode()))
    answer = theirs.messages.create(model="scripted-anthropic", max_tokens=20, messages=MESSAGES)
    assert answer.content[0].to_dict() == {"type": "text", "text": "hi"}
    assert (
        ours.chat.completions.create(model="scripted-anthropic", messages=MESSAGES).choices[0].message.content == "hi"
    )


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, "BadRequestError"),
        (404, "NotFoundError"),
        (429, "RateLimitError"),
        (500, "InternalServerError"),
    ],
)
def test_anthropic_errors(theirs: anthropic.Anthropic, status: int, kind: str) -> None:
    messages: Any = [{"role": "user", "content": json.dumps({"behave": str(status)})}]
    with pytest.raises(getattr(anthropic, kind)) as refused:
        theirs.messages.create(model=f"anthropic-{status}", max_tokens=5, messages=messages)
    body: Any = refused.value.body
    assert body["type"] == "error"
    with (
        pytest.raises(getattr(anthropic, kind)),
        theirs.messages.stream(model=f"anthropic-{status}", max_tokens=5, messages=messages) as stream,
    ):
        stream.get_final_message()


def test_anthropic_refusals_of_ours(theirs: anthropic.Anthropic, server: Server) -> None:
    with server.anthropic("wrong") as unknown:
        with pytest.raises(anthropic.AuthenticationError):
            unknown.messages.create(model="any", max_tokens=5, messages=MESSAGES)
    with pytest.raises(anthropic.BadRequestError, match="container"):
        theirs.messages.create(model="any", max_tokens=5, messages=MESSAGES, extra_body={"container": "c"})
