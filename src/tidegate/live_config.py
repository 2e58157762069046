"""The live configuration: deployments and resources of the settings, and those added at run time.

Every 2 seconds each process looks at the store, the settings file, and the files of keys and
certificates, and applies what changed:
- An entry that cannot be used is left out with a reason in the log, and tried again later.
- A deployment with a new key is tried at once, whatever its health was.
- When the terms change (what may be sent where, above all limits), the store wakes all
  work that rests.
- The most connections stay as they were at the start.

The module routes nothing and holds no connection.
"""

import asyncio
import hashlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

import msgspec
import structlog
from msgspec.structs import replace

from tidegate import metrics
from tidegate.core.body_rules.caller_fields import FieldRules
from tidegate.core.deployments import Deployment, Resource, Secret, reached_names
from tidegate.core.errors import SettingsError, StoreError
from tidegate.core.retry import RetryPolicy
from tidegate.settings import Settings, deployments, resources
from tidegate.settings.added import added
from tidegate.settings.body_fields import field_rules
from tidegate.settings.models import model_caps, retry_policies
from tidegate.settings.reload import SettingsFile, reloaded
from tidegate.settings.renewal import Renewal
from tidegate.settings.tenants import Tenants
from tidegate.store.store import Store

log = structlog.get_logger()

LOOK_S = 2.0
# Processes follow a change one after another. A process whose terms differ for the first number of
# looks (half a minute) logs it; after the second (ten minutes) it relies on its own terms alone.
DIFFERS_LOOKS = 15
OUTDATED_LOOKS_MAX = 300
# Items of an unknown model wait for the next look, or for another worker to take them.
LOOK_WAIT_MS, OUTDATED_WAIT_MS = 2_500, 10_000
UNKNOWN_LOOKS_MAX = 30
UNKNOWN_MAX = 1_000
UNKNOWN_LOGGED_MAX = 10

DIFFERS = (
    "another process has other models, resources, tenants or budgets than this one: give all processes the same settings; until then "
    "each goes by its own"
)

T = TypeVar("T")

# Serves these from now on, with these caps of models. Returns the reason for each that
# cannot be used, by name.
Serve = Callable[[Iterable[Deployment], Iterable[Resource], Mapping[str, int]], dict[str, str]]


class LiveConfig:
    """The configuration in force. Its mappings stay the same objects, and their content
    follows changes:

    - `model_of`: the model behind each resource.
    - `reached_by`: all names by which a call can reach a resource.
    - `retry_of`: how items of a name are retried.
    - `fields_of`: the fields that callers of a name may not set.

    `settings` are the settings in force, and `tenants` the policies that they give to
    each tenant."""

    def __init__(self, store: Store, settings: Settings, serve: Serve, file: SettingsFile | None = None) -> None:
        self._store = store
        self.settings = settings
        self._serve = serve
        self._file = file
        self.tenants = Tenants(settings)
        self._number: int | None = None
        self._is_reached = True
        self._reload_trouble = ""
        self._looking = asyncio.Lock()
        self._renewal = Renewal()
        self._keys: dict[str, Secret | None] = {}
        # The terms in force, and the terms under which resting work was last woken.
        self._terms: tuple[Any, ...] = ()
        self._digest = ""
        self._woken_under: tuple[Any, ...] | None = None
        self._wakes_again = False
        self._looks_outdated = 0
        self._look_count = 0
        # Unknown models that were asked for, each with the number of the look at that moment.
        self._unknown: dict[str, int] = {}
        self.unusable: dict[tuple[str, str], str] = {}
        self.model_of: dict[str, str] = {one.name: one.model for one in resources(settings)}
        self.reached_by: dict[str, tuple[str, ...]] = reached_names(resources(settings))
        self.retry_of: dict[str, RetryPolicy] = retry_policies(settings)
        self.fields_of: dict[str, FieldRules] = field_rules(settings, deployments(settings), resources(settings))

    async def _reload(self) -> None:
        """Apply the settings that may change at run time, if their file was changed. A file with a
        mistake changes nothing."""
        try:
            found = await asyncio.to_thread(self._file.news) if self._file is not None else None
        except SettingsError as error:
            if str(error) != self._reload_trouble:
                self._reload_trouble = str(error)
                log.error("settings_reload_failed", why=str(error))
            return
        if found is not None:
            self._reload_trouble = ""
            self.settings, waiting = reloaded(self.settings, found)
            self.tenants.follow(self.settings)
            # Forces a rebuild of what is served, at a later look if the store does not answer now.
            self._number = None
            log.info("settings_reloaded", wait_for_restart=", ".join(waiting) or "none")

    async def look(self) -> None:
        """Apply what an operator changed since the last look."""
        async with self._looking:
            await self._reload()
            # An entry that lacks a key or a file may get it; one that conflicts with the settings
            # stays unused until the next start.
            may_change = bool(self.unusable) and not self.settings.upstream.url
            may_change = may_change or await asyncio.to_thread(self._renewal.has_news)
            if not may_change and await self._store.routing_number() == self._number:
                await self._wake_what_rests()
                await self._compare_terms()
                return
            number, entries = await self._store.routing()
            troubles = self._renewal.troubles
            self._renewal.begin_renewal()
            documents = [(one.kind, one.name, one.document) for one in entries]
            found = added(self.settings, documents, renewal=self._renewal)
            configured = map(self._renewal.renewed, deployments(self.settings))
            ours = [found.in_state(one) for one in (*configured, *found.deployments)]
            if (now := self._renewal.troubles) and now != troubles:
                log.warning("secrets_reload_failed", why=sorted(f"{file} {trouble}" for file, trouble in now.items()))
            named = (*resources(self.settings), *found.resources)
            metrics.pin(models=[one for two in ours for one in two.models], deployments=[one.name for one in ours])
            # Rules come before the deployments that they bind.
            _follow(self.fields_of, field_rules(self.settings, ours, named, found.models))
            caps = model_caps(self.settings, found.models)
            refused = self._serve(ours, named, caps)
            places = {one.name for one in ours}
            unusable = found.unusable | {
                ("deployment" if name in places else "resource", name): why for name, why in refused.items()
            }
            _follow(self.model_of, {one.name: one.model for one in named})
            _follow(self.reached_by, reached_names(named))
            _follow(self.retry_of, retry_policies(self.settings, found.models, found.resources))
            if number != (self._number or 0):
                log.info("routing_changed", number=number, deployments=len(ours), resources=len(named))
            self._say(unusable)
            self._say_renewed(ours)
            self._number, self.unusable = number, unusable
            self._terms = (ours, named, caps, self.settings.tenants, self.settings.budgets)
            self._digest = _digest(self._terms)
            await self._wake_what_rests()
            await self._compare_terms()

    def unknown_wait_ms(self, model: str) -> int:
        """Return how long items of a model that is unknown here wait: another process may know it.

        They wait until this process has looked, and then as long as the terms differ, but not
        forever: the other process may be gone. Over an embedded store they do not wait, because
        each process has only its own terms."""
        if not self.settings.store.is_postgresql:
            return 0
        if self._is_just_asked(model):
            return LOOK_WAIT_MS
        return OUTDATED_WAIT_MS if 0 < self._looks_outdated <= OUTDATED_LOOKS_MAX else 0

    def _is_just_asked(self, model: str) -> bool:
        """Return whether there was no look since this unknown model was first asked for.

        Callers choose the names, so only a bounded number is remembered, and items of any other
        name do not wait."""
        long_ago = self._look_count - UNKNOWN_LOOKS_MAX
        if self._unknown.get(model, long_ago - 1) < long_ago:
            if len(self._unknown) >= UNKNOWN_MAX:
                self._unknown = {name: at for name, at in self._unknown.items() if at >= long_ago}
            if len(self._unknown) < UNKNOWN_MAX:
                self._unknown[model] = self._look_count
        return self._unknown.get(model) == self._look_count

    async def _compare_terms(self) -> None:
        """Compare the terms of this process with those of the process that changed last."""
        if not self.settings.store.is_postgresql:
            return
        terms = await self._store.terms()
        # Counted only now: a look that the store did not answer compared nothing.
        self._look_count += 1
        if terms == self._digest:
            self._looks_outdated = 0
            return
        self._looks_outdated += 1
        if self._looks_outdated == DIFFERS_LOOKS:
            log.warning("settings_differ", why=DIFFERS, unknown_models=sorted(self._unknown)[:UNKNOWN_LOGGED_MAX])

    async def _wake_what_rests(self) -> None:
        """Wake work that rests under other terms than these.

        At the start, only the digest of an earlier process's terms is known. Later, a process whose
        own terms change wakes the work even if others did: it may have put off again what they
        woke. The next look wakes once more, for work that was just being put off."""
        is_changed = self._woken_under != self._terms
        if not is_changed and not self._wakes_again:
            return
        is_first = self._woken_under is None
        if not is_first or self._digest != await self._store.terms():
            await self._store.wake_under(self._digest)
        self._woken_under = self._terms
        self._wakes_again = is_changed and not is_first

    def _say(self, unusable: dict[tuple[str, str], str]) -> None:
        for (kind, name), why in unusable.items():
            if self.unusable.get((kind, name)) != why:
                log.warning("routing_entry_ignored", kind=kind, name=name, why=why)

    def _say_renewed(self, ours: Iterable[Deployment]) -> None:
        keys = {one.name: one.api_key for one in ours}
        renewed = sorted(name for name, key in keys.items() if name in self._keys and key != self._keys[name])
        if renewed:
            log.info("upstream_keys_reloaded", deployments=renewed)
        self._keys = keys

    async def follow(self) -> None:
        """Look for as long as this process lives. While the store does not answer,
        everything stays as it is."""
        while True:
            await asyncio.sleep(LOOK_S)
            try:
                await self.look()
                self._is_reached = True
            except StoreError as error:
                if self._is_reached:
                    log.warning("routing_refresh_failed", error=str(error))
                self._is_reached = False
            except Exception as error:
                # Any error: this process goes on serving what it serves now.
                log.error("routing_crashed", kind=type(error).__name__, why=str(error))


def _follow(kept: dict[str, T], now: dict[str, T]) -> None:
    """Change the content of a mapping in place, because others hold the same object."""
    for gone in kept.keys() - now.keys():
        del kept[gone]
    kept.update(now)


def _digest(terms: tuple[Any, ...]) -> str:
    """Return a digest that is equal in all processes with these terms, whatever keys and
    certificates they have. It shows no secret."""
    ours, *others = terms
    places = [replace(one, api_key=None, tls=replace(one.tls, stamp="")) for one in ours]
    return hashlib.sha256(msgspec.json.encode([places, *others], enc_hook=repr, order="deterministic")).hexdigest()
