"""The shapes of answers without words: embeddings, moderations, scores and classes.

A vector's components are plus or minus one over the square root of its dimension, by the bits of
the input's hash. So vectors have unit length, equal inputs have equal vectors, and others are
nearly orthogonal.
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
    """The shape of answers of /v1/embeddings, with a default length of vectors."""

    def __init__(self, dimensions: int) -> None:
        self._dimensions = dimensions

    def whole(self, answer: SimulatedAnswer) -> bytes:
        """Return the body."""
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
    """The shape of answers of /v1/moderations: no input is ever flagged."""

    @staticmethod
    def whole(answer: SimulatedAnswer) -> bytes:
        """Return the body."""
        verdicts = b",".join(_VERDICT for _ in answer.choices)
        return b'{"id":"modr-%s","model":%s,"results":[%s]}' % (answer.name, answer.model, verdicts)


class Scores:
    """The shape of answers of /v1/score: a number from 0 to 1, made from the two texts alone."""

    @staticmethod
    def whole(answer: SimulatedAnswer) -> bytes:
        """Return the body."""
        data = b",".join(
            b'{"index":%d,"object":"score","score":%.6f}' % (index, _score(choice.prompt))
            for index, choice in enumerate(answer.choices)
        )
        return _listed(b"score", answer, data)


class Reranked:
    """The shape of answers of /v1/rerank: the documents with their scores, best first."""

    @staticmethod
    def whole(answer: SimulatedAnswer) -> bytes:
        """Return the body."""
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
    """The shape of answers of /v1/classify: each input has the label `sea`, with a probability."""

    @staticmethod
    def whole(answer: SimulatedAnswer) -> bytes:
        """Return the body."""
        data = b",".join(
            b'{"index":%d,"label":"sea","probs":[%.6f,%.6f],"num_classes":2}'
            % (index, 0.5 + _score(choice.prompt) / 2, 0.5 - _score(choice.prompt) / 2)
            for index, choice in enumerate(answer.choices)
        )
        return _listed(b"classify", answer, data)


class Pooled:
    """The shape of answers of /v1/pooling, with a default length of vectors."""

    def __init__(self, dimensions: int) -> None:
        self._dimensions = dimensions

    def whole(self, answer: SimulatedAnswer) -> bytes:
        """Return the body."""
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
    """Return eight components as text for each byte."""
    size = 1 / dimensions**0.5
    signs = (repr(-size).encode(), repr(size).encode())
    return [tuple(signs[byte >> bit & 1] for bit in range(8)) for byte in range(256)]


@lru_cache(maxsize=8)
def _packed(dimensions: int) -> list[bytes]:
    """Return eight components as little-endian floats for each byte."""
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
