"""The weights, caps and budgets of tenants, made from the settings, by a tenant's name."""

from collections.abc import Iterator

import msgspec

from tidegate.core.budgets.budget import Budget, Limit, LimitBound, budgets_of, creation_budgets, tightest
from tidegate.settings.capacity import TenantEntry
from tidegate.settings.check import nearest
from tidegate.settings.groups import Settings
from tidegate.settings.key_path import KeyPath
from tidegate.settings.models import limit_problems, limits_of


class TenantPolicy(msgspec.Struct, frozen=True):
    """The weight, caps and limits of one tenant; 0 lifts a cap."""

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
        """Return whether this limits calls at all: by a budget, or by a number of calls at once."""
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
        """Return the budgets of the tenant, team, user, key and job that bind a call."""
        named = (*self._named(tenant_id, team, user, key_id), (LimitBound.JOB, job_id, job_limits))
        return tuple(one for bound, name, limits in named if name for one in budgets_of(bound, name, limits))

    def creation_budgets(
        self, tenant_id: str, team: str | None, user: str | None, key_id: str | None, own: tuple[Limit, ...]
    ) -> tuple[Budget, ...]:
        """Return the budgets that bind the creation of batches; `own` are the key's own limits."""
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
        """Return how many calls at once the tenant, user and key of a call may have, by name.

        `key_parallel_max` is the key's own cap.
        """
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
    """The policies of all tenants, named in the settings or not."""

    def __init__(self, settings: Settings) -> None:
        # The caps of tenants that have their own, by name. Others keep this mapping, so it is
        # changed in place.
        self.in_flight_caps: dict[str, int] = {}
        # Grows with every change.
        self.number = 0
        self.follow(settings)

    def follow(self, settings: Settings) -> None:
        """Use these settings from now on."""
        self.number += 1
        self._settings = settings
        self._known = {name: self._policy(entry) for name, entry in settings.tenants.items()}
        self._other = self._policy(TenantEntry())
        # Most settings bind no tenant; then no call needs a look-up.
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
        """Return the tenants that the settings name."""
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
    """Return the problems of tenants: unknown tiers, both a tier and a weight, and bad limits."""
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
