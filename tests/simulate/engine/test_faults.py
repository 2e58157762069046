"""What a behaviour's text means, and how chance deals behaviours out."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidegate.simulate.engine.faults import (
    KINDS,
    BadBehaviour,
    Chance,
    FaultStep,
    behaviour_from,
    rate_from_option,
    rates_from,
)


@pytest.mark.parametrize(
    ("text", "step"),
    [
        ("429", FaultStep("429")),
        ("429:ra=2", FaultStep("429", retry_after="2")),
        ("429:ra=-1", FaultStep("429", retry_after="-1")),
        ("429:ra=date", FaultStep("429", retry_after="date")),
        ("500x3", FaultStep("500", times=3)),
        ("503:ra=1x2", FaultStep("503", retry_after="1", times=2)),
        ("hangx1", FaultStep("hang", times=1)),
        ("huge=1000", FaultStep("huge", value=1000)),
        ("error200", FaultStep("error200")),
        ("error200x2", FaultStep("error200", times=2)),
        ("reset_before", FaultStep("reset_before")),
    ],
)
def test_a_fault_is_read(text: str, step: FaultStep) -> None:
    behaviour = behaviour_from(text)
    assert (behaviour.fault, behaviour.delays) == (step, ())


def test_delays_stand_beside_a_fault() -> None:
    behaviour = behaviour_from("slow=200, latency=10, 500x1")
    assert [step.kind for step in behaviour.delays] == ["slow", "latency"]
    assert behaviour.fault == FaultStep("500", times=1)


@pytest.mark.parametrize("text", ["", "200", "600", "explode", "429:ra=", "500x", "hang,half", "slow=x"])
def test_nonsense_is_refused_with_what_is_known(text: str) -> None:
    with pytest.raises(BadBehaviour):
        behaviour_from(text)


@given(st.text(max_size=40))
def test_any_text_is_read_or_refused(text: str) -> None:
    try:
        behaviour = behaviour_from(text)
    except BadBehaviour:
        return
    assert all(step.kind in KINDS for step in behaviour.delays)


@pytest.mark.parametrize(
    ("text", "rate"), [("429=0.05", ("429", 0.05)), ("503:ra=1=0.5", ("503:ra=1", 0.5)), ("huge=9=1", ("huge=9", 1.0))]
)
def test_an_option_is_a_behaviour_and_a_rate(text: str, rate: tuple[str, float]) -> None:
    assert rate_from_option(text) == rate


@pytest.mark.parametrize("text", ["429", "429=", "429=2", "=0.5", "429=nan", "what=0.5"])
def test_an_option_without_sense_is_refused(text: str) -> None:
    with pytest.raises(BadBehaviour):
        rate_from_option(text)


def test_rates_may_not_add_up_to_more_than_all() -> None:
    with pytest.raises(BadBehaviour, match="sum"):
        rates_from({"429": 0.7, "500": 0.7})


def test_chance_repeats_with_its_seed_and_keeps_its_share() -> None:
    rates = rates_from({"429": 0.2, "reset": 0.1})

    def drawn(seed: int) -> list[str]:
        chance = Chance(rates, seed)
        return [behaviour.text if (behaviour := chance.draw()) else "" for _ in range(5000)]

    assert drawn(1) == drawn(1) != drawn(2)
    assert 800 < drawn(1).count("429") < 1200
    assert 400 < drawn(1).count("reset") < 600
