"""`tidegate usage` and the operator's route: what a run used and cost, told apart as asked, exact to the billionth."""

from __future__ import annotations

import csv
import io
import json
from decimal import Decimal

import pytest

from tests.cli.conftest import Desk

CONFIG = """
models:
  m:
    deployments:
      - {{url: "{url}", price: {{input: 2, cached: 1, output: 4, batch_factor: 0.5}}}}
"""


@pytest.fixture
def ran(desk: Desk) -> Desk:
    (desk.here / "c.yaml").write_text(CONFIG.format(url=desk.engine.url))
    desk.write_requests(12)
    desk.done("run", "requests.jsonl", "--config", "c.yaml", "-o", "results.jsonl")
    return desk


def test_what_a_run_used_and_cost(ran: Desk) -> None:
    usages = [line["response"]["body"]["usage"] for line in ran.results()]
    prompt = sum(usage["prompt_tokens"] for usage in usages)
    cached = sum((usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0) for usage in usages)
    output = sum(usage["completion_tokens"] for usage in usages)
    [used] = [json.loads(one) for one in ran.done("usage", "--by", "organization,model").stdout().splitlines()]
    assert (used["organization"], used["model"], used["calls"]) == ("default", "m", 12)
    assert (used["input_tokens"], used["cached_tokens"], used["output_tokens"]) == (prompt, cached, output)
    want = (Decimal(prompt - cached) * 2 + Decimal(cached) + Decimal(output) * 4) / 2 / 10**6
    assert Decimal(used["cost"]) == want
    assert sum(Decimal(used[part]) for part in ("input_cost", "cached_cost", "output_cost")) == want
    table = list(csv.DictReader(io.StringIO(ran.done("usage", "--by", "job,deployment", "--format", "csv").stdout())))
    assert [(row["deployment"], row["calls"]) for row in table] == [("m/1", "12")]
    assert Decimal(table[0]["cost"]) == want
    # The days that are shown without a first one, and a single day, on which nothing happened.
    for first, arguments in (("2001-01-01", []), ("2001-01-31", ["--from", "2001-01-31"])):
        quiet = ran.done("usage", *arguments, "--to", "2001-01-31")
        assert (quiet.stdout(), quiet.stderr()) == ("", f"Nothing was used from {first} to 2001-01-31.\n")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--by", "mood"], "day, organization, team"),
        (["--by", ""], "day, organization, team"),
        (["--from", "yesterday"], "2026-11-01"),
        (["--from", "2026-02-02", "--to", "2026-02-01"], "earlier day first"),
        (["--org", "unknown"], "no organization"),
    ],
)
def test_what_cannot_be_reported(ran: Desk, arguments: list[str], says: str) -> None:
    assert says in ran.done("usage", *arguments, code=2).stderr()
