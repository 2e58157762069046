"""The description of the surface: whole, printed from what checks, and true; and no call that fits it breaks the server."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from typing import Any, cast

import httpx2
import msgspec
import pytest
from hypothesis import HealthCheck, given, settings

from tests.support.sdks import schemathesis
from tests.web import stages
from tests.web.server import OPERATOR, WebServer, model_at
from tidegate.web.admin.keys import KeyRequest
from tidegate.web.doors import SCOPES
from tidegate.web.openapi.operations import OPERATIONS
from tidegate.web.requests.requests import BatchCreate


def test_every_route_is_described_and_no_other(web: WebServer, client: httpx2.Client) -> None:
    document = client.get("/openapi.json").json()
    shown = {(method.upper(), path) for path, methods in document["paths"].items() for method in methods}
    there = {
        (method, route.path.replace(":path}", "}"))
        for route in web.app.routes
        for method in route.methods
        if method != "HEAD" and route.path.startswith(("/v1/", "/admin/v1/"))
    }
    assert shown == there
    assert {(method, path.replace(":path}", "}")) for method, path in OPERATIONS} <= there
    names = [one["operationId"] for methods in document["paths"].values() for one in methods.values()]
    assert len(names) == len(set(names))


def test_what_keys_may_be_allowed_is_what_routes_ask_for(client: httpx2.Client) -> None:
    document = client.get("/openapi.json").json()
    asked = {one["x-scope"] for methods in document["paths"].values() for one in methods.values()}
    assert {scope for each in asked for scope in each.split(" or ")} == set(SCOPES.all)


@pytest.mark.parametrize(
    ("path", "struct"), [("/v1/batches", BatchCreate), ("/admin/v1/keys", KeyRequest)], ids=["batch", "key"]
)
def test_a_body_is_described_by_the_struct_that_checks_it(client: httpx2.Client, path: str, struct: Any) -> None:
    document = client.get("/openapi.json").json()
    body = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
    described = document["components"]["schemas"][body["$ref"].rpartition("/")[2]]
    assert set(described["properties"]) == {one.encode_name for one in msgspec.structs.fields(struct)}


@pytest.mark.parametrize("path", ["/", "/docs"])
def test_pages_ask_no_other_host_and_run_no_script(client: httpx2.Client, path: str) -> None:
    answer = client.get(path)
    assert (answer.status_code, answer.headers["content-type"]) == (200, "text/html; charset=utf-8")
    assert "default-src 'none'; script-src 'self'" in answer.headers["content-security-policy"]
    assert answer.headers["x-content-type-options"] == "nosniff"
    for outside in ('src="http', 'href="http', "<script", "javascript:", "style="):
        assert outside not in answer.text
    assert client.get("/static/style.css").headers["content-type"] == "text/css; charset=utf-8"
    for name in ("x", "style.css%00", "%2e%2e", "base.html", "STYLE.CSS"):
        assert client.get(f"/static/{name}").status_code == 404


def test_a_hostile_host_is_not_part_of_a_page(client: httpx2.Client) -> None:
    answer = client.get("/", headers={"Host": '"><script>alert(1)</script>'})
    assert "<script" not in answer.text


SOAKED = [pytest.mark.soak, pytest.mark.timeout(1_800)]
CREATE = {"endpoint": "/v1/chat/completions", "completion_window": "24h"}
ENDED = 2
COMPLETION_BATCH = {
    "type": "ASYNC",
    "items": [{"resourceId": "m", "request": {"messages": [{"role": "user", "content": "x"}]}}],
}
UPLOAD = {"bytes": 9, "filename": "a", "mime_type": "text/plain", "purpose": "batch"}
ENDPOINT = {"name": "x", "url": "https://example.com/hook", "event_types": ["batch.completed"]}
MESSAGES = {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "x"}]}


def result_line(number: int) -> bytes:
    line = {
        "id": f"batch_req_{number}",
        "custom_id": f"c{number}",
        "response": None,
        "error": {"code": "x", "message": "x"},
    }
    return msgspec.json.encode(line) + b"\n"


class Things:
    """What the server has, so that calls come to more than `not found`: fresh ones for each operation, in turn of every state."""

    def __init__(self, web: WebServer, client: httpx2.Client) -> None:
        self._web = web
        self._client = client

    def made(self, parameters: list[str], turn: int) -> dict[str, str]:
        """Return the ids of things that were just made, for these path parameters."""
        makers: dict[str, Callable[[], str]] = {
            "file_id": self._file,
            "upload_id": lambda: self._post("/v1/uploads", UPLOAD),
            "batch_id": lambda: self._batch(turn),
            "custom_id": lambda: "c0",
            "model": lambda: "m",
            "message_batch_id": lambda: self._post(
                "/v1/messages/batches", {"requests": [{"custom_id": "a", "params": MESSAGES}]}
            ),
            "workspace_id": lambda: "default",
            "environment_id": lambda: "prod",
            "completion_batch_id": self._completion_batch,
            "item_id": lambda: "0",
            "webhook_endpoint_id": lambda: self._post("/v1/webhook_endpoints", ENDPOINT),
            "operation_id": lambda: self._operate("operations", {"action": "pause", "filter": {"q": "none"}}),
            "name": lambda: "configured",
            "key_id": lambda: self._operate("keys", {"org": "default"}),
        }
        return {name: makers[name]() for name in parameters if name in makers}

    def _file(self) -> str:
        lines = "".join(
            f'{{"custom_id": "c{n}", "method": "POST", "url": "/v1/chat/completions", "body": {{"model": "m", "messages": []}}}}\n'
            for n in range(2)
        )
        made = self._client.post("/v1/files", files={"file": ("a.jsonl", lines)}, data={"purpose": "batch"})
        assert made.status_code == 200, made.text
        return str(made.json()["id"])

    def _batch(self, turn: int) -> str:
        """A batch that is validating, runs, or ended."""
        batch_id = self._post("/v1/batches", {**CREATE, "input_file_id": self._file()})
        if turn % 3:
            stages.start(self._web, batch_id, 2)
        if turn % 3 == ENDED:
            stages.finish(self._web, batch_id, {0: result_line(0)}, {1: result_line(1)})
            stages.publish(self._web, batch_id)
        return batch_id

    def _completion_batch(self) -> str:
        made = self._client.post("/v1/completion-batch/default/prod", json=COMPLETION_BATCH)
        assert made.status_code == 201, made.text
        return str(made.json()["batchId"])

    def _operate(self, path: str, body: Any) -> str:
        return self._post(f"/admin/v1/{path}", body, headers=OPERATOR)

    def _post(self, path: str, body: Any, **more: Any) -> str:
        made = self._client.post(path, json=body, **more)
        assert made.status_code in (200, 201), (path, made.text)
        return str(made.json()["id"])


@pytest.mark.parametrize(
    ("mode", "examples", "existing"),
    [
        ("POSITIVE", 1, True),
        *(
            pytest.param(mode, 25, existing, marks=SOAKED)
            for mode in ("POSITIVE", "NEGATIVE")
            for existing in (False, True)
        ),
    ],
)
def test_no_described_call_breaks_the_server(
    start_web: Callable[..., WebServer], mode: str, examples: int, existing: bool
) -> None:
    """Calls as they are described, and calls that break their description somewhere; with any id, and with ids of what is there."""
    web = start_web(models={"m": model_at(name="configured")})
    described = schemathesis.openapi.from_url(f"{web.url}/openapi.json")
    operations = [cast(Any, found).ok() for found in described.get_all_operations()]
    assert len(operations) > 80
    key = web.make_key("default")
    headers = {**OPERATOR, "Authorization": f"Bearer {key}"}
    things = Things(web, web.client(key))
    statuses: Counter[int] = Counter()
    for turn, operation in enumerate(operations):
        parameters = re.findall(r"{(\w+)", operation.path)
        # The events of what goes on have no end.
        is_endless = operation.path.endswith("/events") and "completion_batch_id" in parameters
        if existing and (not parameters or is_endless):
            continue
        given_path = things.made(parameters, ENDED if operation.path.endswith("/events") else turn) if existing else {}

        @given(case=operation.as_strategy(generation_mode=schemathesis.GenerationMode[mode]))
        @settings(
            max_examples=examples,
            deadline=None,
            suppress_health_check=list(HealthCheck),
            derandomize=True,
            database=None,
        )
        def call(case: Any) -> None:
            case.path_parameters |= given_path  # noqa: B023 - called before the next turn
            answer = case.call(headers=headers, timeout=30)
            assert answer.status_code < 500, (case.method, case.formatted_path, answer.text)
            statuses[answer.status_code] += 1

        call()
    if existing and mode == "POSITIVE":
        assert statuses[200] > statuses[404], statuses
