"""The doctor on capacity, the switch of modes and the explanation, as commands."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.cli.conftest import Desk, Serving
from tests.support.processes import free_port
from tidegate.cli.server.examine import largest_step


def findings(desk: Desk, config: str, code: int = 0) -> list[dict[str, Any]]:
    (desk.here / "c.yaml").write_text(config)
    return list(desk.json_of("doctor", "--config", "c.yaml", "--json", code=code))


def findings_about(found: list[dict[str, Any]], about: str) -> list[tuple[str, str]]:
    return [(one["grade"], f"{one['text']} -> {one['to_do']}") for one in found if one["about"] == about]


def test_limits_that_contradict_are_found(desk: Desk) -> None:
    found = findings(
        desk,
        f"""\
models:
  m:
    in_flight_max: 500
    deployments:
      - url: {desk.engine.url}
        name: d
        limits: [{{period: minute, requests: 100, tokens: 50}}, {{period: day, requests: 90}}, {{period: hour, tokens: 60}}]
resources: {{m: {{limits: [{{period: hour, tokens: 9}}, {{period: lifetime, tokens: 8, enabled: false}}]}}}}
tenants: {{acme: {{weight: 2, limits: [{{period: week, tokens: 5}}, {{period: month, tokens: 4}}]}}}}
""",
    )
    warned = findings_about(found, "limits")
    assert [grade for grade, _ in warned] == ["warning"] * 3
    assert "deployment d: 100 requests a minute are more than the 90 of its day" in warned[0][1]
    assert "tenant acme: 5 tokens a week are more than the 4 of its month" in warned[1][1]
    assert "m: in_flight_max is above what its deployments take together (64)" in warned[2][1]


def test_a_tenant_without_an_organization_is_found(desk: Desk) -> None:
    desk.done("keys", "create", "--org", "acme", "--json")
    found = findings(
        desk, f"upstream: {{url: '{desk.engine.url}'}}\ntenants: {{acme: {{weight: 2}}, acne: {{weight: 2}}}}"
    )
    assert [text for _, text in findings_about(found, "tenants")] == [
        "`tenants` gives acne a weight or budgets, but there is no such organization -> "
        "tidegate keys create --org acne, or fix the name"
    ]


def test_redis_answers_or_does_not(desk: Desk, redis_url: str) -> None:
    upstream = f"upstream: {{url: '{desk.engine.url}'}}\n"
    ((grade, text),) = findings_about(
        findings(desk, upstream + f"redis: {{url: '{redis_url}', timeout_ms: 60000}}"), "redis"
    )
    assert (grade, text.startswith(f"{redis_url} answers, version ")) == ("ok", True)
    away = f"redis://:canary@127.0.0.1:{free_port()}/0"
    found = findings(desk, upstream + f"redis: {{url: '{away}'}}")
    ((grade, text),) = findings_about(found, "redis")
    assert grade == "warning"
    assert "does not answer" in text
    assert "until then limits come from the store alone" in text
    assert "canary" not in json.dumps(found)


def test_engines_show_their_load_or_are_asked_to(desk: Desk) -> None:
    hints = "hints: {priority_field: priority}"
    shows = f"{desk.engine.url.removesuffix('/v1')}/metrics"
    found = findings(
        desk,
        f"""\
models:
  m:
    deployments:
      - {{url: '{desk.engine.url}', name: seen, engine: vllm}}
      - {{url: '{desk.engine.url}', name: hinted, engine: vllm, {hints}}}
      - {{url: '{desk.engine.url}', name: wrong, engine: sglang, {hints}}}
      - {{url: '{desk.engine.url}', name: mapped, metrics_url: '{shows}', metrics_names: {{running: no_such_gauge}}}}
      - {{url: '{desk.engine.url}', name: away, engine: vllm, metrics_url: 'http://127.0.0.1:{free_port()}/metrics'}}
      - {{url: '{desk.engine.url}', name: not_asked, engine: vllm, tide: 'off'}}
      - {{url: '{desk.engine.url}', name: plain}}
""",
    )
    tide = dict.fromkeys(("seen", "hinted", "wrong", "mapped", "away", "not_asked", "plain"), "")
    for grade, text in findings_about(found, "tide"):
        name = next(name for name in tide if text.startswith((f"{name} ", f"{name}:")))
        tide[name] += f"{grade}: {text}\n"
    assert "ok: seen shows its load" in tide["seen"]
    assert "start it with --scheduling-policy priority, then set hints.priority_field" in tide["seen"]
    assert tide["hinted"].splitlines() == [f"ok: hinted shows its load at {shows} -> "]
    assert "its metrics lack sglang:" in tide["wrong"]
    assert "its metrics lack no_such_gauge" in tide["mapped"]
    assert "set metrics_url; until then the tide goes by latency and refusals alone" in tide["away"]
    assert tide["not_asked"] == tide["plain"] == ""


def test_the_size_of_an_engine_s_steps_is_read_from_its_histogram() -> None:
    def shown(*counts: tuple[str, float]) -> str:
        return "\n".join(
            f'vllm:iteration_tokens_total_bucket{{engine="0",le="{bound}",model_name="m"}} {count}'
            for bound, count in counts
        )

    assert largest_step("") == 0
    assert largest_step(shown(("256.0", 100), ("512.0", 100), ("+Inf", 100))) == 256
    assert largest_step(shown(("512.0", 50), ("2048.0", 100), ("+Inf", 100))) == 2048
    assert largest_step(shown(("512.0", 99.5), ("2048.0", 100), ("+Inf", 100))) == 512
    assert largest_step(shown(("512.0", 0), ("+Inf", 100))) == 512
    assert largest_step("vllm:iteration_tokens_total_bucket{le=") == 0


# ---- the switch


def status(desk: Desk, *arguments: str) -> dict[str, Any]:
    return dict(desk.json_of("scheduler", *arguments, "--json"))


def test_the_mode_is_switched_with_and_without_a_server(desk: Desk) -> None:
    desk.done("migrate")
    assert status(desk, "show")["mode"] == "smart_v1"
    switched = status(desk, "set", "fifo_v1", "--shadow", "smart_v1")
    assert (switched["mode"], switched["shadow_mode"], switched["mode_switched"]) == ("fifo_v1", "smart_v1", True)
    server = Serving(desk).proc
    assert status(desk, "show")["mode"] == "fifo_v1"
    assert status(desk, "set", "fair_share_v1")["shadow_mode"] == "smart_v1"
    shown = desk.done("scheduler", "set", "configured", "--shadow", "none").stdout()
    assert "smart_v1" in shown
    assert "none (switched at run time)" in shown
    server.terminate()
    assert server.wait(60) == 0
    assert (status(desk, "show")["mode"], status(desk, "show")["mode_switched"]) == ("smart_v1", False)


def test_the_mode_is_switched_over_postgresql(desk: Desk, migrated_postgres_url: str) -> None:
    env: dict[str, Any] = {"TIDEGATE_STORE_URL": migrated_postgres_url}
    desk.done("migrate", **env)
    desk.done("scheduler", "set", "slice_v1", **env)
    assert desk.json_of("scheduler", "show", "--json", **env)["mode"] == "slice_v1"


@pytest.mark.parametrize("arguments", [["set", "smart"], ["set"], ["set", "fifo_v1", "--shadow", "x"]])
def test_a_mode_that_does_not_exist_is_refused(desk: Desk, arguments: list[str]) -> None:
    proc = desk.done("scheduler", *arguments, code=2)
    assert "Traceback" not in proc.stderr()


def test_without_a_store_there_is_nothing_to_show(desk: Desk) -> None:
    assert "Nothing is kept in" in desk.done("scheduler", "show", code=2).stderr()
