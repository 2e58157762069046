"""Turns what an operator wrote about tenants into weights, caps and budgets, by a tenant's name."""

from collections.abc import Iterator

import msgspec

from tidegate.core.budgets.budget import Budget, Limit, LimitBound, budgets_of, creation_budgets, tightest
from tidegate.settings.capacity import TenantEntry
from tidegate.settings.check import nearest
from tidegate.settings.groups import Settings
from tidegate.settings.key_path import KeyPath
from tidegate.settings.models import limit_problems, limits_of


class TenantPolicy(msgspec.Struct, frozen=True):
    """What one tenant may have; 0 lifts a cap."""

    weight: float
    in_flight_units_max: int
    queued_units_max: int
    limits: tuple[Limit, ...]
    user_limits: tuple[Limit, ...]
    key_limits: tuple[Limit, ...]
    team_limits: tuple[Limit, ...] = ()
    parallel_max: int = 0
    user_parallel_max: int = 0
    key_parallel_max: int = 0

    @property
    def binds_calls(self) -> bool:
        """Whether this limits calls at all: by a budget, or by how many may go at once."""
        limits = (self.limits, self.team_limits, self.user_limits, self.key_limits)
        return any(limits) or bool(self.parallel_max or self.user_parallel_max or self.key_parallel_max)

    def budgets(
        self,
        tenant_id: str,
        user: str | None = None,
        key_id: str | None = None,
        job_id: str = "",
        job_limits: tuple[Limit, ...] = (),
        team: str | None = None,
    ) -> tuple[Budget, ...]:
        """The budgets that bind a call of this tenant, beside its deployment's and its resource's; none that limits nothing."""
        named = (*self._named(tenant_id, team, user, key_id), (LimitBound.JOB, job_id, job_limits))
        return tuple(one for bound, name, limits in named if name for one in budgets_of(bound, name, limits))

    def creation_budgets(
        self, tenant_id: str, team: str | None, user: str | None, key_id: str | None, own: tuple[Limit, ...]
    ) -> tuple[Budget, ...]:
        """What binds those who create batches; `own` are the key's own limits."""
        return tuple(
            one
            for bound, name, limits in self._named(tenant_id, team, user, key_id)
            if name
            for one in creation_budgets(bound, name, tightest((*limits, *own) if bound is LimitBound.KEY else limits))
        )

    def _named(
        self, tenant_id: str, team: str | None, user: str | None, key_id: str | None
    ) -> tuple[tuple[LimitBound, str, tuple[Limit, ...]], ...]:
        return (
            (LimitBound.TENANT, tenant_id, self.limits),
            (LimitBound.TEAM, f"{tenant_id}/{team}" if team else "", self.team_limits),
            (LimitBound.USER, f"{tenant_id}/{user}" if user else "", self.user_limits),
            (LimitBound.KEY, key_id or "", self.key_limits),
        )

    def parallel(
        self, tenant_id: str, user: str | None, key_id: str | None, key_parallel_max: int
    ) -> tuple[tuple[str, int], ...]:
        """How many calls at once those may have who are behind a call, by name; `key_parallel_max` is the key's own."""
        if not (key_parallel_max or self.parallel_max or self.user_parallel_max or self.key_parallel_max):
            return ()
        of_key = min((one for one in (self.key_parallel_max, key_parallel_max) if one), default=0)
        named = (
            (f"tenant:{tenant_id}", self.parallel_max),
            (f"user:{tenant_id}/{user}" if user else "", self.user_parallel_max),
            (f"key:{key_id}" if key_id else "", of_key),
        )
        return tuple((name, cap) for name, cap in named if name and cap)


class Tenants:
    """The policy of every tenant, named in the settings or not."""

    def __init__(self, settings: Settings) -> None:
        # The caps of those tenants that have one of their own, by name: others hold this very mapping, and its content follows.
        self.in_flight_caps: dict[str, int] = {}
        # Another one after every change.
        self.number = 0
        self.follow(settings)

    def follow(self, settings: Settings) -> None:
        """Hold tenants to these settings from now on."""
        self.number += 1
        self._settings = settings
        self._known = {name: self._policy(entry) for name, entry in settings.tenants.items()}
        self._other = self._policy(TenantEntry())
        # Most settings bind no tenant: then nothing is asked of them for each call.
        self.bind_calls = any(policy.binds_calls for policy in (self._other, *self._known.values()))
        self.in_flight_caps.clear()
        self.in_flight_caps.update(
            (name, entry.in_flight_units_max)
            for name, entry in settings.tenants.items()
            if entry.in_flight_units_max is not None
        )

    def of(self, name: str) -> TenantPolicy:
        return self._known.get(name, self._other)

    def names(self) -> frozenset[str]:
        """The tenants that the settings name."""
        return frozenset(self._known)

    def tier(self, name: str) -> str | None:
        entry = self._settings.tenants.get(name)
        return entry.tier if entry is not None else None

    def _policy(self, entry: TenantEntry) -> TenantPolicy:
        budgets = self._settings.budgets
        weight = entry.weight
        if weight is None:
            weight = self._settings.tiers[entry.tier] if entry.tier else 1.0
        in_flight = entry.in_flight_units_max
        return TenantPolicy(
            weight=weight,
            in_flight_units_max=self._settings.scheduler.in_flight_units_max if in_flight is None else in_flight,
            queued_units_max=entry.queued_units_max,
            limits=limits_of(entry.limits or budgets.tenant),
            team_limits=limits_of(entry.limits_per_team or budgets.team),
            user_limits=limits_of(entry.limits_per_user or budgets.user),
            key_limits=limits_of(entry.limits_per_key or budgets.key),
            parallel_max=entry.parallel_max,
            user_parallel_max=entry.parallel_max_per_user,
            key_parallel_max=entry.parallel_max_per_key,
        )


def problems(settings: Settings) -> Iterator[tuple[KeyPath, str]]:
    """Tiers that do not exist, weights given twice, and limits that cannot be."""
    for name in ("tenant", "team", "user", "key"):
        yield from limit_problems(("budgets", name), getattr(settings.budgets, name))
    tiers = list(settings.tiers)
    for tenant, entry in settings.tenants.items():
        path = ("tenants", tenant)
        for name in ("limits", "limits_per_team", "limits_per_user", "limits_per_key"):
            yield from limit_problems((*path, name), getattr(entry, name))
        if entry.tier is not None and entry.tier not in settings.tiers:
            hint = nearest(entry.tier, tiers) if tiers else "`tiers` names none yet"
            yield (*path, "tier"), f"is {entry.tier!r}, which is not a tier; {hint}"
        if entry.tier is not None and entry.weight is not None:
            yield (*path, "weight"), "and tier are both given; keep one of the two"
