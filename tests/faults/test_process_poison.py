"""An item that kills the process that runs it is failed alone, and its neighbours are not blamed."""

from __future__ import annotations

import math

import pytest

from tests.faults.conftest import CLUSTER_IN_SOAK
from tests.support.processes import Proc, wait_until
from tests.support.tidegate import ASK_S, END_S, ENDED, IN_FLIGHT, Site, chat_line, requests

POISON = "before_send@poison=kill"
ITEMS = 20
# Three losses without suspicion, one for each halving of what was open (all of it, where the first die at once), and three alone.
DEATHS_MAX = 3 + math.ceil(math.log2(ITEMS)) + 3
KILLS = 6


@CLUSTER_IN_SOAK
def test_a_poison_item_fails_alone(site: Site) -> None:
    lines = [*requests(9), chat_line("poison", "do not read this"), *requests(ITEMS)[9:]]
    proc = site.begin(POISON)
    batch_id = site.submit(lines)
    deaths = 0
    while not _ended_or_dead(site, batch_id, proc):
        deaths += 1
        assert deaths <= DEATHS_MAX
        proc = site.relieve(more={"TIDEGATE_FAILPOINTS": POISON})
    results = site.judge(batch_id, lines, repeats_max=2 * len(lines))
    assert [line["custom_id"] for line in results.errors] == ["poison"]
    assert results.error_codes() == {"worker_lost": 1}
    assert not any("poison" in call.get("custom", "") for call in site.calls())


@pytest.mark.parametrize("count", [pytest.param(1, marks=pytest.mark.soak), 12])
def test_workers_that_are_killed_from_outside_fail_no_item(embedded: Site, count: int) -> None:
    """Each is killed while everything that is left is in flight: nothing tells that from an item that kills its worker."""
    lines = requests(count)
    # Until the last kill no call ends, however long a busy machine takes to kill.
    embedded.engine.set_faults({"hang": 1.0})
    proc = embedded.begin()
    batch_id = embedded.submit(lines)
    seen = 0
    for kills_left in reversed(range(KILLS)):
        embedded.until_called(seen + 1)
        proc.kill()
        proc.wait()
        seen = len(embedded.calls())
        if kills_left == 0:
            embedded.engine.set_faults()
        proc = embedded.relieve()
    results = embedded.judge(batch_id, lines, repeats_max=KILLS * IN_FLIGHT)
    assert results.errors == []


def _ended_or_dead(site: Site, batch_id: str, proc: Proc) -> bool:
    """True when the batch ended, False when the process died before."""

    def there() -> str | None:
        if not proc.running:
            return "dead"
        found = site.batch_if_answered(batch_id)
        return "ended" if found is not None and found["status"] in ENDED else None

    return wait_until(there, END_S, "the batch to end or its worker to die", poll_s=ASK_S) == "ended"
