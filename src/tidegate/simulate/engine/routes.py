"""The table of endpoints: for each path its reader of requests and its writer of answers."""

from collections.abc import Callable
from typing import Protocol

import msgspec

from tidegate.simulate.engine import asks, meters
from tidegate.simulate.engine.answers import Chat, ChatBatch, Completion, SimulatedAnswer, chunks
from tidegate.simulate.engine.answers_messages import Messages
from tidegate.simulate.engine.answers_responses import Responses
from tidegate.simulate.engine.asks import SimulatedRequest
from tidegate.simulate.engine.audio import Transcript, audio_ask
from tidegate.simulate.engine.options import EngineOptions
from tidegate.simulate.engine.vectors import Classes, Moderations, Pooled, Reranked, Scores, SimulatedEmbeddings


class Streamed(Protocol):
    """An endpoint's writer of events: before the first token, for each one, and after the last."""

    @staticmethod
    def opening(answer: SimulatedAnswer) -> bytes:
        """Return the events before the first token."""

    @staticmethod
    def token(answer: SimulatedAnswer, index: int, chunk: bytes) -> bytes:
        """Return the event of one token of one choice."""

    @staticmethod
    def closing(answer: SimulatedAnswer) -> bytes:
        """Return the events after the last token."""


class SimulatedRoute(msgspec.Struct, frozen=True):
    """One endpoint.

    `number` is its place among the counters; `tokens_mean` is 0 if it answers without words.
    """

    number: int
    read: Callable[[bytes], SimulatedRequest]
    whole: Callable[[SimulatedAnswer], bytes]
    streamed: type[Streamed] | None
    tokens_mean: int


def routes_for(options: EngineOptions) -> dict[bytes, SimulatedRoute]:
    """Return the endpoints by path."""
    words = options.answer_tokens_mean
    table: tuple[
        tuple[Callable[[bytes], SimulatedRequest], Callable[[SimulatedAnswer], bytes], type[Streamed] | None, int], ...
    ] = (
        (asks.chat_ask, Chat.whole, Chat, words),
        (asks.completion_ask, Completion.whole, Completion, words),
        (asks.embedding_ask, SimulatedEmbeddings(options.embedding_dimensions).whole, None, 0),
        (asks.response_ask, Responses.whole, Responses, words),
        (asks.moderation_ask, Moderations.whole, None, 0),
        (asks.chat_batch_ask, ChatBatch.whole, None, words),
        (asks.messages_ask, Messages.whole, Messages, words),
        (asks.score_ask, Scores.whole, None, 0),
        (asks.rerank_ask, Reranked.whole, None, 0),
        (asks.embedding_ask, Classes.whole, None, 0),
        (asks.embedding_ask, Pooled(options.embedding_dimensions).whole, None, 0),
        (audio_ask, Transcript.whole, None, words),
        (audio_ask, Transcript.whole, None, words),
    )
    return {meters.ROUTES[number].encode(): SimulatedRoute(number, *row) for number, row in enumerate(table)}


def stream_body(shape: type[Streamed], answer: SimulatedAnswer) -> bytes:
    """Return all events of a stream at once."""
    events = [shape.opening(answer)]
    for index, choice in enumerate(answer.choices):
        events.extend(shape.token(answer, index, chunk) for chunk in chunks(choice))
    events.append(shape.closing(answer))
    return b"".join(events)
