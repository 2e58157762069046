"""What tests of the console stand on: a server with hostile texts in it, and the browsers of operators."""

from __future__ import annotations

import re

import httpx2

from tests.web import stages
from tests.web.calls import create, upload
from tests.web.server import WebServer
from tidegate.core.ids import item_id
from tidegate.web.console.session import SESSION_S

HOSTILE = '"><script>alert(1)</script><img src=x onerror=alert(1)>'
PAGES = ("", "/batches", "/operations", "/queues", "/deployments", "/orgs", "/deliveries", "/audit", "/playground")
# Pages for those who may change things.
FORMS = ("/batches/new", "/deployments/edit")


class Console:
    """A server with a batch whose texts are hostile, and browsers of two operators."""

    def __init__(self, web: WebServer) -> None:
        self.web = web
        owner = web.client(web.make_key(f"org {HOSTILE}"))
        self._owner, self._file = owner, upload(owner)
        self.batch = create(owner, self._file, metadata={HOSTILE: HOSTILE})["id"]
        stages.start(web, self.batch, 3)
        # Lines as the recorder writes them.
        answered = b'{"id":"%s","custom_id":"a","response":{"status_code":200,"body":{}},"error":null}\n'
        body = b'{"error":{"code":"<i>bad</i>"}}'
        refused = b'{"id":"%s","custom_id":"<b>x</b>","response":{"status_code":400,"body":%s},"error":null}\n'
        first, second = (item_id(self.batch, number).encode() for number in (0, 1))
        stages.finish(web, self.batch, {0: answered % first}, {1: refused % (second, body)})
        self.reader_key = web.make_key("ops", scopes=["admin:read"])
        self.writer_key = web.make_key("ops", scopes=["admin:write"])

    def run_again(self) -> str:
        """Another batch of the same file."""
        return str(create(self._owner, self._file)["id"])

    def signed_in(self, key: str) -> httpx2.Client:
        client = self.web.client()
        answer = client.post("/console/sign-in", data={"key": key})
        assert (answer.status_code, answer.headers["location"]) == (303, "/console"), answer.text
        cookie = answer.headers["set-cookie"]
        for flag in ("HttpOnly", "Secure", "SameSite=strict", "Path=/", f"Max-Age={SESSION_S}"):
            assert flag in cookie
        client.cookies.clear()
        # Over plain HTTP the client would not send a cookie that is marked as secure; a browser does so on this machine.
        client.headers["Cookie"] = cookie.partition(";")[0]
        return client


def csrf_of(client: httpx2.Client, path: str) -> str:
    found = re.search(r'name="csrf" value="([0-9a-f]+)"', client.get(path).text)
    assert found
    return found[1]
