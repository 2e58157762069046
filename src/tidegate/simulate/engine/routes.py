"""The table of endpoints: for each path its reader of requests and its writer of answers."""

from collections.abc import Callable
from typing import Protocol

import msgspec

from tidegate.simulate.engine import meters, requests
from tidegate.simulate.engine.answers import Chat, ChatBatch, Completion, SimulatedAnswer, chunks
from tidegate.simulate.engine.answers_messages import Messages
from tidegate.simulate.engine.answers_responses import Responses
from tidegate.simulate.engine.audio import Transcript, audio_request
from tidegate.simulate.engine.options import EngineOptions
from tidegate.simulate.engine.requests import SimulatedRequest
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
        (requests.chat_request, Chat.whole, Chat, words),
        (requests.completion_request, Completion.whole, Completion, words),
        (requests.embedding_request, SimulatedEmbeddings(options.embedding_dimensions).whole, None, 0),
        (requests.response_request, Responses.whole, Responses, words),
        (requests.moderation_request, Moderations.whole, None, 0),
        (requests.chat_batch_request, ChatBatch.whole, None, words),
        (requests.messages_request, Messages.whole, Messages, words),
        (requests.score_request, Scores.whole, None, 0),
        (requests.rerank_request, Reranked.whole, None, 0),
        (requests.embedding_request, Classes.whole, None, 0),
        (requests.embedding_request, Pooled(options.embedding_dimensions).whole, None, 0),
        (audio_request, Transcript.whole, None, words),
        (audio_request, Transcript.whole, None, words),
    )
    return {meters.ROUTES[number].encode(): SimulatedRoute(number, *row) for number, row in enumerate(table)}


def stream_body(shape: type[Streamed], answer: SimulatedAnswer) -> bytes:
    """Return all events of a stream at once."""
    events = [shape.opening(answer)]
    for index, choice in enumerate(answer.choices):
        events.extend(shape.token(answer, index, chunk) for chunk in chunks(choice))
    events.append(shape.closing(answer))
    return b"".join(events)
