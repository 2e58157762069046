"""The characters that clients split lines at are escaped, and nothing else is changed."""

import json
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from tidegate.core.answers.line_breaks import StreamEscaper, escape_line_breaks

texts = st.text(st.one_of(st.sampled_from('\u2028\u2029\u0085\u2027\u00c2\u20ac\\"ab'), st.characters(codec="utf-8")))


@given(texts)
def test_json_means_the_same_and_is_one_line(text: str) -> None:
    escaped = escape_line_breaks(json.dumps(text, ensure_ascii=False).encode()).decode()
    assert json.loads(escaped) == text
    assert len(escaped.splitlines()) == 1


@given(texts, st.lists(st.integers(0, 60)))
def test_pieces_make_what_the_whole_makes(text: str, cuts: list[int]) -> None:
    data = text.encode()
    places = [0, *sorted(cuts), len(data)]
    escaper = StreamEscaper()
    passed = b"".join(escaper.feed(data[a:b]) for a, b in pairwise(places))
    assert passed + escaper.end_stream() == escape_line_breaks(data)


def test_bytes_that_end_inside_a_character_are_passed_on() -> None:
    for cut in (b"\xe2", b"\xe2\x80", b"\xc2"):
        escaper = StreamEscaper()
        assert escaper.feed(b"a" + cut) + escaper.end_stream() == b"a" + cut
