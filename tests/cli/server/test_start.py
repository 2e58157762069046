"""What a server says when it starts: what listens where, in words or as JSON from the first line, and what it cannot do."""

from __future__ import annotations

import json
from decimal import Decimal
from urllib.request import urlopen

import httpx2

from tests.cli.conftest import Desk
from tests.support.processes import free_port, wait_until

SERVE = ("serve", "--port", "0")


def test_a_server_says_what_listens_where(desk: Desk) -> None:
    metrics = free_port()
    proc = desk.start(*SERVE, "--upstream", desk.engine.url, TIDEGATE_METRICS_PORT=str(metrics))
    url = proc.wait_for_line(r"^tidegate listening on (http://\S+)$").group(1)
    proc.wait_for_line(rf"^  console  {url}/console$")
    proc.wait_for_line(rf"^  metrics  http://127\.0\.0\.1:{metrics}/metrics$")
    proc.wait_for_line(r"^  store    \S+tidegate\.db$")
    proc.terminate()
    assert proc.wait() == 0
    assert "Stopping; calls in flight are finished first" in proc.stderr()


def test_a_json_log_is_json_from_the_first_line(desk: Desk) -> None:
    quick = {"TIDEGATE_LOGGING_FORMAT": "json"}
    proc = desk.start(*SERVE, "--upstream", desk.engine.url, **quick)
    proc.wait_for_line("process_started")
    proc.terminate()
    assert proc.wait() == 0
    lines = [json.loads(line) for line in (proc.stdout() + proc.stderr()).splitlines()]
    events = {line["event"]: line for line in lines}
    assert events["process_started"]["api"].startswith("http://127.0.0.1:")
    assert "process_stopping" in events
    refused = desk.done(*SERVE, code=2, **quick)
    last = json.loads(refused.stderr().splitlines()[-1])
    assert last["event"] == "start_failed"
    assert "No model server is known" in last["why"]


def test_a_worker_that_cannot_write_says_so_at_its_start(desk: Desk, postgres_url: str) -> None:
    proc = desk.start(
        "worker",
        "--upstream",
        desk.engine.url,
        TIDEGATE_STORE_URL=postgres_url,
        TIDEGATE_BLOBS_URL="s3://bucket/files",
        TIDEGATE_BLOBS_ENDPOINT=f"http://127.0.0.1:{free_port()}",
        TIDEGATE_BLOBS_ALLOW_HTTP="true",
        TIDEGATE_BLOBS_ACCESS_KEY_ID="unknown",
        TIDEGATE_BLOBS_SECRET_ACCESS_KEY="nothing",
    )
    proc.wait_for_line("blobs_unanswered .*blobs.endpoint")
    proc.wait_for_line("blobs_unwritable", 90)


def test_models_prices_and_tenants_follow_the_file_without_a_restart(desk: Desk) -> None:
    path = desk.here / "c.yaml"

    def write(model: str, **more: object) -> None:
        place = {"name": "gpu", "url": desk.engine.url, "price": {"input": 1, "output": 1}}
        whole = {"models": {model: {"deployments": [place]}}, **more}
        new = path.with_name("new.yaml")
        new.write_text(json.dumps(whole))
        new.replace(path)

    def models() -> list[str]:
        with urlopen(f"{url}/v1/models", timeout=30) as answer:
            return [one["id"] for one in json.load(answer)["data"]]

    write("first")
    proc = desk.start(*SERVE, "--config", "c.yaml")
    url = proc.wait_for_line(r"^tidegate listening on (http://\S+)$").group(1)
    assert models() == ["first"]
    path.write_text("models: [")
    proc.wait_for_line("settings_reload_failed")
    assert models() == ["first"], "a file with a mistake in it changes nothing"
    write(
        "second", tenants={"default": {"limits": [{"period": "lifetime", "requests": 1}]}}, logging={"level": "warning"}
    )
    proc.wait_for_line("settings_reloaded wait_for_restart=logging")
    wait_until(lambda: models() == ["second"], what="the other model")
    body = json.dumps({"model": "second", "messages": [{"role": "user", "content": "hi"}]}).encode()
    headers = {"Content-Type": "application/json"}
    for status in (200, 429):
        answer = httpx2.post(f"{url}/v1/chat/completions", content=body, headers=headers, timeout=30)
        assert answer.status_code == status, answer.text


def test_a_price_that_is_changed_in_the_file_is_what_the_next_batch_costs(desk: Desk) -> None:
    def write(price: float) -> None:
        place = {"name": "gpu", "url": desk.engine.url, "price": {"input": price, "output": price}}
        new = desk.here / "new.yaml"
        new.write_text(json.dumps({"models": {"m": {"deployments": [place]}}}))
        new.replace(desk.here / "c.yaml")

    def cost() -> Decimal:
        batch = desk.done("batches", "create", "requests.jsonl", "--config", "c.yaml").stdout().strip()
        desk.done("batches", "watch", batch, "--config", "c.yaml")
        shown = desk.json_of("batches", "show", batch, "--config", "c.yaml", "--json")
        return Decimal(shown["cost"])

    write(1)
    desk.write_requests(3)
    proc = desk.start(*SERVE, "--config", "c.yaml")
    proc.wait_for_line("^tidegate listening on")
    before = cost()
    assert before > 0
    write(7)
    proc.wait_for_line("settings_reloaded")
    assert cost() == 7 * before
