"""Two tenants: whatever one has, the other gets exactly the answer that an absent id gets. On both stores, for every route there is."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

import httpx2
import pytest
from starlette.routing import Route

from tests.web import stages
from tests.web.calls import create, upload
from tests.web.server import NOWHERE, WebServer, settings_with
from tidegate.core.ids import item_id
from tidegate.core.problems import ID_CHARS_MAX

ABSENT = {"file_id": "file-0000000000000000000000", "batch_id": "batch_0000000000000000000000"}
ABSENT["message_batch_id"] = "msg" + ABSENT["batch_id"]
ABSENT["completion_batch_id"] = ABSENT["batch_id"]
ABSENT["webhook_endpoint_id"] = "whk_0000000000000000000000"
ABSENT["response_id"] = "resp_0000000000000000000000"
ABSENT["delivery_id"] = "evt_0000000000000000000000.whk_0000000000000000000000"
ABSENT["upload_id"] = "upload_0000000000000000000000"
# What stands in a path beside the id that a test is about: a caller's own workspace, where that is looked for.
BESIDE = {
    "{workspace_id}": "theirs",
    "{environment_id}": "prod",
    "{item_id}": "batch_req_0000000000000000000000",
    "{custom_id:path}": "a",
}
COMPLETION_BATCHES = "/v1/completion-batch/{workspace_id}/{environment_id}"
ANSWERED = b'{"id":"x","custom_id":"response","response":{"status_code":200,"body":{}},"error":null}\n'
NO_SHAPE = ("x", "file-abc", "batch_", "%ff", "A" * 300)
# What every route of the app is about; a route that is not here fails the test below.
ONE_THING = {
    ("GET", "/v1/files/{file_id}"),
    ("DELETE", "/v1/files/{file_id}"),
    ("GET", "/v1/files/{file_id}/content"),
    ("POST", "/v1/uploads/{upload_id}/parts"),
    ("POST", "/v1/uploads/{upload_id}/complete"),
    ("POST", "/v1/uploads/{upload_id}/cancel"),
    ("GET", "/v1/batches/{batch_id}"),
    ("POST", "/v1/batches/{batch_id}"),
    ("DELETE", "/v1/batches/{batch_id}"),
    ("POST", "/v1/batches/{batch_id}/cancel"),
    ("POST", "/v1/batches/{batch_id}/pause"),
    ("POST", "/v1/batches/{batch_id}/resume"),
    ("POST", "/v1/batches/{batch_id}/retry"),
    ("POST", "/v1/batches/{batch_id}/canary"),
    ("GET", "/v1/batches/{batch_id}/items"),
    ("GET", "/v1/batches/{batch_id}/items/{custom_id:path}"),
    ("GET", "/v1/batches/{batch_id}/output"),
    ("GET", "/v1/batches/{batch_id}/errors"),
    ("GET", "/v1/batches/{batch_id}/events"),
    ("GET", "/v1/batches/{batch_id}/explain"),
    ("GET", "/v1/messages/batches/{message_batch_id}"),
    ("DELETE", "/v1/messages/batches/{message_batch_id}"),
    ("POST", "/v1/messages/batches/{message_batch_id}/cancel"),
    ("GET", "/v1/messages/batches/{message_batch_id}/results"),
    ("GET", COMPLETION_BATCHES + "/{completion_batch_id}"),
    ("POST", COMPLETION_BATCHES + "/{completion_batch_id}/cancel"),
    ("GET", COMPLETION_BATCHES + "/{completion_batch_id}/events"),
    ("GET", COMPLETION_BATCHES + "/{completion_batch_id}/{item_id}"),
    ("GET", "/v1/responses/{response_id}"),
    ("DELETE", "/v1/responses/{response_id}"),
    ("POST", "/v1/responses/{response_id}/cancel"),
    ("GET", "/v1/webhook_endpoints/{webhook_endpoint_id}"),
    ("POST", "/v1/webhook_endpoints/{webhook_endpoint_id}"),
    ("DELETE", "/v1/webhook_endpoints/{webhook_endpoint_id}"),
    ("POST", "/v1/webhook_endpoints/{webhook_endpoint_id}/rotate_secret"),
    ("POST", "/v1/webhook_endpoints/{webhook_endpoint_id}/test"),
    ("POST", "/v1/webhook_deliveries/{delivery_id}/replay"),
}
LISTS = {
    ("GET", f"/v1/{name}")
    for name in ("files", "batches", "messages/batches", "webhook_endpoints", "webhook_deliveries")
}
MAKERS = {("POST", f"/v1/{name}") for name in ("files", "uploads", "batches", "messages/batches", "webhook_endpoints")}
MAKERS.add(("POST", COMPLETION_BATCHES))
# A call here names no object at all: what it takes of anyone's is a budget, and its own.
INTERACTIVE = {
    ("POST", path)
    for path in (
        "/v1/chat/completions",
        "/v1/completions",
        "/v1/embeddings",
        "/v1/responses",
        "/v1/moderations",
        "/v1/messages",
    )
}
NOBODYS = {
    ("GET", "/"),
    ("GET", "/docs"),
    ("GET", "/openapi.json"),
    ("GET", "/static/{name}"),
    ("GET", "/v1/limits"),
    ("GET", "/v1/models"),
    ("GET", "/v1/models/{model:path}"),
    ("GET", "/v1/webhook_event_types"),
    ("GET", "/healthz"),
    ("GET", "/readyz"),
    ("GET", "/metrics"),
}
OPERATORS = {
    ("GET", f"/admin/v1/{name}")
    for name in (
        "audit",
        "autoscale",
        "budgets",
        "autoscale/models/{model:path}",
        "autoscale/workers",
        "batches",
        "batches/{batch_id}",
        "batches/{batch_id}/errors",
        "batches/{batch_id}/explain",
        "batches/{batch_id}/items",
        "batches/{batch_id}/items/{custom_id:path}",
        "batches/{batch_id}/timeline",
        "deliveries",
        "deployments",
        "flows",
        "keys",
        "model_capacity",
        "models",
        "operations",
        "operations/{operation_id}",
        "orgs",
        "overview",
        "resources",
        "scheduler",
        "usage",
        "workers",
    )
}
OPERATORS |= {
    ("POST", f"/admin/v1/{name}")
    for name in (
        "keys",
        "keys/{key_id}/change",
        "keys/{key_id}/rotate",
        "keys/{key_id}/revoke",
        "keys/delete",
        "deliveries/{delivery_id}/replay",
        "flows/refresh",
        "operations",
        "operations/{operation_id}/cancel",
        "scheduler",
    )
}
OPERATORS |= {
    ("POST", f"/admin/v1/batches/{{batch_id}}/{verb}")
    for verb in ("abandon", "cancel", "fail", "pause", "requeue", "resume", "retry", "retry_finalization")
}
OPERATORS |= {
    ("POST", f"/admin/v1/{kind}/{verb}")
    for kind in ("deployments", "resources", "models")
    for verb in ("add", "change", "remove")
}
OPERATORS |= {("POST", f"/admin/v1/deployments/{{name:path}}/{verb}") for verb in ("drain", "resume", "refresh")}


# Pages of the console ask for a session; `tests/web/console` shows who gets one.
CONSOLE = {
    ("GET", f"/console{path}")
    for path in (
        "",
        "/audit",
        "/{rest:path}",
        "/batches",
        "/batches/check",
        "/batches/new",
        "/batches/{batch_id}",
        "/batches/{batch_id}/compare",
        "/batches/{batch_id}/items",
        "/batches/{batch_id}/items/{item_id}",
        "/batches/{batch_id}/results/{kind}",
        "/deliveries",
        "/deployments",
        "/deployments/edit",
        "/operations",
        "/operations/impact",
        "/operations/{operation_id}",
        "/orgs",
        "/orgs/{org_id}",
        "/playground",
        "/queues",
        "/sign-in",
    )
}
CONSOLE |= {
    ("POST", f"/console{path}")
    for path in (
        "/batches/new",
        "/batches/upload",
        "/batches/{batch_id}/{action}",
        "/deployments/drain",
        "/deployments/edit",
        "/deployments/refresh",
        "/deployments/remove",
        "/deployments/resume",
        "/deliveries/{delivery_id}/replay",
        "/operations",
        "/operations/{operation_id}/cancel",
        "/orgs/{org_id}/keys",
        "/orgs/{org_id}/revoke",
        "/playground",
        "/sign-in",
        "/sign-out",
    )
}


class Two:
    """A server where `ours` has one of everything and `theirs` has a key."""

    def __init__(self, web: WebServer) -> None:
        self.web = web
        self.ours = web.client(web.make_key("ours"))
        self.theirs = web.client(web.make_key("theirs"))
        shape = {"name": "ours alone", "url": "https://hooks.example.com/", "event_types": ["batch.completed"]}
        self.endpoint_id = self.ours.post("/v1/webhook_endpoints", json=shape).json()["id"]
        asked = {"bytes": 9, "filename": "ours alone", "mime_type": "text/plain", "purpose": "batch"}
        self.upload_id = self.ours.post("/v1/uploads", json=asked).json()["id"]
        self.file_id = upload(self.ours)
        self.deleted_id = upload(self.ours)
        self.ours.delete(f"/v1/files/{self.deleted_id}")
        self.running_id = create(self.ours, self.file_id, metadata={"secret": "ours alone"})["id"]
        stages.start(web, self.running_id, 2)
        stages.finish(web, self.running_id, {0: b"growing\n"})
        self.done_id = stages.running(web, self.ours, 2)
        stages.finish(web, self.done_id, {0: b"answer\n"}, {1: b"error\n"})
        stages.publish(web, self.done_id)
        body = {"requests": [{"custom_id": "a", "params": {"model": "m"}}, {"custom_id": "b", "params": {}}]}
        self.message_ids = [self.ours.post("/v1/messages/batches", json=body).json()["id"] for _ in range(2)]
        ended_id = self.message_ids[1].removeprefix("msg")
        stages.start(web, ended_id, 2)
        stages.finish(web, ended_id, {0: b"answer\n"}, {1: b"error\n"})
        stages.publish(web, ended_id)
        items = [{"resourceId": "m", "request": {"messages": [{"role": "user", "content": "ours alone"}]}}]
        made = self.ours.post("/v1/completion-batch/ours/prod", json={"type": "ASYNC", "items": items})
        self.completion_id = made.json()["batchId"]
        ask = {"model": "m", "input": "ours alone", "background": True}
        self.response_ids = [self.ours.post("/v1/responses", json=ask).json()["id"] for _ in range(2)]
        stages.finish(web, self.response_ids[1].replace("resp_", "batch_"), {0: ANSWERED})
        self.delivery_id = self.ours.get("/v1/webhook_deliveries").json()["data"][0]["id"]
        done = self.ours.get(f"/v1/batches/{self.done_id}").json()
        running = web.job(self.running_id)
        self.ids = {
            "file_id": [
                self.file_id,
                self.deleted_id,
                done["output_file_id"],
                done["error_file_id"],
                str(running.output_file_id),
                *NO_SHAPE,
            ],
            "batch_id": [self.running_id, self.done_id, ended_id, *NO_SHAPE],
            "completion_batch_id": [self.completion_id, self.running_id, *NO_SHAPE],
            "message_batch_id": [*self.message_ids, f"msg{self.running_id}", *NO_SHAPE],
            "response_id": [*self.response_ids, self.done_id.replace("batch_", "resp_"), *NO_SHAPE],
            "webhook_endpoint_id": [self.endpoint_id, *NO_SHAPE],
            "upload_id": [self.upload_id, *NO_SHAPE],
            "delivery_id": [self.delivery_id, *NO_SHAPE],
        }

    def of_every_kind(self) -> dict[str, str]:
        """One id of each kind of thing that `ours` has."""
        job = self.web.job(self.done_id)
        keys = [key for key in self.web.run(self.web.store.list_keys(10)) if key["tenant"] == "ours"]
        return {
            "file": self.file_id,
            "batch": self.done_id,
            "message batch": self.message_ids[1],
            "response": self.response_ids[0],
            "webhook endpoint": self.endpoint_id,
            "upload": self.upload_id,
            "webhook delivery": self.delivery_id,
            "item": item_id(self.done_id, 0),
            "key": str(keys[0]["id"]),
            "tenant": job.tenant_id,
            "worker": self.web.worker_id,
            "idempotency key": "same",
            "request": self.ours.get("/v1/files").headers["x-request-id"],
        }

    @contextlib.contextmanager
    def watched(self) -> Iterator[list[str]]:
        """How the store is asked meanwhile: a name for each transaction. Keys are asked for once in a while, whatever the id."""
        driver, asked = self.web.store._driver, []
        kept = {name: getattr(driver, name) for name in ("read", "write", "free")}

        def watch(name: str) -> Any:
            def run(body: Any) -> Any:
                what = f"{name} {body.__qualname__}"
                if "key" not in what:
                    asked.append(what)
                return kept[name](body)

            return run

        for name in kept:
            setattr(driver, name, watch(name))
        try:
            yield asked
        finally:
            for name, was in kept.items():
                setattr(driver, name, was)


@pytest.fixture(params=["sqlite", pytest.param("postgresql", marks=pytest.mark.soak)], scope="module")
def two(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Two]:
    directory: Path = tmp_path_factory.mktemp("isolation")
    url = None
    if request.param == "postgresql":
        postgres = request.getfixturevalue("postgres_server")
        url = postgres.create_database()
    web = WebServer(directory, settings_with(upstream={"url": NOWHERE}), url)
    web.start()
    two = Two(web)
    yield two
    two.ours.close()
    two.theirs.close()
    web.stop()
    if url is not None:
        postgres.drop_database(url)


def routes(web: WebServer) -> set[tuple[str, str]]:
    found = set()
    for route in web.app.routes:
        assert isinstance(route, Route)
        found |= {(method, route.path) for method in route.methods or () if method != "HEAD"}
    return found


def about_one(path: str) -> tuple[str, str]:
    """A path with one name left to fill in, and that name."""
    for name, value in BESIDE.items():
        path = path.replace(name, value)
    return path, path.partition("{")[2].partition("}")[0]


def looks(answer: httpx2.Response, sent_id: str = "") -> tuple[int, bytes, dict[str, str]]:
    """Everything about an answer but the moment, the request's own id, and the id that the caller sent and gets back."""
    dropped = ("x-request-id", "request-id", "date", "content-length")
    headers = {name: value for name, value in answer.headers.items() if name not in dropped}
    # Anthropic's errors name the request in their body too.
    compared = whole = answer.content.replace(answer.headers["x-request-id"].encode(), b"REQUEST")
    if sent_id:
        shown = unquote(sent_id)[:ID_CHARS_MAX].replace("\ufffd", "?").encode()
        compared = compared.replace(b": %b." % shown, b": ID.").replace(b"'%b'" % shown, b"'ID'")
        assert len(whole) == len(compared) + len(shown) - 2
    return answer.status_code, compared, headers


def test_every_route_is_looked_at(two: Two) -> None:
    assert routes(two.web) == ONE_THING | LISTS | MAKERS | NOBODYS | OPERATORS | CONSOLE | INTERACTIVE


@pytest.mark.parametrize(("method", "path"), sorted(ONE_THING))
def test_another_tenants_id_is_an_absent_id(two: Two, method: str, path: str) -> None:
    path, param = about_one(path)
    absent = two.theirs.request(method, path.replace(f"{{{param}}}", ABSENT[param]))
    assert absent.status_code == 404
    wanted = looks(absent, ABSENT[param])
    for its_id in two.ids[param]:
        answer = two.theirs.request(method, path.replace(f"{{{param}}}", its_id))
        assert looks(answer, its_id) == wanted, its_id
    first_id = two.ids[param][0]
    ranged = two.theirs.request(method, path.replace(f"{{{param}}}", first_id), headers={"Range": "bytes=0-"})
    assert looks(ranged, first_id) == wanted


@pytest.mark.parametrize(("method", "path"), sorted(ONE_THING))
def test_nothing_of_any_kind_is_found_where_something_else_is_asked_for(two: Two, method: str, path: str) -> None:
    """Whatever ids leak, in links, logs or results: of whatever kind, on whatever route, they open nothing."""
    path, param = about_one(path)
    absent = looks(two.theirs.request(method, path.replace(f"{{{param}}}", ABSENT[param])), ABSENT[param])
    for kind, its_id in two.of_every_kind().items():
        assert looks(two.theirs.request(method, path.replace(f"{{{param}}}", its_id)), its_id) == absent, kind


@pytest.mark.parametrize(("method", "path"), sorted(ONE_THING))
def test_the_store_is_asked_as_much_for_a_foreign_id_as_for_an_absent_one(two: Two, method: str, path: str) -> None:
    """Time tells nothing either: both take the same way through the store."""
    path, param = about_one(path)

    def asked(its_id: str) -> list[str]:
        with two.watched() as statements:
            two.theirs.request(method, path.replace(f"{{{param}}}", its_id))
        return statements

    absent = asked(ABSENT[param])
    assert absent
    for its_id in two.ids[param]:
        if its_id not in NO_SHAPE:
            assert asked(its_id) == absent, its_id


@pytest.mark.parametrize(
    "header", ["X-Tidegate-Tenant", "OpenAI-Organization", "OpenAI-Project", "anthropic-workspace"]
)
def test_no_header_makes_a_key_another_tenants(two: Two, header: str) -> None:
    tenant_id = two.web.run(two.web.store.tenant_by_name("ours"))
    for name in ("ours", str(tenant_id)):
        named = {header: name}
        assert two.theirs.get("/v1/files", headers=named).json() == two.theirs.get("/v1/files").json()
        assert two.theirs.get(f"/v1/batches/{two.running_id}", headers=named).status_code == 404
        assert two.theirs.delete(f"/v1/files/{two.file_id}", headers=named).status_code == 404


@pytest.mark.parametrize(("method", "path"), sorted(OPERATORS))
def test_a_key_opens_nothing_of_the_operators(two: Two, method: str, path: str) -> None:
    before = two.web.run(two.web.store.list_keys(10))
    # Wrong tokens are counted by address, for all of these tests together: those of the one before are past.
    two.web.clock.ahead_ms += 61_000
    for key in before:
        url = path.replace("{key_id}", str(key["id"])).replace("{batch_id}", two.running_id)
        refused = two.theirs.request(method, url, json={"org": "ours"} if method == "POST" else None)
        assert (refused.status_code, refused.json()["error"]["code"]) == (403, "insufficient_scope")
        wrong = {"X-Tidegate-Control": "wrong"}
        assert two.theirs.request(method, url, headers=wrong).status_code == 401
    after = two.web.run(two.web.store.list_keys(10))
    assert [(key["id"], key["revoked_at"]) for key in after] == [(key["id"], key["revoked_at"]) for key in before]


def test_nothing_of_it_happened(two: Two) -> None:
    assert two.ours.get(f"/v1/files/{two.file_id}").status_code == 200
    assert two.ours.get(f"/v1/batches/{two.running_id}").json()["status"] == "in_progress"
    assert two.ours.get(f"/v1/batches/{two.running_id}/output").content == b"growing\n"
    assert two.ours.get(f"/v1/webhook_endpoints/{two.endpoint_id}").json()["name"] == "ours alone"
    assert two.ours.get(f"/v1/responses/{two.response_ids[0]}").json()["status"] == "queued"


@pytest.mark.parametrize(("method", "path"), sorted(LISTS))
def test_lists_show_only_ones_own(two: Two, method: str, path: str) -> None:
    assert two.theirs.request(method, path).json()["data"] == []
    foreign, absent, name = {
        "/v1/files": (two.file_id, ABSENT["file_id"], "after"),
        "/v1/batches": (two.running_id, ABSENT["batch_id"], "after"),
        "/v1/messages/batches": (two.message_ids[0], ABSENT["message_batch_id"], "after_id"),
        "/v1/webhook_endpoints": (two.endpoint_id, ABSENT["webhook_endpoint_id"], "after"),
        "/v1/webhook_deliveries": (two.delivery_id, ABSENT["delivery_id"], "after"),
    }[path]
    wanted = looks(two.theirs.get(path, params={name: absent}))
    assert wanted[0] == 400
    for cursor in (foreign, "x"):
        assert looks(two.theirs.get(path, params={name: cursor})) == wanted


def test_another_tenants_workspace_is_an_absent_one(two: Two) -> None:
    tenant_id = str(two.web.run(two.web.store.tenant_by_name("ours")))
    body = {"type": "ASYNC", "items": [{"resourceId": "m", "request": {}}]}
    absent = looks(two.theirs.post("/v1/completion-batch/unknown/prod", json=body))
    assert absent[0] == 404
    for name in ("ours", tenant_id):
        assert looks(two.theirs.post(f"/v1/completion-batch/{name}/prod", json=body)) == absent
        there = f"/v1/completion-batch/{name}/prod/{two.completion_id}"
        assert two.theirs.get(there).status_code == 404
        assert two.theirs.post(f"{there}/cancel").status_code == 404
    own = f"/v1/completion-batch/{tenant_id}/prod/{two.completion_id}"
    assert two.ours.get(own).json()["status"] == "PENDING"
    assert two.ours.get(own.replace("prod", "dev")).status_code == 404


def test_another_tenants_file_is_no_input(two: Two) -> None:
    def post(file_id: str) -> tuple[int, bytes, dict[str, str]]:
        body = {"input_file_id": file_id, "endpoint": "/v1/embeddings"}
        return looks(two.theirs.post("/v1/batches", json=body), quote(file_id))

    absent = post(ABSENT["file_id"])
    assert absent[0] == 404
    for its_id in two.ids["file_id"]:
        assert post(its_id) == absent


def test_idempotency_keys_are_ones_own(two: Two) -> None:
    same: dict[str, Any] = {"Idempotency-Key": "same"}
    named: Callable[[httpx2.Client], Any] = lambda client: upload(client, **same)  # noqa: E731
    assert named(two.ours) == named(two.ours)
    assert named(two.theirs) != named(two.ours)
    for client in (two.ours, two.theirs):
        file_id = named(client)
        ids = [
            client.post(
                "/v1/batches",
                json={"input_file_id": file_id, "endpoint": "/v1/embeddings"},
                headers={"Idempotency-Key": "same"},
            ).json()["id"]
            for _ in range(2)
        ]
        assert ids[0] == ids[1]
        client.post(f"/v1/batches/{ids[0]}/cancel")
    # Nor does the same key with another body show that someone else has used it.
    for client, name in ((two.ours, "once"), (two.theirs, "once")):
        answer = client.post(
            "/v1/files",
            files={"file": (f"{id(client)}.jsonl", b'{"a": 1}\n')},
            data={"purpose": "batch"},
            headers={"Idempotency-Key": name},
        )
        assert answer.status_code == 200


def test_no_answer_names_the_other(two: Two) -> None:
    for path in ("/v1/files", "/v1/batches", "/v1/messages/batches", "/v1/models", "/readyz", "/healthz"):
        text = two.theirs.get(path).text
        for ours in (two.file_id, two.running_id, two.done_id, "ours"):
            assert ours not in text
