"""`/v1/models` asks every deployment: what they report is passed on, and none that is away, slow or hostile changes what is listed."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from tests.support.processes import wait_until
from tests.support.sdks import openai
from tests.upstream.raw_server import Peer, Request, Script
from tests.web.gateway_world import GatewayWorld
from tests.web.server import model_at
from tests.web.upstream import answers
from tidegate.settings.capacity import ResourceEntry


def lists(*models: Any, **more: Any) -> Script:
    return answers(json.dumps({"object": "list", "data": list(models), **more}).encode())


def listed(world: GatewayWorld, key: str | None = None) -> dict[str, dict[str, Any]]:
    return {one["id"]: one for one in world.client(key).get("/v1/models").json()["data"]}


def until_listed(world: GatewayWorld, expected: Any) -> None:
    """A server that takes its time is not waited for long: its word counts when it comes."""
    wait_until(lambda: listed(world) == expected, 60, f"the list to be {expected}")


def test_what_deployments_report_of_a_model_is_passed_on(world: GatewayWorld) -> None:
    one = {"id": "m", "created": 1_700_000_000, "owned_by": "vllm", "max_model_len": 8_192, "root": "/disk/secret"}
    world.start(
        lists(one, {"id": "not ours"}),
        lists({**one, "max_model_len": 4_096}),
        options=[{}, {}],
        resources={"chat": ResourceEntry(model="m")},
    )
    shown = {"object": "model", "created": 1_700_000_000, "owned_by": "vllm", "max_model_len": 4_096}
    until_listed(world, {"m": {"id": "m", **shown}, "chat": {"id": "chat", **shown}})
    assert world.client().get("/v1/models/chat").json() == {"id": "chat", **shown}
    assert world.client().get("/v1/models/not%20ours").status_code == 404


@pytest.mark.parametrize(
    "script",
    [
        answers(b"{}", 500),
        answers(b"<html>"),
        lists({"id": "another"}),
        lists({"id": "m", "created": "yesterday", "owned_by": ["x"], "max_model_len": -5}),
        lists({"id": "m", "created": 10**30, "owned_by": "x\u0000y", "max_model_len": True}),
        lists({"id": "m", "created": None, "owned_by": "x" * 1_000, "created_at": "never"}),
    ],
)
def test_a_name_that_the_operator_gave_is_listed_whatever_its_deployment_says(
    world: GatewayWorld, script: Script
) -> None:
    world.start(script)
    assert list(listed(world)) == ["m"]
    assert set(listed(world)["m"]) == {"id", "object", "created", "owned_by"}
    assert listed(world)["m"]["owned_by"] == "tidegate"
    assert listed(world)["m"]["created"] > 1_700_000_000, "when this process began"


def test_a_deployment_that_is_away_or_silent_does_not_hold_up_the_list(world: GatewayWorld) -> None:
    """The silent one never answers: that the list does, and that the other's words are in it, is the proof."""
    asked = []

    async def silent(request: Request, peer: Peer) -> None:
        asked.append(request.line)
        await peer.until_gone()

    quiet, well = world.upstream(silent), world.upstream(lists({"id": "well", "owned_by": "vllm"}))
    places = {"silent": quiet.url, "well": well.url, "gone": "http://127.0.0.1:1/v1"}
    world.start(
        models={name: model_at(url, name=name) for name, url in places.items()},
        gateway={"models_cache_s": 0},
    )
    wait_until(lambda: listed(world)["well"]["owned_by"] == "vllm", 60, "the well one's word")
    for _ in range(20):
        found = listed(world)
        assert sorted(found) == ["gone", "silent", "well"]
        assert found["well"]["owned_by"] == "vllm"
    assert asked
    quiet.becomes(lists({"id": "silent", "owned_by": "back"}))
    wait_until(lambda: listed(world)["silent"]["owned_by"] == "back", 30, "the silent one's word")


def test_more_deployments_than_connections_are_all_asked(world: GatewayWorld) -> None:
    names = [f"m{number}" for number in range(30)]
    upstream = world.upstream(lists(*({"id": name, "owned_by": "one of many"} for name in names)))
    place = {name: model_at(upstream.url, name=name) for name in names}
    world.start(models=place)
    wait_until(lambda: {one["owned_by"] for one in listed(world).values()} == {"one of many"}, 30, "every word")


def test_an_answer_of_a_deployment_is_believed_for_a_while_and_serves_many_callers(world: GatewayWorld) -> None:
    world.start(lists({"id": "m", "owned_by": "first"}))
    wait_until(lambda: listed(world)["m"]["owned_by"] == "first", 60, "the first word")
    world.upstreams[0].becomes(lists({"id": "m", "owned_by": "second"}))
    assert {listed(world)["m"]["owned_by"] for _ in range(5)} == {"first"}
    world.web.clock.ahead_ms += 11_000
    wait_until(lambda: listed(world)["m"]["owned_by"] == "second", 30, "the next question")


def test_a_key_sees_what_it_may_use(world: GatewayWorld) -> None:
    world.start(
        lists({"id": "m", "owned_by": "vllm"}, {"id": "n"}),
        models={},
        upstream={"url": "http://127.0.0.1:1/v1"},
    )
    other = GatewayWorld(world._directory.parent / "other")
    try:
        other.start(models={}, upstream={"url": world.upstreams[0].url})
        narrow, wide = other.web.make_key("ours", models=["n"]), other.web.make_key("ours")
        wait_until(lambda: list(listed(other, wide)) == ["m", "n"], 60, "both names")
        assert list(listed(other, narrow)) == ["n"]
    finally:
        other.close()


def test_both_sdks_list_models(world: GatewayWorld) -> None:
    world.start(lists({"id": "m", "created": 1_700_000_000, "display_name": "Em", "max_model_len": 4_096}))
    wait_until(lambda: "max_model_len" in listed(world)["m"], 60, "its word")
    with world.openai() as ours:
        (one,) = ours.models.list().data
        assert (one.id, one.created, one.to_dict()["max_model_len"]) == ("m", 1_700_000_000, 4_096)
        assert ours.models.retrieve("m").id == "m"
        with pytest.raises(openai.NotFoundError):
            ours.models.retrieve("unknown")
    with world.anthropic() as theirs:
        (two,) = list(theirs.models.list())
        assert (two.id, two.type, two.display_name, two.created_at.year) == ("m", "model", "Em", 2023)
        assert theirs.models.retrieve("m").display_name == "Em"


def test_a_list_for_anthropic_says_where_it_begins_and_ends(world: GatewayWorld) -> None:
    world.start(lists({"id": "m"}), resources={name: ResourceEntry(model="m") for name in "ab"})
    page = world.client().get("/v1/models", headers={"anthropic-version": "2023-06-01"}).json()
    names = [one["id"] for one in page["data"]]
    assert sorted(names) == ["a", "b", "m"]
    assert (page["first_id"], page["last_id"], page["has_more"]) == (names[0], names[-1], False)


def test_a_model_with_a_slash_in_its_name_is_found_as_sdks_write_it(world: GatewayWorld) -> None:
    """They escape a slash within a name, and most models that are published have one."""
    world.start(lists({"id": "m"}), resources={"meta-llama/Llama-3": ResourceEntry(model="m")})
    with world.openai() as ours, world.anthropic() as theirs:
        assert ours.models.retrieve("meta-llama/Llama-3").id == "meta-llama/Llama-3"
        assert theirs.models.retrieve("meta-llama/Llama-3").id == "meta-llama/Llama-3"
    for path in ("meta-llama%2FLlama-3", "meta-llama%2fLlama-3", "meta-llama/Llama-3"):
        assert world.client().get(f"/v1/models/{path}").status_code == 200
    for path in ("/v1/models%2Fm", "/v1%2Fmodels/m", "/v1/models/m%00", "/x/v1/models/a%2Fb"):
        answer = world.client().get(path)
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "unknown_url")


def test_an_anthropic_engine_is_asked_for_all_that_it_has(world: GatewayWorld) -> None:
    paths = []

    async def says(request: Request, peer: Peer) -> None:
        paths.append(request.path)
        data = [{"type": "model", "id": "m", "display_name": "Em", "created_at": "2025-02-19T00:00:00Z"}]
        await peer.answer(200, json.dumps({"data": data, "has_more": True}).encode())

    world.start(says, options=[{"engine": "anthropic"}])
    wait_until(lambda: listed(world)["m"]["created"] == 1_739_923_200, 60, "its word")
    assert set(paths) == {"/v1/models?limit=1000"}


def test_a_deployment_that_is_taken_away_while_it_is_asked_is_forgotten(world: GatewayWorld) -> None:
    gate = asyncio.Event()

    async def late(request: Request, peer: Peer) -> None:
        await gate.wait()
        await peer.answer(200, b'{"data": [{"id": "m", "owned_by": "gone"}]}')

    world.start(late)
    assert listed(world)["m"]["owned_by"] == "tidegate"

    async def take_away() -> None:
        world.web.router.replace((), ())

    world.web.run(take_away())
    world.upstreams[0]._loop.call_soon_threadsafe(gate.set)
    assert listed(world) == {}


def test_a_name_that_a_server_without_names_takes_is_found_though_it_is_not_listed(world: GatewayWorld) -> None:
    async def takes_m(request: Request, peer: Peer) -> None:
        is_known = request.path in ("/v1/models", "/v1/models/org%2Fm")
        await peer.answer(200 if is_known else 404, b'{"object":"list","data":[{"id":"listed"}]}')

    world.start(models={}, upstream={"url": world.upstream(takes_m).url})
    assert list(listed(world)) == ["listed"]
    assert world.client().get("/v1/models/org/m").json()["id"] == "org/m"
    assert world.client().get("/v1/models/other").status_code == 404
    key = world.web.make_key("ours", models=["listed"])
    assert world.client(key).get("/v1/models/org/m").status_code == 404, "a key may not ask for what it may not use"
