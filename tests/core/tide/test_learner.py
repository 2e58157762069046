"""Learning what an upstream takes: it starts safe, keeps the calls that get more work done, obeys refusals, and is never stuck."""

from __future__ import annotations

from collections.abc import Callable

from hypothesis import given, settings
from hypothesis import strategies as st

from bench.capacity import CEILING, learned_share
from bench.capacity_world import Item, SteadyServer, run
from tidegate.core.deployments import Deployment
from tidegate.core.tide.learner import ROUND_CALLS_MAX, SAFE_CALLS, UP_ROUNDS_MAX, Learner
from tidegate.core.tide.signals import CallKind, Ended
from tidegate.simulate.engine.model import EngineLimits

CHATS: CallKind = ("m", "/v1/chat/completions")
EMBEDDINGS: CallKind = ("e", "/v1/embeddings")


class Upstream:
    """An upstream whose milliseconds per token depend on how many calls it has."""

    def __init__(self, learner: Learner, pace_ms: Callable[[int], float] = lambda calls: 10.0) -> None:
        self.learner = learner
        self.pace_ms = pace_ms
        self.now_ms = 0.0

    def rounds(
        self, count: int, kind: CallKind = CHATS, *, share: float = 1.0, refused: int = 0, tokens: int = 50
    ) -> None:
        """So many rounds in which the limit is used to a share, and of each hundred calls so many are refused."""
        for _ in range(count):
            used = max(1, int(self.learner.calls * share))
            pace_ms = self.pace_ms(used)
            lengths = [tokens + place % tokens for place in range(4 * ROUND_CALLS_MAX)]
            ended = [Ended(400, length, (6.0 + length) * pace_ms, kind) for length in lengths]
            latencies_ms = [call.latency_ms for call in ended]
            self.now_ms += max(sum(latencies_ms) / used, max(latencies_ms) + 1.0)
            self.learner.observe(self.now_ms, used, ended, round(refused * len(ended) / (100 - refused)))


def test_it_starts_safe_and_grows_to_its_ceiling_while_more_calls_get_more_done() -> None:
    learner = Learner(200)
    assert learner.calls == SAFE_CALLS
    Upstream(learner).rounds(6)
    assert learner.calls == 200
    assert Learner(4).calls == 4


def test_calls_that_only_wait_behind_one_another_are_not_kept() -> None:
    """Eight seats: with more calls each takes longer, and no more is done."""
    learner = Learner(200)
    upstream = Upstream(learner, lambda calls: 10.0 * max(1.0, calls / 8))
    upstream.rounds(60)
    assert learner.calls <= 2 * SAFE_CALLS
    upstream.pace_ms = lambda calls: 10.0 * max(1.0, calls / 150)
    upstream.rounds(60)
    assert learner.calls >= 100, "a step up is tried again and again"


def test_too_many_calls_from_the_beginning_are_given_up() -> None:
    learner = Learner(64)
    Upstream(learner, lambda calls: 10.0 * max(1.0, (calls / 4) ** 2)).rounds(60)
    assert learner.calls <= 9


def test_at_one_call_every_round_counts_towards_the_next_try_of_two() -> None:
    """There is nothing lower to try."""
    learner = Learner(64)
    upstream = Upstream(learner, lambda calls: 10.0 * calls**2)
    upstream.rounds(60)
    seen = []
    for _ in range(4 * UP_ROUNDS_MAX):
        upstream.rounds(1)
        seen.append(learner.calls)
    assert {len(ones) for ones in "".join(map(str, seen)).strip("1").split("22")[1:-1]} == {UP_ROUNDS_MAX + 1}, seen


def test_an_upstream_that_became_slow_for_good_is_not_held_to_its_youth() -> None:
    learner = Learner(64)
    upstream = Upstream(learner)
    upstream.rounds(5)
    upstream.pace_ms = lambda calls: 40.0
    upstream.rounds(100)
    assert learner.calls == 64


def test_long_answers_are_not_slow_ones() -> None:
    learner = Learner(200)
    upstream = Upstream(learner)
    for number in range(20):
        upstream.rounds(1, tokens=10 if number % 2 else 1_000)
    assert learner.calls == 200


def test_one_kind_of_call_is_no_yardstick_for_another() -> None:
    """Quick embeddings that eight calls serve as well as more, then chats: those begin at a safe number at least, and grow."""
    learner = Learner(64)
    upstream = Upstream(learner, lambda calls: 0.1 * max(1.0, calls / 4))
    upstream.rounds(60, EMBEDDINGS)
    upstream.pace_ms = lambda calls: 40.0
    upstream.rounds(2)
    assert learner.calls >= SAFE_CALLS
    upstream.rounds(6)
    assert learner.calls == 64


def test_a_limit_that_is_not_used_does_not_grow() -> None:
    learner = Learner(200)
    Upstream(learner).rounds(20, share=0.3)
    assert learner.calls == SAFE_CALLS


def test_a_step_that_there_was_nothing_to_send_for_is_not_judged() -> None:
    """The first items ran out while twice the calls were tried: that they did not get more done proves nothing about the server."""
    learner = Learner(200)
    upstream = Upstream(learner)
    while learner.calls == SAFE_CALLS:
        upstream.rounds(1)
    assert learner.calls == 2 * SAFE_CALLS
    upstream.pace_ms = lambda calls: 10.5
    upstream.rounds(1, share=0.5)
    upstream.pace_ms = lambda calls: 10.0
    upstream.rounds(6)
    assert learner.calls == 200


def test_a_step_is_seen_also_where_a_whole_round_ends_between_two_looks() -> None:
    """A quick server: what came and went under the step counts, not what was in flight when it was taken."""
    learner, now_ms = Learner(64), 0.0
    for _ in range(8):
        calls = learner.calls
        # Twice the calls get a seventh more done.
        latency_ms = 1.0 * calls ** (1 - 0.2)
        now_ms += 20.0
        learner.observe(now_ms, calls, [Ended(100, 1, latency_ms)] * round(calls * 20 / latency_ms), 0)
    assert learner.calls == 64


def test_few_refusals_lower_it_by_their_share_and_it_returns_to_where_it_was() -> None:
    learner = Learner(100, start=100)
    upstream = Upstream(learner)
    upstream.rounds(20, refused=2)
    assert 97 <= learner.calls <= 99
    upstream.rounds(20)
    assert learner.calls == 100


def test_many_refusals_lower_it_until_more_calls_are_taken_again() -> None:
    for by_pace in (True, False):
        learner = Learner(64, start=64, by_pace=by_pace)
        upstream = Upstream(learner)
        upstream.rounds(1, refused=40)
        assert 24 <= learner.calls <= 40
        upstream.rounds(10, refused=60)
        assert learner.calls <= 2
        upstream.rounds(60)
        assert learner.calls == 64


@given(
    st.integers(1, 100),
    st.lists(
        st.tuples(st.floats(1.0, 1e3), st.integers(0, 100), st.integers(1, 40), st.integers(0, 3)),
        min_size=1,
        max_size=30,
    ),
)
def test_with_fewer_answers_than_are_missing_it_says_the_same(
    ceiling: int, history: list[tuple[float, int, int, int]]
) -> None:
    """Until then it need not be asked."""
    learner, now_ms = Learner(ceiling), 0.0
    for elapsed_ms, in_flight, answers, refusals in history:
        few = min(answers, learner.answers_missing - 1)
        for ended, refused in ((few, 0), (answers - few, refusals)):
            before, now_ms = learner.calls, now_ms + elapsed_ms
            learner.observe(now_ms, in_flight, [Ended(100, 10, elapsed_ms)] * ended, refused)
            assert ended != few or refused or learner.calls == before


@settings(max_examples=15, deadline=None)
@given(
    st.integers(1, 100),
    st.lists(st.tuples(st.floats(0.0, 1e4), st.integers(0, 1000), st.integers(0, 9), st.floats(0.0, 1e7)), max_size=60),
)
def test_it_is_never_stuck_and_never_beyond_its_ceiling(
    ceiling: int, history: list[tuple[float, int, int, float]]
) -> None:
    learner = Learner(ceiling)
    upstream = Upstream(learner)
    for elapsed_ms, in_flight, refusals, latency_ms in history:
        upstream.now_ms += elapsed_ms
        learner.observe(upstream.now_ms, in_flight, [Ended(100, 10, latency_ms)] * 9, refusals)
        assert 1 <= learner.calls <= ceiling
    # The pace it has learned may be absurd; steady answers bring it back all the same.
    for _ in range(100):
        upstream.rounds(1)
        if learner.calls == ceiling:
            return
    raise AssertionError(f"stuck at {learner.calls} of {ceiling}")


def test_behind_an_engine_without_metrics_it_gets_nine_tenths_of_the_best_fixed_number() -> None:
    items = [Item("m", 200, 40 + number % 80) for number in range(1_200)]
    share, _ = learned_share(items, EngineLimits(), (16, 64))
    assert share >= 0.9


def test_chats_after_embeddings_are_not_sent_one_by_one() -> None:
    """What was seen: 25, 16, 10, 5, 4, 3, 2, 1 calls within 30 s."""
    place = Deployment("one", "http://one/v1", max_in_flight=CEILING, is_capacity_known=False)
    items = [Item("e", 100, 0)] * 3_000 + [Item("m", 100, 50)] * 600
    report = run([(place, lambda: SteadyServer(chat_s=2.0))], items)
    assert max(in_flight for *_, in_flight in report.witness.sent[-200:]) == CEILING
    assert report.seconds <= 40


def test_a_larger_number_that_is_tried_and_refused_is_given_up_at_once() -> None:
    """And nothing but the step is: the number below it was not refused."""
    learner = Learner(64)
    upstream = Upstream(learner)
    while learner._trial is None:
        upstream.rounds(1)
    believed = learner._limit
    assert learner.calls > believed
    upstream.rounds(1, refused=20)
    learner._refused_share = 0.0
    assert learner.calls == believed
