"""Estimate how many tokens an item will cost, before a server has counted them.

A prompt's tokens are its bytes over four; an answer's are what the caller allows, within a bound.
No tokenizer is loaded: that costs a hundred times as much, and real usage corrects the estimate
later. This module does not look into a line.
"""

PROMPT_BYTES_PER_TOKEN = 4
_HIGH_SURROGATES = (b"\\ud8", b"\\ud9", b"\\uda", b"\\udb")


def prompt_tokens(prompt_bytes: int) -> int:
    """Return the prompt's tokens, rounded up."""
    return (prompt_bytes + PROMPT_BYTES_PER_TOKEN - 1) // PROMPT_BYTES_PER_TOKEN


def escaped_bytes(text: bytes) -> int:
    """Return how many bytes of JSON text only write escapes and are not read: a model reads one of
    `\\n`, and two of `\\u00e4`."""
    slashes = text.count(b"\\")
    if not slashes:
        return 0
    marked = text.count(b"\\u") - text.count(b"\\\\u")
    short = min(marked, text.count(b"\\u0"))
    # Two surrogates together write one character of four bytes.
    pairs = sum(text.count(high) for high in _HIGH_SURROGATES) if marked else 0
    return 4 * short + 3 * (marked - short) + 2 * pairs + slashes - marked - text.count(b"\\\\")


def output_tokens(asked: int | None, choices: int, *, default_tokens: int, tokens_max: int) -> int:
    """Return the tokens that all choices together may produce: what the caller allows, or the
    default, within the bound.
    """
    return min(default_tokens if asked is None else asked, tokens_max) * choices


def work_units(prompt_bytes: int, output_token_count: int) -> int:
    """Return the cost of one item in the scheduler's measure."""
    return prompt_tokens(prompt_bytes) + output_token_count
