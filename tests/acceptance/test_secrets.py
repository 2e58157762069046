"""Secrets that stand out, in every place that can hold one, and everything that can go wrong with each: none is ever shown.

Real processes at the debug level. What they print, answer, count, trace, write into results and show of their settings or in the console is
searched for each secret, as it is and as others write it (base64, percent signs).
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

import httpx2
import pytest

from tests.support.collector import Collector
from tests.support.console import console_pages
from tests.support.engine import Engine
from tests.support.processes import Proc, Processes
from tests.support.tidegate import TIDEGATE, Site, chat_line, operator_headers
from tests.upstream.raw_server import Peer, Request
from tests.web.upstream import Upstream

# One for each place; the text of the secret names the place.
PLACES = (
    "api-key-env", "api-key-environ", "api-key-file", "api-key-literal", "pepper", "redis", "postgres", "s3-id", "s3-secret",
    "header-of-a-caller", "wrong-key", "wrong-token", "collector",
)  # fmt: skip
CANARY = {place: f"CANARY+{place}/7f3a" for place in PLACES}
ASK = {"messages": [{"role": "user", "content": "Say hi."}]}


def forms(secret: str) -> set[str]:
    return {secret, quote(secret, safe=""), quote(secret), base64.b64encode(secret.encode()).decode().rstrip("=")}


async def quotes_the_key(request: Request, peer: Peer) -> None:
    """Quotes the key that it was sent, as some servers do with a wrong one; the prompt says with which status."""
    shown = request.headers.get("Authorization", "").encode()
    if b"answer well" in request.body:
        choice = (
            b'{"index":0,"message":{"role":"assistant","content":"You sent %s, answered well"},"finish_reason":"stop"}'
            % shown
        )
        await peer.answer(200, b'{"id":"x","object":"chat.completion","choices":[%s]}' % choice, X_Echo=shown.decode())
        return
    status = next((code for code in (401, 400, 500, 200) if f"say {code}".encode() in request.body), 401)
    await peer.answer(status, b'{"error":{"message":"Incorrect API key provided: %s"}}' % shown, X_Echo=shown.decode())


class Shown:
    """Everything that was shown so far, by the process or the address that showed it."""

    def __init__(self) -> None:
        self.by: dict[str, str] = {}

    def note(self, answer: httpx2.Response) -> httpx2.Response:
        request = answer.request
        self.by[f"{len(self.by)} {request.method} {request.url.path} -> {answer.status_code}"] = (
            f"{dict(answer.headers)} {answer.text}"
        )
        return answer

    def places_of(self, secrets: dict[str, str]) -> list[tuple[str, str]]:
        return [
            (place, who)
            for place, secret in secrets.items()
            for who, text in self.by.items()
            if any(form in text for form in forms(secret))
        ]


class Installation:
    def __init__(self, processes: Processes, directory: Path, collector: Collector) -> None:
        self.processes = processes
        self.directory = directory
        self.engine = Engine(processes, directory / "engine")
        self.quoting = Upstream(quotes_the_key)
        self.collector = collector
        self.shown = Shown()
        key_file = directory / "upstream.key"
        key_file.write_text(CANARY["api-key-file"] + "\n")
        gone = "http://127.0.0.1:1/v1"
        models = {
            "quoted": {"url": self.quoting.url, "api_key": "env:CANARY_ENV"},
            "forbidden": {"url": self.quoting.url, "api_key": "os.environ/CANARY_ENVIRON"},
            "gone": {"url": gone, "api_key": f"file:{key_file}"},
            "well": {"url": self.engine.url, "api_key": CANARY["api-key-literal"]},
        }
        more = {
            "TIDEGATE_LOGGING_LEVEL": "debug",
            "TIDEGATE_AUTH_PEPPER": CANARY["pepper"] * 2,
            "TIDEGATE_REDIS_URL": f"redis://:{quote(CANARY['redis'], safe='')}@127.0.0.1:1/0",
            "TIDEGATE_RETRY_BACKOFF_MS": "20",
            **collector.env,
            "OTEL_EXPORTER_OTLP_HEADERS": f"x-own=value,authorization={quote(CANARY['collector'], safe='')}",
            "CANARY_ENV": CANARY["api-key-env"],
            "CANARY_ENVIRON": CANARY["api-key-environ"],
        }
        self.site = Site("embedded", processes, directory, self.engine, more)
        self.site.configure(models={name: {"deployments": [one]} for name, one in models.items()})
        self.site.env["TIDEGATE_UPSTREAM_URL"] = ""
        self.serve = self.site.serve()
        self.keys: dict[str, str] = {}

    def command(self, *arguments: str, more: dict[str, str] | None = None, data: Path | None = None) -> Proc:
        """A command run to its end, whatever that is."""
        args = [TIDEGATE, *arguments, "--data", str(data or self.site.data)]
        proc = self.processes.start(args, name=arguments[0], env=self.site.environment(more=more))
        proc.wait(60)
        return proc

    def key(self, org: str) -> str:
        made = self.keys[f"key of {org}"] = self.site.keyed(org).api_key
        return made


@pytest.fixture(scope="module")
def installation(module_processes: Processes, module_directory: Path) -> Iterator[Installation]:
    with Collector() as collector:
        made = Installation(module_processes, module_directory, collector)
        yield made
        made.quoting.close()


@pytest.mark.timeout(300)
def test_no_secret_is_ever_shown(installation: Installation) -> None:
    one, shown = installation, installation.shown
    key = one.key("acme")
    with httpx2.Client(base_url=one.site.url, timeout=60, headers={"Authorization": f"Bearer {key}"}) as client:
        _run_a_batch(one, key, shown)
        _ask_interactively(client, shown)
        for path in ("/metrics", "/readyz", "/healthz", "/v1/models", "/v1/models/quoted", "/v1/files", "/v1/batches"):
            shown.note(client.get(path))
    _be_refused(one, shown)
    _look_at_the_console(one, shown)
    _ask_commands(one)
    for number, span in enumerate(one.collector.spans()):
        shown.by[f"span {number} {span.name}"] = str(span)
    for number, proc in enumerate(one.processes.started):
        shown.by[f"process {number} {' '.join(proc.args[1:3])}"] = proc.stdout() + proc.stderr()
    assert (
        shown.places_of({**CANARY, **one.keys, "control token": operator_headers(one.site.data)["X-Tidegate-Control"]})
        == []
    )
    text = "".join(shown.by.values())
    for word in (
        *("upstream_key_rejected", "127.0.0.1:1", "redis", "invalid_api_key", "batch_cancelled", "answered well"),
        *("process-batch", "chat quoted", "<title>"),
    ):
        assert word in text, f"there is no {word}: the search would prove nothing"


def _ask_interactively(client: httpx2.Client, shown: Shown) -> None:
    for model, text in (
        ("quoted", "say 400"),
        ("quoted", "say 500"),
        ("quoted", "say 200"),
        ("quoted", "answer well"),
        ("gone", ""),
        ("well", ""),
    ):
        messages = [{"role": "user", "content": text or "Say hi."}]
        shown.note(client.post("/v1/chat/completions", json={"model": model, "messages": messages}))
        shown.note(client.post("/v1/messages", json={"model": model, "messages": messages, "max_tokens": 5}))
    shown.note(client.post("/v1/chat/completions", json={"model": "forbidden", **ASK}))
    secret_header = {"X-Secret": CANARY["header-of-a-caller"]}
    shown.note(client.post("/v1/chat/completions", json={"model": "absent", **ASK}, headers=secret_header))


def _run_a_batch(one: Installation, key: str, shown: Shown) -> None:
    site = one.site.as_caller(key)
    texts = {
        "quoted": ("say 400", "say 500", "say 200", "answer well"),
        "forbidden": ("a", "b"),
        "gone": ("a", "b"),
        "well": ("a",),
    }
    lines = [
        chat_line(f"{model} {number}", text, model)
        for model, all_of_it in texts.items()
        for number, text in enumerate(all_of_it)
    ]
    batch_id = site.submit(lines)
    site.until_done(batch_id, 5)
    one.serve.wait_for_line("upstream_key_rejected")
    one.command("explain", batch_id, "--org", "acme")
    site.cancel(batch_id)
    ended = site.ended(batch_id)
    shown.by["results"] = json.dumps([ended.batch, ended.output, ended.errors])


def _be_refused(one: Installation, shown: Shown) -> None:
    wrong = [
        {"Authorization": f"Bearer {CANARY['wrong-key']}"},
        {"Authorization": CANARY["wrong-key"]},
        {"x-api-key": CANARY["wrong-key"]},
        {"X-Tidegate-Control": CANARY["wrong-token"]},
    ]
    with httpx2.Client(base_url=one.site.url, timeout=60) as client:
        for headers in wrong:
            for method, path in (("GET", "/v1/files"), ("POST", "/v1/messages"), ("POST", "/admin/v1/keys")):
                shown.note(client.request(method, path, headers=headers, json={} if method == "POST" else None))


def _look_at_the_console(one: Installation, shown: Shown) -> None:
    """Every page of a key that may read requests and responses too: in these, no prompt is a secret."""
    scopes = ["admin:read", "admin:write", "admin:content"]
    key = one.keys["key of an operator"] = str(one.site.operate("keys", org="ops", scopes=scopes)["key"])
    for address, text in console_pages(one.site.url, key).items():
        shown.by[f"page {address}"] = text
    one.collector.until("process-batch")


def _ask_commands(one: Installation) -> None:
    password = quote(CANARY["postgres"], safe="")
    postgres = {"TIDEGATE_STORE_URL": f"postgresql://tidegate:{password}@127.0.0.1:1/tidegate"}
    objects = {
        "TIDEGATE_BLOBS_URL": "s3://bucket/prefix",
        "TIDEGATE_BLOBS_ENDPOINT": "http://127.0.0.1:1",
        "TIDEGATE_BLOBS_ALLOW_HTTP": "true",
        "TIDEGATE_BLOBS_ACCESS_KEY_ID": CANARY["s3-id"],
        "TIDEGATE_BLOBS_SECRET_ACCESS_KEY": CANARY["s3-secret"],
    }
    no_url = {"TIDEGATE_STORE_URL": CANARY["postgres"], "TIDEGATE_REDIS_URL": CANARY["redis"]}
    elsewhere = one.directory / "elsewhere"
    for arguments, more, data in (
        (("config", "--json", "--explain"), {}, None),
        (("doctor", "--debug"), {}, None),
        (("keys", "list"), {}, None),
        (("deployments", "list"), {}, None),
        (("config",), {**postgres, **objects}, elsewhere),
        (("worker", "--debug"), postgres, elsewhere),
        (("doctor", "--json"), {**postgres, **objects}, elsewhere),
        (("migrate", "--debug"), no_url, elsewhere),
    ):
        one.command(*arguments, more=more, data=data)
