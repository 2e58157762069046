"""The official SDK against the simulated engine."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.simulate.engine.wire import Address
from tests.support.sdks import openai


@pytest.fixture(scope="module")
def client(address: Address) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=address.url, api_key="any", max_retries=0, timeout=20) as found:
        yield found


def test_chat(client: openai.OpenAI) -> None:
    seen = client.chat.completions.create(model="m", messages=[{"role": "user", "content": "hello"}])
    assert seen.choices[0].message.content
    assert seen.usage is not None
    assert seen.usage.prompt_tokens_details is not None
    assert seen.usage.prompt_tokens_details.cached_tokens == 0


def test_chat_stream(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(model="m", messages=[{"role": "user", "content": "hello"}])
    stream = client.chat.completions.create(
        model="m", messages=[{"role": "user", "content": "hello"}], stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-1].usage == whole.usage


def test_completions(client: openai.OpenAI) -> None:
    whole = client.completions.create(model="m", prompt="hello", max_tokens=5)
    streamed = client.completions.create(model="m", prompt="hello", max_tokens=5, stream=True)
    assert "".join(chunk.choices[0].text for chunk in streamed) == whole.choices[0].text


def test_embeddings_in_both_encodings(client: openai.OpenAI) -> None:
    packed = client.embeddings.create(model="e", input=["a", "b"])
    plain = client.embeddings.create(model="e", input=["a", "b"], encoding_format="float")
    assert len(packed.data[0].embedding) == 64
    assert packed.data[0].embedding == pytest.approx(plain.data[0].embedding)
    assert packed.data[0].embedding != packed.data[1].embedding


def test_responses(client: openai.OpenAI) -> None:
    whole = client.responses.create(model="m", input="hello", instructions="be brief", metadata={"run": "7"})
    assert whole.metadata == {"run": "7"}
    assert whole.status == "completed"
    assert whole.output_text
    with client.responses.stream(model="m", input="hello", instructions="be brief") as stream:
        deltas = [event.delta for event in stream if event.type == "response.output_text.delta"]
        final = stream.get_final_response()
    assert "".join(deltas) == whole.output_text == final.output_text
    assert final.usage == whole.usage
    cut = client.responses.create(model="m", input="hello", max_output_tokens=2)
    assert cut.status == "incomplete"


def test_models_and_moderations(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["simulated"]
    assert client.models.retrieve("anything").id == "anything"
    assert client.moderations.create(input="a calm sea").results[0].flagged is False


@pytest.mark.parametrize(
    ("behaviour", "error"),
    [
        ("429", "RateLimitError"),
        ("401", "AuthenticationError"),
        ("404", "NotFoundError"),
        ("400", "BadRequestError"),
        ("500", "InternalServerError"),
        ("reset_before", "APIConnectionError"),
    ],
)
def test_faults_are_the_sdks_own_errors(client: openai.OpenAI, behaviour: str, error: str) -> None:
    with pytest.raises(getattr(openai, error)):
        client.chat.completions.create(model="m", messages=[{"role": "user", "content": f'{{"behave":"{behaviour}"}}'}])
