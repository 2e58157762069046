"""The shapes that answer without words: embeddings, whose vectors follow from the input alone, moderations, scores and classes.

A vector's components are plus or minus one over the square root of its length, by the bits of the input's hash: unit
length exactly, equal for equal inputs, and nearly orthogonal otherwise.
"""

import struct
from base64 import b64encode
from functools import lru_cache
from hashlib import shake_256

from tidegate.simulate.engine.answers import SimulatedAnswer

_CATEGORIES = (
    "harassment",
    "harassment/threatening",
    "hate",
    "hate/threatening",
    "illicit",
    "illicit/violent",
    "self-harm",
    "self-harm/instructions",
    "self-harm/intent",
    "sexual",
    "sexual/minors",
    "violence",
    "violence/graphic",
)
_VERDICT = b'{"flagged":false,"categories":{%s},"category_scores":{%s},"category_applied_input_types":{%s}}' % (
    b",".join(b'"%s":false' % name.encode() for name in _CATEGORIES),
    b",".join(b'"%s":0.0001' % name.encode() for name in _CATEGORIES),
    b",".join(b'"%s":["text"]' % name.encode() for name in _CATEGORIES),
)


class SimulatedEmbeddings:
    """/v1/embeddings, with vectors of a default length."""

    def __init__(self, dimensions: int) -> None:
        self._dimensions = dimensions

    def whole(self, answer: SimulatedAnswer) -> bytes:
        """The body."""
        dimensions = answer.ask.dimensions or self._dimensions
        vector = _base64_vector if answer.ask.base64 else _float_vector
        data = b",".join(
            b'{"object":"embedding","index":%d,"embedding":%s}' % (index, vector(choice.prompt, dimensions))
            for index, choice in enumerate(answer.choices)
        )
        tokens = answer.prompt_tokens
        return b'{"object":"list","data":[%s],"model":%s,"usage":{"prompt_tokens":%d,"total_tokens":%d}}' % (
            data,
            answer.model,
            tokens,
            tokens,
        )


class Moderations:
    """/v1/moderations: the sea is never flagged."""

    @staticmethod
    def whole(answer: SimulatedAnswer) -> bytes:
        """The body."""
        verdicts = b",".join(_VERDICT for _ in answer.choices)
        return b'{"id":"modr-%s","model":%s,"results":[%s]}' % (answer.name, answer.model, verdicts)


class Scores:
    """/v1/score: a number between 0 and 1 that follows from the two texts alone."""

    @staticmethod
    def whole(answer: SimulatedAnswer) -> bytes:
        """The body."""
        data = b",".join(
            b'{"index":%d,"object":"score","score":%.6f}' % (index, _score(choice.prompt))
            for index, choice in enumerate(answer.choices)
        )
        return _listed(b"score", answer, data)


class Reranked:
    """/v1/rerank: the documents with their scores, best first."""

    @staticmethod
    def whole(answer: SimulatedAnswer) -> bytes:
        """The body."""
        scored = sorted((-_score(choice.prompt), index) for index, choice in enumerate(answer.choices))
        results = b",".join(b'{"index":%d,"relevance_score":%.6f}' % (index, -score) for score, index in scored)
        return b'{"id":"rerank-%s","model":%s,"usage":{"prompt_tokens":%d,"total_tokens":%d},"results":[%s]}' % (
            answer.name,
            answer.model,
            answer.prompt_tokens,
            answer.prompt_tokens,
            results,
        )


class Classes:
    """/v1/classify: everything is the sea, more or less."""

    @staticmethod
    def whole(answer: SimulatedAnswer) -> bytes:
        """The body."""
        data = b",".join(
            b'{"index":%d,"label":"sea","probs":[%.6f,%.6f],"num_classes":2}'
            % (index, 0.5 + _score(choice.prompt) / 2, 0.5 - _score(choice.prompt) / 2)
            for index, choice in enumerate(answer.choices)
        )
        return _listed(b"classify", answer, data)


class Pooled:
    """/v1/pooling, with vectors of a default length."""

    def __init__(self, dimensions: int) -> None:
        self._dimensions = dimensions

    def whole(self, answer: SimulatedAnswer) -> bytes:
        """The body."""
        data = b",".join(
            b'{"index":%d,"object":"pooling","data":%s}' % (index, _float_vector(choice.prompt, self._dimensions))
            for index, choice in enumerate(answer.choices)
        )
        return _listed(b"pool", answer, data)


def _listed(kind: bytes, answer: SimulatedAnswer, data: bytes) -> bytes:
    tokens = answer.prompt_tokens
    return b'{"id":"%s-%s","object":"list","model":%s,"data":[%s],"usage":{"prompt_tokens":%d,"total_tokens":%d}}' % (
        kind,
        answer.name,
        answer.model,
        data,
        tokens,
        tokens,
    )


def _score(prompt: bytes) -> float:
    return int.from_bytes(shake_256(prompt).digest(4)) / (1 << 32)


@lru_cache(maxsize=8)
def _components(dimensions: int) -> list[tuple[bytes, ...]]:
    """For each byte, its eight components as text."""
    size = 1 / dimensions**0.5
    signs = (repr(-size).encode(), repr(size).encode())
    return [tuple(signs[byte >> bit & 1] for bit in range(8)) for byte in range(256)]


@lru_cache(maxsize=8)
def _packed(dimensions: int) -> list[bytes]:
    """For each byte, its eight components as little-endian floats."""
    size = 1 / dimensions**0.5
    return [struct.pack("<8f", *(size if byte >> bit & 1 else -size for bit in range(8))) for byte in range(256)]


def _bits(prompt: bytes, dimensions: int) -> bytes:
    return shake_256(prompt).digest(-(-dimensions // 8))


def _float_vector(prompt: bytes, dimensions: int) -> bytes:
    table = _components(dimensions)
    parts = [part for byte in _bits(prompt, dimensions) for part in table[byte]]
    return b"[%s]" % b",".join(parts[:dimensions])


def _base64_vector(prompt: bytes, dimensions: int) -> bytes:
    table = _packed(dimensions)
    packed = b"".join([table[byte] for byte in _bits(prompt, dimensions)])
    return b'"%s"' % b64encode(packed[: dimensions * 4])
