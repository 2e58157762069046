"""What the text of a key alone shows."""

from __future__ import annotations

from tidegate.core import keys


def test_a_key_that_was_mistyped_anywhere_is_known_without_the_store() -> None:
    made = keys.make(bytes(range(keys.RANDOM_BYTES)))
    text = made.text.reveal()
    assert keys.public_id_of(text) == made.public_id
    for place in range(len(keys.PREFIX), len(text)):
        other = "a" if text[place] != "a" else "b"
        assert keys.public_id_of(text[:place] + other + text[place + 1 :]) is None
