"""`tidegate run` of a file that was edited since the last run: its changed lines run, and no result is lost or paid for twice."""

from __future__ import annotations

from collections import Counter

from tests.cli.conftest import QUICK, Desk, summary_of
from tests.cli.run.test_tables import begin, read_csv, write_csv, write_template
from tests.support.processes import wait_until
from tests.support.tidegate import behaving, chat_line

WAIT_S = 90
SLOW = behaving("latency=100")
# So slow that a run with more of them than may be in flight is not over before a kill.
SLOWER = behaving("latency=500")
# A kill may leave so many answers unrecorded: two flushes of what is in flight.
UNRECORDED_MAX = 4 * int(QUICK["TIDEGATE_WORKER_IN_FLIGHT_MAX"])


def lines(count: int, edited: range = range(0), text: str = SLOW) -> list[str]:
    return [
        chat_line(f"c{number}", f"{text} {number}{' edited' if number in edited else ''}") for number in range(count)
    ]


def test_a_changed_file_runs_its_changed_lines_and_keeps_the_old_results(desk: Desk) -> None:
    desk.write([*lines(12, text="say"), chat_line("refused", behaving("400"))])
    first = summary_of(desk.run("--json"))
    desk.write([*lines(13, edited=range(3), text="say"), chat_line("refused", behaving("400"))])
    planned, everything = (summary_of(desk.run("--json", "--dry-run", *more)) for more in ((), ("--fresh",)))
    assert [(plan["item_count"], plan["reused"], plan["done_before"]) for plan in (planned, everything)] == [
        (14, 9, 0),
        (14, 0, 0),
    ]
    assert 2 * planned["tokens"]["output"]["p95"] < everything["tokens"]["output"]["p95"]
    assert len(desk.called()) == 13, "nothing was sent"
    proc = desk.run("--json")
    second = summary_of(proc)
    assert "requests.jsonl changed since the last run" in proc.stderr()
    assert (second["total"], second["succeeded"], second["failed"], second["found_done"]) == (14, 13, 1, 9)
    assert len(desk.called()) == 13 + 5, "three edited lines, a new one, and one that has no answer"
    assert desk.custom_ids() == [f"c{number}" for number in range(13)]
    assert [len((desk.here / f"results{kind}jsonl.1.old").read_text().splitlines()) for kind in (".", ".errors.")] == [
        12,
        1,
    ]
    assert "results.jsonl.1.old" in proc.stderr()
    assert "results.errors.jsonl.1.old" in proc.stderr()
    desk.verified(second["batch"])
    desk.write([*lines(12, text="say"), chat_line("refused", behaving("400"))])
    assert summary_of(desk.run("--json"))["batch"] == first["batch"], "the file as it was is the run as it was"
    assert len(desk.called()) == 18
    everything = summary_of(desk.run("--json", "--fresh"))
    assert everything["found_done"] == 0
    assert len(desk.called()) == 18 + 13


def test_a_broken_line_that_is_fixed_again_costs_nothing_twice(desk: Desk) -> None:
    desk.write(lines(8, text="say"))
    summary_of(desk.run("--json"))
    desk.write([*lines(8, text="say"), "{broken"])
    assert desk.run().wait(WAIT_S) == 2
    assert len(desk.custom_ids()) == 8, "a refused input changes no result"
    desk.write(lines(9, text="say"))
    assert summary_of(desk.run("--json"))["found_done"] == 8
    assert len(desk.called()) == 9


def test_answers_of_another_server_another_output_or_none_are_not_taken(desk: Desk) -> None:
    desk.write(lines(3, text="say"))
    summary_of(desk.run("--json"))
    desk.write(lines(4, text="say"))
    summary_of(desk.run("--json", "-o", "other.jsonl"))
    assert len(desk.called()) == 3 + 4
    for job in desk.json_of("batches", "list", "--json"):
        desk.done("batches", "delete", job["id"], "--yes")
    desk.write(lines(5, text="say"))
    assert summary_of(desk.run("--json"))["succeeded"] == 5
    assert len(desk.called()) == 3 + 4 + 5


def test_a_file_that_was_edited_in_the_middle_of_a_killed_run(desk: Desk) -> None:
    """Both versions are killed in the middle. What was recorded is kept, and the first version sends nothing more."""
    edited = range(40, 60)
    desk.write([*lines(40), *lines(60, text=SLOWER)[40:]])
    first = desk.run()
    wait_until(lambda: desk.answered() >= 16, what="some answers")
    first.kill()
    desk.write(lines(60, edited))
    before = len(desk.called())
    dry = desk.run("--dry-run")
    assert dry.wait(WAIT_S) == 0, dry.logs()
    assert "A run of an earlier version did not end: its " in dry.stderr()
    second = desk.run()
    wait_until(lambda: len(desk.called()) >= before + 8, what="calls of the other version")
    second.kill()
    last = summary_of(desk.run("--json"))
    assert (last["total"], last["succeeded"], last["exit_code"]) == (60, 60, 0)
    assert desk.custom_ids() == [f"c{number}" for number in range(60)]
    calls = desk.called()
    assert len(calls) <= 60 + 2 * UNRECORDED_MAX
    assert len({call["idempotency_key"] for call in calls[before:]}) < 60, "answers of the first version were kept"
    desk.done("verify", last["batch"])
    states = Counter(job["status"] for job in desk.json_of("batches", "list", "--json"))
    assert states == {"cancelled": 1, "completed": 1}


def test_a_dry_run_of_a_file_that_ran_is_about_what_would_still_run(desk: Desk) -> None:
    usual = [*lines(20), *lines(40, text=SLOWER)[20:]]
    desk.write([*usual, chat_line("refused", behaving("400")), chat_line("lost", behaving("503:ra=0"))])
    everything = summary_of(desk.run("--json", "--dry-run"))
    first = desk.run()
    wait_until(lambda: desk.answered() >= 16, what="some answers")
    first.kill()
    sent = len(desk.called())
    dry = summary_of(desk.run("--json", "--dry-run"))
    assert dry["done_before"] > 0
    assert dry["item_count"] == everything["item_count"] - dry["done_before"]
    assert dry["tokens"]["output"]["p95"] < everything["tokens"]["output"]["p95"]
    assert len(desk.called()) == sent
    done = desk.run("--json")
    assert done.wait(WAIT_S) == 1, done.logs()
    sent = len(desk.called())
    again = desk.run("--dry-run")
    assert again.wait(WAIT_S) == 0, again.logs()
    assert (
        "before   40 of 42 requests have an answer; this is about what would still run\nrequests 1\n" in again.stderr()
    )
    desk.write(usual)
    summary_of(desk.run("--json"))
    nothing = desk.run("--dry-run")
    assert nothing.wait(WAIT_S) == 0, nothing.logs()
    assert "its results are copied again" in nothing.stderr()
    assert "requests 0: nothing would be sent" in nothing.stderr()
    assert len(desk.called()) == sent


def test_an_empty_input_overwrites_no_results(desk: Desk) -> None:
    desk.write([*lines(2, text="say"), chat_line("refused", behaving("400"))])
    summary_of(desk.run("--json"))
    desk.write([])
    proc = desk.run()
    assert proc.wait(WAIT_S) == 0, proc.logs()
    assert (desk.here / "results.jsonl").read_bytes() == b""
    assert not (desk.here / "results.errors.jsonl").exists()
    assert len((desk.here / "results.jsonl.1.old").read_text().splitlines()) == 2
    assert "results.errors.jsonl.1.old" in proc.stderr()


def test_a_changed_table_runs_its_changed_rows(desk: Desk) -> None:
    write_template(desk)
    rows = [["id", "text"], *([f"x{number}", f"say {number}"] for number in range(6))]
    write_csv(desk.here / "in.csv", rows)
    assert begin(desk, "in.csv", "out.csv").wait(WAIT_S) == 0
    rows[2][1] = "say something else"
    write_csv(desk.here / "in.csv", rows)
    proc = begin(desk, "in.csv", "out.csv", "--json")
    assert summary_of(proc)["found_done"] == 5
    assert len(desk.called()) == 7
    assert len(read_csv(desk.here / "out.csv")) == 6
    assert len(read_csv(desk.here / "out.csv.1.old")) == 6
    assert "out.csv.1.old" in proc.stderr()
    same = begin(desk, "in.csv", "out.csv")
    assert same.wait(WAIT_S) == 0
    assert "old" not in same.stderr()
