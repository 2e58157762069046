"""What a model may read for a request beside the bytes of its body: comparisons, files, and what servers find elsewhere."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from tidegate.core.json_limits import NODES_MAX
from tidegate.core.usage.prompt_bounds import (
    BODY_BYTES_MAX,
    IMAGE_TOKENS,
    IMAGE_TOKENS_MAX,
    OTHER_TOKENS,
    OTHER_TOKENS_MAX,
    Hidden,
    compared_bytes,
    hidden_tokens,
)

LONG = "sea " * 500
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}


def encoded(**fields: Any) -> bytes:
    return msgspec.json.encode({"model": "m", **fields})


@pytest.mark.parametrize(
    ("fields", "least"),
    [
        ({"query": LONG, "documents": ["a"] * 100}, 100 * len(LONG)),
        ({"query": LONG, "documents": [{"text": "a"}] * 100}, 100 * len(LONG)),
        ({"text_1": LONG, "text_2": ["a"] * 100}, 100 * len(LONG)),
        ({"text_1": ["a"] * 100, "text_2": LONG}, 100 * len(LONG)),
        ({"query": LONG, "documents": {"content": [{"type": "text", "text": "a"}] * 100}}, 100 * len(LONG)),
        ({"query": "a", "documents": [LONG] * 3}, 3 * len(LONG)),
    ],
)
@pytest.mark.parametrize("endpoint", ["/v1/score", "/v1/rerank"])
def test_one_text_is_read_with_each_of_many(endpoint: str, fields: dict[str, Any], least: int) -> None:
    body = encoded(**fields)
    assert least <= compared_bytes(endpoint, body) < least + 100 * 100
    assert compared_bytes("/v1/embeddings", body) == len(body)


def test_texts_in_pairs_and_a_single_one_are_read_once() -> None:
    pairs = encoded(text_1=[LONG] * 50, text_2=[LONG] * 50)
    assert compared_bytes("/v1/score", pairs) < len(pairs) + 50 * 1_000
    single = encoded(query=LONG, documents=["a"])
    assert compared_bytes("/v1/rerank", single) == len(single)


def test_of_a_list_that_is_named_twice_the_longer_one_counts() -> None:
    body = b'{"query":"%b","documents":[%b],"documents":["a"]}' % (LONG.encode(), b",".join([b'"a"'] * 100))
    assert compared_bytes("/v1/rerank", body) >= 100 * len(LONG)


@pytest.mark.parametrize("body", [b"[1,2]", b"{,,", b'{"query":"a"%b,"b":1}' % (b" " * BODY_BYTES_MAX)])
def test_what_cannot_be_read_may_be_any_comparison(body: bytes) -> None:
    assert compared_bytes("/v1/score", body) == len(body) * (1 + body.count(b","))


def chat(*parts: Any, **more: Any) -> bytes:
    return encoded(messages=[{"role": "user", "content": list(parts)}], **more)


@pytest.mark.parametrize(
    ("body", "images", "others"),
    [
        (chat("an image of a file"), 0, 0),
        (chat({"type": "text", "text": "image_url"}), 0, 0),
        (chat(IMAGE), 1, 0),
        (chat(IMAGE, IMAGE), 2, 0),
        (chat({"image_url": "data:,a"}), 1, 0),
        (chat({"type": "IMAGE_URL"}), 1, 0),
        (chat({"type": "image_url", "image_url": ["data:,a", "data:,b", "data:,c"]}), 3, 0),
        (chat({"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}), 1, 0),
        (chat({"type": "tool_result", "content": [{"type": "image", "source": {"type": "url"}}]}), 1, 0),
        (chat({"type": "input_audio", "input_audio": {"data": "AAAA", "format": "flac"}}), 0, 1),
        (chat({"type": "file", "file": {"file_data": "AAAA", "filename": "a.pdf"}}), 0, 1),
        (chat({"type": "video_url", "video_url": {"url": "data:,"}}), 0, 1),
        (chat({"type": "document", "source": {"type": "base64", "data": "AAAA"}}), 0, 1),
        (chat({"type": "document", "source": {"type": "text", "data": "words"}}), 0, 0),
        (chat({"type": "document", "source": {"type": "content", "content": [IMAGE]}}), 1, 0),
        (chat({"type": "tool_use", "input": {"file": "a", "image": "b"}}), 0, 0),
        (encoded(input=[{"role": "user", "content": [{"type": "input_image", "image_url": "data:,"}]}]), 1, 0),
        (encoded(input=[{"type": "computer_call_output", "output": {"type": "computer_screenshot"}}]), 1, 0),
        (encoded(tools=[{"type": "function", "function": {"name": "image", "parameters": {"file": {}}}}]), 0, 0),
        (encoded(tools=[{"name": "file", "input_schema": {}}, {"type": "custom", "name": "image"}]), 0, 0),
        (encoded(tools=[{"type": "web_search"}, {"type": "file_search"}, {"type": "function"}]), 0, 2),
        (encoded(tools=[{"type": "web_search_20250305", "name": "web_search"}]), 0, 1),
        (encoded(web_search_options={"search_context_size": "high"}), 0, 1),
        (encoded(web_search_options={}), 0, 1),
        (encoded(web_search_options=None), 0, 0),
        (encoded(mcp_servers=[{"url": "https://a"}]), 0, 1),
        (encoded(previous_response_id="resp_1", prompt={"id": "pmpt_1"}), 0, 2),
        (encoded(prompt="words", audio={"voice": "a"}, modalities=["audio"], metadata={"file": "a"}), 0, 0),
        (b'{"messages":[{"content":[{"\\u0069mage_url":"data:,"}]}]}', 1, 0),
        (b'{"a":{"image":"b"},"a":1}', 1, 0),
        (b'{"image', 0, 1),
        (b'{"image":1%b}' % (b" " * BODY_BYTES_MAX), 0, 1),
        (b'{"image":[%b]}' % b",".join([b"{}"] * (NODES_MAX + 1)), 0, 1),
    ],
)
def test_files_and_what_servers_read_elsewhere_are_counted(body: bytes, images: int, others: int) -> None:
    most = images * IMAGE_TOKENS_MAX + others * OTHER_TOKENS_MAX
    assert hidden_tokens(body) == Hidden(most, images * IMAGE_TOKENS + others * OTHER_TOKENS)
