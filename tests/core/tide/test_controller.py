"""The tide's promises, for any signals: bounds, standing back, never stuck, determinism, ceilings."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from tidegate.core.tide.controller import QUIET_TOKENS_MAX, Tide, TidePolicy
from tidegate.core.tide.learner import SAFE_CALLS
from tidegate.core.tide.prefill import MARGIN
from tidegate.core.tide.signals import UNLIMITED_TOKENS, Decision, Ended, EngineSample, Signals
from tidegate.core.tide.steps import StepCost

POLICIES = st.builds(
    TidePolicy,
    calls_max=st.integers(1, 1000),
    capacity_fraction=st.floats(0.0, 1.0),
    yields=st.booleans(),
    slowdown_max=st.floats(0.01, 0.5),
)
FIGURES = st.none() | st.floats(0.0, 1e7) | st.sampled_from([math.inf, math.nan])
SAMPLES = st.builds(
    EngineSample,
    at_ms=st.just(0.0),
    known=st.integers(0, 500),
    running=st.none() | st.floats(0.0, 1000.0),
    waiting=st.none() | st.floats(0.0, 1000.0),
    kv_use=st.none() | st.floats(0.0, 1.0),
    ttft_ms=FIGURES,
    between_tokens_ms=FIGURES,
    prompt_tokens_per_s=FIGURES,
)
MOMENTS = st.tuples(
    st.floats(-100.0, 20_000.0),
    st.builds(
        Signals,
        now_ms=st.just(0.0),
        in_flight=st.integers(0, 1000),
        awaiting=st.integers(0, 1000),
        awaiting_tokens=st.integers(0, 100_000),
        sent_tokens=st.integers(0, 10_000_000),
        waiting_tokens=st.integers(0, 100_000),
        waiting_ms=st.floats(0.0, 1e6),
        interactive=st.none() | st.integers(0, 200),
        interactive_awaiting=st.none() | st.integers(0, 50),
        sample=st.none() | SAMPLES,
        ended=st.lists(
            st.builds(Ended, st.integers(0, 10_000), st.integers(0, 5_000), st.floats(0.0, 1e6, allow_nan=False)),
            max_size=5,
        ).map(tuple),
        refusals=st.integers(0, 5),
    ),
)
HISTORIES = st.lists(MOMENTS, max_size=40)


def play(
    tide: Tide, history: list[tuple[float, Signals]], now_ms: float = 0.0
) -> tuple[float, list[tuple[Signals, Decision]]]:
    decisions = []
    for elapsed_ms, signals in history:
        now_ms += elapsed_ms
        sample = signals.sample and replace(signals.sample, at_ms=now_ms - 100.0)
        now = replace(signals, now_ms=now_ms, sample=sample)
        decisions.append((now, tide.observe(now)))
    return now_ms, decisions


ROUND = tuple(Ended(400, 100, 1_000.0) for _ in range(64))


def quiet(tide: Tide, now_ms: float, seconds: float, *, metrics: bool = True, gateway: bool = True) -> Decision:
    """No interactive call is there, and batch uses what it gets; asked five times a second."""
    decision = tide.observe(Signals(now_ms=now_ms, interactive=0 if gateway else None))
    for _ in range(int(seconds * 5)):
        now_ms += 200.0
        sample = EngineSample(now_ms, decision.calls, decision.calls, 0.0, 0.1, 20.0, 5.0, 100.0)
        decision = tide.observe(
            Signals(
                now_ms=now_ms,
                in_flight=decision.calls,
                interactive=0 if gateway else None,
                interactive_awaiting=0 if gateway else None,
                sample=sample if metrics else None,
                ended=ROUND,
            )
        )
    return decision


def test_what_was_not_counted_is_nothing_of_one_worker() -> None:
    assert Signals(7.0) == Signals(7.0, 1, 0, 0, 0, 0, 0, 0.0, None, None, None, (), 0)


@settings(max_examples=40, deadline=None)
@given(POLICIES, HISTORIES)
def test_limits_stay_within_their_bounds(policy: TidePolicy, history: list[tuple[float, Signals]]) -> None:
    for signals, decision in play(Tide(policy), history)[1]:
        assert 1 <= decision.calls <= policy.ceiling
        assert decision.calls <= max(1.0, policy.calls_max * policy.capacity_fraction)
        assert 0 <= decision.prompt_tokens <= UNLIMITED_TOKENS
        assert 0 <= decision.hand_back <= signals.awaiting
        assert decision.why


@settings(max_examples=40, deadline=None)
@given(POLICIES, HISTORIES, MOMENTS, st.integers(1, 50))
def test_nothing_is_sent_while_an_interactive_call_waits_for_its_first_token(
    policy: TidePolicy, history: list[tuple[float, Signals]], moment: tuple[float, Signals], waiting: int
) -> None:
    tide = Tide(replace(policy, yields=True))
    now_ms, _ = play(tide, history)
    signals = replace(moment[1], interactive=waiting, interactive_awaiting=waiting)
    _, decisions = play(tide, [(moment[0], signals)], now_ms)
    assert decisions[0][1].prompt_tokens == 0
    # What waits for its first token is handed back whole, unless it is too little to be worth it.
    assert decisions[0][1].hand_back in (0, signals.awaiting)
    assert decisions[0][1].hand_back or not signals.awaiting or signals.awaiting_tokens < 128


@pytest.mark.parametrize(("tokens", "handed_back"), [(127, 0), (128, 3)])
def test_what_rides_along_for_nothing_is_not_handed_back(tokens: int, handed_back: int) -> None:
    signals = Signals(0.0, in_flight=9, awaiting=3, awaiting_tokens=tokens, interactive=1, interactive_awaiting=1)
    assert Tide(TidePolicy(64)).observe(signals).hand_back == handed_back


@settings(max_examples=40, deadline=None)
@given(POLICIES, HISTORIES)
def test_nothing_is_handed_back_while_no_interactive_call_waits(
    policy: TidePolicy, history: list[tuple[float, Signals]]
) -> None:
    calm = [
        (elapsed, replace(signals, interactive=signals.interactive or 0, interactive_awaiting=0))
        for elapsed, signals in history
    ]
    assert not any(decision.hand_back for _, decision in play(Tide(policy), calm)[1])


@settings(max_examples=40, deadline=None)
@given(POLICIES, HISTORIES, st.booleans())
def test_quiet_opens_it_again_from_any_state(
    policy: TidePolicy, history: list[tuple[float, Signals]], metrics: bool
) -> None:
    tide = Tide(policy)
    now_ms, _ = play(tide, history)
    decision = quiet(tide, now_ms, 120.0, metrics=metrics)
    assert decision.calls == policy.ceiling
    assert decision.prompt_tokens >= QUIET_TOKENS_MAX


@settings(max_examples=40, deadline=None)
@given(POLICIES)
def test_from_the_start_quiet_opens_it_within_half_a_minute(policy: TidePolicy) -> None:
    assert quiet(Tide(policy), 0.0, 30.0).calls == policy.ceiling


@settings(max_examples=40, deadline=None)
@given(POLICIES, HISTORIES)
def test_equal_signals_lead_to_equal_decisions(policy: TidePolicy, history: list[tuple[float, Signals]]) -> None:
    assert play(Tide(policy), history)[1] == play(Tide(policy), history)[1]


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 200), st.integers(0, 200), st.integers(0, 30))
def test_a_higher_ceiling_never_means_fewer_calls(calls_max: int, more: int, seconds: int) -> None:
    low = quiet(Tide(TidePolicy(calls_max)), 0.0, seconds)
    high = quiet(Tide(TidePolicy(calls_max + more)), 0.0, seconds)
    assert low.calls <= high.calls
    half = quiet(Tide(TidePolicy(calls_max, capacity_fraction=0.5)), 0.0, seconds)
    assert half.calls <= low.calls


def test_long_prompts_wait_for_long_quiet() -> None:
    tide = Tide(TidePolicy(256))
    now_ms, _ = play(tide, [(0.0, Signals(0.0, interactive=3, interactive_awaiting=0))])
    limits = []
    for _ in range(100):
        now_ms += 200.0
        limits.append(tide.observe(Signals(now_ms, interactive=0, interactive_awaiting=0)).prompt_tokens)
    assert limits == sorted(limits)
    # An estimate counts a prompt as waiting for 1.4 times as long as it does: fewer wait than are allowed.
    assert limits[0] < MARGIN * 1_200
    assert limits[-1] == QUIET_TOKENS_MAX


def test_beside_traffic_one_small_prompt_at_a_time() -> None:
    tide = Tide(TidePolicy(256))
    decision = tide.observe(Signals(0.0, interactive=3, interactive_awaiting=0))
    assert decision == Decision(1, 512, 0, "beside: 3 interactive calls, slowed by 4.0% of 8.0%", True)


def test_a_prompt_that_was_held_for_long_goes_even_beside_traffic() -> None:
    tide = Tide(TidePolicy(256))
    beside = Signals(0.0, interactive=1, interactive_awaiting=0, waiting_tokens=3_000)
    assert tide.observe(beside).prompt_tokens == 512
    assert tide.observe(replace(beside, waiting_ms=61_000.0)).prompt_tokens == 3_000
    # One at a time: while something of ours waits for its first token, it does not.
    waits = replace(beside, waiting_ms=61_000.0, in_flight=1, awaiting=1, awaiting_tokens=300)
    assert tide.observe(waits).prompt_tokens == 512


def test_a_prompt_longer_than_any_limit_goes_after_long_quiet() -> None:
    tide = Tide(TidePolicy(256))
    tide.observe(Signals(0.0, interactive=0, waiting_tokens=50_000))
    assert tide.observe(Signals(9_000.0, interactive=0, waiting_tokens=50_000)).prompt_tokens == QUIET_TOKENS_MAX
    assert tide.observe(Signals(11_000.0, interactive=0, waiting_tokens=50_000)).prompt_tokens == 50_000


def traffic(tide: Tide, now_ms: float, seconds: float, decoding: int) -> float:
    """Interactive calls all the time, and so many batch calls that decode beside them."""
    for _ in range(int(seconds * 10)):
        now_ms += 100.0
        tide.observe(Signals(now_ms, in_flight=decoding, interactive=4, interactive_awaiting=0))
    return now_ms


def test_the_swell_falls_while_batch_slows_others_down_and_rises_while_it_does_not() -> None:
    harmful, harmless = Tide(TidePolicy(256)), Tide(TidePolicy(256))
    traffic(harmful, 0.0, 10.0, decoding=60)
    traffic(harmless, 0.0, 10.0, decoding=0)
    sample = EngineSample(at_ms=10_050.0, running=0.0)
    after = Signals(10_100.0, interactive=0, interactive_awaiting=0, sample=sample)
    assert harmful.observe(after).calls < 16 < harmless.observe(after).calls
    assert harmful.slowdown > 0.06 > harmless.slowdown


@pytest.mark.parametrize("sees_users", [True, False])
def test_where_only_the_engine_shows_users_batch_may_slow_them_half_as_much(sees_users: bool) -> None:
    """What batch does here slows them by more than half of what is allowed, and by less than all of it."""
    tide = Tide(TidePolicy(256, slowdown_max=1.5 * StepCost().slowdown(20, 0.0)))
    users, known = (4, 24) if sees_users else (None, 20)
    for number in range(100):
        sample = EngineSample(100.0 * number, known=known, running=24.0, waiting=0.0)
        tide.observe(Signals(100.0 * number, in_flight=20, interactive=users, interactive_awaiting=0, sample=sample))
    nothing_runs = EngineSample(10_000.0, known=0, running=0.0)
    after = Signals(10_000.0, interactive=0, interactive_awaiting=0, sample=nothing_runs)
    assert (tide.observe(after).calls > 16) == sees_users


def test_traffic_that_never_ends_still_lets_batch_through_while_the_slowdown_allows() -> None:
    tide = Tide(TidePolicy(64))
    now_ms = traffic(tide, 0.0, 60.0, decoding=1)
    beside = tide.observe(Signals(now_ms + 1, in_flight=1, interactive=4, interactive_awaiting=0))
    assert beside.calls > 1


def test_a_restart_begins_where_calls_were_learned_but_never_below_the_safe_number_nor_off_what_is_configured() -> None:
    for known, learned, calls in ((False, 40, 40), (False, 3, SAFE_CALLS), (True, 20, 64)):
        tide = Tide(TidePolicy(64, is_known=known, yields=False))
        tide.begin_at(learned)
        assert tide.observe(Signals(0.0)).calls == calls


def test_a_long_prompt_waits_ten_times_as_long_while_the_slowdown_is_used_up() -> None:
    tide = Tide(TidePolicy(64, slowdown_max=0.01))
    for number in range(100):
        tide.observe(Signals(100.0 * number, in_flight=60, interactive=4, interactive_awaiting=0))
    assert tide.slowdown > 0.01
    held = Signals(10_000.0, in_flight=60, interactive=4, interactive_awaiting=0, waiting_tokens=4_000)
    assert tide.observe(replace(held, waiting_ms=61_000.0)).prompt_tokens < 4_000
    assert tide.observe(replace(held, now_ms=10_100.0, waiting_ms=601_000.0)).prompt_tokens == 4_000


def test_traffic_past_our_gateway_shows_in_the_engines_own_numbers() -> None:
    tide = Tide(TidePolicy(64))
    busy = EngineSample(at_ms=0.0, known=5, running=8.0, waiting=0.0)
    assert tide.observe(Signals(0.0, in_flight=5, sample=busy)).why.startswith("beside: 3 interactive calls")
    queue = EngineSample(at_ms=200.0, known=5, running=5.0, waiting=2.0)
    waits = tide.observe(Signals(200.0, in_flight=5, awaiting=1, awaiting_tokens=400, sample=queue))
    assert (waits.prompt_tokens, waits.hand_back) == (0, 1)
    ours = EngineSample(at_ms=400.0, known=6, running=5.0, waiting=1.0)
    assert tide.observe(Signals(400.0, in_flight=6, awaiting=1, sample=ours)).why.startswith("quiet")
    ours = EngineSample(at_ms=600.0, known=5, running=6.0, waiting=1.0)
    beside = tide.observe(Signals(600.0, in_flight=5, awaiting=1, awaiting_tokens=400, sample=ours))
    assert (beside.prompt_tokens > 0, beside.hand_back) == (True, 0), "the one that waits is ours"


def test_without_a_gateway_fewer_prompt_tokens_are_let_in_beside_a_prompt_in_flight() -> None:
    def quiet(at_ms: float, awaiting: int, interactive: int | None) -> int:
        sample = EngineSample(at_ms, known=awaiting, running=float(awaiting), waiting=0.0)
        signals = Signals(at_ms, in_flight=awaiting, awaiting=awaiting, sample=sample)
        return tide.observe(replace(signals, interactive=interactive, interactive_awaiting=interactive)).prompt_tokens

    tide = Tide(TidePolicy(64))
    assert (quiet(0.0, 0, None), quiet(1.0, 1, None)) == (1_024, 512)
    assert (quiet(9_000.0, 0, None), quiet(9_010.0, 1, None)) == (2_048, 1_024)
    tide = Tide(TidePolicy(64))
    assert (quiet(0.0, 1, 0), quiet(9_000.0, 1, 0)) == (1_500, 8_192), "a gateway sees the calls that come"


def test_an_engine_that_stops_telling_is_not_pressed() -> None:
    tide = Tide(TidePolicy(256))
    decision = quiet(tide, 0.0, 60.0, gateway=False)
    assert decision.calls == 256
    last = EngineSample(at_ms=60_000.0, known=256, running=256.0)
    fresh = tide.observe(Signals(62_000.0, in_flight=256, sample=last))
    stale = tide.observe(Signals(64_000.0, in_flight=256, sample=last))
    assert fresh.calls == 256
    assert 1 <= stale.calls <= SAFE_CALLS
    assert stale.why.startswith("unseen")
    assert quiet(tide, 70_000.0, 60.0, gateway=False).calls == 256


def test_a_hosted_provider_is_learned_and_does_not_yield() -> None:
    tide = Tide(TidePolicy(256, yields=False))
    busy = Signals(0.0, in_flight=3, awaiting=3, awaiting_tokens=3_000, interactive=9, interactive_awaiting=9)
    decision = tide.observe(busy)
    assert decision == Decision(SAFE_CALLS, UNLIMITED_TOKENS, 0, "learned: 16 calls")


def test_refusals_lower_it_by_their_share_also_where_the_engine_shows_its_load() -> None:
    tide = Tide(TidePolicy(64))
    assert quiet(tide, 0.0, 30.0).calls == 64
    sample = EngineSample(at_ms=30_200.0, known=64, running=64.0, waiting=0.0)
    assert 56 <= tide.observe(Signals(30_200.0, in_flight=64, interactive=0, sample=sample, refusals=7)).calls < 64
    # Where most calls of a round are refused, half as many are enough for the next one.
    assert tide.observe(Signals(30_300.0, in_flight=64, interactive=0, sample=sample, refusals=64)).calls == 32


def test_a_full_cache_and_a_full_engine_leave_room() -> None:
    tide = Tide(TidePolicy(256))
    assert quiet(tide, 0.0, 30.0).calls == 256
    full = EngineSample(at_ms=30_200.0, known=200, running=200.0, waiting=0.0, kv_use=0.97)
    assert tide.observe(Signals(30_200.0, in_flight=200, interactive=0, sample=full)).calls == 180
    tide = Tide(TidePolicy(256))
    quiet(tide, 0.0, 30.0)
    for number in range(4):
        now_ms = 31_000.0 + 200 * number
        queueing = EngineSample(at_ms=now_ms, known=40, running=32.0, waiting=8.0, kv_use=0.3)
        decision = tide.observe(Signals(now_ms, in_flight=40, awaiting=8, interactive=0, sample=queueing))
    assert decision.calls == 28
    # Two processes have half of that room each.
    half = Signals(now_ms + 1, 2, in_flight=20, awaiting=4, interactive=0, sample=queueing)
    assert tide.observe(half).calls == 14


def test_several_processes_have_a_share_each() -> None:
    alone, beside = Signals(0.0, interactive=0), Signals(0.0, interactive=0, workers=4)
    for seconds in (0.0, 30.0):
        one = Tide(TidePolicy(256)).observe(replace(alone, now_ms=seconds * 1000))
        four = Tide(TidePolicy(256)).observe(replace(beside, now_ms=seconds * 1000))
        assert four.calls <= max(1, 256 // 4)
        assert four.prompt_tokens == one.prompt_tokens // 4
    known = Tide(TidePolicy(256, is_known=True))
    known.observe(beside)
    assert known.observe(replace(beside, now_ms=60_000.0)).calls == 256 // 4
    users = Signals(0.0, interactive=1, interactive_awaiting=0)
    one, four = (Tide(TidePolicy(256)).observe(replace(users, workers=count)) for count in (1, 4))
    assert four.prompt_tokens == one.prompt_tokens // 4 > 0
    # Each reckons that the others do what it does.
    one_tide, four_tide = Tide(TidePolicy(256)), Tide(TidePolicy(256))
    for number in range(100):
        busy = Signals(100.0 * number, in_flight=5, interactive=4, interactive_awaiting=0)
        one_tide.observe(busy)
        four_tide.observe(replace(busy, workers=4))
    assert four_tide.slowdown > 2 * one_tide.slowdown


def test_while_it_is_unknown_which_calls_are_ours_none_is_taken_for_an_interactive_one() -> None:
    sample = EngineSample(at_ms=0.0, known=None, running=50.0, waiting=3.0)
    assert Tide(TidePolicy(64)).observe(Signals(0.0, in_flight=5, interactive=0, sample=sample)).why.startswith("quiet")
    # Without a gateway either, nothing is known of interactive traffic at all.
    assert Tide(TidePolicy(64)).observe(Signals(0.0, in_flight=5, sample=sample)).why.startswith("unseen")


@pytest.mark.parametrize(
    ("signals", "words"),
    [
        (Signals(0, interactive=1, interactive_awaiting=1), "first_token: 1 interactive call waits for its"),
        (Signals(0, interactive=2, interactive_awaiting=2), "first_token: 2 interactive calls wait for theirs"),
        (Signals(0, interactive=1, interactive_awaiting=0), "beside: 1 interactive call, slowed by 4.0% of 8.0%"),
        (Signals(0, interactive=2, interactive_awaiting=0), "beside: 2 interactive calls, slowed by 4.0% of 8.0%"),
    ],
)
def test_it_says_beside_how_many_users_it_stands(signals: Signals, words: str) -> None:
    assert Tide(TidePolicy()).observe(signals).why == words
