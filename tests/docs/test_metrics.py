"""Metrics: each is on the page as it is declared, old names have answers that exist, and nobody can make series by inventing names."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from tests.docs.pages import codes, first_codes, page, rows
from tidegate import metrics

PAGE = page("docs/reference/metrics.md")
DECLARED = {one.name: one for one in metrics.declared()}
LABELS = {"why", "reason", "model", "bound", "deployment", "outcome"}


def test_every_metric_is_on_the_page_and_no_other() -> None:
    generated = PAGE.split("<!-- generated: metrics -->")[1].split("<!-- /generated -->")[0]
    assert {row[0].strip("`") for row in rows(generated)} == set(DECLARED)


def test_the_answers_to_old_names_exist() -> None:
    old = PAGE.split("<!-- /generated -->")[1]
    assert first_codes(old)
    for there, here in rows(old):
        assert set(codes(here)) <= set(DECLARED), there


@pytest.mark.parametrize("name", DECLARED)
def test_a_metric_has_our_prefix_a_sentence_and_labels_from_closed_sets(name: str) -> None:
    one = DECLARED[name]
    assert re.fullmatch(r"tidegate_[a-z_]+", name)
    assert name.endswith("_total") == (one.kind == "counter")
    assert one.about.endswith(".")
    assert set(one.labels) <= LABELS


def test_invented_names_make_one_series_each() -> None:
    """In a process of its own: what is counted here would be seen by other tests."""
    program = """
from tidegate import metrics
metrics.pin(models=["llama"], deployments=[f"d{n}" for n in range(500)])
for n in range(10_000):
    metrics.scheduler_fairness_gap_tokens.of(f"junk-{n}").set(n)
    metrics.upstream_in_flight.of(f"d{n}").set(n)
    metrics.scheduler_picks.of(f"why-{n}").inc()
    metrics.scheduler_skips.of(f"reason-{n}").inc()
    metrics.scheduler_skips.of(f"reason-{n}\\n\\ud800").inc()
    metrics.limits_spent.of(f"bound-{n}").inc()
metrics.scheduler_fairness_gap_tokens.of("llama").set(5)
series = [line for line in metrics.text().decode().splitlines() if not line.startswith("#")]
for name in ("fairness_gap", "upstream_in_flight", "picks", "skips", "spent"):
    print(name, sum(name in line for line in series))
print(metrics.counted(metrics.scheduler_picks))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=100, check=True)
    assert done.stdout.splitlines() == [
        "fairness_gap 2",
        "upstream_in_flight 201",
        "picks 1",
        "skips 51",
        "spent 1",
        "{'other': 10000}",
    ]
