"""The tree of beginnings: how far two texts agree, and the stem that a prompt stands on."""

from tidegate.core.input.prefix_tree import PrefixStem, branch_off, common_prefix


def test_texts_of_any_size_agree_up_to_where_they_differ() -> None:
    for agreed in (*range(600), *range(601, 60_000, 397)):
        text = bytes(agreed)
        assert common_prefix(text + b"one", text + b"other") == agreed + 1
        assert common_prefix(text, text + b"x") == agreed


def test_a_prompt_stands_on_the_longest_stem_that_it_goes_on_with() -> None:
    """The second branch begins like the first: what counts is where it begins."""
    opening = b'[{"content":"'
    root = PrefixStem(0, opening, len(opening), b'"')
    lower_text, upper_text = b"p" * 80 + b"-", b"p" * 30 + b"q" * 80
    lower = branch_off(root, b"p" * 24, [lower_text], 1)
    assert lower is not None
    upper = branch_off(lower, b"p" * 24, [upper_text], 2)
    assert upper is not None
    for text, stem, is_stray in (
        (lower_text + upper_text, upper, False),
        (lower_text + b"p" * 90, lower, True),
        (lower_text + lower_text, lower, True),
        (lower_text + b"else" * 20, lower, False),
        (b"p" * 60 + b"else" * 20, root, True),
        (b"else" * 20, root, False),
    ):
        found, seemed = root.climb(text, 0)
        assert (found.number, seemed) == (stem.number, is_stray), text
        assert text.startswith(found.path)
