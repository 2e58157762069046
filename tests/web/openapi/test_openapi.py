"""The description of the surface: whole, printed from what checks, and true; and no call that fits it breaks the server."""

from __future__ import annotations

from typing import Any, cast

import httpx2
import msgspec
import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis import GenerationMode

from tests.web.server import CONTROL_TOKEN, WebServer
from tidegate.web.admin.keys import KeyWish
from tidegate.web.http.requests import BatchCreate
from tidegate.web.openapi.operations import OPERATIONS

OPERATOR = {"X-Tidegate-Control": CONTROL_TOKEN}


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


@pytest.mark.parametrize(
    ("path", "struct"), [("/v1/batches", BatchCreate), ("/admin/v1/keys", KeyWish)], ids=["batch", "key"]
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


@pytest.mark.parametrize(
    ("mode", "examples"),
    [
        (GenerationMode.POSITIVE, 1),
        pytest.param(GenerationMode.POSITIVE, 25, marks=SOAKED),
        pytest.param(GenerationMode.NEGATIVE, 25, marks=SOAKED),
    ],
)
def test_no_described_call_breaks_the_server(web: WebServer, mode: GenerationMode, examples: int) -> None:
    """Calls as they are described, and calls that break their description somewhere."""
    described = schemathesis.openapi.from_url(f"{web.url}/openapi.json")
    operations = [cast(Any, found).ok() for found in described.get_all_operations()]
    assert len(operations) > 80
    for operation in operations:

        @given(case=operation.as_strategy(generation_mode=mode))
        @settings(
            max_examples=examples,
            deadline=None,
            suppress_health_check=list(HealthCheck),
            derandomize=True,
            database=None,
        )
        def call(case: Any) -> None:
            answer = case.call(headers=OPERATOR, timeout=30)
            assert answer.status_code < 500, (case.method, case.path, answer.text)

        call()
