"""A continuous-batching engine without a clock: it turns requests into steps with costs and events.

It schedules as vLLM does:

- Running sequences go first, then the queue, under a sequence limit and a token budget per step.
- Prompts are prefilled in chunks.
- A full cache preempts the sequence that came last, which starts over when there is room.

The engine knows no time, sockets or text. A caller drives `step()` and decides what a millisecond
is, so the same engine runs in real time behind the simulated server and in virtual time inside a
benchmark.

    engine = ModelledEngine(EngineLimits())
    engine.submit(ModelledRequest(prompt=b"...", output_tokens=20))
    while (step := engine.step()) is not None:
        now_ms += step.duration_ms
        for event in step.events: ...
"""

from collections.abc import Callable, Hashable
from heapq import heappop, heappush
from typing import NamedTuple

import msgspec

from tidegate.simulate.engine.cost import step_ms
from tidegate.simulate.engine.kv_cache import BLOCK_TOKENS, TOKEN_BYTES, KvCache, block_hashes


class EngineLimits(msgspec.Struct, frozen=True):
    """The engine's size, in vLLM's terms.

    `prefill_chunk_tokens` is vLLM's max_num_batched_tokens; `priority_scheduling` is its policy.
    """

    max_num_seqs: int = 256
    prefill_chunk_tokens: int = 2048
    kv_blocks: int = 32768
    priority_scheduling: bool = False


class ModelledRequest(msgspec.Struct, frozen=True):
    """A request to the engine: a prompt (four bytes are a token) and the tokens to answer.

    - An embedding has 0 `output_tokens`.
    - `answer` are the answer's bytes, if known: a later prompt that has them finds them cached.
    - The lowest `priority` goes first, as in vLLM, if the limits turn that on.
    - `tag` belongs to the caller; the sequence in an event has it.
    """

    prompt: bytes
    output_tokens: int
    answer: bytes = b""
    priority: int = 0
    tag: Hashable = None


class RequestTooLong(ValueError):
    """The prompt and its answer would not fit an empty cache."""


class Sequence:
    """A request inside the engine: its progress, and the blocks that it holds."""

    __slots__ = (
        "blocks",
        "cached_tokens",
        "closed",
        "computed_tokens",
        "emitted_tokens",
        "hashes",
        "output_tokens",
        "prompt_tokens",
        "rank",
        "started",
        "tag",
    )

    def __init__(self, request: ModelledRequest, order: int, priority: int) -> None:
        self.tag = request.tag
        self.prompt_tokens = max(1, -(-len(request.prompt) // TOKEN_BYTES))
        self.output_tokens = request.output_tokens
        text = request.prompt if len(request.prompt) % TOKEN_BYTES else request.prompt + request.answer
        self.hashes = block_hashes(text)
        # The lowest rank is served first and preempted last.
        self.rank = (priority, order)
        self.blocks: list[int] = []
        self.computed_tokens = 0
        self.emitted_tokens = 0
        self.cached_tokens = 0
        self.started = False
        self.closed = False

    @property
    def total_tokens(self) -> int:
        """Return the tokens to compute before the next one: the prompt and those emitted so far."""
        return self.prompt_tokens + self.emitted_tokens


class ModelledEvent(NamedTuple):
    """One token of a sequence (`ordinal` from 1), or the end of a request without (`ordinal` 0)."""

    sequence: Sequence
    ordinal: int
    finished: bool


class ModelledStep(NamedTuple):
    """One pass of the engine. Its events happen at its end, `duration_ms` after its begin."""

    duration_ms: float
    events: list[ModelledEvent]
    decoding: int
    prefill_tokens: int


class ModelledEngine:
    """The scheduler over one cache.

    `cost` returns a step's milliseconds for its decoding sequences, their context tokens and its
    prompt tokens.
    """

    def __init__(self, limits: EngineLimits, cost: Callable[[int, int, int], float] = step_ms) -> None:
        self.limits = limits
        self._cost = cost
        self.cache = KvCache(limits.kv_blocks)
        self.running: list[Sequence] = []
        self._queue: list[tuple[tuple[int, int], Sequence]] = []
        self.waiting_count = 0
        self.prefix_queried_tokens = 0
        self.prefix_hit_tokens = 0
        self.preemption_count = 0
        self._order = 0

    def submit(self, request: ModelledRequest) -> Sequence:
        """Queue a request; raise RequestTooLong if it could never run."""
        priority = request.priority if self.limits.priority_scheduling else 0
        self._order += 1
        sequence = Sequence(request, self._order, priority)
        blocks = -(-(sequence.prompt_tokens + request.output_tokens) // BLOCK_TOKENS)
        if blocks > self.limits.kv_blocks:
            raise RequestTooLong(
                f"{sequence.prompt_tokens} prompt tokens and {request.output_tokens} to answer do not fit a cache of "
                f"{self.limits.kv_blocks * BLOCK_TOKENS} tokens"
            )
        self._enqueue(sequence)
        return sequence

    def abort(self, sequence: Sequence) -> None:
        """Forget a sequence that waits or runs; ignore one that has ended."""
        if sequence.closed:
            return
        sequence.closed = True
        if sequence in self.running:
            self.running.remove(sequence)
            self.cache.release(sequence.blocks)
        else:
            self.waiting_count -= 1

    def step(self) -> ModelledStep | None:
        """Run one pass; return None if there is no work."""
        scheduled: list[tuple[Sequence, int]] = []
        budget = self.limits.prefill_chunk_tokens
        preempted, budget = self._schedule_running(scheduled, budget)
        if not preempted:
            self._schedule_waiting(scheduled, budget)
        if not scheduled:
            return None
        decoding = context_tokens = prefill_tokens = 0
        for sequence, tokens in scheduled:
            if tokens == 1 and sequence.emitted_tokens:
                decoding += 1
                context_tokens += sequence.computed_tokens
            else:
                prefill_tokens += tokens
        events = self._advance(scheduled)
        return ModelledStep(self._cost(decoding, context_tokens, prefill_tokens), events, decoding, prefill_tokens)

    def _schedule_running(self, scheduled: list[tuple[Sequence, int]], budget: int) -> tuple[bool, int]:
        preempted = False
        # Preemption changes the list, so this walks over a copy and skips preempted sequences.
        for sequence in list(self.running):
            if budget <= 0:
                break
            computed_tokens = sequence.computed_tokens
            tokens = min(sequence.prompt_tokens + sequence.emitted_tokens - computed_tokens, budget)
            if tokens == 1 and sequence.blocks and 0 < computed_tokens % BLOCK_TOKENS < BLOCK_TOKENS - 1:
                # The next token fits into the last block and does not fill it, so no block is
                # reserved.
                scheduled.append((sequence, 1))
                budget -= 1
                continue
            while sequence.blocks and not self._reserve(sequence, tokens):
                preempted = True
                budget += self._preempt(max(self.running, key=_rank), scheduled)
            if sequence.blocks:
                scheduled.append((sequence, tokens))
                budget -= tokens
        return preempted, budget

    def _schedule_waiting(self, scheduled: list[tuple[Sequence, int]], budget: int) -> None:
        while self._queue and budget > 0 and len(self.running) < self.limits.max_num_seqs:
            sequence = self._queue[0][1]
            if sequence.closed:
                heappop(self._queue)
                continue
            # A prompt's last token is always computed: its output is the answer's first token.
            reusable = (sequence.total_tokens - 1) // BLOCK_TOKENS
            hits = self.cache.match(sequence.hashes[:reusable])
            hit_tokens = len(hits) * BLOCK_TOKENS
            tokens = min(sequence.total_tokens - hit_tokens, budget)
            fresh = -(-(hit_tokens + tokens) // BLOCK_TOKENS) - len(hits)
            if fresh + self.cache.idle(hits) > self.cache.free_count:
                return
            heappop(self._queue)
            self.waiting_count -= 1
            self.cache.hold(hits)
            sequence.blocks = hits
            sequence.computed_tokens = hit_tokens
            if not sequence.started:
                sequence.started = True
                sequence.cached_tokens = hit_tokens
                self.prefix_queried_tokens += sequence.prompt_tokens
                self.prefix_hit_tokens += hit_tokens
            self._reserve(sequence, tokens)
            self.running.append(sequence)
            scheduled.append((sequence, tokens))
            budget -= tokens

    def _reserve(self, sequence: Sequence, tokens: int) -> bool:
        """Give a sequence the blocks for its next tokens.

        If too few are free, change nothing and return False.
        """
        after = sequence.computed_tokens + tokens
        fresh = -(-after // BLOCK_TOKENS) - len(sequence.blocks)
        if fresh > self.cache.free_count:
            return False
        for _ in range(fresh):
            sequence.blocks.append(self.cache.take_block())
        # A block is published when the step that fills it is planned: later sequences of that step
        # use it.
        full = min(after // BLOCK_TOKENS, len(sequence.hashes))
        for place in range(sequence.computed_tokens // BLOCK_TOKENS, full):
            self.cache.publish(sequence.blocks[place], sequence.hashes[place])
        return True

    def _preempt(self, victim: Sequence, scheduled: list[tuple[Sequence, int]]) -> int:
        """Put a running sequence back into the queue; return the planned tokens that this frees."""
        self.running.remove(victim)
        self.cache.release(victim.blocks)
        victim.blocks = []
        victim.computed_tokens = 0
        self.preemption_count += 1
        self._enqueue(victim)
        for place, (sequence, tokens) in enumerate(scheduled):
            if sequence is victim:
                del scheduled[place]
                return tokens
        return 0

    def _advance(self, scheduled: list[tuple[Sequence, int]]) -> list[ModelledEvent]:
        events: list[ModelledEvent] = []
        finished = False
        for sequence, tokens in scheduled:
            sequence.computed_tokens += tokens
            if sequence.computed_tokens < sequence.prompt_tokens + sequence.emitted_tokens:
                continue
            if sequence.output_tokens:
                sequence.emitted_tokens += 1
            if sequence.emitted_tokens >= sequence.output_tokens:
                sequence.closed = finished = True
                self.cache.release(sequence.blocks)
            events.append(ModelledEvent(sequence, sequence.emitted_tokens, sequence.closed))
        if finished:
            self.running = [sequence for sequence in self.running if not sequence.closed]
        return events

    def _enqueue(self, sequence: Sequence) -> None:
        heappush(self._queue, (sequence.rank, sequence))
        self.waiting_count += 1


def _rank(sequence: Sequence) -> tuple[int, int]:
    return sequence.rank
