"""The bounded wait of an answer until its job has changed: `Prefer: wait=N` (RFC 7240)."""

import asyncio
import re
from collections.abc import Callable

from starlette.requests import Request

from tidegate.core.nouns import Job
from tidegate.web.http.content import while_the_client_stays
from tidegate.web.http.intake import refusal
from tidegate.web.http.tenant_slots import TenantSlots
from tidegate.web.jobs.job_watch import JobWatch
from tidegate.web.requests.requests import preferences

WAIT_S_MAX = 60
WAIT_PREFERENCE = "wait"
APPLIED = {"Preference-Applied": WAIT_PREFERENCE}
_WAIT = re.compile(r'wait\s*=\s*"?([0-9]{1,9})"?\s*(?:;.*)?', re.ASCII | re.IGNORECASE)


def preferred_wait_s(request: Request) -> int:
    """Return how long the caller prefers to wait, at most a minute; 0 without a preference that can
    be read.
    """
    for preference in preferences(request):
        if (found := _WAIT.fullmatch(preference)) is not None:
            return min(int(found[1]), WAIT_S_MAX)
    return 0


class JobWait:
    def __init__(self, watch: JobWatch, slots: TenantSlots) -> None:
        self._watch = watch
        self._slots = slots

    def has_room(self, job: Job) -> bool:
        """Return whether one more request of the job's tenant may wait here; without room it is
        answered at once.
        """
        return not self._slots.are_taken(job.tenant_id)

    async def until(self, request: Request, job: Job, wait_s: int, is_awaited: Callable[[Job], bool]) -> Job | None:
        """Wait until the job is as awaited, the time is over, the client leaves or this process
        stops. Return the job's last state; None if it is gone.
        """
        loop = asyncio.get_running_loop()
        end_s = loop.time() + wait_s
        open_call = request.scope["tidegate.intake"].open_call
        async with self._slots.taken(job.tenant_id):
            with self._watch.following(job) as follower:
                if open_call is not None:
                    open_call.when_cut(follower.wake)
                async with while_the_client_stays(request.receive):
                    while (now := follower.job) is not None and not is_awaited(now):
                        is_cut = open_call is not None and open_call.is_cut
                        left_s = end_s - loop.time()
                        if left_s <= 0 or is_cut or follower.is_stopping:
                            break
                        await follower.wait(left_s)
        if open_call is not None:
            open_call.when_cut(None)
            if open_call.is_cut:
                raise refusal()
        return follower.job
