"""The creation of jobs for every door.

It includes the forecast's warnings, the quotas of the caller, and the notice that starts ingest.
"""

import asyncio

import msgspec
import structlog

from tidegate import metrics
from tidegate.core.errors import ApiProblem
from tidegate.core.job_controls import RetryChoice
from tidegate.core.nouns import Caller, Job, JobRequest, Quotas
from tidegate.core.policy.policy_rules import allows
from tidegate.core.schedule.share_owner import share_owner_of
from tidegate.stages.accept import Reception
from tidegate.web.context import WebContext
from tidegate.web.jobs.forecast import Forecaster

log = structlog.get_logger()


class JobCreation:
    def __init__(self, context: WebContext, reception: Reception) -> None:
        self._store = context.store
        self._settings = context.settings
        self._wakes = context.wakes
        self._reception = reception
        self._forecaster = Forecaster(context)
        self._tenants = context.tenants()
        self._router = context.router
        self._model_of = context.model_of()

    async def create(self, caller: Caller, wanted: JobRequest, key: str | None) -> tuple[Job, tuple[str, ...]]:
        """Accept a job; returns it with warnings about its deadline.

        `key` is the caller's Idempotency-Key.
        """
        begun_s = asyncio.get_running_loop().time()
        share_owner = share_owner_of(caller, self._settings.scheduler.scope_preference)
        self._check_escalation(caller, wanted)
        warnings = await self._forecaster.admit(caller, wanted, share_owner, key)
        job = await self._reception.create_job(
            caller, wanted, idempotency_key=key, quotas=await self._quotas(caller), share_owner=share_owner
        )
        self._wakes.inputs.notify()
        metrics.create_seconds.observe(asyncio.get_running_loop().time() - begun_s)
        log.info("job_created", job=job.id, tenant=job.tenant_id, endpoint=job.endpoint, input=job.input_file_id)
        return job, warnings

    async def create_inline(self, caller: Caller, wanted: JobRequest, key: str | None, file_key: str | None) -> Job:
        """Accept a job whose input came with its create and is kept under `file_key`.

        A refusal takes the input back.
        """
        try:
            job, _ = await self.create(caller, wanted, key)
        except ApiProblem as problem:
            await self._reception.take_back_file(caller.tenant_id, wanted.input_file_id, file_key)
            if key is not None and problem.code == "file_not_found":
                # Another copy of this request was refused, and took back the input of both.
                raise _refused_elsewhere() from None
            raise
        return job

    async def retry(self, caller: Caller, job_id: str, choice: RetryChoice, key: str | None) -> Job | None:
        """Accept a job that runs items of an ended job again; None if there is no such job."""
        share_owner = share_owner_of(caller, self._settings.scheduler.scope_preference)
        job = await self._reception.retry_job(
            caller, job_id, choice, idempotency_key=key, quotas=await self._quotas(caller), share_owner=share_owner
        )
        self._wakes.inputs.notify()
        return job

    async def refusals(self, caller: Caller, wanted: JobRequest) -> list[ApiProblem]:
        """Return why a create would be refused as a whole; no job is created."""
        share_owner = share_owner_of(caller, self._settings.scheduler.scope_preference)
        found = [await self._store.creation_problem(caller, wanted, await self._quotas(caller), share_owner)]
        try:
            self._check_escalation(caller, wanted)
            await self._forecaster.admit(caller, wanted, share_owner, None)
        except ApiProblem as problem:
            found.append(problem)
        return [problem for problem in found if problem is not None]

    def _check_escalation(self, caller: Caller, wanted: JobRequest) -> None:
        """Refuse a job whose stronger model is not served here, or not allowed by its key."""
        name = wanted.answers.escalate_to if wanted.answers else None
        if name is None:
            return
        if not allows(caller.models, caller.resources, name, self._model_of):
            message = f"This key does not allow the model {name!r}: name one that it allows, or use another key."
            raise ApiProblem(404, "model_not_found", message, param="answers.escalate_to")
        if not self._router.knows(name):
            message = f"No deployment serves the model {name!r} to batches here. Check its name against GET /v1/models."
            raise ApiProblem(404, "model_not_found", message, param="answers.escalate_to")

    async def _quotas(self, caller: Caller) -> Quotas:
        """Return the quotas of every tenant, with the limits of this one."""
        quotas = self._settings.limits.quotas()
        name = await self._store.tenant_name(caller.tenant_id) if self._tenants.names() else None
        policy = self._tenants.of(name or "")
        creation = policy.creation_budgets(caller.tenant_id, caller.team, caller.user, caller.key_id, caller.limits)
        return msgspec.structs.replace(quotas, queued_units_max=policy.queued_units_max, creation=creation)


def _refused_elsewhere() -> ApiProblem:
    message = "Another request with this Idempotency-Key was refused at the same moment. Send this one again."
    return ApiProblem(409, "idempotency_conflict", message, param="Idempotency-Key", retry_after_s=1)
