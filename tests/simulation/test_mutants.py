"""Planted bugs: a simulation that does not notice them checks nothing."""

import pytest

from tests.simulation.seeds import ONCE_BROKEN
from tidegate.simulate.world.__main__ import main
from tidegate.simulate.world.mutants import MUTANTS, planted
from tidegate.simulate.world.plan import draw
from tidegate.simulate.world.report import report
from tidegate.simulate.world.trace import SHOWN_MAX
from tidegate.simulate.world.world import Verdict, simulate

SEEDS_MAX = 600


def hunt(name: str) -> Verdict | None:
    """The first seed that notices this bug, beginning with the one that did so before."""
    known = ONCE_BROKEN.get(name)
    for seed in [*([known] if known is not None else []), *range(SEEDS_MAX)]:
        with planted(name):
            verdict = simulate(draw(seed))
        if verdict.broken is not None:
            return verdict
    return None


# One whose seed is not known has to be hunted for, which may take minutes: that is for the soak.
HUNTED = [pytest.param(name, marks=[] if name in ONCE_BROKEN else pytest.mark.soak) for name in MUTANTS]


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", HUNTED)
def test_a_planted_bug_is_caught(name: str) -> None:
    verdict = hunt(name)
    assert verdict is not None, f"{SEEDS_MAX} seeds did not notice that {MUTANTS[name][0]}"
    assert simulate(draw(verdict.plan.seed)).broken is None, "it is the planted bug that was noticed"


def test_there_are_enough_of_them() -> None:
    assert len(MUTANTS) >= 34


def test_a_broken_run_says_how_to_replay_it(capsys: pytest.CaptureFixture[str]) -> None:
    with planted("given_back_though_sent"):
        verdict = hunt("given_back_though_sent")
        assert verdict is not None
        text = report(verdict)
    assert f"seed {verdict.plan.seed} broke a promise" in text
    assert f"replay: python -m tidegate.simulate.world {verdict.plan.seed}" in text
    assert all(kind in text for kind in verdict.plan.kinds)
    assert len(verdict.last) <= SHOWN_MAX
    assert main([str(verdict.plan.seed), "--mutant", "given_back_though_sent", "--shrink"]) == 1
    assert "broke a promise" in capsys.readouterr().out
    assert main([str(verdict.plan.seed)]) == 0
