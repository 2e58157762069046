"""The shape of a batch's work, as a client asks for it and reads it back."""

from __future__ import annotations

from typing import Any

import httpx2

from tests.web import stages
from tests.web.calls import upload
from tests.web.jobs.test_validation import CHAT, line, validated
from tests.web.server import WebServer


def made(client: httpx2.Client, file_id: str, **more: Any) -> dict[str, Any]:
    answer = client.post("/v1/batches", json={"input_file_id": file_id, "endpoint": CHAT, **more})
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def test_parameters_are_read_back_and_a_batch_without_them_says_so(client: httpx2.Client) -> None:
    asked = {"defaults": {"temperature": 0, "stop": ["x"]}, "overrides": {"max_tokens": 5}}
    file_id = upload(client, line(1))
    batch = made(client, file_id, **asked)
    for shown in (batch, client.get(f"/v1/batches/{batch['id']}").json()):
        assert {name: shown["tidegate"][name] for name in asked} == asked
    plain = made(client, file_id, defaults=None, overrides={})["tidegate"]
    assert (plain["defaults"], plain["overrides"]) == ({}, {})


def test_dedupe_is_read_back_and_must_be_true_or_false(client: httpx2.Client) -> None:
    file_id = upload(client, line(1))
    asked, plain = made(client, file_id, dedupe=True)["tidegate"], made(client, file_id)["tidegate"]
    assert [(one["dedupe"], one["deduplicated"]) for one in (asked, plain)] == [(True, 0), (False, 0)]
    values: tuple[object, ...] = ("yes", 1, None, {})
    for value in values:
        refused = client.post("/v1/batches", json={"input_file_id": file_id, "endpoint": CHAT, "dedupe": value})
        assert refused.status_code == 400
        assert refused.json()["error"]["message"] == "`dedupe` must be true or false."


def test_answers_of_another_batch_must_be_ones_own(web: WebServer, client: httpx2.Client) -> None:
    file_id = upload(client, line(1))
    earlier = made(client, file_id)["id"]

    def refused(asking: httpx2.Client, own_id: str, name: object) -> tuple[int, str, str]:
        body = {"input_file_id": own_id, "endpoint": CHAT, "reuse_from": name}
        answer = asking.post("/v1/batches", json=body)
        dry = asking.post("/v1/batches", json={**body, "validate_only": True})
        assert (dry.status_code, dry.json()["error"]["code"]) == (answer.status_code, answer.json()["error"]["code"])
        error = answer.json()["error"]
        return answer.status_code, error["code"], error["param"]

    assert refused(client, file_id, earlier) == (409, "batch_not_ended", "reuse_from")
    for strange in ("batch_x", "batch_" + "0" * 22, "../x", ""):
        assert refused(client, file_id, strange) == (404, "batch_not_found", "reuse_from")
    assert refused(client, file_id, 7)[:2] == (400, "invalid_parameter")
    stages.start(web, earlier, 1)
    stages.finish(web, earlier, {0: b'{"id": "x", "custom_id": "c1", "response": {}, "error": null}\n'}, {})
    stages.publish(web, earlier)
    shown = made(client, file_id, reuse_from=earlier)["tidegate"]
    assert (shown["reuse_from"], shown["reused"]) == (earlier, 0)
    assert made(client, file_id)["tidegate"]["reuse_from"] is None


def test_an_estimate_leaves_out_what_an_earlier_batch_answered(web: WebServer, client: httpx2.Client) -> None:
    earlier = made(client, upload(client, line(1)))["id"]
    stages.start(web, earlier, 1)
    answered = (
        b'{"id": "batch_req_1", "custom_id": "c1", "response": {"status_code": 200, "body": {}}, "error": null}\n'
    )
    stages.finish(web, earlier, {0: answered}, {})
    stages.publish(web, earlier)
    again = line(1) + line(2) + line(3)
    whole, rest = validated(client, again), validated(client, again, reuse_from=earlier)
    assert rest["valid"] is whole["valid"] is True
    assert rest["request_counts"]["total"] == 3
    assert 3 * rest["tokens"]["output"]["p95"] == 2 * whole["tokens"]["output"]["p95"]
    assert list(web.context.scratch.iterdir()) == []


def test_an_estimate_counts_identical_requests_once(client: httpx2.Client) -> None:
    same = b"".join(line(number, messages=[{"role": "user", "content": "Say it."}]) for number in (1, 2, 3))
    reports = {asked: validated(client, same, dedupe=asked, overrides={"temperature": 0}) for asked in (True, False)}
    assert reports[True]["request_counts"]["total"] == reports[False]["request_counts"]["total"] == 3
    assert reports[True]["tokens"]["input"] < reports[False]["tokens"]["input"]


def test_retries_and_files_are_read_back(web: WebServer, client: httpx2.Client) -> None:
    first, second = upload(client, line(1)), upload(client, line(2))
    body = {"input_file_ids": [second, first], "endpoint": CHAT, "retry": {"attempts_max": 5, "codes": ["500", "404"]}}
    batch = client.post("/v1/batches", json=body).json()
    assert (batch["input_file_id"], batch["tidegate"]["input_file_ids"]) == (second, [second, first])
    assert batch["tidegate"]["retry"] == {
        "attempts_max": 5, "backoff_ms": None, "backoff_ms_max": None, "codes": ["500", "404"],
    }  # fmt: skip
    for needed in (first, second):
        refused = client.delete(f"/v1/files/{needed}")
        assert (refused.status_code, refused.json()["error"]["code"]) == (409, "file_in_use")
    plain = made(client, first, retry={})["tidegate"]
    assert (plain["retry"], plain["input_file_ids"]) == (None, [first])


def test_results_of_bounded_size_are_several_files(web: WebServer, client: httpx2.Client) -> None:
    batch_id = made(client, upload(client, line(1)), output_file_bytes_max=1_024)["id"]
    stages.start(web, batch_id, 4)
    lines = {number: b'{"n": %d, "x": "%s"}\n' % (number, b"x" * 600) for number in range(4)}
    growing = client.get(f"/v1/batches/{batch_id}").json()["tidegate"]
    assert (growing["output_file_ids"], growing["error_file_ids"], growing["output_file_bytes_max"]) == ([], [], 1_024)
    stages.finish(web, batch_id, {number: lines[number] for number in range(3)}, {3: lines[3]})
    stages.publish(web, batch_id)
    batch = client.get(f"/v1/batches/{batch_id}").json()
    output, errors = batch["tidegate"]["output_file_ids"], batch["tidegate"]["error_file_ids"]
    assert (len(output), len(errors)) == (3, 1)
    assert (batch["output_file_id"], batch["error_file_id"]) == (output[0], errors[0])
    for number, file_id in enumerate(output):
        assert client.get(f"/v1/files/{file_id}/content").content == lines[number]
    assert client.get(f"/v1/batches/{batch_id}/output").content == b"".join(lines[number] for number in range(3))
    listed = client.get("/v1/files", params={"purpose": "batch_output"}).json()["data"]
    assert set(output) | set(errors) <= {file["id"] for file in listed}
    assert made(client, upload(client, line(1)))["tidegate"]["output_file_bytes_max"] is None


def test_several_files_are_checked_as_one_and_no_other_tenants_is_taken(web: WebServer, client: httpx2.Client) -> None:
    files = [upload(client, line(1)), upload(client, line(2) + line(1))]
    body = {"input_file_ids": files, "endpoint": CHAT, "validate_only": True}
    report = client.post("/v1/batches", json=body).json()
    assert [(error["code"], error["line"]) for error in report["errors"]["data"]] == [("duplicate_custom_id", 2)]
    assert report["errors"]["data"][0]["message"].startswith(f"{files[1]}: Line 1 of {files[0]} has")
    assert list(web.context.scratch.iterdir()) == []
    body["input_file_ids"] = [files[0], "file-" + "0" * 24]
    missing = client.post("/v1/batches", json=body)
    assert (missing.status_code, missing.json()["error"]["param"]) == (404, "input_file_ids")


def test_an_idempotency_key_is_bound_to_the_parameters(client: httpx2.Client) -> None:
    body = {"input_file_id": upload(client, line(1)), "endpoint": CHAT, "defaults": {"seed": 1}}
    key = {"Idempotency-Key": "same"}
    first = client.post("/v1/batches", json=body, headers=key)
    assert client.post("/v1/batches", json=body, headers=key).json()["id"] == first.json()["id"]
    other = client.post("/v1/batches", json={**body, "defaults": {"seed": 2}}, headers=key)
    assert (other.status_code, other.json()["error"]["code"]) == (422, "idempotency_key_reused")


def test_a_validation_counts_with_the_final_bodies(web: WebServer, client: httpx2.Client) -> None:
    data = b"".join(line(number) for number in range(20))
    assert validated(client, data)["tokens"]["output"]["p95"] == 200
    assert validated(client, data, overrides={"max_tokens": 3})["tokens"]["output"]["p95"] == 60
    assert validated(client, data, defaults={"max_tokens": 3})["tokens"]["output"]["p95"] == 200
    assert list(web.context.scratch.iterdir()) == []


def test_an_override_that_makes_lines_invalid_says_so(client: httpx2.Client) -> None:
    many = {f"k{number}": number for number in range(100)}
    report = validated(client, line(1) + line(2, **many), overrides={f"o{number}": 0 for number in range(40)})
    assert (report["request_counts"]["failed"], report["valid"]) == (1, True)
    # What a line says wrongly is replaced before anything looks at it.
    cured = validated(client, line(3, tools=5), overrides={"tools": [{"type": "function"}]})
    assert cured["request_counts"]["failed"] == 0
