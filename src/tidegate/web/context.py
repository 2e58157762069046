"""The parts that the web app works with: the composition root fills them in, and the routes only
read them.
"""

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

# Commands that change keys import this module too, and call no model server.
if TYPE_CHECKING:
    from tidegate.interactive_usage import InteractiveUsageBook
    from tidegate.live_config import LiveConfig
    from tidegate.upstream.calls.router import Router


def nothing_to_report() -> Mapping[str, str | None]:
    return {}


class WebContext(msgspec.Struct, frozen=True):
    """The parts of the web app.

    `worker_id` names the incarnation that uploads belong to. It must be registered and keep its
    heartbeat, or sweeps delete the uploads. `router` leads to the model servers and `callbacks` to
    tenants' webhooks. `scratch` is a directory for temporary files, and `scopes` are what keys may
    be allowed. `readiness` reports for each further part of the process, such as the worker, what
    is wrong with it, or None. `control_token` is what commands on this machine show instead of a
    key. `live_config` follows what is added at run time, `book` counts interactive calls, and
    `stop` is set when the process is asked to stop. `servers` names the model servers whose rates
    forecasts use; empty for all that were measured.
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
        """Return the model of each resource, as one mapping that follows changes at run time."""
        if self.live_config is not None:
            return self.live_config.model_of
        return {one.name: one.model for one in resources(self.settings)}

    def tenants(self) -> Tenants:
        """Return the policies of tenants, which follow the settings file."""
        return self.live_config.tenants if self.live_config is not None else Tenants(self.settings)

    def live_settings(self) -> Settings:
        """Return the settings with the changes since the start."""
        return self.live_config.settings if self.live_config is not None else self.settings

    def reached_by(self) -> Mapping[str, tuple[str, ...]]:
        """Return all names by which a call can reach each resource, as one mapping that follows
        changes at run time.
        """
        return self.live_config.reached_by if self.live_config is not None else reached_names(resources(self.settings))

    def fields_of(self) -> Mapping[str, FieldRules]:
        """Return the fields that callers of each name may not set, as one mapping that follows
        changes at run time.
        """
        if self.live_config is not None:
            return self.live_config.fields_of
        return field_rules(self.settings, deployments(self.settings), resources(self.settings))
