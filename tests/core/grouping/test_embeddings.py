"""Grouped embeddings: who goes together, that answers come apart again, and that not a token is lost or made up."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidegate.core.answers import answer as answers_core
from tidegate.core.apportion import apportion
from tidegate.core.errors import (
    Ambiguous,
    BrokenAnswer,
    HandedBack,
    KeyRejected,
    PoolExhausted,
    Refused,
    Throttled,
    Unavailable,
    UpstreamError,
    Withheld,
)
from tidegate.core.grouping.embeddings import (
    GROW_AFTER_GROUPS,
    Alone,
    CannotSplit,
    GroupSize,
    Part,
    Remedy,
    build,
    plan,
    read,
    split,
)

URL = "/v1/embeddings"


def part(**fields: Any) -> Part:
    found = read(URL, "m", json.dumps({"model": "m", **fields}).encode())
    assert isinstance(found, Part)
    return found


def embed(request: dict[str, Any], tokens: list[int]) -> dict[str, Any]:
    """A model server: a vector for each input, made from the input alone, in the wrong order on purpose."""
    inputs = request["input"]
    if isinstance(inputs, str) or (inputs and isinstance(inputs[0], int)):
        inputs = [inputs]
    rows = [
        {"object": "embedding", "index": index, "embedding": [len(str(one)) / 7, 0.25]}
        for index, one in enumerate(inputs)
    ]
    usage = {"prompt_tokens": sum(tokens), "total_tokens": sum(tokens)}
    return {"object": "list", "data": rows[::-1], "model": request["model"], "usage": usage}


@given(st.integers(0, 10**12), st.lists(st.integers(0, 10**6), min_size=1, max_size=40))
def test_parts_add_up_and_none_is_off_by_more_than_one(total: int, weights: list[int]) -> None:
    parts = apportion(total, weights)
    assert sum(parts) == total
    whole = sum(weights)
    for weight, share in zip(weights, parts, strict=True):
        if whole:
            assert total * weight // whole <= share <= total * weight // whole + 1


def test_leftovers_go_to_the_largest_fraction_and_ties_to_the_first() -> None:
    assert apportion(10, [1, 1, 1]) == [4, 3, 3]
    assert apportion(5, [6, 3, 1]) == [3, 2, 0]
    assert apportion(3, [0, 0]) == [2, 1]
    assert apportion(0, []) == []
    with pytest.raises(ValueError):
        apportion(1, [])
    with pytest.raises(ValueError):
        apportion(-1, [1])


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (b'{"input":["a","b"]}', Alone.MANY_INPUTS),
        (b'{"input":["only one"]}', Alone.MANY_INPUTS),
        (b'{"input":[[1],[2]]}', Alone.MANY_INPUTS),
        (b'{"input":[]}', Alone.MANY_INPUTS),
        (b'{"input":[1,"a"]}', Alone.MANY_INPUTS),
        (b'{"input":[1.5]}', Alone.MANY_INPUTS),
        (b'{"input":[true]}', Alone.MANY_INPUTS),
        (b'{"input":{"text":"a"}}', Alone.MANY_INPUTS),
        (b'{"input":"half', Alone.MALFORMED),
        (b'{"input":null}', Alone.NO_INPUT),
        (b'{"messages":[]}', Alone.NO_INPUT),
        (b'{"input":"a","stream":true}', Alone.STREAM),
        (b"[]", Alone.MALFORMED),
        (b"\xff", Alone.MALFORMED),
        (b'{"input":"' + b"\xff" + b'"}', Alone.MALFORMED),
        (b'{"input":' + b"[" * 100_000, Alone.MALFORMED),
    ],
)
def test_what_goes_alone_and_why(body: bytes, reason: Alone) -> None:
    assert read(URL, "m", body) is reason


def test_another_endpoint_is_never_grouped() -> None:
    assert read("/v1/chat/completions", "m", b'{"input":"a"}') is Alone.ENDPOINT


def test_everything_but_the_input_must_be_the_same() -> None:
    same = part(input="a", encoding_format="float")
    assert part(input="b", encoding_format="float").key == same.key
    for other in (
        part(input="b"),
        part(input="b", encoding_format="base64"),
        part(input="b", encoding_format="float", dimensions=8),
        part(input="b", encoding_format="float", user="u"),
        part(input="b", encoding_format="float", surprise=[1]),
        part(input=[1, 2], encoding_format="float"),
    ):
        assert other.key != same.key
    elsewhere = read(URL, "other", b'{"model":"m","encoding_format":"float","input":"b"}')
    assert isinstance(elsewhere, Part)
    assert elsewhere.key != same.key
    between = read(URL, "m", b' { "model": "m", "encoding_format": "float" , "input" : "c" } ')
    assert isinstance(between, Part)
    assert build([between, between]).endswith(b'"input":["c","c"]}')


@pytest.mark.parametrize(
    "body",
    [
        b'{"input":"a"}',
        b'{"model":"m","input":"a"}',
        b'{"input":"a","model":"m"}',
        b' {\n"user" : "input" , "input" : "a" , "x":{"input":"a"} } ',
        b'{"user":"\\"input\\":","input":"a"}',
        b'{"inp\\u0075t":"a","x":{"input":"a"}}',
        b'{"x":{"input":"a"},"input":"a"}',
        b'{"x":[1,2],"input":[7,8],"y":{"z":null}}',
        b'{"input":"a","input":"b","x":1}',
        b'{"x":"\xc3\xa9","input":"\xc3\xa9, \\"input\\":"}',
    ],
)
def test_however_a_body_is_written_only_its_input_is_cut_out(body: bytes) -> None:
    found = read(URL, "m", body)
    assert isinstance(found, Part)
    fields = json.loads(body)
    assert json.loads(build([found, found])) == {**fields, "input": [fields["input"]] * 2}


def test_a_group_cannot_be_faked_by_a_name_with_quotes() -> None:
    """A field whose name or value spells another's does not fit that other one."""
    assert part(input="a", **{'x":1,"y': 2}).key != part(input="a", x=1, y=2).key


@given(
    st.lists(st.sampled_from(["k1", "k2", "k3", ""]), max_size=40),
    st.integers(1, 9),
    st.integers(2, 5),
)
def test_each_item_goes_once_in_order_and_within_bounds(keys: list[str], inputs_max: int, inputs_min: int) -> None:
    parts: list[Part | Alone] = [Part(key.encode(), b"", b'"x"', 1) if key else Alone.MANY_INPUTS for key in keys]
    calls = plan(parts, inputs_max, inputs_min)
    assert sorted(place for call in calls for place in call) == list(range(len(parts)))
    for call in calls:
        assert call == sorted(call)
        assert len(call) <= max(1, inputs_max)
        assert len(call) == 1 or (len(call) >= inputs_min and len({keys[place] for place in call}) == 1)
        assert len(call) == 1 or keys[call[0]]


def test_a_group_is_cut_evenly() -> None:
    parts = [Part(b"k", b"", b'"x"', 1)] * 9
    assert [len(call) for call in plan(parts, 8)] == [5, 4]
    assert [len(call) for call in plan(parts, 1)] == [1] * 9
    assert [len(call) for call in plan(parts[:3], 8, 4)] == [1] * 3


_ONE_INPUT = st.one_of(st.text(max_size=30), st.lists(st.integers(0, 100_000), min_size=1, max_size=9))


@given(st.lists(_ONE_INPUT, min_size=1, max_size=12), st.data())
def test_split_of_build_is_what_single_calls_answer(inputs: list[Any], data: st.DataObject) -> None:
    kinds = [type(one) for one in inputs]
    inputs = [one for one in inputs if type(one) is kinds[0]]
    parts = [part(input=one, dimensions=2) for one in inputs]
    tokens = [data.draw(st.integers(0, 50)) for _ in parts]
    grouped = json.loads(build(parts))
    assert grouped["input"] == inputs
    whole = json.dumps(embed(grouped, tokens)).encode()
    answers = [json.loads(one) for one, _ in split(whole, parts)]
    assert [answers_core.read(URL, one)[1] for one, _ in split(whole, parts)] == [
        used for _, used in split(whole, parts)
    ]
    singles = [embed({"model": "m", "dimensions": 2, "input": one}, [0]) for one in inputs]
    assert [{**one, "usage": None} for one in answers] == [{**one, "usage": None} for one in singles]
    assert sum(one["usage"]["prompt_tokens"] for one in answers) == sum(tokens)
    assert sum(one["usage"]["total_tokens"] for one in answers) == sum(tokens)


@given(
    st.lists(st.integers(1, 400), min_size=1, max_size=10), st.integers(0, 5000), st.integers(0, 5000), st.booleans()
)
def test_every_number_adds_up_and_no_item_has_more_cached_than_prompt(
    weights: list[int], prompt: int, other: int, agrees: bool
) -> None:
    parts = [Part(b"k", b"", b'"x"', weight) for weight in weights]
    usage = {
        "prompt_tokens": prompt,
        "completion_tokens": other,
        "total_tokens": prompt + other + (not agrees),
        "prompt_tokens_details": {"cached_tokens": min(prompt, other), "audio_tokens": None},
        "note": None,
    }
    rows = [{"index": index, "embedding": "AAAA"} for index in range(len(parts))]
    got = [json.loads(one)["usage"] for one, _ in split(json.dumps({"data": rows, "usage": usage}).encode(), parts)]
    for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert sum(one[name] for one in got) == usage[name]
    assert sum(one["prompt_tokens_details"]["cached_tokens"] for one in got) == min(prompt, other)
    for one in got:
        assert one["prompt_tokens_details"]["cached_tokens"] <= one["prompt_tokens"]
        assert one["note"] is None
        if agrees:
            assert one["total_tokens"] == one["prompt_tokens"] + one["completion_tokens"]


def test_vectors_and_unknown_fields_go_on_byte_for_byte() -> None:
    body = b'{"id":"e-1","object":"list","data":[{"embedding":[1.50e-2, 3],"index":1,"x":1.0},{"index":0,"embedding":"AA=="}],"model":"m"}'
    (first, _), (second, _) = split(body, [Part(b"k", b"", b'"a"', 1)] * 2)
    assert first == b'{"id":"e-1","object":"list","data":[{"index":0,"embedding":"AA=="}],"model":"m"}'
    assert second == b'{"id":"e-1","object":"list","data":[{"embedding":[1.50e-2, 3],"index":0,"x":1.0}],"model":"m"}'


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"null",
        b"[]",
        b"{}",
        b"<html>",
        b"\xff\xfe",
        b'{"data":null}',
        b'{"data":{"0":1}}',
        b'{"data":[1,2]}',
        b'{"data":[{"index":0,"embedding":[1]}]}',
        b'{"data":[{"index":0,"embedding":[1]},{"index":0,"embedding":[1]}]}',
        b'{"data":[{"index":0,"embedding":[1]},{"index":2,"embedding":[1]}]}',
        b'{"data":[{"index":0,"embedding":[1]},{"index":-1,"embedding":[1]}]}',
        b'{"data":[{"index":0,"embedding":[1]},{"embedding":[1]}]}',
        b'{"data":[{"index":0,"embedding":[1]},{"index":"1","embedding":[1]}]}',
        b'{"data":[{"index":0,"embedding":[1]},{"index":true,"embedding":[1]}]}',
        b'{"data":[{"index":0,"embedding":[1]},{"index":1}]}',
        b'{"data":[{"index":0,"embedding":[1]},{"index":1,"embedding":null}]}',
        b'{"data":[{"index":0,"embedding":[1]},{"index":1,"embedding":[1]},{"index":2,"embedding":[1]}]}',
        b'{"error":{"message":"no"},"data":[{"index":0,"embedding":[1]},{"index":1,"embedding":[1]}]}',
        b'{"data":' + b"[" * 100_000,
    ],
)
def test_an_answer_of_a_bad_shape_is_not_split(body: bytes) -> None:
    with pytest.raises(CannotSplit):
        split(body, [Part(b"k", b"", b'"a"', 1)] * 2)


@pytest.mark.parametrize(
    ("usage", "prompt"),
    [
        (b"null", 0),
        (b'"many"', 0),
        (b'{"prompt_tokens":-4}', 0),
        (b'{"prompt_tokens":1.5}', 0),
        (b'{"prompt_tokens":7.0}', 7),
        (b'{"prompt_tokens":7,"completion_tokens":"3","prompt_tokens_details":{"cached_tokens":-1}}', 7),
        (b'{"prompt_tokens":7,"x":1e999}', 0),
        (b"{}", 0),
    ],
)
def test_odd_usage_costs_no_vector_and_each_part_is_charged_what_its_line_says(usage: bytes, prompt: int) -> None:
    body = b'{"data":[{"index":0,"embedding":[1]},{"index":1,"embedding":[2]}],"usage":%b}' % usage
    answers = split(body, [Part(b"k", b"", b'"a"', 1)] * 2)
    assert [json.loads(one)["data"][0]["embedding"] for one, _ in answers] == [[1], [2]]
    assert [answers_core.read("/v1/embeddings", one)[1] for one, _ in answers] == [used for _, used in answers]
    assert sum(used.input_tokens for _, used in answers) == prompt


def test_parts_of_two_kinds_are_not_built_into_one_call() -> None:
    with pytest.raises(ValueError):
        build([part(input="a"), part(input=[1])])


def test_overload_is_waited_out_first_then_halved_then_single() -> None:
    size = GroupSize.fresh(8)
    steps: list[tuple[int, Remedy]] = []
    for error in (Throttled("x"), Ambiguous("x"), Unavailable("x"), Throttled("x"), Throttled("x")):
        size, remedy = size.failed(error, size.epoch)
        steps.append((size.inputs, remedy))
    assert steps == [
        (8, Remedy.REQUEUE),
        (4, Remedy.SHRINK),
        (2, Remedy.SHRINK),
        (1, Remedy.SINGLES),
        (1, Remedy.SINGLES),
    ]
    for _ in range(3 * GROW_AFTER_GROUPS):
        size = size.succeeded(size.epoch)
    assert size.inputs == 8
    size, remedy = size.failed(Throttled("x"), size.epoch)
    assert (size.inputs, remedy) == (8, Remedy.REQUEUE)


def test_one_overload_is_counted_once_however_many_calls_were_out() -> None:
    size = GroupSize.fresh(8)
    for _ in range(20):
        size, remedy = size.failed(Throttled("x"), 0)
        assert (size.inputs, remedy) == (8, Remedy.REQUEUE)
    assert size.succeeded(0) == size, "an answer from before the overload says nothing about now"
    size, remedy = size.failed(Throttled("x"), size.epoch)
    assert (size.inputs, remedy) == (4, Remedy.SHRINK)


@pytest.mark.parametrize(
    ("error", "remedy"),
    [
        (Refused("x", status=400), Remedy.SINGLES),
        (KeyRejected("x"), Remedy.REQUEUE),
        (PoolExhausted("x"), Remedy.REQUEUE),
        (Withheld("x"), Remedy.REQUEUE),
        (HandedBack("x"), Remedy.REQUEUE),
    ],
)
def test_a_failure_that_is_no_overload_never_shrinks_a_group(error: UpstreamError, remedy: Remedy) -> None:
    size = GroupSize.fresh(8)
    for _ in range(5):
        size, found = size.failed(error, size.epoch)
        assert (size.inputs, found) == (8, remedy)


@pytest.mark.parametrize("error", [BrokenAnswer("x"), Refused("x", status=413)])
def test_a_server_that_cannot_do_groups_is_asked_for_one_ever_more_rarely(error: UpstreamError) -> None:
    size = GroupSize.fresh(2)
    answered_between: list[int] = []
    for _ in range(4):
        size, remedy = size.failed(error, size.epoch)
        assert (size.inputs, remedy) == (1, Remedy.SINGLES)
        count = 0
        while size.inputs == 1:
            size = size.succeeded(size.epoch)
            count += 1
        answered_between.append(count)
    assert answered_between == [
        2 * GROW_AFTER_GROUPS,
        4 * GROW_AFTER_GROUPS,
        8 * GROW_AFTER_GROUPS,
        16 * GROW_AFTER_GROUPS,
    ]
    for _ in range(16 * GROW_AFTER_GROUPS):
        size = size.succeeded(size.epoch)
    assert size.patience == GROW_AFTER_GROUPS, "a group that went well for long is trusted again"


def test_a_size_that_is_over_learns_nothing_from_a_group_of_before() -> None:
    size = GroupSize.fresh(8).unfit(0)
    assert size.inputs == 4
    assert size.unfit(0) == size


def test_two_models_behind_one_name_share_no_call() -> None:
    body = b'{"model":"public","input":"x"}'
    one, same, other = (read("/v1/embeddings", model, body) for model in ("a", "a", "b"))
    assert isinstance(one, Part)
    assert isinstance(same, Part)
    assert isinstance(other, Part)
    assert one.key == same.key != other.key
