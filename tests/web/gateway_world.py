"""What tests of the gateway stand on: a web server over scripted model servers, and what clients send."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx2

from tests.support.sdks import anthropic, openai
from tests.upstream.raw_server import Script
from tests.web.server import WebServer, settings_with
from tests.web.upstream import Upstream, answers
from tidegate.settings.capacity import ModelDeployment, ModelSettings

CHAT = "/v1/chat/completions"
MESSAGES = "/v1/messages"
ASK: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "Say hi."}]}


class GatewayWorld:
    """`web` is in front of `upstreams`, which all serve the model `m` unless their options say otherwise."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.upstreams: list[Upstream] = []
        self._clients: list[httpx2.Client] = []
        self.web: WebServer

    def upstream(self, script: Script) -> Upstream:
        """One more model server, for models that a test names itself."""
        self.upstreams.append(Upstream(script))
        return self.upstreams[-1]

    def start(self, *scripts: Script, models: dict[str, Any] | None = None, **groups: Any) -> GatewayWorld:
        opened = [self.upstream(script) for script in scripts or ((answers(),) if models is None else ())]
        options: list[dict[str, Any]] = groups.pop("options", [{}] * len(opened))
        places = tuple(
            ModelDeployment(url=upstream.url, name=f"u{number}", **more)
            for number, (upstream, more) in enumerate(zip(opened, options, strict=True))
        )
        named = models if models is not None else {"m": ModelSettings(deployments=places)}
        self.web = WebServer(self._directory, settings_with(models=named, **groups))
        self._directory.mkdir(exist_ok=True)
        self.web.start()
        return self

    def client(self, key: str | None = None) -> httpx2.Client:
        client = self.web.client(key)
        self._clients.append(client)
        return client

    def openai(self, key: str = "none", max_retries: int = 0) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.web.url}/v1", api_key=key, max_retries=max_retries)

    def anthropic(self, key: str = "none") -> anthropic.Anthropic:
        return anthropic.Anthropic(base_url=self.web.url, api_key=key, max_retries=0)

    def interactive(self, name: str = "u0") -> tuple[int, int]:
        async def ask() -> tuple[int, int]:
            return self.web.router.interactive(name)

        return self.web.run(ask())

    def states(self) -> list[str]:
        async def ask() -> list[str]:
            return [status.state for status in self.web.router.status()]

        return self.web.run(ask())

    def close(self) -> None:
        for client in self._clients:
            client.close()
        if hasattr(self, "web"):
            self.web.stop()
        for upstream in self.upstreams:
            upstream.close()
