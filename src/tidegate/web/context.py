"""What the web app is given: the composition root fills this in, the routes only read it."""

import asyncio
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from tidegate.core.body_rules.caller_fields import FieldRules
from tidegate.core.deployments import Secret, reached_names
from tidegate.core.keys import Scopes
from tidegate.core.ports import Blobs, Callbacks, Clock, Entropy, Wakes
from tidegate.settings import Settings, deployments, resources
from tidegate.settings.body_fields import field_rules
from tidegate.settings.tenants import Tenants
from tidegate.store.store import Store

# A command that changes a key stands on this too, and calls no model server.
if TYPE_CHECKING:
    from tidegate.interactive_usage import InteractiveUsageBook
    from tidegate.live_config import LiveConfig
    from tidegate.upstream.calls.router import Router


def nothing_to_report() -> Mapping[str, str | None]:
    return {}


class WebContext(msgspec.Struct, frozen=True):
    """`worker_id` names the incarnation under which uploads are begun: it must be enlisted and beating, or sweeps collect them.

    `router` is the way to the model servers, `callbacks` the way to tenants' webhooks, `scratch` a directory for passing files,
    `scopes` what keys may be allowed to do.
    `readiness` says for each further part of the process (the worker, say) what is wrong with
    it, or None. `control_token` is what commands on this machine show instead of a key. `live_config` follows what is added at run time,
    `book` is where interactive calls are counted, and `stop` is set when the process is asked to stop.
    `servers` names the model servers whose rates a forecast is made from; empty for all that were measured.
    """

    store: Store
    blobs: Blobs
    settings: Settings
    clock: Clock
    entropy: Entropy
    wakes: Wakes
    worker_id: Callable[[], str]
    pepper: bytes
    router: "Router"
    callbacks: Callbacks
    scratch: Path
    scopes: Scopes
    readiness: Callable[[], Mapping[str, str | None]] = nothing_to_report
    control_token: Secret | None = None
    live_config: "LiveConfig | None" = None
    book: "InteractiveUsageBook | None" = None
    stop: asyncio.Event | None = None
    servers: str = ""

    def model_of(self) -> Mapping[str, str]:
        """The model behind each resource: one mapping, which follows what is added at run time."""
        if self.live_config is not None:
            return self.live_config.model_of
        return {one.name: one.model for one in resources(self.settings)}

    def tenants(self) -> Tenants:
        """What tenants may have, which follows the file of settings."""
        return self.live_config.tenants if self.live_config is not None else Tenants(self.settings)

    def live_settings(self) -> Settings:
        """The settings with what was changed since the start."""
        return self.live_config.settings if self.live_config is not None else self.settings

    def reached_by(self) -> Mapping[str, tuple[str, ...]]:
        """Every name that a call to a resource may come under: one mapping, which follows what is added at run time."""
        return self.live_config.reached_by if self.live_config is not None else reached_names(resources(self.settings))

    def fields_of(self) -> Mapping[str, FieldRules]:
        """What callers of each name may not say: one mapping, which follows what is added at run time."""
        if self.live_config is not None:
            return self.live_config.fields_of
        return field_rules(self.settings, deployments(self.settings), resources(self.settings))
