"""What a caller may not put into a body: where it may hide, what looks alike and is fine, and what an operator can allow."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tidegate.core.body_rules import caller_fields, media_hosts
from tidegate.core.body_rules.body_names import ENGINE_FIELDS, KNOWN_FIELDS, PROVIDER_FIELDS
from tidegate.core.body_rules.caller_fields import (
    NAMES_MAX,
    OTHER,
    STRICT,
    FieldFault,
    FieldRules,
    field_fault,
    rules_for,
)
from tidegate.core.body_rules.plain_body import HARMLESS, read_plain
from tidegate.core.deployments import EngineKind

URL = "https://images.example.com/cat.png"
LOOSE = FieldRules(refused=STRICT.refused, allowed=KNOWN_FIELDS, media_hosts=frozenset({"images.example.com"}))


def fault_in(body: bytes, rules: FieldRules) -> FieldFault | None:
    """Return what of a body its caller may not say, as the doors find it; None when it may be sent."""
    return None if read_plain(body) is not None else field_fault(body, rules)


def asks(*parts: Any, **more: Any) -> dict[str, Any]:
    content: Any = list(parts) or "hi"
    return {"model": "m", "messages": [{"role": "user", "content": content}], **more}


def responds(*items: Any, **more: Any) -> dict[str, Any]:
    return {"model": "m", "input": list(items) or "hi", **more}


def compares(*documents: Any, **more: Any) -> dict[str, Any]:
    return {"model": "m", "query": "q", "documents": list(documents), **more}


def written(body: Any, *, escaped: bool = False) -> bytes:
    """As JSON; escaped, every letter of every name is written as a number."""
    if not escaped:
        return json.dumps(body).encode()
    if isinstance(body, dict):
        pairs = ("".join(f"\\u{ord(one):04x}" for one in name) for name in body)
        inner = (
            f'"{name}":{written(value, escaped=True).decode()}'
            for name, value in zip(pairs, body.values(), strict=True)
        )
        return ("{" + ",".join(inner) + "}").encode()
    if isinstance(body, list):
        return b"[" + b",".join(written(one, escaped=True) for one in body) + b"]"
    return json.dumps(body).encode()


OBJECTS = [
    (responds(previous_response_id="resp_1"), "previous_response_id"),
    (responds(conversation="conv_1"), "conversation"),
    (responds(conversation={"id": "conv_1"}), "conversation"),
    (responds(prompt={"id": "pmpt_1", "version": "2"}), "prompt.id"),
    (responds({"type": "item_reference", "id": "msg_1"}), "input[0].id"),
    (responds({"id": "msg_1"}), "input[0].id"),
    (responds({"type": "reasoning", "id": "rs_1", "summary": []}), "input[0].id"),
    (responds({"type": "image_generation_call", "id": "ig_1"}), "input[0].id"),
    (responds({"role": "user", "content": [{"type": "input_file", "file_id": "file-1"}]}), "input[0].content[0].file_id"),
    (responds({"role": "user", "content": [{"type": "input_image", "file_id": "file-1"}]}), "input[0].content[0].file_id"),
    (
        responds({"type": "function_call_output", "call_id": "c", "output": [{"type": "input_file", "file_id": "f"}]}),
        "input[0].output[0].file_id",
    ),
    (responds(tools=[{"type": "file_search", "vector_store_ids": ["vs_1"]}]), "tools[0].vector_store_ids"),
    (responds(tools=[{"type": "code_interpreter", "container": "cntr_1"}]), "tools[0].container"),
    (
        responds(tools=[{"type": "code_interpreter", "container": {"type": "auto", "file_ids": ["file-1"]}}]),
        "tools[0].container.file_ids",
    ),
    (
        responds(tools=[{"type": "image_generation", "input_image_mask": {"file_id": "file-1"}}]),
        "tools[0].input_image_mask.file_id",
    ),
    (asks({"type": "file", "file": {"file_id": "file-1"}}), "messages[0].content[0].file.file_id"),
    (asks({"type": "file", "file": {"fileId": "file-1"}}), "messages[0].content[0].file.fileId"),
    (asks(attachments=[{"file_id": "file-1"}]), "attachments[0].file_id"),
    ({"model": "m", "messages": [{"role": "assistant", "audio": {"id": "audio_1"}}]}, "messages[0].audio.id"),
    (asks(audio={"voice": {"id": "voice_1"}, "format": "wav"}), "audio.voice.id"),
    (asks({"type": "document", "source": {"type": "file", "file_id": "file_1"}}), "messages[0].content[0].source.file_id"),
    (asks({"type": "container_upload", "file_id": "file_1"}), "messages[0].content[0].file_id"),
    (
        asks({"type": "tool_result", "tool_use_id": "t", "content": [{"type": "image", "source": {"file_id": "f"}}]}),
        "messages[0].content[0].content[0].source.file_id",
    ),
    (asks(container="container_1"), "container"),
    (asks(container={"skills": [{"type": "custom", "skill_id": "skill_1"}]}), "container"),
    (asks(extra_body={"previous_response_id": "resp_1"}), "extra_body.previous_response_id"),
]  # fmt: skip
STEERING = [
    (asks(priority=-1), "priority"),
    (asks(Priority=-1), "Priority"),
    (asks(priority=None), "priority"),
    (asks(chat_template="{{ 1 }}"), "chat_template"),
    (asks(chat_template_kwargs={"chat_template": "{{ 1 }}"}), "chat_template_kwargs.chat_template"),
    (asks(chat_template_kwargs={"tokenize": True}), "chat_template_kwargs.tokenize"),
    (asks(kv_transfer_params={"do_remote_prefill": True, "remote_host": "10.0.0.1"}), "kv_transfer_params"),
    (asks(vllm_xargs={"kv_transfer_params": "x"}), "vllm_xargs"),
    ({"model": "m", "prompt": "", "prompt_embeds": "AAAA"}, "prompt_embeds"),
    (asks({"type": "image_embeds", "image_embeds": "AAAA"}), "messages[0].content[0].image_embeds"),
    (asks({"type": "image_url", "image_url": None, "uuid": "a"}), "messages[0].content[0].uuid"),
    (
        compares({"content": [{"type": "image_embeds", "image_embeds": "AAAA"}]}),
        "documents[0].content[0].image_embeds",
    ),
    (asks(custom_logit_processor="80049514"), "custom_logit_processor"),
    (asks(bootstrap_host="10.0.0.1"), "bootstrap_host"),
    (asks(lora_path="/adapters/other"), "lora_path"),
    (asks(extra_body={"priority": -1}), "extra_body.priority"),
    (asks(api_base="https://evil.example"), "api_base"),
]
SPELLINGS = [
    (asks(Model="dearer"), "Model"),
    (asks(MODEL="dearer"), "MODEL"),
    ({"model": "m", "input": "hi", "\u017ftream": True}, "'\\u017ftream'"),
    (asks(maxTokens=100_000), "maxTokens"),
    (asks(Messages=[]), "Messages"),
    (asks(Stream=True), "Stream"),
    (asks(extra_body={"Model": "dearer"}), "extra_body.Model"),
]
MEDIA = [
    (asks({"type": "image_url", "image_url": {"url": URL}}), "messages[0].content[0].image_url.url"),
    (asks({"type": "image_url", "image_url": URL}), "messages[0].content[0].image_url"),
    (asks({"image_url": URL}), "messages[0].content[0].image_url"),
    (asks({"type": "video_url", "video_url": {"url": URL}}), "messages[0].content[0].video_url.url"),
    (asks({"type": "audio_url", "audio_url": {"url": URL}}), "messages[0].content[0].audio_url.url"),
    (asks({"type": "input_audio", "input_audio": {"url": URL}}), "messages[0].content[0].input_audio.url"),
    (asks({"type": "input_audio", "input_audio": {"data": URL}}), "messages[0].content[0].input_audio.data"),
    (asks({"type": "image", "source": {"type": "base64", "data": URL}}), "messages[0].content[0].source.data"),
    (asks({"type": "file", "file": {"file_data": URL}}), "messages[0].content[0].file.file_data"),
    (asks({"type": "image", "image": URL}), "messages[0].content[0].image"),
    (asks({"type": "image", "source": {"type": "url", "url": URL}}), "messages[0].content[0].source.url"),
    (asks({"type": "document", "source": {"type": "url", "url": URL}}), "messages[0].content[0].source.url"),
    (asks({"type": "document_url", "document_url": URL}), "messages[0].content[0].document_url"),
    (
        responds({"role": "user", "content": [{"type": "input_image", "image_url": URL}]}),
        "input[0].content[0].image_url",
    ),
    (responds({"role": "user", "content": [{"type": "input_file", "file_url": URL}]}), "input[0].content[0].file_url"),
    (responds({"type": "image_url", "image_url": {"url": URL}}), "input[0].image_url.url"),
    (responds({"image": URL}), "input[0].image"),
    (responds([{"image": URL}]), "input[0][0].image"),
    ({"model": "m", "prompt": [[{"image": URL}]]}, "prompt[0][0].image"),
    (
        compares({"content": [{"type": "image_url", "image_url": {"url": URL}}]}),
        "documents[0].content[0].image_url.url",
    ),
    (compares({"type": "image_url", "image_url": {"url": URL}}), "documents[0].image_url.url"),
    (compares([{"type": "image_url", "image_url": {"url": URL}}]), "documents[0][0].image_url.url"),
    (compares({"image": URL}), "documents[0].image"),
    (compares({"image": URL}, messages=[]), "documents[0].image"),
    ({"model": "m", "queries": "q", "documents": {"content": [{"image_url": URL}]}}, "documents.content[0].image_url"),
    ({"model": "m", "documents": [{"image": URL}]}, "documents[0].image"),
]
ALWAYS = [
    "/etc/shadow.png",
    "file:///etc/shadow",
    "FILE:/etc/shadow",
    "ftp://images.example.com/a",
    "gs://bucket/a",
    "iVBORw0KGgo=",
]
FINE = [
    asks(),
    asks(temperature=0.5, max_tokens=5, n=1, stop=["a"], user="u", metadata={"file_id": "file-1", "image_url": URL}),
    asks(previous_response_id=None, container=None, conversation=None, file_ids=[]),
    asks(**{"a field of the future": {"deep": [1.0]}}),
    asks(chat_template_kwargs={"enable_thinking": False}),
    asks({"type": "text", "text": f"see {URL} and file_id"}),
    asks({"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw0KGgo="}}),
    asks({"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "iVBORw0KGgo="}}),
    asks({"type": "input_audio", "input_audio": {"data": "/9j/4AAQ", "format": "wav"}}),
    asks({"type": "file", "file": {"filename": "a.pdf", "file_data": "data:application/pdf;base64,JVBERi0="}}),
    asks({"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": f"{URL} is a link"}}),
    asks({"type": "input_file", "filename": "a.pdf", "file_data": "data:application/pdf;base64,JVBERi0="}),
    asks(chat_template_kwargs={"my_switch": {"deep": True}}),
    asks({"type": "search_result", "source": URL, "title": "t", "content": [{"type": "text", "text": "x"}]}),
    asks({"type": "tool_use", "id": "t1", "name": "read", "input": {"file_id": "7", "image_url": URL, "priority": 1}}),
    asks({"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "x"}]}),
    asks(tools=[{"type": "function", "function": {"name": "f", "parameters": {"properties": {"file_id": {"type": "string"}}}}}]),
    asks(tools=[{"name": "f", "input_schema": {"properties": {"image_url": {"default": URL}, "priority": {}}}}]),
    asks(response_format={"type": "json_schema", "json_schema": {"name": "n", "schema": {"required": ["file_id", "Model"]}}}),
    {"model": "m", "messages": [{"role": "assistant", "tool_calls": [{"function": {"arguments": '{"file_id": 1}'}}]}]},
    responds({"type": "message", "role": "assistant", "id": "msg_1", "content": [{"type": "output_text", "text": "x"}]}),
    responds({"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "gAAAA"}),
    responds({"type": "function_call", "id": "fc_1", "call_id": "c", "name": "f", "arguments": '{"url": 1}'}),
    responds(
        {
            "role": "assistant",
            "content": [{"type": "output_text", "text": "x", "annotations": [{"type": "url_citation", "url": URL}]}],
        }
    ),
    responds(tools=[{"type": "code_interpreter", "container": {"type": "auto"}}]),
    responds(tools=[{"type": "mcp", "server_label": "s", "server_url": URL}]),
    asks(mcp_servers=[{"type": "url", "url": URL, "name": "s"}]),
    asks(audio={"voice": "alloy", "format": "wav"}),
    asks(documents=[{"title": "t", "text": "x", "url": URL, "image_url": URL, "file_id": "file-1"}]),
    compares(URL, {"text": "x", "url": URL}),
    compares({"content": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw0KGgo="}}]}),
    {"model": "m", "input": ["a", "b"]},
    {"model": "m", "input": [[1, 2], [3]]},
    {"model": "m", "prompt": [1, 2, 3]},
]  # fmt: skip


@pytest.mark.parametrize("escaped", [False, True])
@pytest.mark.parametrize(("body", "param"), [*OBJECTS, *STEERING])
def test_what_a_caller_may_not_set_is_refused_and_can_be_allowed(body: Any, param: str, escaped: bool) -> None:
    fault = fault_in(written(body, escaped=escaped), STRICT)
    assert fault is not None
    assert (fault.code, fault.param) == ("parameter_not_allowed", param)
    assert f"`{param}`" in fault.message
    assert "allowed_fields" in fault.message, "it says what to do next"
    assert fault_in(written(body, escaped=escaped), LOOSE) is None


@pytest.mark.parametrize("escaped", [False, True])
@pytest.mark.parametrize(("body", "param"), SPELLINGS)
def test_another_spelling_of_what_we_read_is_refused(body: Any, param: str, escaped: bool) -> None:
    for rules in (STRICT, LOOSE):
        fault = fault_in(written(body, escaped=escaped), rules)
        assert fault is not None
        assert (fault.code, fault.param) == ("duplicate_parameter", param)


@pytest.mark.parametrize("escaped", [False, True])
@pytest.mark.parametrize(("body", "param"), MEDIA)
def test_a_file_elsewhere_comes_only_from_an_allowed_host(body: Any, param: str, escaped: bool) -> None:
    fault = fault_in(written(body, escaped=escaped), STRICT)
    assert fault is not None
    assert (fault.code, fault.param) == ("media_not_allowed", param)
    assert "images.example.com" in fault.message
    assert fault_in(written(body, escaped=escaped), LOOSE) is None


@pytest.mark.parametrize("url", ALWAYS)
def test_what_is_no_web_address_is_never_fetched(url: str) -> None:
    every = FieldRules(media_hosts=frozenset({"*"}))
    for rules in (STRICT, LOOSE, every):
        fault = fault_in(written(asks({"type": "image_url", "image_url": {"url": url}})), rules)
        assert fault is not None
        assert fault.code == "media_not_allowed"


@pytest.mark.parametrize("at", range(6))
def test_what_is_typical_is_plain(at: int) -> None:
    """Such bodies pass by the quick look alone."""
    picture = "data:image/png;base64,iVBORw0KGgo="
    typical = [
        asks(temperature=0.2, max_tokens=5, seed=1, response_format={"type": "json_object"}),
        asks({"type": "text", "text": "x"}, {"type": "image_url", "image_url": {"url": picture, "detail": "low"}}),
        asks({"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "iVBORw0KGgo="}}),
        asks(chat_template_kwargs={"enable_thinking": False}, top_k=5, tools=[{"type": "function", "function": {}}]),
        responds(
            {"role": "user", "content": [{"type": "input_image", "image_url": picture}]}, instructions="Be brief."
        ),
        {"model": "m", "documents": ["a", URL]},
    ]
    assert read_plain(written(typical[at])) is not None


@pytest.mark.parametrize("body", FINE)
def test_what_only_looks_alike_passes(body: Any) -> None:
    assert fault_in(written(body), STRICT) is None
    assert field_fault(written(body), STRICT) is None


@pytest.mark.parametrize(
    "body",
    [
        b'{"model":"m","previous_response_id":"resp_1","previous_response_id":null,"input":"hi"}',
        b'{"model":"m","previous_response_id":null,"input":"hi","previous_response_id":"resp_1"}',
        b'{"model":"m","messages":[{"content":[{"type":"file","file":{"file_id":"f"}}],"content":"hi"}]}',
        b'{"model":"m","messages":[{"content":"hi","content":[{"type":"file","file":{"file_id":"f","file_id":null}}]}]}',
        b'{"model":"m","messages":[{"role":"user","content":[{"file_id":"f"}]}],"messages":[{"role":"user","content":"hi"}]}',
    ],
)
def test_both_values_of_a_name_that_comes_twice_are_seen(body: bytes) -> None:
    fault = fault_in(body, STRICT)
    assert fault is not None
    assert fault.code == "parameter_not_allowed"


def test_each_engine_has_fields_of_its_own() -> None:
    for engine, names in ENGINE_FIELDS.items():
        rules = FieldRules(refused=names)
        for name in KNOWN_FIELDS - PROVIDER_FIELDS:
            refused = fault_in(written(asks(**{name: "x"})), rules) is not None
            assert refused == (name in names), (engine, name)
    for name in ("priority", "chat_template", "kv_transfer_params", "prompt_embeds"):
        assert all(name in ENGINE_FIELDS[one] for one in (EngineKind.VLLM, EngineKind.SGLANG, EngineKind.GENERIC))


def test_one_allowed_field_allows_no_other() -> None:
    rules = FieldRules(allowed=frozenset({"file_id"}))
    assert fault_in(written(asks({"type": "file", "file": {"file_id": "f"}})), rules) is None
    for body in (asks(priority=1), responds(previous_response_id="r"), asks({"image_url": URL})):
        assert fault_in(written(body), rules) is not None


def test_a_call_that_may_come_under_two_names_gets_what_both_allow() -> None:
    one = FieldRules(frozenset({"priority"}), frozenset({"file_id", "prompt"}), frozenset({"a.example", "b.example"}))
    two = FieldRules(frozenset({"rid"}), frozenset({"file_id"}), frozenset({"b.example"}))
    every = FieldRules(frozenset(), frozenset({"file_id"}), frozenset({"*"}))
    assert one.both(two) == FieldRules(frozenset({"priority", "rid"}), frozenset({"file_id"}), frozenset({"b.example"}))
    assert two.both(every).media_hosts == every.both(two).media_hosts == frozenset({"b.example"})
    assert every.both(every).media_hosts == frozenset({"*"})


def test_a_body_of_endless_names_is_refused() -> None:
    for body in (
        {"model": "m", "odd": {f"n{number}": 1 for number in range(NAMES_MAX + 1)}},
        {"model": "m", "odd": [{"a": {}}] * (NAMES_MAX // 2 + 1)},
        {"model": "m", **{f"n{number}": 1 for number in range(NAMES_MAX + 1)}},
    ):
        fault = fault_in(written(body), STRICT)
        assert fault is not None
        assert fault.code == "invalid_request"


def test_names_and_objects_are_counted_up_to_their_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(caller_fields, "NAMES_MAX", 6)
    assert field_fault(written({"a": 1, "b": {"c": 1}, "d": 1}), STRICT) is None
    for body in ({"a": 1, "b": {"c": 1, "e": 1}, "d": 1}, dict.fromkeys("abcdef", 1)):
        assert field_fault(written(body), STRICT) is not None


def test_rules_are_those_of_the_name_or_else_of_all_others() -> None:
    named, others = FieldRules(refused=frozenset({"a"})), FieldRules(refused=frozenset({"b"}))
    assert rules_for({"m": named, OTHER: others}, "m") is named
    assert rules_for({"m": named, OTHER: others}, "n") is others
    assert rules_for({"m": named}, "n") is STRICT


def test_a_long_odd_name_is_shown_in_part() -> None:
    fault = field_fault(written({"odd name" * 9: {"file_id": "f"}}), STRICT)
    assert fault is not None
    assert fault.param == f"'{'odd name' * 5}'.file_id"


@pytest.mark.parametrize(
    ("url", "allowed"),
    [
        ("https://images.example.com/a?b=c@d", True),
        ("http://images.example.com", True),
        ("HTTPS://IMAGES.EXAMPLE.COM./a", True),
        ("https://images.example.com:443/a", True),
        ("https://images.example.com:8443/a", False),
        ("https://files.example.com:8443/a", True),
        ("https://files.example.com/a", False),
        ("https://a.b.cdn.example.com/a", True),
        ("https://a.b.cdn.example.com:8443/a", False),
        ("https://cdn.example.com/a", False),
        ("https://evilcdn.example.com/a", False),
        ("https://example.com/a", False),
        ("https://images.example.com.evil.example/a", False),
        ("https://images.example.com@evil.example/a", False),
        ("https://evil.example/images.example.com", False),
        ("https://evil.example#@images.example.com/", False),
        ("https://evil.example\\@images.example.com/", False),
        ("https://images.example.com\\@evil.example/", False),
        ("https://images.example.com/\\evil.example", False),
        ("https://images.example.com/#@evil.example", False),
        (" https://images.example.com/a", False),
        ("https://images.example.com/a\n", False),
        ("https://images.example.com/\u00e9", False),
        ("https:/images.example.com/a", False),
        ("https:///images.example.com/a", False),
        ("//images.example.com/a", False),
        ("http://169.254.169.254/latest", False),
        ("http://[::1]/a", False),
        ("http://2130706433/a", False),
        ("http://.images.example.com/a", False),
        ("http:///a", False),
        ("https://images.example.com/" + "a" * 9_000, False),
    ],
)
def test_hosts(url: str, allowed: bool) -> None:
    hosts = {"images.example.com", "files.example.com:8443", "*.cdn.example.com"}
    assert media_hosts.is_allowed(url, hosts) is allowed


NAMES = sorted(
    {
        *KNOWN_FIELDS,
        *HARMLESS,
        "documents",
        "query",
        "Model",
        "content",
        "file",
        "id",
        "image_url",
        "input",
        "messages",
        "source",
        "tools",
        "type",
        "url",
    }
)
VALUES = st.recursive(
    st.sampled_from([None, "", "text", "item_reference", "url", URL, "data:image/png;base64,AA", 1, True]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(NAMES), inner, max_size=4),
    max_leaves=12,
)


@settings(max_examples=100, deadline=None)
@given(st.dictionaries(st.sampled_from(NAMES), VALUES, max_size=5))
def test_the_quick_look_passes_nothing_that_the_closer_one_refuses(body: dict[str, Any]) -> None:
    if read_plain(written(body)) is not None:
        assert field_fault(written(body), STRICT) is None


@pytest.mark.parametrize(
    ("url", "allowed"),
    [("http://a.b", True), ("HTTPS://a.b:9", True), ("ftp://a.b", False), ("file:///a", False), (" http://a.b", False)],
)
def test_any_host_is_any_web_address(url: str, allowed: bool) -> None:
    assert media_hosts.is_allowed(url, {"*"}) is allowed


@pytest.mark.parametrize(
    "spelled",
    [
        "\1http://10.0.0.1/a",
        "ht\ntp://10.0.0.1/a",
        "http\t:/\r/10.0.0.1/a",
        "\0\x1ffi\nle:/etc/shadow",
        f"{'a' * 40}://10.0.0.1/a",
    ],
)
def test_a_url_that_is_broken_up_is_no_content_of_a_file(spelled: str) -> None:
    """Readers of URLs take control characters away."""
    for part in (
        {"type": "input_audio", "input_audio": {"data": spelled}},
        {"type": "file", "file": {"file_data": spelled}},
        {"type": "image", "source": {"type": "base64", "data": spelled}},
    ):
        for escaped in (False, True):
            fault = fault_in(written(asks(part), escaped=escaped), STRICT)
            assert fault is not None
            assert fault.code == "media_not_allowed"


def test_an_address_has_a_length_that_is_read() -> None:
    longest = "https://a.b/".ljust(media_hosts.URL_CHARS_MAX, "x")
    assert media_hosts.host_of(longest) == "a.b"
    assert media_hosts.host_of(longest + "x") is None
