"""`tidegate run --template`: tables in and out, whatever is in the cells, wherever they lie, whatever stops the run."""

from __future__ import annotations

import csv
import json
import os
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import obstore
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyarrow import parquet

from tests.cli.conftest import QUICK, Desk
from tests.support.processes import Proc, wait_until
from tests.support.s3 import S3Server
from tests.support.shims import Shims, preload_env
from tests.support.tidegate import behaving, chat_line
from tidegate.cli.run import remote_files, run_table, tables, template
from tidegate.cli.run.answer_columns import AnswerColumns
from tidegate.cli.run.tables import RowTable, open_writer
from tidegate.core.answers.failed_place import split_place
from tidegate.core.errors import SettingsError
from tidegate.core.job_controls import JobControls, MaxErrors
from tidegate.core.job_shape import InputPlaces

CHAT = {"model": "m", "messages": [{"role": "user", "content": "{{ text }}"}], "max_tokens": 8}
RESULTS = ["answer", "error", "finish_reason", "input_tokens", "output_tokens"]


def write_template(desk: Desk, given: object = CHAT) -> None:
    (desk.here / "t.json").write_text(json.dumps(given))


def write_csv(path: Path, rows: Sequence[Sequence[str]]) -> None:
    with path.open("w", newline="") as stream:
        csv.writer(stream).writerows(rows)


def read_csv(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as stream:
        return list(csv.DictReader(stream))


def begin(desk: Desk, source: str, target: str, *more: str, **variables: str) -> Any:
    return desk.start(
        "run", source, "--template", "t.json", "--upstream", desk.engine.url, "-o", target, *more, **variables
    )


def begin_and_wait(desk: Desk, source: str, target: str, *more: str, code: int = 0) -> Any:
    proc = begin(desk, source, target, *more)
    assert proc.wait() == code, proc.logs()
    return proc


def test_rows_come_back_in_order_with_their_answers_and_failures(desk: Desk) -> None:
    write_template(desk)
    texts = [f'say {number}, "twice"\nplease' for number in range(30)]
    texts[7] = behaving("400")
    texts[11] = ""
    write_csv(desk.here / "in.csv", [["id", "text"], *([f"x{n}", text] for n, text in enumerate(texts))])
    proc = begin(desk, "in.csv", "out.csv", "--json")
    assert proc.wait() == 1, proc.logs()
    rows = read_csv(desk.here / "out.csv")
    assert [(row["id"], row["text"]) for row in rows] == [(f"x{n}", text) for n, text in enumerate(texts)]
    assert list(rows[0]) == ["id", "text", *RESULTS]
    assert [n for n, row in enumerate(rows) if row["error"]] == [7]
    assert all(bool(row["answer"]) == (n != 7) for n, row in enumerate(rows))
    assert rows[0]["finish_reason"] == "length"
    assert int(rows[0]["output_tokens"]) == 8
    summary = json.loads(proc.stdout())
    assert (summary["total"], summary["succeeded"], summary["failed"], summary["results"]) == (30, 29, 1, "out.csv")
    assert [(cause["count"], cause["custom_id"]) for cause in summary["failures"]] == [(1, "row-8")]
    assert "1 x 400" in begin_and_wait(desk, "in.csv", "out.csv", code=1).stderr(), "why stands in the summary, too"
    desk.verified(summary["batches"][0])


def test_a_dry_run_of_a_table_says_what_it_would_take_and_sends_nothing(desk: Desk) -> None:
    write_template(desk)
    write_csv(desk.here / "in.csv", [["id", "text"], *([f"x{number}", f"say {number}"] for number in range(9))])
    proc = begin(desk, "in.csv", "out.csv", "--dry-run")
    assert proc.wait() == 0, proc.logs()
    assert "requests 9\n" in proc.stderr()
    assert "Nothing was sent" in proc.stderr()
    unnamed = desk.done("run", "in.csv", "--template", "t.json", "--upstream", desk.engine.url, "--dry-run")
    assert "requests 9\n" in unnamed.stderr(), "results have a name by themselves"
    as_json = begin(desk, "in.csv", "out.csv", "--dry-run", "--json")
    assert as_json.wait() == 0
    assert json.loads(as_json.stdout())["item_count"] == 9
    assert not desk.called()
    assert not (desk.here / "out.csv").exists()
    assert desk.done("batches", "list").stdout().count("batch_") == 0, "nothing is kept"


def test_a_dry_run_of_a_table_says_why_rows_cannot_be_sent(desk: Desk) -> None:
    write_template(desk, {**CHAT, "max_tokens": "{{n}}"})
    write_csv(desk.here / "in.csv", [["text", "n"], *(["say it", f"x{number}"] for number in range(12))])
    proc = begin_and_wait(desk, "in.csv", "out.csv", "--dry-run")
    assert "requests 12, 12 of them cannot be sent\n" in proc.stderr()
    assert "error    row 1: body.max_tokens must be a whole number above zero. (invalid_request)\n" in proc.stderr()
    assert "and 2 more\n" in proc.stderr()


def test_a_table_all_of_whose_rows_fail_stops_by_itself(desk: Desk) -> None:
    write_template(desk)
    write_csv(
        desk.here / "in.csv", [["text"], *([behaving("latency=100,400") + f" {number}"] for number in range(400))]
    )
    proc = begin_and_wait(desk, "in.csv", "out.csv", "--concurrency", "4", code=1)
    assert len(desk.called()) < 300
    assert "each of the first requests failed" in proc.stderr()


def test_rows_that_cannot_be_sent_stop_no_table(desk: Desk) -> None:
    write_template(desk, {**CHAT, "model": "{{ model }}"})
    rows = [["say it", ""]] * 60 + [["say it", "m"]] * 5
    write_csv(desk.here / "in.csv", [["text", "model"], *rows])
    proc = begin_and_wait(desk, "in.csv", "out.csv", code=1)
    assert "5 of 65 rows answered" in proc.stderr()
    assert "stopped" not in proc.stderr()
    assert "(row 1) (as row-1)" in proc.stderr()
    assert all("line" not in row["error"] for row in read_csv(desk.here / "out.csv"))


def test_a_killed_run_goes_on_and_calls_nothing_twice(desk: Desk) -> None:
    write_template(desk)
    table = pa.table({"n": list(range(120)), "text": [behaving("latency=100") + f" {n}" for n in range(120)]})
    parquet.write_table(table, desk.here / "in.parquet")
    first = begin(desk, "in.parquet", "out.parquet")
    wait_until(lambda: len(desk.called()) >= 24, what="some calls")
    first.kill()
    assert not (desk.here / "out.parquet").exists()
    second = begin(desk, "in.parquet", "out.parquet", "--json")
    assert second.wait() == 0, second.logs()
    done = parquet.read_table(desk.here / "out.parquet")
    assert done.schema.names == ["n", "text", *RESULTS]
    assert done.column("n").to_pylist() == list(range(120))
    assert None not in done.column("answer").to_pylist()
    desk.verified(json.loads(second.stdout())["batches"][0])
    called = len(desk.called())
    # What was in flight or not yet durable at the kill may be asked again (P5), and nothing else.
    assert called < 120 + 24 + 8
    third = begin(desk, "in.parquet", "again.jsonl", "--json")
    assert third.wait() == 0, third.logs()
    assert json.loads(third.stdout())["found_done"] == 120
    assert len(desk.called()) == called
    assert [row["answer"] for row in desk.results("again.jsonl")] == done.column("answer").to_pylist()


def test_a_dry_run_of_a_killed_table_is_about_the_rows_that_would_still_run(desk: Desk) -> None:
    write_template(desk)
    texts = [behaving(f"latency={20 if number < 20 else 60_000}") + f" {number}" for number in range(40)]
    write_csv(desk.here / "in.csv", [["text"], *([text] for text in texts)])
    first = begin(desk, "in.csv", "out.csv", "--concurrency", "64")
    wait_until(lambda: "20/40" in first.stderr(), what="half of the answers")
    first.kill()
    dry = begin_and_wait(desk, "in.csv", "out.csv", "--dry-run")
    assert (
        "before   20 of 40 requests have an answer; this is about what would still run\nrequests 20\n" in dry.stderr()
    )


def test_several_parts_become_one_table(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    from tidegate.cli.run import run_table

    table = RowTable([_csv(desk.here / "in.csv", 25)])
    monkeypatch.setattr(run_table, "PART_ROWS_MAX", 10)
    rows = enumerate(table.rows(), 1)
    scratch = desk.here / "scratch"
    scratch.mkdir()
    request = template.read(_template(desk.here / "t.json", CHAT), None)
    counts, ids = [], []
    while part := run_table.write_part(rows, request, scratch, 1 << 20):
        source, count = part
        counts.append(count)
        ids += [json.loads(line)["custom_id"] for line in source.path.read_text().splitlines()]
    assert counts == [10, 10, 5]
    assert ids == [f"row-{number}" for number in range(1, 26)]


def test_the_example_gives_each_row_its_answer(desk: Desk) -> None:
    example = Path(__file__).parents[3] / "examples" / "rows_with_answers.py"
    env = {"PATH": os.environ["PATH"], "HOME": str(desk.here), **QUICK, "MODEL_SERVER_URL": desk.engine.url}
    for _ in range(2):
        run = desk.processes.start([sys.executable, str(example)], name="example", env=env, cwd=desk.here)
        assert run.wait(60) == 0, run.logs()
        assert run.stdout().splitlines()[-1] == "completed: every row has its answer"
    assert len(desk.called()) == 3


def test_tables_and_requests_in_a_bucket(desk: Desk, s3_server: S3Server, s3_bucket: str) -> None:
    write_template(desk)
    where: dict[str, Any] = {
        "TIDEGATE_BLOBS_ENDPOINT": s3_server.endpoint,
        "TIDEGATE_BLOBS_ALLOW_HTTP": "true",
        "TIDEGATE_BLOBS_ACCESS_KEY_ID": s3_server.access_key,
        "TIDEGATE_BLOBS_SECRET_ACCESS_KEY": s3_server.secret_key,
    }
    store = s3_server.store(s3_bucket)
    for number in range(2):
        _csv(desk.here / f"part{number}.csv", 5)
        obstore.put(store, f"in/part{number}.csv", desk.here / f"part{number}.csv")
    proc = begin(desk, f"s3://{s3_bucket}/in/*.csv", f"s3://{s3_bucket}/out/done.jsonl", **where)
    assert proc.wait() == 0, proc.logs()
    assert f"results  s3://{s3_bucket}/out/done.jsonl" in proc.stderr()
    lines = bytes(obstore.get(store, "out/done.jsonl").bytes()).splitlines()
    assert [json.loads(line)["text"] for line in lines] == [f"say {n}" for n in range(5)] * 2
    desk.write_requests(3)
    obstore.put(store, "requests.jsonl", desk.here / "requests.jsonl")
    upstream = ["--upstream", desk.engine.url]
    desk.done("run", f"s3://{s3_bucket}/requests.jsonl", *upstream, "-o", f"s3://{s3_bucket}/results.jsonl", **where)
    first = bytes(obstore.get(store, "results.jsonl").bytes())
    assert len(first.splitlines()) == 3
    desk.write_requests(4)
    obstore.put(store, "requests.jsonl", desk.here / "requests.jsonl")
    named = ("run", f"s3://{s3_bucket}/requests.jsonl", *upstream, "-o", f"s3://{s3_bucket}/results.jsonl")
    edited = desk.done(*named, **where)
    assert f"they are now in s3://{s3_bucket}/results.jsonl.1.old" in edited.stderr()
    assert bytes(obstore.get(store, "results.jsonl.1.old").bytes()) == first
    assert len(bytes(obstore.get(store, "results.jsonl").bytes()).splitlines()) == 4
    assert ".old" not in desk.done(*named, **where).stderr(), "the same results are not kept twice"
    missing = desk.done("run", f"s3://{s3_bucket}/nosuch.jsonl", *upstream, "-o", "out.jsonl", code=2, **where)
    assert "There is no object" in missing.stderr()


def test_several_files_of_requests_by_a_pattern(desk: Desk) -> None:
    desk.write_requests(3).rename(desk.here / "a1.jsonl")
    (desk.here / "a2.jsonl").write_text(
        '{"custom_id": "last", "url": "/v1/chat/completions", "body": ' + json.dumps({**CHAT}) + "}"
    )
    upstream = ["--upstream", desk.engine.url]
    desk.done("run", "a*.jsonl", *upstream, "-o", "results.jsonl")
    assert len(desk.results()) == 4
    assert "say where they go with -o" in desk.done("run", "a*.jsonl", *upstream, code=2).stderr()
    assert "is the input itself" in desk.done("run", "a*.jsonl", *upstream, "-o", "a2.jsonl", code=2).stderr()


def test_lines_of_several_files_are_named_as_their_author_finds_them(desk: Desk) -> None:
    desk.write([chat_line(f"a{number}", "say it") for number in range(5)], "a1.jsonl")
    desk.write([chat_line("b0", "say it"), chat_line("a3", "say it"), "{"], "a2.jsonl")
    asked = ("run", "a*.jsonl", "--upstream", desk.engine.url, "-o", "results.jsonl")
    twice = "line 2: a2.jsonl: Line 4 of a1.jsonl has this custom_id already"
    for more in ([], ["--dry-run"]):
        refused = desk.done(*asked, *more, code=2).stderr()
        assert twice in refused, refused
        assert "line 3: a2.jsonl: " in refused
    report = desk.json_of(*asked, "--json", "--fresh", code=2)
    assert [error["line"] for error in report["errors"]] == [2, 3]
    lenient = desk.done(*asked, "--invalid-lines", "error_file", code=1).stderr()
    assert "(line 2 of a2.jsonl) (as a3)" in lenient, lenient
    places = [split_place(line["error"]["message"])[1] for line in desk.results("results.errors.jsonl")]
    assert places == ["line 2 of a2.jsonl", "line 3 of a2.jsonl"]


def test_a_store_names_lines_of_several_files_and_rows_as_their_author_finds_them(desk: Desk) -> None:
    """What other commands show of a batch has no numbers of a file that only the run saw."""
    desk.write([chat_line(f"a{number}", "say it") for number in range(5)], "a(1).jsonl")
    unbounded = json.dumps({**json.loads(chat_line("b2", "say it")), "body": {**CHAT, "max_tokens": "x"}})
    desk.write([chat_line("b0", behaving("400")), chat_line("a3", "say it"), unbounded, "{"], "b.jsonl")
    asked = ("run", "*.jsonl", "--upstream", desk.engine.url, "-o", "out/results.jsonl", "--model", "m", "--json")
    (desk.here / "out").mkdir()
    batch = desk.json_of(*asked, "--invalid-lines", "error_file", code=1)["batch"]
    shown = desk.done("batches", "output", batch, "--errors").stdout()
    messages = {line["custom_id"]: failure_of(line) for line in map(json.loads, shown.splitlines())}
    assert split_place(messages["a3"]) == (
        "Line 4 of a(1).jsonl has this custom_id already: give every line one of its own.",
        "line 2 of b.jsonl",
    )
    assert split_place(messages["b2"])[1] == "line 3 of b.jsonl"
    assert split_place(messages[None])[1] == "line 4 of b.jsonl"
    assert sorted(shown.splitlines()) == sorted((desk.here / "out/results.errors.jsonl").read_text().splitlines())
    write_template(desk, {**CHAT, "max_tokens": "{{n}}"})
    desk.write([json.dumps({"text": "say it", "n": "x" if number == 2 else 8}) for number in range(5)], "in.jsonl")
    table = json.loads(begin_and_wait(desk, "in.jsonl", "out.csv", "--json", code=1).stdout())
    (line,) = desk.done("batches", "output", table["batches"][0], "--errors").stdout().splitlines()
    assert split_place(failure_of(json.loads(line)))[1] == "row 3"


def test_files_of_one_name_are_named_with_their_folders(desk: Desk) -> None:
    for folder in ("d1", "d2"):
        (desk.here / folder).mkdir()
        desk.write([chat_line(f"{folder}-0", "say it"), "{"], f"{folder}/a.jsonl")
    refused = desk.done("run", "d*/a.jsonl", "--upstream", desk.engine.url, "-o", "results.jsonl", code=2).stderr()
    assert "line 2: d1/a.jsonl: " in refused
    assert "line 2: d2/a.jsonl: " in refused


@pytest.mark.parametrize(
    ("source", "output", "is_read"),
    [
        ("in/*.jsonl", "in/out.jsonl", True),
        ("*/*.jsonl", "in/../in/out.jsonl", True),
        ("**/*.jsonl", "in/deep/out.jsonl", True),
        ("in/*.jsonl", "in/deep/out.jsonl", False),
        ("in/part-*.jsonl", "in/out.jsonl", False),
        ("in/a.jsonl", "in/a.jsonl", False),
        ("s3://bucket/in/*.csv", "s3://bucket/in/out.csv", True),
        ("s3://bucket/in/*.csv", "s3://bucket/out/out.csv", False),
        ("s3://bucket/in/*.csv", "in/out.csv", False),
    ],
)
def test_results_are_never_what_the_next_run_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, output: str, *, is_read: bool
) -> None:
    (tmp_path / "in" / "deep").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SettingsError, match="the next run would read it") if is_read else nullcontext():
        remote_files.check_apart(output, source)


def failure_of(line: dict[str, Any]) -> str:
    """The message of a failed line."""
    error = line["error"] or line["response"]["body"]["error"]
    return str(error["message"])


def in_parts(desk: Desk, source: str, *more: str, **variables: str) -> Proc:
    """`tidegate run` over a table whose parts have ten rows."""
    code = "import sys, tidegate.cli.run.run_table as t; t.PART_ROWS_MAX = 10; from tidegate.cli import main; sys.exit(main())"
    asked = ["run", source, "--template", "t.json", "--upstream", desk.engine.url, "-o", "out.csv", *more]
    env = {"PATH": os.environ["PATH"], "HOME": str(desk.here), **QUICK, **variables}
    return desk.processes.start([sys.executable, "-c", code, *asked], name="run", env=env, cwd=desk.here)


def test_a_dry_run_of_a_killed_table_of_several_parts_sums_up_what_is_left(desk: Desk) -> None:
    write_template(desk)
    texts = [behaving(f"latency={20 if number < 15 else 60_000}") + f" {number}" for number in range(35)]
    write_csv(desk.here / "in.csv", [["text"], *([text] for text in texts)])
    first = in_parts(desk, "in.csv", "--concurrency", "64")
    wait_until(lambda: "Rows 11 to 20:" in first.stderr() and "5/10" in first.stderr(), what="a part and a half")
    first.kill()
    sent = len(desk.called())
    dry = in_parts(desk, "in.csv", "--dry-run")
    assert dry.wait() == 0, dry.logs()
    inputs = [text for text in dry.stderr().splitlines() if text.startswith(("input ", "requests ", "all "))]
    assert inputs == [
        "input    rows 1 to 10",
        "requests 0: nothing would be sent",
        "input    rows 11 to 20",
        "requests 5",
        "input    rows 21 to 30",
        "requests 10",
        "input    rows 31 to 35",
        "requests 5",
        "all      4 parts of in.csv",
        "requests 20",
    ]
    assert "before   15 of 35 requests have an answer; this is about what would still run\n" in dry.stderr()
    assert dry.stderr().count("Nothing was sent") == 1
    scripted = in_parts(desk, "in.csv", "--dry-run", "--json")
    assert scripted.wait() == 0, scripted.logs()
    estimate = json.loads(scripted.stdout())
    assert (estimate["input"], estimate["item_count"], estimate["done_before"], estimate["valid"]) == (
        "in.csv",
        20,
        15,
        True,
    )
    assert [part["item_count"] for part in estimate["parts"]] == [0, 5, 10, 5]
    assert estimate["tokens"]["output"]["p95"] == sum(part["tokens"]["output"]["p95"] for part in estimate["parts"])
    assert len(desk.called()) == sent


def test_the_bounds_of_a_table_count_over_all_of_its_parts(desk: Desk) -> None:
    write_template(desk)
    failing = {3, 7, 12, 25}
    texts = [behaving("400") + f" {number}" if number in failing else f"say {number}" for number in range(35)]
    write_csv(desk.here / "in.csv", [["text"], *([text] for text in texts)])
    run = in_parts(desk, "in.csv", "--max-errors", "2", "--json")
    assert run.wait() == 1, run.logs()
    summary = json.loads(run.stdout())
    assert summary["total"] == 20, "two rows of the first part failed, and the next one is too many"
    larger = in_parts(desk, "in.csv", "--max-errors", "4", "--json")
    assert larger.wait() == 1, larger.logs()
    summary = json.loads(larger.stdout())
    assert (summary["total"], summary["failed"]) == (35, 4)


def test_a_cost_bounds_all_parts_of_a_table_and_is_shown_at_its_end() -> None:
    ending = run_table.TableEnding(row_count=10, answered_count=8, cost_nano=700)
    assert "\ncost     0.0000007\n" in ending.for_people("out.csv", "", has_bound=False)
    assert ending.for_scripts("out.csv")["cost"] == "0.0000007"
    unpriced = run_table.TableEnding(row_count=10, answered_count=8)
    assert "\ncost     0: no answer had a price" in unpriced.for_people("out.csv", "", has_bound=True)
    assert "\ncost " not in unpriced.for_people("out.csv", "", has_bound=False)
    asked = JobControls(max_cost_nano=1_000, max_errors=MaxErrors(count=5))
    assert ending.bounds_left(asked) == JobControls(max_cost_nano=300, max_errors=MaxErrors(count=3))
    share = JobControls(max_errors=MaxErrors(share_ppm=50_000, after=100))
    assert ending.bounds_left(share) == share


def test_a_row_of_a_later_part_keeps_its_number() -> None:
    places = InputPlaces(rows_before=500_000)
    assert (places.number(3), places.words(3), places.name(3)) == (500_003, "row 500003", "")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("[]", "must be a JSON object"),
        ("{", "is not JSON"),
        ('{"input": "{{text}}"}', "names no endpoint"),
        ('{"body": {"messages": []}, "custom_id": "x"}', "has custom_id beside body"),
    ],
)
def test_a_template_that_cannot_be_used_is_refused(tmp_path: Path, given: str, message: str) -> None:
    path = tmp_path / "t.json"
    path.write_text(given)
    with pytest.raises(SettingsError, match=message):
        template.read(path, None)


def test_a_placeholder_alone_keeps_its_type_and_one_in_a_text_is_written_out(tmp_path: Path) -> None:
    given = {"messages": ["{{a}}", "{{ a }} and {{b}}"], "n": "{{a}}", "stop": None}
    request = template.read(_template(tmp_path / "t.json", given), None)
    assert request.endpoint == "/v1/chat/completions"
    assert request.columns == {"a", "b"}
    line = json.loads(request.line("row-1", {"a": 3, "b": None}))
    assert line == {
        "custom_id": "row-1",
        "method": "POST",
        "url": "/v1/chat/completions",
        "body": {"messages": [3, "3 and "], "n": 3, "stop": None},
    }
    with pytest.raises(SettingsError, match="row 2 has no column b, which the template names: add it"):
        request.line("row-2", {"a": 1})


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.csv", "a,a\n1,2\n", "has the column a twice"),
        ("a.csv", "", "is empty"),
        ("a.csv", "a,b\n1\n", "row 1 has 1 cells where the header has 2"),
        ("a.csv", "a,b\n1\n", "put a cell with commas in it in quotes"),
        ("a.csv", 'a\nx\n"open\nmore', 'begins at line 3: a cell begins with " and the file ends before it does'),
        ("a.csv", 'a\n"x\ny"\n"z"q\n', "begins at line 4: "),
        ("a.csv", "a,b\n\n1\n", "row 2 has 1 cells"),
        ("a.csv", f"a\n{'x' * 50}\n", "begins at line 2: a cell has more than 40 characters"),
        ("a.csv", 'a\n"x"y\n', r"begins at line 2: .*write a cell that has commas, quotes or lines"),
        ("a.csv", "a\n1\ncaf\udce9\n", "line 3 is not UTF-8: save the table as UTF-8"),
        ("a.csv", "\udcff\udcfea\x00\n\x001\x00", "iconv -f UTF-16 -t UTF-8"),
        ("a.jsonl", "[1]\n", "line 1 is no JSON object"),
        ("a.parquet", "no", r"cannot be read as Parquet: .*[^.]\.$"),
        ("a.txt", "x", "is no table that can be read"),
    ],
)
def test_a_table_that_cannot_be_read_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, content: str, message: str
) -> None:
    monkeypatch.setattr(tables, "CELL_CHARS_MAX", 40)
    path = tmp_path / name
    path.write_text(content, errors="surrogateescape")
    with pytest.raises(SettingsError, match=message):
        list(RowTable([path]).rows())


def test_a_table_of_another_format_is_named_as_it_was_given(desk: Desk) -> None:
    _template(desk.here / "t.json", {"messages": ["{{a}}"]})
    (desk.here / "a.xlsx").write_bytes(b"PK")
    refused = desk.done("run", "a.xlsx", "--template", "t.json", "--upstream", desk.engine.url, code=2).stderr()
    assert "a.xlsx is no table that can be read: it must be CSV" in refused


@pytest.mark.parametrize(
    ("header", "message"),
    [
        ("id,reviews,text", "did you mean reviews\\?"),
        ("id;review", "parted by semicolons: save it with commas"),
        (",".join(f"c{number}" for number in range(100)), "it has c0, .*, c19 and 80 more"),
    ],
)
def test_a_column_that_is_not_there_is_reported_with_what_may_be_meant(
    tmp_path: Path, header: str, message: str
) -> None:
    table = tmp_path / "a.csv"
    table.write_text(f"{header}\n")
    request = template.read(_template(tmp_path / "t.json", {"messages": ["{{review}}"]}), None)
    with pytest.raises(SettingsError, match=message):
        run_table.check_columns(RowTable([table]), request)


@pytest.mark.parametrize("name", ["out.csv", "out.jsonl", "out.parquet"])
def test_a_full_disk_loses_no_answer_of_a_table(desk: Desk, shims: Shims, name: str) -> None:
    write_template(desk)
    (desk.here / "full").mkdir()
    disk = shims.disk(desk.here / "full")
    disk.fail("enospc-write")
    write_csv(desk.here / "in.csv", [["id", "text"], *([f"x{number}", "say it"] for number in range(9))])
    refused = begin(desk, "in.csv", f"full/{name}", **preload_env(disk, base={}))
    assert refused.wait() == 2, refused.logs()
    assert f"full/{name} cannot be written: " in refused.stderr()
    assert "The results are kept; make room, or choose another place" in refused.stderr()
    assert list((desk.here / "full").iterdir()) == []
    called = len(desk.called())
    again = begin(desk, "in.csv", "elsewhere.csv")
    assert again.wait() == 0, again.logs()
    assert (len(desk.called()), len(read_csv(desk.here / "elsewhere.csv"))) == (called, 9)


def test_a_link_to_a_table_stays_and_a_device_is_refused(desk: Desk) -> None:
    write_template(desk)
    write_csv(desk.here / "in.csv", [["text"], ["say it"]])
    (desk.here / "linked.csv").symlink_to("real.csv")
    begin_and_wait(desk, "in.csv", "linked.csv")
    assert (desk.here / "linked.csv").is_symlink()
    assert len(read_csv(desk.here / "real.csv")) == 1
    (desk.here / "device.csv").symlink_to("/dev/null")
    assert "device.csv is no file" in begin_and_wait(desk, "in.csv", "device.csv", code=2).stderr()


def test_parquet_without_its_library_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    with pytest.raises(SettingsError, match=r"pip install 'tidegate\[tables\]'"):
        RowTable([tmp_path / "a.parquet"])


CELLS = st.one_of(st.none(), st.text(), st.integers(-(2**53), 2**53), st.booleans())


@given(st.lists(st.fixed_dictionaries({"a": st.text(), "b": CELLS}), max_size=5))
def test_rows_survive_jsonl(tmp_path_factory: pytest.TempPathFactory, rows: list[dict[str, Any]]) -> None:
    folder = tmp_path_factory.mktemp("rows")
    writer = open_writer(folder / "out.jsonl", ".jsonl", RowTable([_csv(folder / "in.csv", 0)]), {})
    writer.write(rows)
    writer.close()
    assert list(RowTable([folder / "out.jsonl"]).rows()) == rows


@given(st.lists(st.text(st.characters(exclude_characters="\x00\r", exclude_categories=["Cs"])), max_size=5))
def test_texts_survive_csv(tmp_path_factory: pytest.TempPathFactory, texts: list[str]) -> None:
    folder = tmp_path_factory.mktemp("rows")
    writer = open_writer(folder / "out.csv", ".csv", RowTable([_csv(folder / "in.csv", 0)]), {"answer": "text"})
    rows = [{"id": "x", "text": text, "answer": text} for text in texts]
    writer.write(rows)
    writer.close()
    assert list(RowTable([folder / "out.csv"]).rows()) == rows


def test_result_columns_keep_away_from_the_tables_own() -> None:
    columns = AnswerColumns("/v1/chat/completions", ["answer", "x"])
    assert list(columns.kinds) == [f"tidegate_{name}" for name in RESULTS]
    with pytest.raises(SettingsError, match="has a column tidegate_answer already"):
        AnswerColumns("/v1/chat/completions", ["answer", "tidegate_answer"])


@pytest.mark.parametrize(
    ("endpoint", "body", "answer"),
    [
        ("/v1/chat/completions", {"choices": [{"message": {"content": "hi"}}]}, {"answer": "hi"}),
        ("/v1/completions", {"choices": [{"text": "hi", "finish_reason": "stop"}]}, {"answer": "hi"}),
        (
            "/v1/embeddings",
            {"data": [{"embedding": [1.0, 2.0]}], "usage": {"prompt_tokens": 3}},
            {"embedding": [1.0, 2.0]},
        ),
        ("/v1/responses", {"output": [{"content": [{"text": "a"}, {"text": "b"}]}]}, {"answer": "ab"}),
        ("/v1/messages", {"content": [{"type": "text", "text": "hi"}], "usage": {"input_tokens": 3}}, {"answer": "hi"}),
        ("/v1/rerank", {"results": [1]}, {"answer": '{"results":[1]}'}),
    ],
)
def test_every_shape_of_answer_fills_its_column(endpoint: str, body: dict[str, Any], answer: dict[str, Any]) -> None:
    line = json.dumps({"custom_id": "row-1", "response": {"status_code": 200, "body": body}, "error": None})
    row = AnswerColumns(endpoint, []).add({}, line.encode())
    assert answer.items() <= row.items()
    assert row["error"] is None


def test_an_address_without_a_key_is_refused() -> None:
    for name in ("s3://", "s3://bucket", "s3://bucket/", "s3://bucket/folder/"):
        with pytest.raises(SettingsError, match="names no object"):
            remote_files.check_address(name)


def _csv(path: Path, count: int) -> Path:
    write_csv(path, [["id", "text"], *([f"x{n}", f"say {n}"] for n in range(count))])
    return path


def _template(path: Path, given: object) -> Path:
    path.write_text(json.dumps(given))
    return path
