"""`tidegate batches create` with all that the API can do: asked before, controlled while it runs, and shaped."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from typing import Any

import msgspec
import pytest

from tests.cli.conftest import Desk, Serving
from tests.support.tidegate import behaving, chat_line
from tidegate.web.requests.requests import BatchCreate


class Counter(Serving):
    """A desk with a server beside it that serves two models."""

    def __init__(self, desk: Desk) -> None:
        desk.write_requests(6)
        (desk.here / "tidegate.yaml").write_text(
            f"models:\n  m: {{deployments: [{{url: '{desk.engine.url}'}}]}}\n"
            f"  large: {{deployments: [{{url: '{desk.engine.url}'}}]}}\n"
        )
        super().__init__(desk, "--config", "tidegate.yaml")

    def asked(self, path: str) -> dict[str, Any]:
        status, answer = self.call("GET", path)
        assert status == 200, answer
        return dict(answer)

    def created(self, *arguments: str) -> dict[str, Any]:
        """The batch of this command, as the API shows it."""
        proc = self.desk.done("batches", "create", "requests.jsonl", *arguments)
        return self.asked(f"/v1/batches/{proc.stdout().strip()}")

    def refused(self, *arguments: str) -> str:
        return self.desk.done("batches", "create", *arguments, code=2).stderr()


@pytest.fixture
def counter(desk: Desk) -> Counter:
    return Counter(desk)


def test_options_and_fields_are_what_the_api_keeps(counter: Counter) -> None:
    (counter.desk.here / "schema.json").write_text('{"type": "object"}')
    tomorrow = int(time.time()) + 86_400
    typed = f"--priority 7 --not-before {tomorrow} --window 36h --max-cost 2.5 --max-errors 5% --canary 3"
    options = f"{typed} --dedupe --ordered --schema schema.json --metadata team=search".split()
    fields: Mapping[str, object] = {
        "retry.attempts_max": 5,
        "retry.codes": ["500", "upstream_timeout"],
        "defaults.temperature": 0,
        "overrides.max_tokens": 3,
        "answers.tries_max": 4,
        "answers.feedback": True,
        "answers.escalate_to": "large",
        "canary.then": "wait",
        "output_file_bytes_max": 4096,
        "prefix_order": False,
        "invalid_lines": "error_file",
    }
    given = [word for name, value in fields.items() for word in ("--field", f"{name}={_typed(value)}")]
    made = counter.created(*options, *given)
    ours = made["tidegate"]
    assert made["metadata"] == {"team": "search"}
    assert made["completion_window"] == "36h"
    assert (ours["priority"], ours["not_before"], ours["max_cost"]) == (7, tomorrow, "2.5")
    assert ours["max_errors"] == {"count": None, "share": 0.05, "after": 100}
    assert (ours["canary"]["items"], ours["canary"]["then"]) == (3, "wait")
    assert ours["retry"] | {"attempts_max": 5, "codes": ["500", "upstream_timeout"]} == ours["retry"]
    assert (ours["defaults"], ours["overrides"]) == ({"temperature": 0}, {"max_tokens": 3})
    answers = {"schema": {"type": "object"}, "tries_max": 4, "feedback": True, "escalate_to": "large"}
    assert ours["answers"] == answers
    assert ours["output_file_bytes_max"] == 4096
    counter.desk.done("batches", "cancel", made["id"])
    earlier = counter.created()["id"]
    counter.desk.done("batches", "watch", earlier)
    again = counter.created("--field", f"reuse_from={earlier}")["id"]
    assert "6/6 done" in counter.desk.done("batches", "watch", again).stderr()
    assert counter.asked(f"/v1/batches/{again}")["tidegate"]["reused"] == 6 == len(counter.desk.called())


def _typed(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def test_every_field_of_the_api_can_be_given(counter: Counter) -> None:
    """An unknown one is refused by its name, so one that is not was taken."""
    wrong: dict[str, str] = {}
    for name in msgspec.structs.fields(BatchCreate):
        if name.name in ("endpoint", "input_file_id", "input_file_ids", "custom_llm_provider", "validate_only"):
            continue
        error = counter.refused("requests.jsonl", "--field", f"{name.name}=[[]]")
        if f"`{name.name}` must be" not in error and name.name not in error:
            wrong[name.name] = error
        assert "Unknown parameter" not in error, error
    assert not wrong
    assert "Did you mean `priority`?" in counter.refused("requests.jsonl", "--field", "prioritty=1")
    assert counter.asked("/v1/batches")["data"] == []


def test_several_files_are_one_batch(counter: Counter) -> None:
    counter.desk.write([chat_line("d0", "say d0"), chat_line("d1", "say d1")], "more.jsonl")
    made = counter.created("more.jsonl")
    assert len(made["tidegate"]["input_file_ids"]) == 2
    watched = counter.desk.done("batches", "watch", made["id"]).stderr()
    assert "8/8 done, 0 failed" in watched
    assert "There is no file gone.jsonl" in counter.refused("requests.jsonl", "gone.jsonl")
    assert len(counter.asked("/v1/files?purpose=batch")["data"]) == 2, "nothing is uploaded of a list with a hole"
    file_id = made["input_file_id"]
    assert "needs --endpoint" in counter.refused(file_id)
    counter.desk.done("batches", "create", file_id, "more.jsonl", "--endpoint", "/v1/chat/completions")


def test_a_dry_run_says_what_a_batch_would_take_and_keeps_nothing(counter: Counter) -> None:
    desk = counter.desk
    estimate = desk.done("batches", "create", "requests.jsonl", "--dry-run").stderr()
    assert "requests 6" in estimate
    assert "tokens   about" in estimate
    assert estimate.rstrip().endswith("Nothing was kept; leave --dry-run out to create it.")
    facts = desk.json_of("batches", "create", "requests.jsonl", "--dry-run", "--json")
    assert (facts["object"], facts["valid"], facts["request_counts"]["total"]) == ("batch.validation", True, 6)
    desk.write([chat_line("c0", "x"), "nonsense", chat_line("c0", "y")], "bad.jsonl")
    bad = counter.refused("bad.jsonl", "--dry-run")
    assert "error    line 2:" in bad
    assert "error    line 3:" in bad
    assert bad.rstrip().endswith("Nothing was kept; fix this and try again.")
    some = desk.done("batches", "create", "bad.jsonl", "--dry-run", "--field", "invalid_lines=error_file").stderr()
    assert "2 of them cannot be sent" in some
    assert "error    line 2:" in some
    assert "must be one of" in counter.refused("requests.jsonl", "--dry-run", "--endpoint", "/v1/nonsense")
    assert counter.asked("/v1/files")["data"] == []
    assert counter.asked("/v1/batches")["data"] == []
    assert not desk.called()
    sent = desk.json_of("files", "upload", "requests.jsonl", "--json")["id"]
    desk.done("batches", "create", sent, "--endpoint", "/v1/chat/completions", "--dry-run")
    assert [one["id"] for one in counter.asked("/v1/files")["data"]] == [sent], "what was there before stays"


def test_what_contradicts_itself_is_refused_before_anything_is_sent(counter: Counter) -> None:
    cases = {
        ("--canary", "3", "--field", "canary.items=4"): "canary.items is given twice",
        ("--priority", "1", "--field", "priority=1"): "priority is given twice",
        ("--field", "priority"): "write NAME=VALUE",
        ("--not-before", "tonight"): "--not-before tonight: write a day",
        ("--max-errors", "many"): "neither a count such as 100 nor a share",
        ("--schema", "gone.json"): "--schema gone.json cannot be read: No such file or directory.",
        ("--max-errors", "none"): "neither a count such as 100 nor a share",
        ("--metadata", "search"): "--metadata takes KEY=VALUE",
        ("--metadata", "a=1", "--metadata", "a=2"): "each key once",
        ("--field", "validate_only=true"): "--field validate_only: give --dry-run.",
        ("--field", "endpoint=/v1/embeddings"): "--field endpoint: give --endpoint.",
        ("--field", "input_file_id=file-x"): "name the file",
        ("--field", 'input_file_ids=["file-x"]'): "name the files",
    }
    for arguments, why in cases.items():
        assert why in counter.refused("requests.jsonl", *arguments)
    assert counter.asked("/v1/files")["data"] == []


def test_what_was_uploaded_for_a_batch_that_is_refused_goes_again(counter: Counter) -> None:
    desk = counter.desk
    sent = desk.json_of("files", "upload", "requests.jsonl", "--json")["id"]
    assert "from -100 to 100" in counter.refused("requests.jsonl", "--priority", "500")
    assert "from -100 to 100" in counter.refused(
        sent, "requests.jsonl", "--priority", "500", "--endpoint", "/v1/embeddings"
    )
    assert [one["id"] for one in counter.asked("/v1/files")["data"]] == [sent]


def test_a_dry_run_names_the_files_as_the_command_did(counter: Counter) -> None:
    counter.desk.write([chat_line("c0", "again")], "more.jsonl")
    wrong = counter.refused("requests.jsonl", "more.jsonl", "--dry-run")
    assert "line 1: more.jsonl: Line 1 of requests.jsonl has this custom_id already" in wrong
    assert "file-" not in wrong
    facts = counter.desk.done("batches", "create", "requests.jsonl", "more.jsonl", "--dry-run", "--json", code=2)
    assert "file-" not in facts.stdout()


def test_lists_are_asked_for_by_date(counter: Counter) -> None:
    first = counter.created()["id"]
    day, at = "2001-01-01", counter.asked(f"/v1/batches/{first}")["created_at"]
    for where in ((), ("--server", counter.url)):

        def listed(*options: str, where: tuple[str, ...] = where) -> list[str]:
            found = counter.desk.json_of("batches", "list", "--json", *options, *where)
            return [one["id"] for one in found]

        assert listed("--created-after", day) == listed("--created-after", str(at)) == [first]
        assert listed("--created-before", day) == listed("--created-after", str(at + 1)) == []
        assert listed("--created-before", str(at)) == []
        assert listed("--created-after", day, "--created-before", str(at + 1)) == [first]
    assert (
        "--created-after x: write a day"
        in counter.desk.done("batches", "list", "--created-after", "x", code=2).stderr()
    )


def test_a_run_takes_parameters_and_retries(desk: Desk) -> None:
    desk.write([chat_line("c0", "say it at some length, please"), chat_line("c1", behaving("500x2"))])
    fields = ("--field", "overrides.max_tokens=2", "--field", "retry.attempts_max=1", "--field", "defaults.seed=7")
    assert desk.run(*fields).wait(60) == 1
    [line] = desk.results()
    assert line["response"]["body"]["usage"]["completion_tokens"] == 2
    assert len(desk.called()) == 2, "one attempt each"
    again = desk.run(*fields, "--retry-failed")
    assert again.wait(60) == 1, again.logs()
    assert len(desk.called()) == 3
    # How often a line is tried makes it no other run; parameters do.
    more = desk.run(*fields[:2], "--field", "defaults.seed=7", "--field", "retry.attempts_max=5", "--retry-failed")
    assert more.wait(60) == 0, more.logs()
    assert len(desk.results()) == 2
    assert len(desk.called()) == 6, "refused twice, then answered"
    assert desk.run("--field", "overrides.max_tokens=3").wait(60) == 0
    assert len(desk.called()) == 10
    for pair, why in {
        "overrides.model=x": "each line says it",
        "overrides.messages=[]": "each line says it",
        "priority=1": "Unknown parameter `priority`",
        "retry.attempts_max=0": "must be a whole number from 1",
        "answers.feedback=true": "`answers.schema` is missing",
    }.items():
        refused = desk.run("--field", pair)
        assert refused.wait(60) == 2, refused.logs()
        assert why in refused.stderr()
    assert len(desk.called()) == 10


def test_a_run_that_is_gone_on_with_asks_the_stronger_model(desk: Desk) -> None:
    (desk.here / "schema.json").write_text('{"type": "object"}')
    (desk.here / "tidegate.yaml").write_text(
        f"models:\n  m: {{deployments: [{{url: '{desk.engine.url}'}}]}}\n"
        f"  large: {{deployments: [{{url: '{desk.engine.url}'}}]}}\n"
    )
    desk.write_requests(2)
    usual = ("run", "requests.jsonl", "--config", "tidegate.yaml", "-o", "r.jsonl", "--no-check")
    schema = ("--schema", "schema.json", "--field", "answers.tries_max=0")
    assert desk.start(*usual, *schema).wait(60) == 1
    assert [call["model"] for call in desk.called()] == ["m", "m"]
    # A third field makes it no other run: its lines that did not fit go to the stronger model now.
    assert desk.start(*usual, *schema, "--field", "answers.escalate_to=large", "--retry-failed").wait(60) == 1
    assert sorted(call["model"] for call in desk.called()) == ["large", "large", "m", "m", "m", "m"]
    unknown = desk.start(*usual[:-1], *schema, "--field", "answers.escalate_to=nosuch", "--fresh")
    assert unknown.wait(60) == 2, unknown.logs()
    assert "no deployment of the model 'nosuch', which answers.escalate_to names" in unknown.stderr()
