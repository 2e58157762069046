"""Create jobs for every door: the forecast's warnings, the quotas that bind the caller, and the ring that starts ingest."""

import dataclasses

from tidegate.core.errors import ApiProblem
from tidegate.core.nouns import Caller, Job, JobRequest, Quotas
from tidegate.core.schedule.share_owner import share_owner_of
from tidegate.settings import Tenants
from tidegate.stages.accept import Reception
from tidegate.web.context import WebContext
from tidegate.web.jobs.forecast import Forecaster


class JobCreation:
    def __init__(self, context: WebContext, reception: Reception) -> None:
        self._store = context.store
        self._settings = context.settings
        self._wakes = context.wakes
        self._reception = reception
        self._forecaster = Forecaster(context)
        self._tenants = Tenants(context.settings)

    async def create(self, caller: Caller, wanted: JobRequest, key: str | None) -> tuple[Job, tuple[str, ...]]:
        """Accept a job; returns it with warnings about its deadline. `key` is the caller's Idempotency-Key."""
        share_owner = share_owner_of(caller, self._settings.scheduler.scope_preference)
        warnings = await self._forecaster.admit(caller, wanted, share_owner, key)
        job = await self._reception.create_job(
            caller, wanted, idempotency_key=key, quotas=await self._quotas(caller), share_owner=share_owner
        )
        self._wakes.inputs.notify()
        return job, warnings

    async def refusals(self, caller: Caller, wanted: JobRequest) -> list[ApiProblem]:
        """Why a job that is not created would be refused as a whole."""
        share_owner = share_owner_of(caller, self._settings.scheduler.scope_preference)
        found = [await self._store.creation_problem(caller, wanted, await self._quotas(caller), share_owner)]
        try:
            await self._forecaster.admit(caller, wanted, share_owner, None)
        except ApiProblem as problem:
            found.append(problem)
        return [problem for problem in found if problem is not None]

    async def _quotas(self, caller: Caller) -> Quotas:
        """What every tenant is held to, and what this one is."""
        quotas = self._settings.limits.quotas()
        name = await self._store.tenant_name(caller.tenant_id) if self._settings.tenants else None
        policy = self._tenants.of(name or "")
        creation = policy.creation_budgets(caller.tenant_id, caller.team, caller.user, caller.key_id, caller.limits)
        return dataclasses.replace(quotas, queued_units_max=policy.queued_units_max, creation=creation)
