"""Every other act of control with real processes: it was accepted, so it holds, though the process that accepted it or the database dies
right afterwards. Pauses, canaries, retries, parameters, copies and checked answers have tests of their own."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.faults.conftest import PATIENT, MakeSite
from tests.support.postgres import PostgresServer
from tests.support.processes import Proc, wait_until
from tests.support.tidegate import ASK_S, END_S, IN_FLIGHT, UNRECORDED_MAX, Site, behaving, requests

SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}


class Struck(msgspec.Struct):
    """A site, and how everything that runs there is lost at once."""

    site: Site
    strike: Callable[[], None]
    more: dict[str, str]

    def begin(self) -> None:
        self.site.begin(more=self.more)

    def ask(self, path: str, method: str = "POST", **body: Any) -> Any:
        """Ask until the store is back."""

        def answered() -> Any:
            answer = self.site.client().request(method, f"/v1/{path}", json=body or None)
            assert answer.status_code in (200, 503), answer.text
            return answer.json() if answer.status_code == 200 else None

        return wait_until(answered, END_S, f"{path} to be accepted", poll_s=ASK_S)


@pytest.fixture(params=["kill", pytest.param("database", marks=pytest.mark.soak)])
def struck(request: pytest.FixtureRequest, make_site: MakeSite) -> Struck:
    if request.param == "kill":
        site = make_site("embedded")

        more: dict[str, str] = {}

        def strike() -> None:
            site.workers[-1].kill()
            site.relieve(more=more)

    else:
        server: PostgresServer = request.getfixturevalue("private_postgres_server")
        site = request.getfixturevalue("crashing")
        more, strike = dict(PATIENT), server.restart_immediate
    site.env["TIDEGATE_LIMITS_WINDOW_MIN_S"] = "1"
    return Struck(site, strike, more)


def slow(number: int) -> str:
    return f"{behaving('latency=250')} {number}"


@pytest.mark.soak
def test_a_shorter_window_ends_a_batch_after_a_loss(struck: Struck) -> None:
    """A window may not be made to end within a minute."""
    site, lines = struck.site, requests(400, lambda number: f"{behaving('latency=1500')} {number}")
    struck.begin()
    batch_id = site.submit(lines)
    site.until_called(IN_FLIGHT + 1)
    changed = struck.ask(f"batches/{batch_id}", completion_window="70s")
    assert changed["expires_at"] == changed["created_at"] + 70
    struck.strike()
    site.until_status(batch_id, "expired", timeout_s=120)
    results = site.judge(batch_id, lines, "expired", repeats_max=UNRECORDED_MAX)
    assert set(results.error_codes()) == {"batch_expired"}


def test_what_expired_runs_again_and_the_merged_output_holds_both(struck: Struck) -> None:
    site, lines = struck.site, requests(60, slow)
    struck.begin()
    batch_id = site.submit(lines, completion_window="2s")
    site.until_called(IN_FLIGHT + 1)
    struck.strike()
    first = site.judge(batch_id, lines, "expired", repeats_max=UNRECORDED_MAX)
    assert set(first.error_codes()) == {"batch_expired"}
    made = struck.ask(f"batches/{batch_id}/retry", outcomes=["expired"])
    # A retry has the window of the first.
    struck.ask(f"batches/{made['id']}", completion_window="24h")
    struck.strike()
    expired = {line["custom_id"] for line in first.errors}
    ran = [line for line in lines if json.loads(line)["custom_id"] in expired]
    again = site.judge(made["id"], ran, repeats_max=UNRECORDED_MAX)
    merged = site.content(again.batch["tidegate"]["merged_output_file_id"])
    assert merged == [*first.output, *again.output]
    after = site.ended(batch_id)
    assert (after.output, after.errors) == (first.output, first.errors), "the first never changes"
    assert after.batch["tidegate"]["retried_by"] == [made["id"]]


def test_a_longer_window_keeps_a_paused_batch_alive(struck: Struck) -> None:
    site, lines = struck.site, requests(12, slow)
    struck.begin()
    batch_id = site.submit(lines, completion_window="6s")
    struck.ask(f"batches/{batch_id}/pause")
    created_at = struck.ask(f"batches/{batch_id}", completion_window="1h")["created_at"]
    struck.strike()
    wait_until(lambda: time.time() > created_at + 8, END_S, "the first window to be over", poll_s=ASK_S)
    assert struck.ask(f"batches/{batch_id}", "GET")["status"] == "in_progress"
    struck.ask(f"batches/{batch_id}/resume")
    site.judge(batch_id, lines, repeats_max=UNRECORDED_MAX)


def test_a_priority_that_was_raised_goes_first_after_a_loss(struck: Struck) -> None:
    site, lines = struck.site, requests(60, slow)
    struck.begin()
    # What is smaller and came before would be done first.
    usual = site.submit(lines[:48])
    site.until_called(1)
    urgent = site.submit(lines)
    struck.ask(f"batches/{urgent}", priority=50)
    struck.strike()
    site.judge(urgent, lines, repeats_max=UNRECORDED_MAX)
    # Results in a bucket are committed later than they come: what counts is when calls were made.
    began_at, *_, all_sent_at = sorted(_first_calls(site, urgent).values())
    others = _first_calls(site, usual).values()
    # What was leased before the urgent one could run is done; of the rest nothing goes before it.
    assert len([at for at in others if began_at < at < all_sent_at]) <= 12, "the other one waited meanwhile"
    assert struck.ask(f"batches/{urgent}", "GET")["tidegate"]["priority"] == 50
    site.judge(usual, lines[:48], repeats_max=UNRECORDED_MAX)
    later = [at for at in _first_calls(site, usual).values() if at > all_sent_at]
    assert later, "there was something to go before"


def _first_calls(site: Site, batch_id: str) -> dict[str, float]:
    """When each item of a batch was first called."""
    first: dict[str, float] = {}
    for call in site.calls_of(batch_id):
        first[call["idempotency_key"]] = min(call["at"], first.get(call["idempotency_key"], call["at"]))
    return first


def test_a_cost_and_a_share_of_errors_stop_a_batch_after_a_loss(struck: Struck, tmp_path: Path) -> None:
    site = struck.site
    place = {"name": "gpu", "url": site.engine.url, "price": {"input": 1_000, "output": 1_000}}
    site.configure(models={"m": {"deployments": [place]}})
    struck.begin()
    lines = requests(60, slow)
    faulty = requests(60, lambda number: f"{behaving('400' if number % 2 else 'latency=250')} {number}")
    dear = site.submit(lines, max_cost="1000", prefix_order=False)
    wait_until(lambda: float(struck.ask(f"batches/{dear}", "GET")["tidegate"]["cost"]) > 0, END_S, "a cost")
    spent = struck.ask(f"batches/{dear}", "GET")["tidegate"]["cost"]
    struck.ask(f"batches/{dear}", max_cost=spent)
    struck.strike()
    results = site.judge(dear, lines, "failed", repeats_max=UNRECORDED_MAX)
    assert results.batch["tidegate"]["stopped_by"] == "max_cost"
    assert [error["code"] for error in results.batch["errors"]["data"]] == ["max_cost_exceeded"]
    assert results.output, "what was answered is kept"
    assert set(results.error_codes()) == {"batch_failed"}
    wrong = site.submit(faulty, max_errors={"share": 0.2, "after": 8}, prefix_order=False)
    wait_until(lambda: len(site.calls_of(wrong)) >= 2, END_S, "some calls", poll_s=ASK_S)
    struck.strike()
    results = site.judge(wrong, faulty, "failed", repeats_max=UNRECORDED_MAX)
    assert results.batch["tidegate"]["stopped_by"] == "max_errors"
    assert len(results.output) + results.error_codes()["400"] >= 8


def test_a_deleted_batch_stays_deleted_and_takes_nothing_of_its_retry(struck: Struck) -> None:
    site = struck.site
    lines = requests(24, lambda number: f"{behaving('400' if number % 4 == 0 else 'latency=50')} {number}")
    struck.begin()
    batch_id = site.submit(lines)
    first = site.judge(batch_id, lines)
    made = struck.ask(f"batches/{batch_id}/retry")
    site.judge(made["id"], [lines[number] for number in range(0, 24, 4)])
    merged = struck.ask(f"batches/{made['id']}", "GET")["tidegate"]["merged_output_file_id"]
    before = site.content(merged)
    assert len(before) == 18
    struck.ask(f"batches/{batch_id}", "DELETE")
    struck.strike()
    wait_until(lambda: struck.ask("batches", "GET"), END_S, "the store to be back", poll_s=ASK_S)
    for path in (f"batches/{batch_id}", f"files/{first.batch['output_file_id']}"):
        assert site.client().get(f"/v1/{path}").status_code == 404
    assert site.client().delete(f"/v1/batches/{batch_id}").status_code == 404
    assert site.content(merged) == before
    site.verify(made["id"])


def test_a_cancel_that_aborts_ends_its_batch_after_a_loss(struck: Struck) -> None:
    site, lines = struck.site, requests(12, lambda number: f"{behaving('hang')} {number}")
    struck.more["TIDEGATE_WORKER_CANCEL_GRACE_MS"] = "0"
    # A cancel that waited would wait for longer than this test does.
    struck.more["TIDEGATE_WORKER_GRACE_MS"] = "600000"
    struck.begin()
    batch_id = site.submit(lines)
    site.until_called(IN_FLIGHT)
    struck.ask(f"batches/{batch_id}/cancel")
    struck.strike()
    results = site.judge(batch_id, lines, "cancelled", repeats_max=UNRECORDED_MAX)
    assert results.error_codes() == {"batch_cancelled": 12}


def test_what_does_not_fit_is_sent_to_the_stronger_model_after_a_loss(struck: Struck) -> None:
    site, lines = struck.site, []
    for number in range(24):
        text = behaving("unfit" if number % 2 else "latency=250")
        messages = [{"role": "system", "content": f"item {number}"}, {"role": "user", "content": text}]
        asked = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}
        body = {"model": "m", "messages": messages, "response_format": asked}
        lines.append(json.dumps({"custom_id": f"c{number}", "url": "/v1/chat/completions", "body": body}))
    struck.begin()
    batch_id = site.submit(lines, answers={"schema": "response_format", "tries_max": 1, "escalate_to": "strong"})
    site.until_called(2 * IN_FLIGHT)
    struck.strike()
    results = site.judge(batch_id, lines, repeats_max=3 * len(lines))
    assert {line["custom_id"] for line in results.errors} == {f"c{number}" for number in range(1, 24, 2)}
    for line in results.errors:
        assert line["error"]["code"] == "schema_invalid"
        assert [one["model"] for one in line["tidegate"]["tries"]] == ["m", "m", "strong"]
        assert json.loads(line["tidegate"]["raw"])["model"] == "strong"


def test_a_check_before_keeps_nothing_though_it_is_cut_off(struck: Struck) -> None:
    site = struck.site
    struck.begin()
    file_id = site.upload(requests(200)).json()["id"]
    wanted = {"input_file_id": file_id, "endpoint": "/v1/chat/completions", "completion_window": "24h"}
    first = struck.ask("batches", validate_only=True, **wanted)
    struck.strike()
    again = struck.ask("batches", validate_only=True, **wanted)
    assert (again["valid"], again["tokens"], again["request_counts"]) == (
        first["valid"],
        first["tokens"],
        first["request_counts"],
    )
    assert struck.ask("limits", "GET") == struck.ask("limits", "GET")
    assert struck.ask("batches", "GET")["data"] == []
    assert [file["id"] for file in struck.ask("files", "GET")["data"]] == [file_id]
    assert site.calls() == []
    assert not list(site.data.glob("scratch/**/validation-*"))


@pytest.mark.soak
def test_a_table_survives_a_crash_of_the_database_and_a_kill(
    crashing: Site, private_postgres_server: PostgresServer, tmp_path: Path
) -> None:
    body = {"model": "m", "messages": [{"role": "user", "content": "{{ text }}"}], "max_tokens": 4}
    (tmp_path / "t.json").write_text(json.dumps(body))
    rows = [json.dumps({"n": number, "text": slow(number)}) for number in range(60)]
    (tmp_path / "in.jsonl").write_text("\n".join(rows))

    def run() -> Proc:
        asked = crashing.command("run", "in.jsonl", "--template", "t.json", "-o", "out.jsonl", "--json")
        return crashing.processes.start(asked, name="run", env=crashing.environment(more=PATIENT), cwd=tmp_path)

    first = run()
    crashing.until_called(IN_FLIGHT + 1)
    private_postgres_server.restart_immediate()
    crashing.until_called(5 * IN_FLIGHT)
    first.kill()
    second = run()
    crashing.until_called(8 * IN_FLIGHT)
    private_postgres_server.restart_immediate()
    assert second.wait(2 * END_S) == 0, second.logs()
    done = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [row["n"] for row in done] == list(range(60))
    assert all(row["answer"] for row in done)
    (batch_id,) = json.loads(second.stdout())["batches"]
    crashing.verify(batch_id)
    again = run()
    called = len(crashing.calls())
    assert again.wait(END_S) == 0, again.logs()
    assert len(crashing.calls()) == called, "nothing is called twice"
