"""Planted bugs: a simulation that does not notice them checks nothing."""

import pytest

from tests.simulation.seeds import FAMILY_COUNT, SHOWS_AT
from tests.simulation.world.__main__ import main
from tests.simulation.world.families import FAMILIES
from tests.simulation.world.mutants import MUTANTS, planted
from tests.simulation.world.plan import draw
from tests.simulation.world.report import report
from tests.simulation.world.trace import SHOWN_MAX
from tests.simulation.world.world import Verdict, simulate


def run_with_bug(name: str, seed: int) -> Verdict:
    with planted(name):
        return simulate(draw(seed, family=MUTANTS[name].family))


def bugs_of(family: str) -> list[str]:
    return [name for name, mutant in MUTANTS.items() if mutant.family == family]


def hunt(family: str, bugs: list[str], seeds: range) -> list[str]:
    """Run planted bugs of a family with one seed after another until each is noticed; return those that never were."""
    missed, showing = [], set()
    for name in bugs:
        seed = next((seed for seed in in_order(name, seeds) if is_noticed(name, seed)), None)
        if seed is None:
            missed.append(name)
        else:
            showing.add(seed)
    for seed in showing:
        healthy = simulate(draw(seed, family=family))
        assert healthy.broken is None, report(healthy)
    return missed


def in_order(name: str, seeds: range) -> list[int]:
    return sorted(seeds, key=lambda seed: seed != SHOWS_AT.get(name))


def is_noticed(name: str, seed: int) -> bool:
    verdict = run_with_bug(name, seed)
    # A bug whose own code fails, because the engine changed around it, is not planted at all.
    assert "an internal error" not in (verdict.broken or ""), f"{name} must be planted again: {verdict.broken}"
    return verdict.broken is not None


@pytest.mark.timeout(600)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("which", ["first", pytest.param("others", marks=pytest.mark.soak)])
def test_planted_bugs_are_caught(family: str, which: str) -> None:
    """The first of each family in every run, with the healthy engine beside it; all others in the soak."""
    bugs = bugs_of(family)
    missed = hunt(family, bugs[:1] if which == "first" else bugs[1:], range(FAMILY_COUNT))
    assert not missed, (
        f"{FAMILY_COUNT} seeds of {family} did not notice that {[MUTANTS[name].words for name in missed]}"
    )


@pytest.mark.soak
@pytest.mark.timeout(600)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("first", [1_000, 2_000, 3_000])
def test_planted_bugs_are_caught_wherever_the_seeds_begin(family: str, first: int) -> None:
    """No lucky seed: any range of the family does."""
    assert not hunt(family, bugs_of(family), range(first, first + FAMILY_COUNT))


@pytest.mark.parametrize("name", MUTANTS)
def test_each_bug_still_finds_the_code_that_it_changes(name: str) -> None:
    with planted(name):
        pass


def test_there_are_enough_of_them_and_each_family_has_one() -> None:
    assert len(MUTANTS) >= 60
    assert {mutant.family for mutant in MUTANTS.values()} == set(FAMILIES)


def test_a_broken_run_says_how_to_replay_it(capsys: pytest.CaptureFixture[str]) -> None:
    name = "last_budget_forgotten"
    verdict = next(verdict for seed in range(FAMILY_COUNT) if (verdict := run_with_bug(name, seed)).broken is not None)
    text, plan = report(verdict), verdict.plan
    assert f"seed {plan.seed} broke a promise" in text
    assert f"replay: python -m tests.simulation.world {plan.seed} --family {plan.family}" in text
    assert all(kind in text for kind in plan.kinds)
    assert len(verdict.last) <= SHOWN_MAX
    replay = [str(plan.seed), "--family", plan.family]
    assert main([*replay, "--mutant", name, "--shrink"]) == 1
    assert "broke a promise" in capsys.readouterr().out
    assert main(replay) == 0
