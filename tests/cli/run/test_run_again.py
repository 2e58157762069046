"""`tidegate run` after a run that left lines without an answer: only those run, and what was paid for is never paid for again."""

from __future__ import annotations

import json
from decimal import Decimal

from tests.cli.conftest import Desk, summary_of
from tests.support.processes import Proc, wait_until
from tests.support.tidegate import behaving, chat_line

WAIT_S = 90
# A prompt that says what it meets is answered also while the engine is set to fail. It takes its time, so that a bound stops a run in the
# middle.
FINE = behaving("latency=100")
BROKEN = {"400": 1.0}


def ended(desk: Desk, code: int, *arguments: str) -> Proc:
    proc = desk.run(*arguments)
    assert proc.wait(WAIT_S) == code, proc.logs()
    return proc


def test_failed_lines_run_again_and_the_results_are_those_of_both(desk: Desk) -> None:
    desk.write(
        [chat_line("a", "one"), chat_line("b", FINE), chat_line("c", behaving("400")), "not json", chat_line("d", FINE)]
    )
    usual = ("--invalid-lines", "error_file", "--no-check", "--json")
    desk.engine.set_faults(BROKEN)
    first = summary_of(ended(desk, 1, *usual))
    assert desk.custom_ids() == ["b", "d"]
    assert summary_of(ended(desk, 1, *usual))["batch"] == first["batch"], "without the option nothing runs again"
    assert len(desk.called()) == 4
    desk.engine.set_faults()
    second = summary_of(ended(desk, 1, *usual, "--retry-failed"))
    assert (second["total"], second["succeeded"], second["failed"], second["found_done"]) == (5, 3, 2, 2)
    assert len(desk.called()) == 6
    assert desk.custom_ids() == ["a", "b", "d"]
    assert sorted(str(one) for one in desk.custom_ids("results.errors.jsonl")) == ["None", "c"]
    assert not list(desk.here.glob("*.old"))
    desk.verified(second["batch"])
    third = summary_of(ended(desk, 1, *usual))
    assert (third["batch"], third["succeeded"]) == (second["batch"], 3), "the same command finds the last of them"
    assert len(desk.called()) == 6
    assert "leave one out" in ended(desk, 2, "--retry-failed", "--fresh").stderr()


def test_the_same_command_runs_lines_again_that_a_broken_server_lost_and_not_those_it_refused(desk: Desk) -> None:
    desk.write([chat_line("a", "one"), chat_line("b", FINE), chat_line("c", behaving("400"))])
    quick = {"TIDEGATE_RETRY_ATTEMPTS_MAX": "1"}
    desk.engine.set_faults({"500": 1.0})
    first = desk.run("--no-check", "--json", **quick)
    assert first.wait(WAIT_S) == 1, first.logs()
    assert (desk.custom_ids(), desk.custom_ids("results.errors.jsonl")) == (["b"], ["a", "c"])
    called = len(desk.called())
    again = summary_of(ended(desk, 1, "--no-check", "--json"))
    assert (again["total"], again["succeeded"], again["found_done"]) == (3, 1, 1), "the server is still broken"
    assert len(desk.called()) > called
    desk.engine.set_faults()
    called = len(desk.called())
    second = summary_of(ended(desk, 1, "--json"))
    assert (second["total"], second["succeeded"], second["failed"]) == (3, 2, 1)
    assert len(desk.called()) == called + 1
    assert (desk.custom_ids(), desk.custom_ids("results.errors.jsonl")) == (["a", "b"], ["c"])
    desk.verified(second["batch"])
    same = ended(desk, 1)
    assert "--retry-failed runs the 1 line again" in same.stderr()
    assert len(desk.called()) == called + 1
    assert desk.custom_ids("results.errors.jsonl") == ["c"]
    refused = summary_of(ended(desk, 1, "--retry-failed", "--json"))
    assert len(desk.called()) == called + 2, "a line that an earlier batch refused runs again when that is asked for"
    assert (refused["total"], refused["succeeded"]) == (3, 2)
    assert (desk.custom_ids(), desk.custom_ids("results.errors.jsonl")) == (["a", "b"], ["c"])


def test_a_cancelled_run_goes_on_with_what_it_did_not_run(desk: Desk) -> None:
    desk.write([chat_line(f"c{number}", FINE) for number in range(30)])
    first = desk.run("--concurrency", "1")
    wait_until(lambda: len(desk.called()) >= 3, what="some calls")
    first.terminate()
    first.wait(WAIT_S)
    batch = desk.json_of("batches", "list", "--json")[0]["id"]
    desk.done("batches", "cancel", batch)
    second = summary_of(ended(desk, 0, "--json"))
    assert (second["total"], second["succeeded"]) == (30, 30)
    assert len(desk.called()) <= 30, "what has an answer is not asked for again"
    assert desk.custom_ids() == [f"c{number}" for number in range(30)]


def test_a_canary_that_fails_ends_the_run_and_keeps_its_results(desk: Desk) -> None:
    desk.write_requests(12)
    desk.engine.set_faults(BROKEN)
    first = ended(desk, 1, "--canary", "3", "--no-check")
    assert "3 of the 3 requests of its canary failed" in first.stderr()
    assert len(desk.called()) == 3
    assert len(desk.custom_ids("results.errors.jsonl")) == 12
    desk.engine.set_faults()
    same = ended(desk, 1, "--canary", "3")
    assert "stopped before: too much of its canary failed" in same.stderr()
    assert len(desk.called()) == 3
    again = summary_of(ended(desk, 0, "--canary", "3", "--retry-failed", "--json"))
    assert (again["succeeded"], again["exit_code"]) == (12, 0)
    assert len(desk.called()) == 15
    assert not (desk.here / "results.errors.jsonl").exists()
    desk.verified(again["batch"])
    refused = ended(desk, 2, "--canary", "0")
    assert "--canary" in refused.stderr()


def test_a_run_that_cost_too_much_goes_on_with_a_larger_bound_and_pays_nothing_twice(desk: Desk) -> None:
    desk.write([chat_line(f"c{number}", FINE) for number in range(24)])
    place = {"url": desk.engine.url, "price": {"input": 1_000, "output": 1_000}}
    (desk.here / "c.yaml").write_text(json.dumps({"models": {"m": {"deployments": [place]}}}))
    usual = ("run", "requests.jsonl", "-o", "results.jsonl", "--config", "c.yaml", "--concurrency", "1")
    first = summary_of(desk.done(*usual, "--max-cost", "0.001", "--json", code=1))
    called = len(desk.called())
    assert 0 < first["succeeded"] == called < 24
    assert Decimal(first["cost"]) > Decimal("0.001")
    same = desk.done(*usual, "--max-cost", "0.001", code=1)
    assert f"stopped before: its answers cost {first['cost']}," in same.stderr()
    assert f"\ncost     {first['cost']}\n" in same.stderr()
    assert len(desk.called()) == called
    assert len(desk.custom_ids()) == called
    larger = summary_of(desk.done(*usual, "--max-cost", "100", "--json"))
    assert (larger["total"], larger["succeeded"], larger["found_done"]) == (24, 24, called)
    # Both cost a thousandth of a unit a token, over all batches of the run.
    assert Decimal(larger["cost"]) == Decimal(larger["input_tokens"] + larger["output_tokens"]) / 1_000
    assert len(desk.called()) == 24, "what has an answer is not asked for again"
    assert desk.custom_ids() == [f"c{number}" for number in range(24)]
    desk.done("verify", larger["batch"], "--config", "c.yaml", "--witness", str(desk.engine.calls_log))


def test_a_run_whose_answers_have_no_price_says_so_only_where_a_cost_was_to_bound_it(desk: Desk) -> None:
    desk.write_requests(2)
    bounded = ended(desk, 0, "--max-cost", "0.001")
    assert "cost     0: no answer had a price, so --max-cost bounded nothing\n" in bounded.stderr()
    free = ended(desk, 0)
    assert "\ncost " not in free.stderr()
    assert summary_of(ended(desk, 0, "--json"))["cost"] == "0"


def test_a_run_with_too_many_errors_goes_on_only_when_it_may(desk: Desk) -> None:
    desk.write([chat_line(f"c{number}", f"say {number}" if number < 4 else FINE) for number in range(24)])
    usual = ("--concurrency", "1", "--no-prefix-order", "--no-check")
    desk.engine.set_faults(BROKEN)
    first = summary_of(ended(desk, 1, *usual, "--max-errors", "0", "--json"))
    called = len(desk.called())
    assert first["succeeded"] < called < 24
    for same in ("0", "0%"):
        refused = ended(desk, 1, *usual, "--max-errors", same)
        assert "stopped before: more lines failed than --max-errors allows" in refused.stderr()
    assert len(desk.called()) == called
    larger = summary_of(ended(desk, 1, *usual, "--max-errors", "20", "--json"))
    assert (larger["total"], larger["succeeded"]) == (24, 20)
    called = len(desk.called())
    desk.engine.set_faults()
    last = summary_of(ended(desk, 0, *usual, "--retry-failed", "--json"))
    assert (last["total"], last["succeeded"]) == (24, 24)
    assert desk.custom_ids() == [f"c{number}" for number in range(24)]
    assert len(desk.called()) == called + 4
