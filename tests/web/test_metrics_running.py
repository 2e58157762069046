"""Metrics of a service under load: what is documented is there and nothing else, the figures are right, and a scrape is quick."""

from __future__ import annotations

import httpx2
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.support.engine import Engine
from tests.support.processes import Processes, free_port, wait_until
from tests.support.tidegate import Site, chat_line, requests
from tidegate import metrics

ITEMS = 60
JUNK = 150


@pytest.fixture
def serving(processes: Processes, engine: Engine, tmp_path_factory: pytest.TempPathFactory) -> tuple[Site, str]:
    port = free_port()
    site = Site("embedded", processes, tmp_path_factory.mktemp("site"), engine, {"TIDEGATE_METRICS_PORT": str(port)})
    site.serve()
    return site, f"http://127.0.0.1:{port}"


def scrape(address: str) -> dict[str, float]:
    """Every series with its value."""
    text = httpx2.get(f"{address}/metrics", timeout=30).text
    found = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    return {f"{one.name}{sorted(one.labels.items())}": one.value for one in found}


def total(series: dict[str, float], name: str, label: str = "") -> float:
    return sum(value for key, value in series.items() if key.startswith(f"{name}[") and label in key)


def test_a_service_under_load_shows_what_is_documented(serving: tuple[Site, str]) -> None:
    site, address = serving
    batch_id = site.submit(requests(ITEMS))
    site.until_done(batch_id, 5)
    scrape(address)
    site.ended(batch_id)
    text = httpx2.get(f"{address}/metrics", timeout=30).text
    shown = {line.split()[2] for line in text.splitlines() if line.startswith("# TYPE ")}
    assert shown == {one.name for one in metrics.declared()}

    def counted() -> bool:
        series = scrape(address)
        return (
            total(series, "tidegate_jobs", "'completed'") == 1
            and total(series, "tidegate_items", "'completed'") == ITEMS
        )

    wait_until(counted, 60, "a census after the end", poll_s=1)
    series = scrape(address)
    expected = {
        "tidegate_item_seconds_count": ITEMS,
        "tidegate_chat_seconds_count": ITEMS,
        "tidegate_jobs_processed_total": 1,
        "tidegate_job_seconds_count": 1,
        "tidegate_job_queue_wait_seconds_count": 1,
        "tidegate_create_seconds_count": 1,
        "tidegate_ingest_seconds_count": 1,
        "tidegate_finalize_seconds_count": 1,
        "tidegate_build_info": 1,
        "tidegate_scheduler_config_info": 1,
        "tidegate_worker_in_flight": 0,
        "tidegate_worker_broken": 0,
        "tidegate_upstream_connections": 0,
    }
    assert {name: total(series, name) for name in expected} == expected
    for name in (
        "tidegate_policy_allowed_total",
        "tidegate_prompt_tokens_total",
        "tidegate_blob_operations_total",
        "tidegate_api_requests_total",
        "tidegate_sweep_runs_total",
        "tidegate_work_lease_attempts_total",
        "tidegate_process_resident_bytes",
        "tidegate_process_cpu_seconds_total",
        "tidegate_process_descriptors",
        "tidegate_upstream_connections_max",
        "tidegate_workers",
    ):
        assert total(series, name) > 0, name


def test_invented_models_add_no_series(serving: tuple[Site, str]) -> None:
    site, address = serving
    first = site.submit([chat_line("a", "x", "stranger")])
    site.ended(first)
    scrape(address)
    before = set(scrape(address))
    site.ended(site.submit([chat_line(f"c{number}", "x", f"junk-{number}") for number in range(JUNK)]), timeout_s=120)
    after = scrape(address)
    assert not [key for key in after if "junk" in key]
    assert not {key for key in set(after) - before if "'model'" in key and "other" not in key}
