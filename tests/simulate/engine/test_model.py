"""The modelled engine in virtual time: its cost, its limits, its cache."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tidegate.simulate.engine.cost import step_ms
from tidegate.simulate.engine.kv_cache import BLOCK_BYTES, KvCache, block_hashes
from tidegate.simulate.engine.model import EngineLimits, ModelledEngine, ModelledEvent, ModelledRequest, RequestTooLong

# sequences, prefill tokens, context, measured ms: the calibration's table.
MEASURED = [
    (1, 0, 512, 5.01),
    (8, 0, 512, 5.24),
    (32, 0, 512, 5.75),
    (64, 0, 512, 6.42),
    (128, 0, 512, 7.92),
    (256, 0, 512, 12.15),
    (1, 0, 2048, 5.02),
    (8, 0, 2048, 5.64),
    (32, 0, 2048, 7.15),
    (64, 0, 2048, 9.25),
    (128, 0, 2048, 13.59),
    (256, 0, 2048, 23.30),
    (0, 128, 0, 5.96),
    (0, 256, 0, 8.23),
    (0, 512, 0, 13.79),
    (0, 1024, 0, 26.35),
    (0, 2048, 0, 53.41),
    (0, 4096, 0, 108.55),
    (32, 256, 1024, 10.69),
    (32, 512, 1024, 16.70),
    (32, 1024, 1024, 29.88),
    (32, 2048, 1024, 56.46),
    (128, 256, 1024, 14.97),
    (128, 512, 1024, 21.15),
    (128, 1024, 1024, 33.64),
    (128, 2048, 1024, 62.63),
    (256, 256, 1024, 21.56),
    (256, 512, 1024, 28.27),
    (256, 1024, 1024, 39.99),
    (256, 2048, 1024, 66.56),
]


def prompt(seed: str, blocks: int) -> bytes:
    """A prompt of whole blocks that shares nothing with one of another seed."""
    return (seed.encode() * BLOCK_BYTES)[:BLOCK_BYTES] * blocks


def drain(engine: ModelledEngine) -> list[ModelledEvent]:
    events: list[ModelledEvent] = []
    while (step := engine.step()) is not None:
        events += step.events
    return events


def test_cost_follows_the_measured_table() -> None:
    errors = [
        abs(step_ms(sequences, sequences * context, prefill) - ms) / ms for sequences, prefill, context, ms in MEASURED
    ]
    assert max(errors) < 0.115
    assert sum(errors) / len(errors) < 0.035


def test_a_request_emits_its_tokens_in_order_and_ends_once() -> None:
    engine = ModelledEngine(EngineLimits())
    engine.submit(ModelledRequest(prompt("a", 3), 5, tag="a"))
    events = drain(engine)
    assert [(event.sequence.tag, event.ordinal, event.finished) for event in events] == [
        ("a", 1, False),
        ("a", 2, False),
        ("a", 3, False),
        ("a", 4, False),
        ("a", 5, True),
    ]
    assert engine.cache.usage == 0


def test_a_request_without_output_ends_with_its_prefill() -> None:
    engine = ModelledEngine(EngineLimits(prefill_chunk_tokens=32))
    engine.submit(ModelledRequest(prompt("a", 4), 0))
    assert engine.step().events == []  # type: ignore[union-attr]
    (event,) = drain(engine)
    assert (event.ordinal, event.finished) == (0, True)


def test_a_step_costs_what_it_carries() -> None:
    engine = ModelledEngine(EngineLimits(prefill_chunk_tokens=512))
    engine.submit(ModelledRequest(prompt("a", 32), 2))
    first = engine.step()
    assert first is not None
    assert (first.decoding, first.prefill_tokens) == (0, 512)
    assert first.duration_ms == step_ms(0, 0, 512)
    second = engine.step()
    assert second is not None
    assert (second.decoding, second.prefill_tokens) == (1, 0)
    assert second.duration_ms == step_ms(1, 512, 0)


def test_no_more_sequences_run_than_the_limit() -> None:
    engine = ModelledEngine(EngineLimits(max_num_seqs=4))
    for number in range(10):
        engine.submit(ModelledRequest(prompt(f"p{number}", 1), 3, tag=number))
    finished: list[object] = []
    while (step := engine.step()) is not None:
        assert len(engine.running) <= 4
        assert len({event.sequence for event in step.events}) <= 4
        finished += [event.sequence.tag for event in step.events if event.finished]
    assert finished == list(range(10))


def test_a_long_prompt_is_prefilled_in_chunks_beside_decoding() -> None:
    engine = ModelledEngine(EngineLimits(prefill_chunk_tokens=64))
    engine.submit(ModelledRequest(prompt("short", 1), 20, tag="short"))
    engine.step()
    engine.submit(ModelledRequest(prompt("long", 16), 1, tag="long"))
    chunks = []
    while (step := engine.step()) is not None:
        if step.prefill_tokens:
            chunks.append(step.prefill_tokens)
            assert step.decoding == 1
    # One token of each step's budget goes to the sequence that decodes.
    assert chunks == [63, 63, 63, 63, 4]


def test_a_shared_prefix_is_computed_once() -> None:
    engine = ModelledEngine(EngineLimits())
    shared = prompt("system", 8)
    engine.submit(ModelledRequest(shared + prompt("one", 2), 1))
    drain(engine)
    second = engine.submit(ModelledRequest(shared + prompt("two", 2), 1))
    step = engine.step()
    assert step is not None
    assert second.cached_tokens == 8 * 16
    assert step.prefill_tokens == 2 * 16


def test_requests_of_one_step_share_too() -> None:
    engine = ModelledEngine(EngineLimits())
    shared = prompt("system", 8)
    sequences = [engine.submit(ModelledRequest(shared + prompt(name, 1), 1)) for name in "abc"]
    drain(engine)
    assert [sequence.cached_tokens for sequence in sequences] == [0, 128, 128]


def test_the_last_token_of_a_prompt_is_always_computed() -> None:
    engine = ModelledEngine(EngineLimits())
    engine.submit(ModelledRequest(prompt("same", 4), 1))
    drain(engine)
    again = engine.submit(ModelledRequest(prompt("same", 4), 1))
    drain(engine)
    assert again.cached_tokens == 3 * 16


def test_the_next_turn_of_a_conversation_finds_the_answer_cached() -> None:
    engine = ModelledEngine(EngineLimits())
    turn, answer = prompt("turn", 2), prompt("answer", 2)
    engine.submit(ModelledRequest(turn, 32, answer))
    drain(engine)
    following = engine.submit(ModelledRequest(turn + answer + prompt("more", 1), 1))
    drain(engine)
    # The very last token was emitted but never computed, so its block is not whole.
    assert following.cached_tokens == 3 * 16


def test_equal_blocks_behind_different_beginnings_are_not_confused() -> None:
    same = prompt("tail", 1)
    assert block_hashes(prompt("a", 1) + same)[1] != block_hashes(prompt("b", 1) + same)[1]


def test_the_least_recently_used_prefix_is_evicted_first() -> None:
    engine = ModelledEngine(EngineLimits(kv_blocks=12))
    for name in ("old", "new"):
        engine.submit(ModelledRequest(prompt(name, 4), 0))
        drain(engine)
    engine.submit(ModelledRequest(prompt("old", 4) + b"more", 0))
    drain(engine)
    engine.submit(ModelledRequest(prompt("big", 8), 0))
    drain(engine)
    assert len(engine.cache.match(block_hashes(prompt("old", 4)))) == 4
    assert engine.cache.match(block_hashes(prompt("new", 4))) == []


def test_a_full_cache_preempts_the_last_and_every_call_still_ends() -> None:
    engine = ModelledEngine(EngineLimits(kv_blocks=8))
    for number in range(4):
        engine.submit(ModelledRequest(prompt(f"p{number}", 1), 64, tag=number))
    events = drain(engine)
    assert engine.preemption_count > 0
    assert sorted(str(event.sequence.tag) for event in events if event.finished) == ["0", "1", "2", "3"]
    assert len(events) == 4 * 64
    assert next(event.sequence.tag for event in events if event.finished) == 0
    assert engine.cache.usage == 0


def test_a_request_that_can_never_fit_is_refused_at_once() -> None:
    engine = ModelledEngine(EngineLimits(kv_blocks=4))
    with pytest.raises(RequestTooLong, match="64 tokens"):
        engine.submit(ModelledRequest(prompt("a", 4), 1))
    assert engine.step() is None


def test_priority_goes_first_only_when_it_is_on() -> None:
    for on, order in ((True, ["urgent", "late"]), (False, ["late", "urgent"])):
        engine = ModelledEngine(EngineLimits(max_num_seqs=1, priority_scheduling=on))
        engine.submit(ModelledRequest(prompt("a", 1), 2, tag="first"))
        engine.step()
        engine.submit(ModelledRequest(prompt("b", 1), 1, priority=5, tag="late"))
        engine.submit(ModelledRequest(prompt("c", 1), 1, priority=-1, tag="urgent"))
        assert [event.sequence.tag for event in drain(engine) if event.finished] == ["first", *order]


def test_abort_gives_everything_back() -> None:
    engine = ModelledEngine(EngineLimits(max_num_seqs=1))
    runs = engine.submit(ModelledRequest(prompt("a", 2), 50))
    waits = engine.submit(ModelledRequest(prompt("b", 2), 50))
    engine.step()
    engine.abort(runs)
    engine.abort(waits)
    engine.abort(waits)
    assert engine.step() is None
    assert (engine.cache.usage, engine.waiting_count, engine.running) == (0, 0, [])


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(1, 6), st.integers(0, 40), st.booleans()), max_size=25),
    st.integers(10, 24),
    st.integers(1, 6),
    st.integers(8, 64),
)
def test_whatever_is_asked_every_request_ends_and_no_block_is_lost(
    asked: list[tuple[int, int, int, bool]], kv_blocks: int, seqs: int, chunk: int
) -> None:
    engine = ModelledEngine(EngineLimits(max_num_seqs=seqs, prefill_chunk_tokens=chunk, kv_blocks=kv_blocks))
    kept = []
    for family, blocks, output, aborted in asked:
        sequence = engine.submit(ModelledRequest(prompt(f"f{family}", blocks), output))
        if aborted:
            engine.step()
            engine.abort(sequence)
        else:
            kept.append(sequence)
    for _ in range(10_000):
        if engine.step() is None:
            break
    assert all(sequence.closed and sequence.emitted_tokens == sequence.output_tokens for sequence in kept)
    assert (engine.cache.free_count, engine.waiting_count) == (kv_blocks, 0)


def test_a_cache_forgets_content_when_it_reuses_the_place() -> None:
    cache = KvCache(1)
    block = cache.take_block()
    cache.publish(block, b"x")
    cache.release([block])
    assert cache.match([b"x"]) == [block]
    cache.take_block()
    assert cache.match([b"x"]) == []
