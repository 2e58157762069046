"""`validate_only` and `GET /v1/limits`: all that can be known of a batch and of a key's room, with nothing sent and nothing kept."""

from __future__ import annotations

import asyncio
import json
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx2
import pytest
from msgspec.structs import replace

from tests.support.processes import wait_until
from tests.web.calls import create, is_error, kept, upload
from tests.web.server import WebServer, model_at
from tidegate.core.budgets.budget import Limit, Period
from tidegate.core.input.lines import LineRules
from tidegate.core.input.turns import IngestLane
from tidegate.core.schedule.job_estimate import EstimateRange, ModelLoad, cost_nano, output_tokens
from tidegate.core.schedule.outlooks import Minute
from tidegate.core.usage.estimate import prompt_tokens
from tidegate.core.usage.prices import Price
from tidegate.settings.capacity import DeploymentPrice
from tidegate.stages.ingest.ingest_file import InputPasses
from tidegate.web.jobs.limit_rooms import LimitSides
from tidegate.web.jobs.validation import NO_TOKENS, CostShown, EtaSeconds, JobEstimate, _exceeds, _loads, together

CHAT = "/v1/chat/completions"
FIELDS = {
    "object", "valid", "errors", "request_counts", "deduplicated", "reused", "tokens", "cost",
    "eta_seconds", "shared_prefix_share", "limits", "refused",
}  # fmt: skip


def line(number: int, **body: Any) -> bytes:
    asked = {"model": "m", "messages": [{"role": "user", "content": f"Say {number}."}], "max_tokens": 10, **body}
    return json.dumps({"custom_id": f"c{number}", "url": CHAT, "body": asked}).encode() + b"\n"


def validated(client: httpx2.Client, data: bytes, **more: Any) -> dict[str, Any]:
    answer = client.post(
        "/v1/batches",
        json={"input_file_id": upload(client, data), "endpoint": CHAT, "validate_only": True, **more},
    )
    assert answer.status_code == 200, answer.text
    report = dict(answer.json())
    assert set(report) == FIELDS
    assert report["object"] == "batch.validation"
    return report


@pytest.mark.parametrize("count", [3, 2_000], ids=["read by a thread", "read by a process"])
def test_a_good_input_is_reported_in_full_and_nothing_is_kept(
    web: WebServer, client: httpx2.Client, count: int
) -> None:
    data = b"".join(line(number) for number in range(count))
    file_id = upload(client, data)
    before, jobs = kept(web), web.statement("select count(*) from jobs")
    report = client.post("/v1/batches", json={"input_file_id": file_id, "endpoint": CHAT, "validate_only": True}).json()
    assert (report["valid"], report["errors"]) == (True, {"object": "list", "data": []})
    assert report["request_counts"]["total"] == count
    assert report["tokens"]["output"]["p95"] == 10 * count
    assert report["tokens"]["output"]["p5"] <= report["tokens"]["output"]["p50"] <= 10 * count
    assert count <= report["tokens"]["input"] <= 40 * count
    prompts = report["tokens"]["input_range"]
    assert prompts["p5"] < report["tokens"]["input"] == prompts["p50"] < prompts["p95"]
    assert report["cost"] == {"p5": "0", "p50": "0", "p95": "0"}
    assert report["eta_seconds"] is None
    assert 0 < report["shared_prefix_share"] < 1
    assert (kept(web), web.statement("select count(*) from jobs")) == (before, jobs)
    assert list(web.context.scratch.iterdir()) == []


def test_one_tenants_dry_runs_take_turns_and_keep_no_other_tenant_waiting(
    start_web: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    release = threading.Event()
    begun: list[IngestLane] = []
    real = InputPasses.__call__

    async def held(self: InputPasses, input_path: Path, work_path: Path, rules: LineRules, lane: IngestLane) -> Any:
        if b"slow" in await asyncio.to_thread(input_path.read_bytes):
            begun.append(lane)
            await asyncio.to_thread(release.wait)
        return await real(self, input_path, work_path, rules, lane)

    monkeypatch.setattr(InputPasses, "__call__", held)
    web: WebServer = start_web()
    ours, theirs = web.client(web.make_key("ours")), web.client(web.make_key("theirs"))
    small, large = [b"".join(line(number, user="slow") for number in range(count)) for count in (3, 5_000)]
    with ours, theirs, ThreadPoolExecutor(6) as threads:
        try:
            waiting = [threads.submit(validated, ours, data) for data in (small, large) * 3]
            wait_until(lambda: len(begun) == 2, what="a small and a large dry run")
            for count in (1, 5_000):
                quick = b"".join(line(number) for number in range(count))
                assert validated(theirs, quick)["request_counts"]["total"] == count
            assert sorted(begun) == sorted([IngestLane.LARGE, IngestLane.SMALL]), (
                "each of the others waits for its turn"
            )
        finally:
            release.set()
        assert sorted(done.result()["request_counts"]["total"] for done in waiting) == [3] * 3 + [5_000] * 3


@pytest.mark.parametrize(
    "text", ["größer als früher ", "潮の満ち引き ", 'say "it"\n\n', "C:\\users\\me ", "😀 "], ids=ascii
)
def test_how_a_prompt_is_written_down_changes_no_forecast(client: httpx2.Client, text: str) -> None:
    """JSON writes most characters in two ways, and a model reads them in one."""

    def asked(*, is_escaped: bool) -> bytes:
        prompts = [{"messages": [{"role": "user", "content": 40 * f"{text}{number}"}]} for number in range(20)]
        made = [{"custom_id": f"c{n}", "url": CHAT, "body": {"model": "m", **one}} for n, one in enumerate(prompts)]
        return "".join(json.dumps(one, ensure_ascii=is_escaped) + "\n" for one in made).encode()

    plain, escaped = (validated(client, asked(is_escaped=one))["tokens"]["input"] for one in (False, True))
    assert abs(escaped - plain) <= 0.15 * plain
    read = sum(len(40 * f"{text}{number}".encode()) + 33 for number in range(20)) / 4
    assert abs(plain - read) <= 0.02 * read


def test_a_photo_is_estimated_as_an_image(client: httpx2.Client) -> None:
    url = {"url": "data:image/png;base64," + "QUJD" * 25_000}
    content = [{"type": "text", "text": "What is this?"}, {"type": "image_url", "image_url": url}]
    report = validated(
        client, b"".join(line(number, messages=[{"role": "user", "content": content}]) for number in range(3))
    )
    assert 3 * 1_500 < report["tokens"]["input"] < 3 * 2_000
    assert report["tokens"]["output"]["p95"] == 30


def test_copies_of_a_request_are_counted_apart_and_take_nothing(client: httpx2.Client) -> None:
    same = b"".join(
        line(number, messages=[{"role": "user", "content": "Say it."}], temperature=0) for number in range(5)
    )
    whole, once = validated(client, same), validated(client, same, dedupe=True)
    assert [(report["deduplicated"], report["reused"]) for report in (whole, once)] == [(0, 0), (4, 0)]
    assert once["request_counts"]["total"] == 5
    assert (once["tokens"]["input"] * 5, once["tokens"]["output"]["p95"]) == (whole["tokens"]["input"], 10)


def test_every_line_error_is_reported_as_the_batch_would_have_it(client: httpx2.Client) -> None:
    report = validated(client, line(1) + b"{\n" + line(1) + line(2, stream=True))
    assert report["valid"] is False
    assert [(error["line"], error["code"]) for error in report["errors"]["data"]][:2] == [
        (2, "invalid_json_line"),
        (3, "duplicate_custom_id"),
    ]
    lenient = validated(client, line(1) + b"{\n", invalid_lines="error_file")
    assert lenient["valid"] is True
    counts = lenient["request_counts"]
    assert (counts["total"], counts["failed"], counts["in_progress"]) == (2, 1, 1)
    assert [(error["line"], error["code"]) for error in lenient["errors"]["data"]] == [(2, "invalid_json_line")]


def test_the_report_on_a_refused_input_has_all_that_is_wrong_with_it(client: httpx2.Client) -> None:
    """Also what would fail by itself, so that one look is enough."""
    strange = line(4).replace(b'"m"', b'"strange"')
    report = validated(client, line(1) + line(2, n=0) + b"{\n" + line(1) + strange)
    assert report["valid"] is False
    found = [(error["line"], error["code"], error["param"]) for error in report["errors"]["data"]]
    assert found == [
        (3, "invalid_json_line", None),
        (4, "duplicate_custom_id", "custom_id"),
        (2, "invalid_request", "n"),
    ]
    assert any(one["code"] == "model_not_found" and "strange" in one["message"] for one in report["refused"])
    many = validated(client, line(1) + 150 * b"nonsense\n" + line(2, n=0))
    assert {error["code"] for error in many["errors"]["data"]} == {"invalid_json_line"}
    assert len(many["errors"]["data"]) == 100


def test_what_cannot_be_an_input_is_refused_as_by_create(client: httpx2.Client) -> None:
    body = {"endpoint": CHAT, "validate_only": True}
    absent = client.post("/v1/batches", json=body | {"input_file_id": "file-0000000000000000000000"})
    is_error(absent, {"status": 404, "code": "file_not_found"})
    other = upload(client, purpose="vision")
    is_error(
        client.post("/v1/batches", json=body | {"input_file_id": other}),
        {"status": 400, "code": "invalid_file_purpose"},
    )


def served(*names: str, **options: Any) -> dict[str, Any]:
    """Settings with these models, each at a server of its own."""
    return {name: model_at(f"http://{name}.example/v1", **options) for name in names}


def test_a_model_that_no_deployment_serves_and_a_full_quota_are_refusals(start_web: Any) -> None:
    web: WebServer = start_web(limits={"pending_jobs_max": 1}, models=served("m"))
    with web.client() as client:
        data = line(1, model="nowhere") + line(2, model="nowhere") + line(3)
        report = validated(client, data)
        assert [(one["code"], one["count"]) for one in report["refused"]] == [("model_not_found", 2)]
        assert "nowhere" in report["refused"][0]["message"]
        assert report["valid"] is True, "the others would run"
        create(client, upload(client, line(1)))
        refused = {one["code"]: one["count"] for one in validated(client, data)["refused"]}
        assert refused == {"model_not_found": 2, "quota_exceeded": None}
        assert validated(client, data)["valid"] is False
        assert [one["code"] for one in validated(client, line(3))["refused"]] == ["quota_exceeded"]


def test_the_cost_is_that_of_every_model_by_its_price(start_web: Any) -> None:
    price = DeploymentPrice(input=1_000, output=2_000)
    web: WebServer = start_web(models=served("m", "n", price=price))
    with web.client() as client:
        one, two = (validated(client, data) for data in (line(1), line(1) + line(2, model="n")))
        # Prices are for a million tokens; without a measurement an answer may have all of its ten.
        tokens = one["tokens"]
        dearest = (tokens["input_range"]["p95"] * 1_000 + 10 * 2_000) / 1_000_000
        assert float(one["cost"]["p95"]) == pytest.approx(dearest, rel=0.1)
        assert float(two["cost"]["p95"]) == pytest.approx(2 * float(one["cost"]["p95"]), rel=0.1)
        assert 0 < float(one["cost"]["p5"]) < float(one["cost"]["p50"]) < float(one["cost"]["p95"])


def test_lines_for_models_that_the_key_may_not_use_are_reported(start_web: Any) -> None:
    web: WebServer = start_web(models=served("m", "n"))
    with web.client(web.make_key("ours", models=("m",))) as client:
        report = validated(client, line(1) + line(2, model="n"))
        assert report["valid"] is False
        assert [(one["line"], one["code"]) for one in report["errors"]["data"]] == [(2, "model_not_found")]
    with web.client(web.make_key("theirs")) as client:
        assert validated(client, line(1) + line(2, model="n"))["valid"] is True


def test_an_earlier_batch_that_never_was_is_refused(client: httpx2.Client) -> None:
    body = {"endpoint": CHAT, "validate_only": True, "input_file_id": upload(client, line(1))}
    answer = client.post("/v1/batches", json=body | {"reuse_from": "batch_0000000000000000000000"})
    is_error(answer, {"status": 404, "code": "batch_not_found"})


def test_the_limits_of_a_key_say_what_they_have_left_and_which_bind(start_web: Any) -> None:
    web: WebServer = start_web()
    limits = (Limit(Period.DAY, requests=2, tokens=1_000), Limit(Period.MONTH, nano=5_000_000_000))
    with web.client(web.make_key("ours", limits=limits)) as client:
        report = validated(client, line(1) + line(2) + line(3))
        rooms = {(one["bound"], one["period"]): one for one in report["limits"]}
        assert rooms["key", "day"]["remaining"] == {"requests": 2, "tokens": 1_000, "cost": None}
        assert rooms["key", "day"]["binds"] is True
        assert (rooms["key", "month"]["remaining"]["cost"], rooms["key", "month"]["binds"]) == ("5", False)
        listed = client.get("/v1/limits").json()
        assert listed["object"] == "list"
        assert {(one["bound"], one["period"], one["remaining"]["requests"]) for one in listed["data"]} == {
            ("key", "day", 2),
            ("key", "month", None),
        }
        is_error(client.get("/v1/limits?x=1"), {"status": 400, "code": "unknown_parameter"})


def test_what_was_measured_narrows_the_range() -> None:
    load = ModelLoad("m", 100, 1_000, 10_000)
    blind = output_tokens(load, ())
    assert (blind.p5, blind.p95) == (100, 10_000)
    # Answers had a fifth of the tokens that they might have had: of a unit, a tenth are prompts.
    minutes = [Minute(n, 1_000, 460 + n, 10, input_tokens=100) for n in range(5)]
    known = output_tokens(load, minutes)
    assert 1_600 < known.p5 < known.p50 < known.p95 < 2_400
    assert abs(known.p50 - 2_010) < 30
    assert output_tokens(ModelLoad("m", 5, 100, 0), minutes) == EstimateRange()


def test_costs_go_from_the_cheapest_with_a_cache_to_the_dearest_without() -> None:
    load, output = ModelLoad("m", 1, 1_000_000, 1_000_000), EstimateRange(0, 500_000, 1_000_000)
    cheap, dear = Price.of("1", "0.1", "2"), Price.of("2", None, "4")
    found = cost_nano(load, output, [cheap, dear], 0.5)
    assert (found.p5, found.p50, found.p95) == (467_500_000, 3_000_000_000, 6_300_000_000)
    assert cost_nano(load, output, [], 0.5) == EstimateRange()


def test_what_a_plan_asks_is_divided_between_its_models_by_their_work() -> None:
    slices = [("m", 3, 60), ("", 2, 0), ("n", 1, 25), ("m", 1, 15)]
    parts = [SimpleNamespace(model=model, count=count, work_units=units) for model, count, units in slices]
    plan: Any = SimpleNamespace(slices=parts, prompt_bytes=4_000, file_bytes=3_800)
    assert prompt_tokens(200) == 50
    assert _loads(plan) == ([ModelLoad("m", 4, 37, 38), ModelLoad("n", 1, 12, 13)], 2)
    plan.prompt_bytes = 10**9
    assert _loads(plan) == ([ModelLoad("m", 4, 75, 0), ModelLoad("n", 1, 25, 0)], 2), "never more than all of its work"


def test_a_limit_binds_when_one_of_its_sides_has_too_little_left() -> None:
    asked = (10, 1_000, 2_000_000_000)
    assert not _exceeds(LimitSides(10, 1_000, "2"), *asked)
    assert not _exceeds(LimitSides(None, None, None), *asked)
    for short in (LimitSides(9, 1_000, "2"), LimitSides(10, 999, "2"), LimitSides(10, 1_000, "1.99")):
        assert _exceeds(short, *asked)


def test_parts_that_run_one_after_another_have_an_end_if_each_of_them_has_one() -> None:
    part = JobEstimate((), 1, 0, (), 0, 0, NO_TOKENS, CostShown("0", "0", "0"), EtaSeconds(10, 20), None, [], [])
    assert together([part, part]).eta == EtaSeconds(20, 40)
    assert together([part, replace(part, eta=None)]).eta is None
