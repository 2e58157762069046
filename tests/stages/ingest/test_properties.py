"""What must hold for any input: every line arrives once and unchanged, slices tile the work, order follows the prompts."""

import json
from array import array
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from tidegate.core.input import scan as scan_module
from tidegate.core.input.line_faults import BodyFault, LineFault
from tidegate.core.input.lines import LineRules, check_line
from tidegate.core.input.prefix import Bundle, order_family
from tidegate.core.input.prefix_tree import KEY_BYTES, PrefixFamily, common_prefix, resume
from tidegate.core.input.scan import Scan
from tidegate.core.nouns import IngestPlan
from tidegate.core.usage.estimate import work_units
from tidegate.stages.ingest.ingest_file import ingest_file

RULES = LineRules("/v1/chat/completions", slice_count_max=5, slice_bytes_max=700, slice_units_max=2000)
QUICK = settings(deadline=None, suppress_health_check=list(HealthCheck))

beginnings = st.sampled_from(
    ["", "You are kind. ", "You are kind. Be brief. ", "[{\\", 'say "no" \\', "\u20ac\U0001f600", "x" * 90]
)
texts = st.builds("".join, st.lists(st.one_of(beginnings, st.text(max_size=8)), max_size=4)).filter(
    lambda text: not any(0xD800 <= ord(character) < 0xE000 for character in text)
)


# Each strategy is made once: making and checking one costs Hypothesis more than drawing from it.
styles: st.SearchStrategy[dict[str, Any]] = st.sampled_from(
    [{}, {"separators": (",", ":")}, {"ensure_ascii": False}, {"ensure_ascii": False, "indent": None}]
)
line_counts = st.integers(1, 25)
models = st.sampled_from(["m", "m", "m", "other"])
one_in_six = st.integers(0, 5)
tool_names = st.sampled_from("fg")
token_limits = st.sampled_from([1, 10, 5000])
line_ends = st.sampled_from([b"", b"", b"", b"\r", b" "])


@st.composite
def good_lines(draw: st.DrawFn) -> list[bytes]:
    lines = []
    style: dict[str, Any] = draw(styles)
    for number in range(draw(line_counts)):
        body: dict[str, Any] = {"model": draw(models)}
        if draw(one_in_six) == 0:
            body["tools"] = [{"type": "function", "function": {"name": draw(tool_names)}}]
        system, user = draw(beginnings), draw(texts)
        body["messages"] = [{"role": "system", "content": system}, {"role": "user", "content": user}]
        if draw(one_in_six) == 0:
            body["max_tokens"] = draw(token_limits)
        line = {"custom_id": f"id-{number}", "method": "POST", "url": "/v1/chat/completions", "body": body}
        text = json.dumps(line, **style).encode()
        lines.append(text + draw(line_ends))
    return lines


def forked_lines() -> list[bytes]:
    """Runs of lines whose prompts stand on two branches, and then some that leave such a branch behind its key. A line of another shape
    ends each run: branches are made between runs."""
    lines: list[bytes] = []
    for run in ("pppp", "ppqqpq", "pstsq", "ptspq", "tq"):
        for fork in [*run, ""]:
            text = {"s": "p" * 40 + "s" * 60, "t": "p" * 90 + "t" * 30}.get(fork, fork * 100)
            body = {"model": "m", "messages": [{"role": "user", "content": f"Begin. {text} {len(lines)}"}]}
            line = {"custom_id": f"id-{len(lines)}", "method": "POST", "url": "/v1/chat/completions", "body": body}
            lines.append(json.dumps(line if fork else dict(reversed(line.items()))).encode())
    return lines


def ingest(data: bytes, rules: LineRules) -> tuple[IngestPlan, bytes]:
    with TemporaryDirectory() as directory:
        path, work = Path(directory, "in"), Path(directory, "work")
        path.write_bytes(data)
        plan = ingest_file(path, work, rules)
        return plan, work.read_bytes() if work.exists() else b""


def trailer_of(plan: IngestPlan, work: bytes) -> list[int]:
    packed = work[plan.work_bytes :]
    assert len(packed) == 4 * plan.item_count
    return [int.from_bytes(packed[at : at + 4], "little") for at in range(0, len(packed), 4)]


@QUICK
@given(good_lines(), st.booleans(), st.booleans())
@example(forked_lines(), True, True)
def test_every_line_arrives_once_and_unchanged(lines: list[bytes], prefix_order: bool, final_newline: bool) -> None:
    rules = LineRules(
        **{**{name: getattr(RULES, name) for name in LineRules.__struct_fields__}, "prefix_order": prefix_order}
    )
    plan, work = ingest(b"\n".join(lines) + (b"\n" if final_newline else b""), rules)
    assert plan.errors == []
    numbers = trailer_of(plan, work)
    assert sorted(numbers) == list(range(1, len(lines) + 1))
    assert work[: plan.work_bytes] == b"".join(lines[number - 1] + b"\n" for number in numbers)
    check_slices(plan, work, rules)
    checked = [check_line(lines[number - 1], rules) for number in numbers]
    prompts = [lines[n - 1][c.prompt_at : c.prompt_at + c.prompt_size] for n, c in zip(numbers, checked, strict=True)]
    assert plan.prompt_bytes == sum(c.prompt_size + len(c.fixed) for c in checked)
    shared = 0
    for (one, before), (other, after) in pairwise(zip(checked, prompts, strict=True)):
        if (one.model, one.fixed) == (other.model, other.fixed):
            shared += len(one.fixed) + plain_common_prefix(before, after)
    assert plan.shared_prefix_bytes == shared
    models = [c.model for c in checked]
    assert models == sorted(models, key=[check_line(line, rules).model for line in lines].index)
    assert plan.model == check_line(lines[0], rules).model
    if not prefix_order:
        for model in set(models):
            of_model = [number for number, m in zip(numbers, models, strict=True) if m == model]
            assert of_model == sorted(of_model)


def check_slices(plan: IngestPlan, work: bytes, rules: LineRules) -> None:
    number = at = 0
    for one in plan.slices:
        assert (one.first, one.work_at) == (number, at)
        lines = work[at : at + one.work_bytes].split(b"\n")
        assert lines.pop() == b""
        assert len(lines) == one.count >= 1
        assert one.count <= rules.slice_count_max
        assert one.count == 1 or (one.work_bytes <= rules.slice_bytes_max and one.work_units <= rules.slice_units_max)
        checked = [check_line(line, rules) for line in lines]
        assert {line.model for line in checked} == {one.model}
        prompt_bytes = sum(line.prompt_size + len(line.fixed) for line in checked)
        assert one.work_units == work_units(prompt_bytes, sum(line.output_tokens for line in checked))
        number += one.count
        at += one.work_bytes
    assert (number, at) == (plan.item_count, plan.work_bytes)


def plain_common_prefix(one: bytes, other: bytes) -> int:
    size = 0
    while size < min(len(one), len(other)) and one[size] == other[size]:
        size += 1
    return size


@QUICK
@given(st.binary(max_size=300), st.binary(max_size=300), st.binary(max_size=50))
def test_common_prefix(start: bytes, one: bytes, other: bytes) -> None:
    assert common_prefix(start + one, start + other) == plain_common_prefix(start + one, start + other)


@QUICK
@given(good_lines(), st.integers(1, 400), st.booleans())
def test_pieces_of_any_size_say_the_same(lines: list[bytes], size: int, broken: bool) -> None:
    """Shapes and pieces are shortcuts: a scan that takes every line by itself must agree."""
    if broken:
        lines[len(lines) // 2] = lines[len(lines) // 2][:-4]
    data = b"\n".join(lines)

    def scan_in(size: int, *, shapes: bool) -> Scan:
        scan = Scan(RULES)
        if not shapes:
            scan._make_shape = lambda *_: None  # type: ignore[method-assign]
        scan.read_first(data[:size])
        for at in range(size, len(data), size):
            scan.feed(data[at : at + size])
        scan.finish()
        return scan

    whole, pieces, plain = (
        scan_in(10**6, shapes=True),
        scan_in(max(size, len(lines[0]) + 9), shapes=True),
        scan_in(10**6, shapes=False),
    )
    for name in ("at", "size", "line", "id_hash", "output_tokens", "fixed_size", "prompt_at", "prompt_size"):
        assert getattr(whole, name) == getattr(plain, name), name
        assert getattr(pieces, name) == getattr(plain, name), name
    assert whole.errors == plain.errors == pieces.errors
    assert families(whole) == families(pieces) == families(plain)
    for scan in (whole, pieces, plain):
        assert all(known_beginning(scan, number, data) for number in range(len(scan.at)))


def families(scan: Scan) -> list[tuple[str, int]]:
    """Of each item, the model of its family and where all prompts of the family begin to differ."""
    numbers = [scan.stem_family[stem] for stem in scan.stem]
    return [(scan.family_targets[number][1], scan.families[number].cut) for number in numbers]


def known_beginning(scan: Scan, number: int, data: bytes) -> bool:
    """Whether an item's prompt begins as its stem and its key say."""
    start = scan.at[number] + scan.prompt_at[number]
    prompt = data[start : start + scan.prompt_size[number]]
    stem = scan.stem[number]
    key = scan.keys[number * KEY_BYTES : (number + 1) * KEY_BYTES]
    cut = scan.stem_cut[stem]
    return prompt[: cut + KEY_BYTES].ljust(cut + KEY_BYTES, b"\0") == scan.stem_reference[stem][:cut] + key


def test_an_id_is_not_taken_to_reach_into_the_next_line() -> None:
    """The frame stands behind the broken line just where it would if its id were as long as those before."""

    def line(id_size: int, text: str) -> bytes:
        body = {"model": "m", "messages": [{"role": "user", "content": f"The same beginning. {text}"}]}
        return json.dumps({"custom_id": (text * id_size)[:id_size], "body": body}).encode()

    broken = b'{"custom_id": "unfinished'
    lines = [line(60, text) for text in "abcd"] + [broken, line(60 - len(broken) - 1, "e"), line(60, "f")]
    scan = Scan(RULES)
    scan.read_first(b"\n".join(lines))
    scan.finish()
    assert [(error.code, error.line) for error in scan.errors] == [("invalid_json_line", 5)]
    assert [*scan.line] == [1, 2, 3, 4, 6, 7]


def test_broken_lines_do_not_make_up_for_one_another() -> None:
    """One prompt is two values, another reaches over the end of its line: as many values as lines, and as many bytes."""

    def line(text: str) -> bytes:
        frame = '{"custom_id": "%s", "body": {"model": "m", "messages": [{"role": "user", "content": "Begin. %s}}'
        return (frame % (text[:1], text)).encode()

    good = [line(f'{letter}"}}]') for letter in "abcd"]
    broken = [line('e"}] [{"role": "user", "content": "e"}]'), line('f"},'), line('g"}]]')]
    scan = Scan(RULES)
    scan.read_first(b"\n".join([*good, *broken, *good[:1]]))
    scan.finish()
    assert [error.line for error in scan.errors] == [5, 6, 7]
    assert [*scan.line] == [1, 2, 3, 4, 8]


@QUICK
@given(good_lines(), st.data())
def test_no_broken_line_slips_through_a_shape(lines: list[bytes], data: st.DataObject) -> None:
    """A line that was changed in one place is good exactly when it is good by itself."""
    at = data.draw(st.integers(0, len(lines) - 1))
    line = lines[at]
    place = data.draw(st.integers(0, len(line) - 1))
    leased = data.draw(
        st.sampled_from([b"", b'"', b"\\", b"{", b"}", b"[", b"]", b",", b":", b"\0", b"\xff", b" ", b'"}', b"}]"])
    )
    changed = line[:place] + leased + line[place + data.draw(st.integers(0, 3)) :]
    lines = [*lines[:at], changed, *lines[at + 1 :]]
    scan = Scan(RULES)
    scan.read_first(b"\n".join(lines))
    scan.finish()
    expected: LineFault | None = None
    try:
        check_line(changed, RULES)
    except LineFault as fault:
        expected = fault
    if at > 0 and changed.strip():
        of_body = isinstance(expected, BodyFault)
        assert scan.errors == ([expected.at(at + 1)] if expected and not of_body else [])
        assert [*scan.bad_line] == ([at + 1] if of_body else [])


json_texts = st.recursive(
    texts, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts, inner, max_size=4), max_leaves=8
)


@QUICK
@given(json_texts, st.integers(0, 200), st.booleans())
def test_a_prompt_can_be_read_on_from_any_cut(value: Any, agreed: int, ascii_only: bool) -> None:
    text = json.dumps(value, ensure_ascii=ascii_only).encode()
    cut, opening = resume(text, min(agreed, len(text)))
    assert cut <= min(agreed, len(text))
    if opening:
        json.loads((opening + text[cut:]).decode(errors="replace"))
    else:
        assert cut == 0


def reference_order(prompts: list[bytes], numbers: list[int], cut: int) -> list[int]:
    """The walk, written as plainly as can be: split at the cut, then each branch where its own members begin to differ."""
    kin: dict[bytes, list[int]] = {}
    for number in numbers:
        kin.setdefault(prompts[number][cut : cut + KEY_BYTES], []).append(number)
    ordered = []
    for key, members in kin.items():
        if len(members) == 1 or len(key) < KEY_BYTES:
            ordered += members
        else:
            agreed = min(plain_common_prefix(prompts[members[0]], prompts[number]) for number in members)
            ordered += reference_order(prompts, members, agreed)
    return ordered


@QUICK
@given(st.lists(texts, min_size=1, max_size=30), st.sampled_from([30, 100, 1 << 16]), st.data())
def test_order_is_the_reference_order(contents: list[str], reference_bytes_max: int, data: st.DataObject) -> None:
    """However items are bundled, and however much is known of each bundle."""
    prompts = [json.dumps([{"role": "user", "content": text}]).encode() for text in contents]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tidegate.core.input.prefix_tree.REFERENCE_BYTES_MAX", reference_bytes_max)
        family = PrefixFamily(prompts[0])
        for prompt in prompts:
            family.add_prompt(prompt)
        bundles = draw_bundles(prompts, family.cut, data)
        numbers = range(len(prompts))
        ordered, shared = order_family(family.cut, bundles, lambda n, at, count: prompts[n][at : at + count])
    if reference_bytes_max > 1000:
        assert list(ordered) == reference_order(prompts, list(numbers), family.cut)
    assert sorted(ordered) == list(numbers)
    assert shared == sum(plain_common_prefix(prompts[a], prompts[b]) for a, b in pairwise(ordered))
    assert all(prompt.startswith(prompts[0][: family.cut]) for prompt in prompts)
    # Next to the order of all bytes, which shares the most, an item loses less than a key's length at each of its forks.
    best = sorted(prompts)
    assert shared >= sum(plain_common_prefix(a, b) for a, b in pairwise(best)) - 2 * KEY_BYTES * len(prompts)


def draw_bundles(prompts: list[bytes], cut: int, data: st.DataObject) -> list[Bundle]:
    """Any partition of the prompts into groups, each known as far as its members agree or less far, but for the cut."""
    group_of = data.draw(st.lists(st.integers(0, 4), min_size=len(prompts), max_size=len(prompts)))
    bundles = []
    for group in sorted(set(group_of)):
        numbers = [number for number, own in enumerate(group_of) if own == group]
        first = prompts[numbers[0]]
        agreed = min(plain_common_prefix(first, prompts[number]) for number in numbers)
        known = data.draw(st.integers(cut, agreed))
        keys = [prompts[number][known : known + KEY_BYTES].ljust(KEY_BYTES, b"\0") for number in numbers]
        bundles.append(Bundle(array("I", numbers), keys, first[:agreed], known))
    return bundles


@pytest.mark.parametrize("known", [24, 44, 60, 76, 99, 100])
def test_a_fork_is_where_prompts_differ_however_little_is_known(known: int) -> None:
    """Kin share a key's length behind the fork itself, not behind the place up to which they happened to be known."""
    ends = [b"abcdefghij one", b"klmno", b"abcdefghij two", b"k", b"klmno and more than a key's length", b"abcdefgh"]
    almost = b"z" * (KEY_BYTES - 1)
    ends += [almost + b"one", b"between", almost + b"two"]
    prompts = [b'["' + b"x" * 98 + end + b'"]' for end in ends]
    keys = [prompt[known : known + KEY_BYTES].ljust(KEY_BYTES, b"\0") for prompt in prompts]
    bundle = Bundle(array("I", range(len(prompts))), keys, prompts[0][:100], known)
    ordered, _ = order_family(0, [bundle], lambda n, at, count: prompts[n][at : at + count])
    assert list(ordered) == reference_order(prompts, list(range(len(prompts))), 0) == list(range(len(ends)))


def test_many_families_stay_bounded(monkeypatch: Any) -> None:
    monkeypatch.setattr(scan_module, "FAMILIES_MAX", 3)
    scan = Scan(LineRules("/v1/responses"))
    lines = [
        json.dumps({"custom_id": str(n), "body": {"model": "m", "instructions": f"do {n}", "input": f"text {n}"}})
        for n in range(20)
    ]
    scan.read_first("\n".join(lines).encode())
    scan.finish()
    assert scan.errors == []
    assert len(scan.families) == 4
