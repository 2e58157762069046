"""The live configuration: deployments and resources of the settings, and those added at run time.

Each process looks into the store and at the file of settings every other second and follows. What it cannot use it leaves out, says why,
and tries again. It looks at files of keys and certificates too: a deployment with another key is tried at once, whatever was thought of
it. When the terms change (what may be sent where, limits above all), it has the store look again at all work that rests. The ceiling of
connections stays what it was at start. It routes nothing and holds no connection.
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
# Processes follow a change one after another. One that has not followed for so many looks says that it differs (half a minute), and after
# so many (ten minutes) goes by what it knows itself.
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

# Serve these from now on, with these caps of models; says which cannot be used, by name, and why.
Serve = Callable[[Iterable[Deployment], Iterable[Resource], Mapping[str, int]], dict[str, str]]


class LiveConfig:
    """`model_of` is the model behind each resource, `reached_by` every name that a call to it may come under, `retry_of` how items of a
    name are tried again, and `fields_of` what its callers may not say: mappings whose content follows.
    `settings` are those in force, and `tenants` what they give to each tenant."""

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
        # What holds now, and under what work was last looked at.
        self._terms: tuple[Any, ...] = ()
        self._digest = ""
        self._woken_under: tuple[Any, ...] | None = None
        self._wakes_again = False
        self._looks_outdated = 0
        self._look_count = 0
        # When it was first asked for which unknown model, by the count of looks.
        self._unknown: dict[str, int] = {}
        self.unusable: dict[tuple[str, str], str] = {}
        self.model_of: dict[str, str] = {one.name: one.model for one in resources(settings)}
        self.reached_by: dict[str, tuple[str, ...]] = reached_names(resources(settings))
        self.retry_of: dict[str, RetryPolicy] = retry_policies(settings)
        self.fields_of: dict[str, FieldRules] = field_rules(settings, deployments(settings), resources(settings))

    async def _reload(self) -> None:
        """Take over what may change of the settings, when their file was changed. A file with a mistake in it changes nothing."""
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
            # What is served is put together again, also when the store cannot be asked right now.
            self._number = None
            log.info("settings_reloaded", wait_for_restart=", ".join(waiting) or "none")

    async def look(self) -> None:
        """Follow what an operator changed since the last look."""
        async with self._looking:
            await self._reload()
            # What lacks a key or a file may get it; what the settings stand against stays unused until the next start.
            may_mend = bool(self.unusable) and not self.settings.upstream.url
            may_mend = may_mend or await asyncio.to_thread(self._renewal.has_news)
            if not may_mend and await self._store.routing_number() == self._number:
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
        """Return how long items of a model wait that is unknown here, since another process that has started or changed meanwhile may
        know it: until this one has looked, and then as long as their terms differ. That is not believed for ever: the other may be gone.
        Over an embedded store each process is alone with its own terms."""
        if not self.settings.store.is_postgresql:
            return 0
        if self._is_just_asked(model):
            return LOOK_WAIT_MS
        return OUTDATED_WAIT_MS if 0 < self._looks_outdated <= OUTDATED_LOOKS_MAX else 0

    def _is_just_asked(self, model: str) -> bool:
        """Whether there was no look since this unknown model was asked for. Callers choose the names of models: beyond a bound they are
        not remembered, and such a one is not waited for."""
        long_ago = self._look_count - UNKNOWN_LOOKS_MAX
        if self._unknown.get(model, long_ago - 1) < long_ago:
            if len(self._unknown) >= UNKNOWN_MAX:
                self._unknown = {name: at for name, at in self._unknown.items() if at >= long_ago}
            if len(self._unknown) < UNKNOWN_MAX:
                self._unknown[model] = self._look_count
        return self._unknown.get(model) == self._look_count

    async def _compare_terms(self) -> None:
        """Look whether the terms of the process that changed last are those of this one."""
        if not self.settings.store.is_postgresql:
            return
        terms = await self._store.terms()
        # Counted only now: a look that the store did not answer has compared nothing.
        self._look_count += 1
        if terms == self._digest:
            self._looks_outdated = 0
            return
        self._looks_outdated += 1
        if self._looks_outdated == DIFFERS_LOOKS:
            log.warning("settings_differ", why=DIFFERS, unknown_models=sorted(self._unknown)[:UNKNOWN_LOGGED_MAX])

    async def _wake_what_rests(self) -> None:
        """Have work looked at again that rests under other terms. Those of an earlier process are known by their digest alone; a process
        whose own terms change wakes it whatever others did: it may have put work off meanwhile that they woke. The next look does so
        once more, for what was just being put off."""
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
        """Look for as long as this process lives; while the store is away, everything stays as it is."""
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
                # Whatever it is, what is served now goes on being served.
                log.error("routing_crashed", kind=type(error).__name__, why=str(error))


def _follow(kept: dict[str, T], now: dict[str, T]) -> None:
    """Others hold this very mapping: its content is changed, and it stays the same one."""
    for gone in kept.keys() - now.keys():
        del kept[gone]
    kept.update(now)


def _digest(terms: tuple[Any, ...]) -> str:
    """The same for the same terms in any process, whatever key or file each has for a deployment. A secret shows nothing of itself."""
    ours, *others = terms
    places = [replace(one, api_key=None, tls=replace(one.tls, stamp="")) for one in ours]
    return hashlib.sha256(msgspec.json.encode([places, *others], enc_hook=repr, order="deterministic")).hexdigest()
