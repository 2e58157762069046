"""The list of the models that callers may name, in OpenAI's or Anthropic's shape.

It has those that the operator named, and those that deployments list.

A name that the operator gave is always listed, because a server that does not list it now may do so
again. The list adds what deployments report of it: its age, owner and context length. A deployment
without names adds those that it lists, and is asked for a name that it does not list. Deployments
are asked through the control client, side by side, seldom, and are never waited for long: one that
was silent is not waited for until it has answered again. A key sees only the models that it may
use.
"""

import asyncio
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from urllib.parse import unquote

from starlette.requests import Request
from starlette.responses import Response

from tidegate.core.errors import ApiProblem
from tidegate.core.input.lines import MODEL_BYTES_MAX
from tidegate.core.nouns import Caller
from tidegate.core.policy.policy_rules import allows
from tidegate.upstream.routing.deployment_status import DeploymentStatus
from tidegate.upstream.routing.probe import Listed
from tidegate.web.context import WebContext
from tidegate.web.http.answers import json_answer
from tidegate.web.http.routes import Guarded
from tidegate.web.openai import schemas
from tidegate.web.requests import requests

WAIT_S = 1.0
ASK_TIMEOUT_S = 2.0
# The control client has few connections, and probes must find one free.
ASKED_AT_ONCE_MAX = 4
MODELS_MAX = 1_000
SCOPE = "batches:read or inference"
UNLISTED = Listed()
# Known but ignored: the list is always whole. Anthropic's clients page through it, and OpenAI's
# Codex sends its version.
ANTHROPIC_LIST = ("after_id", "before_id", "beta", "limit")
OPENAI_LIST = ("client_version",)

# A deployment's name and address: the list of another server under the same name does not count.
ListedServer = tuple[str, str]


class ModelRoutes:
    def __init__(self, context: WebContext) -> None:
        settings = context.settings
        self._router = context.router
        self._model_of = context.model_of()
        self._clock = context.clock
        self._believed_ms = settings.gateway.models_cache_s * 1000
        self._created_s = context.clock.now_ms() // 1000
        self._listed: dict[ListedServer, Mapping[str, Listed]] = {}
        self._asked_at_ms: dict[ListedServer, float] = {}
        self._silent: set[ListedServer] = set()
        self._asking: dict[ListedServer, asyncio.Task[None]] = {}
        self._ask_slots = asyncio.Semaphore(ASKED_AT_ONCE_MAX)

    def routes(self) -> list[Guarded]:
        return [
            Guarded("GET", "/v1/models", SCOPE, self.list),
            Guarded("GET", "/v1/models/{model:path}", SCOPE, self.one),
        ]

    async def list(self, request: Request, caller: Caller) -> Response:
        requests.refuse_unknown(request.query_params, ANTHROPIC_LIST if _is_anthropic(request) else OPENAI_LIST)
        found = await self._found(caller)
        if _is_anthropic(request):
            data = [self._anthropic(name, listed) for name, listed in found.items()]
            first, last = (data[0].id, data[-1].id) if data else (None, None)
            return json_answer(schemas.AnthropicModels(data, first, last, has_more=False))
        return json_answer(schemas.ModelList("list", [self._model(name, listed) for name, listed in found.items()]))

    async def one(self, request: Request, caller: Caller) -> Response:
        name = unquote(request.path_params["model"])
        found = await self._found(caller)
        if name not in found and await self._is_taken(name, caller):
            found[name] = UNLISTED
        if name not in found:
            raise ApiProblem(
                404, "model_not_found", "The model does not exist here: GET /v1/models lists those that do."
            )
        shown = self._anthropic if _is_anthropic(request) else self._model
        return json_answer(shown(name, found[name]))

    async def _is_taken(self, name: str, caller: Caller) -> bool:
        """Return whether a server without configured names takes this name, although it does not
        list it.
        """
        if not (_is_name(name) and allows(caller.models, caller.resources, name, self._model_of)):
            return False
        async with self._ask_slots:
            return await self._router.takes_by_name(name, ASK_TIMEOUT_S)

    def _model(self, name: str, listed: Listed) -> schemas.ModelObject:
        created_s = listed.created_s or self._created_s
        return schemas.ModelObject(name, "model", created_s, listed.owned_by or "tidegate", listed.context_tokens)

    def _anthropic(self, name: str, listed: Listed) -> schemas.AnthropicModel:
        created = datetime.fromtimestamp(listed.created_s or self._created_s, UTC)
        return schemas.AnthropicModel(
            "model", name, listed.display_name or name, created.strftime("%Y-%m-%dT%H:%M:%SZ")
        )

    async def _found(self, caller: Caller) -> dict[str, Listed]:
        """Return every name that this caller may use, with what is known of it."""
        status = self._router.status()
        await self._ask_if_due(status)
        names = set(self._router.names())
        known: dict[str, Listed] = {}
        for one in status:
            for own_name, listed in self._listed.get((one.name, one.url), {}).items():
                shown = one.models if own_name == one.upstream_model else (own_name,)
                for name in shown:
                    if not one.models:
                        names.add(name)
                    if not one.models or (name in one.models and own_name == (one.upstream_model or name)):
                        known[name] = known[name].beside(listed) if name in known else listed
        allowed = (name for name in names if allows(caller.models, caller.resources, name, self._model_of))
        return {name: known.get(self._model_of.get(name, name), UNLISTED) for name in sorted(allowed)}

    async def _ask_if_due(self, status: Sequence[DeploymentStatus]) -> None:
        now_ms = self._clock.monotonic_ms()
        servers = [(one.name, one.url) for one in status]
        for gone in self._asked_at_ms.keys() - set(servers):
            self._asked_at_ms.pop(gone)
            self._listed.pop(gone, None)
            self._silent.discard(gone)
        # Servers that answered last time go first.
        for server in sorted(servers, key=lambda server: server in self._silent):
            asked_at_ms = self._asked_at_ms.get(server)
            if server not in self._asking and (asked_at_ms is None or now_ms - asked_at_ms >= self._believed_ms):
                self._asked_at_ms[server] = now_ms
                self._asking[server] = asyncio.create_task(self._ask(server))
        awaited = [task for server, task in self._asking.items() if server not in self._silent]
        if awaited:
            await asyncio.wait(awaited, timeout=WAIT_S)
            self._silent |= {server for server, task in self._asking.items() if task in awaited and not task.done()}

    async def _ask(self, server: ListedServer) -> None:
        try:
            async with self._ask_slots:
                probe = await self._router.probe(server[0], ASK_TIMEOUT_S)
        except KeyError:
            # The deployment was removed meanwhile.
            return
        finally:
            del self._asking[server]
        if server not in self._asked_at_ms:
            return
        if not probe.reachable:
            self._silent.add(server)
            return
        self._silent.discard(server)
        if not probe.message:
            named = [one for one in probe.listed.items() if _is_name(one[0])]
            self._listed[server] = dict(named[:MODELS_MAX])


def _is_name(name: str) -> bool:
    return name.isprintable() and 0 < len(name.encode("utf-8", "replace")) <= MODEL_BYTES_MAX


def _is_anthropic(request: Request) -> bool:
    """Return whether an Anthropic client sent this: it sends its API's version with every call."""
    return "anthropic-version" in request.headers
