"""Whole minutes of limits over four real workers: used to 98 % while it is quiet, exceeded in no window, whatever dies or forgets."""

from __future__ import annotations

import pytest

from tests.acceptance.conftest import MakeCrew
from tests.support import trial

QUIET_MINUTES, FAULTY_MINUTES = 3, 2


@pytest.mark.soak
@pytest.mark.timeout(900)
@pytest.mark.parametrize("kind", ["store", "redis"])
def test_limits_are_used_to_98_percent_and_exceeded_in_no_window(
    make_crew: MakeCrew, request: pytest.FixtureRequest, kind: str
) -> None:
    redis = request.getfixturevalue("private_redis") if kind == "redis" else None
    crew = make_crew(trial.config, latency_ms=1, redis=redis, more=trial.SETTINGS)
    findings = trial.run(crew, redis, QUIET_MINUTES, FAULTY_MINUTES)
    assert {one.case.model: one.exceeded for one in findings} == dict.fromkeys([one.model for one in trial.CASES], 0)
    assert {one.case.model: one.quiet_used for one in findings if one.quiet_used < 0.98} == {}
    assert all(one.faulty_used > 0 for one in findings)
