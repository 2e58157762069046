"""Metrics: each is on the page as it is declared, old names have answers that exist, and no caller can make series by inventing names."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.pages import codes, page, rows
from tidegate import metrics
from tidegate.core.schedule.reasons import Reason

PAGE = page("docs/reference/metrics.md")
DECLARED = {one.name: one for one in metrics.declared()}
OLD_NAMES = Path(__file__).parent / "old_names"
FORBIDDEN = {"tenant", "key", "user", "org", "id", "batch", "job", "error", "message", "host"}
# Dimensions that have another name here.
OUR_LABELS = {"model_group": "model", "tenant_scope": "scope", "service_tier": "tier"}
LABELS_OF_ONE = {
    "deltallm_batch_microbatch_retry_delay_seconds": {"category": "reason"},
    "deltallm_batch_chat_microbatch_requests_total": {"status": "outcome"},
}


def test_every_metric_is_on_the_page_and_no_other() -> None:
    generated = PAGE.split("<!-- generated: metrics -->")[1].split("<!-- /generated -->")[0]
    assert {row[0].strip("`") for row in rows(generated)} == set(DECLARED)


def old_rows() -> list[list[str]]:
    return list(rows(PAGE.split("## Coming from DeltaLLM and llm-d")[1]))


def test_every_metric_of_both_systems_has_an_answer_that_exists() -> None:
    """44 names of DeltaLLM's page and 17 of llm-d's, in one table, each once."""
    names = [name for name, _, _ in old_metrics()]
    assert len(names) == len(set(names)) == 44 + 17
    assert [codes(row[0])[0] for row in old_rows()] == names
    for row in old_rows():
        (here,) = codes(row[2])
        assert here in DECLARED, row
        assert codes(row[3]) == list(DECLARED[here].labels), row


def old_metrics() -> list[tuple[str, str, list[str]]]:
    """Name, kind and labels of each metric, as the two systems' pages have them."""
    lines = [
        line.split()
        for name in ("deltallm_metrics.txt", "llm-d_metrics.txt")
        for line in (OLD_NAMES / name).read_text().splitlines()
    ]
    return [(name, kind, labels) for name, kind, *labels in lines]


def test_an_answer_has_the_same_kind_and_dimensions() -> None:
    """A histogram answers for a counter too, with its count or its sum."""
    for row, (there, kind, labels) in zip(old_rows(), old_metrics(), strict=True):
        assert codes(row[1]) == labels, row
        ours = OUR_LABELS | LABELS_OF_ONE.get(there, {})
        assert {ours.get(label, label) for label in labels} <= set(codes(row[3])), row
        here = DECLARED[codes(row[2])[0]].kind
        assert here == kind or (kind, here) == ("counter", "histogram"), row
        if here != kind:
            assert re.fullmatch("its `_(count|sum)`", row[4]), row


def test_the_gauges_of_the_whole_store_are_named() -> None:
    text = PAGE.split("never the sum. ")[1].split("\n\n")[0]
    assert codes(text) == [family.made._name for family in metrics.OF_STORE]


def test_an_answer_has_the_values_that_their_pages_name() -> None:
    """Reasons that are counted as they come are those of the scheduler."""
    here = {codes(row[0])[0]: codes(row[2])[0] for row in old_rows()}
    families = {one.made._name: one._labels for one in vars(metrics).values() if isinstance(one, metrics.MetricFamily)}
    for line in (OLD_NAMES / "label_values.txt").read_text().splitlines():
        there, label, *values = line.split()
        known = families[here[there].removesuffix("_total")][label] or {*Reason}
        assert set(values) <= known, line
    bounds = {
        sample.labels.get("le") for family in metrics.group_items.of("chat").collect() for sample in family.samples
    }
    assert bounds >= {"1.0", "2.0", "4.0", "8.0", "16.0", "32.0", "64.0"}


@pytest.mark.parametrize("name", DECLARED)
def test_a_metric_has_our_prefix_a_sentence_and_labels_from_closed_sets(name: str) -> None:
    one = DECLARED[name]
    assert re.fullmatch(r"tidegate_[a-z_]+", name)
    assert name.endswith("_total") == (one.kind == "counter")
    assert one.about.endswith(".")
    assert not set(one.labels) & FORBIDDEN


def test_invented_names_make_one_series_each() -> None:
    """Every family is fed 1,000 names in every label, and 10,000 where one is a model. In its own process: other tests would see it."""
    program = """
from tidegate import metrics
from tidegate.core.schedule.reasons import Reason
metrics.pin(models=["llama"], deployments=[f"d{n}" for n in range(500)])
families = {name: one for name, one in vars(metrics).items() if isinstance(one, metrics.MetricFamily)}
for name, family in families.items():
    labels = len(family.made._labelnames)
    before = len(family.made._metrics)
    for n in range(10_000 if "model" in family.made._labelnames else 1_000):
        family.of(*[f"junk-{n}"] * labels)
        family.of(*[f"d{n}"] * labels)
    family.of(*["odd\\n\\ud800"] * labels)
    most = 1
    for label in family.made._labelnames:
        most *= metrics.PINNED_MAX + 1 if label in ("model", "deployment") else metrics.REASONS_MAX + 1
    bound = 1 if all(family._labels[label] for label in family.made._labelnames) else most
    kept = len({key for key in family.made._metrics}) - before
    assert kept <= bound, (name, kept, bound)
    assert len(family._children) <= before + kept, name
kept = metrics.text().count(b"junk")
for n in range(10_000):
    metrics.item_counts.ended.append((f"junk-{n}", "concurrent", 0.1, None))
    metrics.item_counts.allowed[f"/junk-{n}"] += 1
assert metrics.text().count(b"junk") == kept
print(len(families))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 40
