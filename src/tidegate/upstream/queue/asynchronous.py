"""The second transport: a call is put into a queue, and a processor makes it and answers.

- It has the same port as the HTTP transport and is chosen for each deployment, so slots, budgets,
  breaker and retries work unchanged.
- Each request has one id, made of its item's idempotency key and the number of its attempt. While
  it is out, any sender of the same attempt, in this process or a later one, waits for the same
  answer.
- Of an answer this module knows only whether it must be kept until it is recorded.
"""

import asyncio
from collections.abc import Callable, Iterable
from contextlib import suppress

import msgspec
import structlog
from yarl import URL

from tidegate.core.deployments import Deployment, HttpLimits, Queue
from tidegate.core.errors import Ambiguous, RecordedElsewhere, Refused, Unavailable, UpstreamError
from tidegate.core.ports import Clock, Entropy, RequestQueue
from tidegate.core.queues import Found, Put, QueueAway, QueueKind, QueueRequest, Withdrawal
from tidegate.upstream.http.transport import Client, HttpReply, SendPermit, Transport, UpstreamRequest
from tidegate.upstream.queue import messages
from tidegate.upstream.queue.mailbox import Mailbox
from tidegate.upstream.queue.receipts import Receipts

log = structlog.get_logger(__name__)

# A result is a JSON text with the answer in it as a JSON string: quotes and backslashes come twice.
ESCAPED = 2
ENVELOPE_BYTES = 64 * 1024

AGAIN_S = 0.5
WITHDRAW_TRIES = 20
CLOSE_S = 5.0


class Office:
    """The state that all queue clients of a process share.

    It has the queues, the calls that wait at them, and the results that are not recorded yet.
    """

    def __init__(
        self, open_queue: Callable[[Queue], RequestQueue], limits: HttpLimits, clock: Clock, entropy: Entropy
    ) -> None:
        self.clock = clock
        self.receipts = Receipts()
        self.answer_bytes_max = limits.response_bytes_max
        self._open_queue = open_queue
        self._mailboxes: dict[Queue, Mailbox] = {}
        self._withdrawing: set[asyncio.Task[None]] = set()
        self._entropy = entropy
        self._count = 0

    def mailbox(self, queue: Queue) -> Mailbox:
        found = self._mailboxes.get(queue)
        if found is None:
            bytes_max = ESCAPED * self.answer_bytes_max + ENVELOPE_BYTES
            found = self._mailboxes[queue] = Mailbox(self._open_queue(queue), bytes_max)
        return found

    def token(self) -> str:
        """Return a name for one put into a queue. Names sort by the moment of the put."""
        self._count += 1
        return f"{self._count:012x}{self._entropy.token_bytes(8).hex()}"

    def withdraw_later(self, mailbox: Mailbox, request_id: str) -> None:
        """Withdraw the request of a cancelled call, which cannot wait for the queue itself.

        If another call here waits for the same request, because a lease was lost and taken again,
        the request stays.
        """
        if mailbox.is_awaited(request_id):
            return
        task = asyncio.create_task(self._withdraw(mailbox, request_id))
        self._withdrawing.add(task)
        task.add_done_callback(self._withdrawing.discard)

    async def _withdraw(self, mailbox: Mailbox, request_id: str) -> None:
        for _ in range(WITHDRAW_TRIES):
            try:
                await mailbox.queue.withdraw(request_id)
            except QueueAway:
                await asyncio.sleep(AGAIN_S)
            else:
                return
        log.warning("request_withdrawal_failed", request=request_id, advice="the processor may still run it")

    async def close(self) -> None:
        if self._withdrawing:
            await asyncio.wait(self._withdrawing, timeout=CLOSE_S)
        for task in list(self._withdrawing):
            task.cancel()
        await self.receipts.close()
        for mailbox in self._mailboxes.values():
            await mailbox.close()
            await mailbox.queue.close()


class QueueClient:
    """The client of one deployment that is called through its queue."""

    def __init__(self, office: Office, deployment: Deployment) -> None:
        assert deployment.queue is not None
        self._office = office
        self._mailbox = office.mailbox(deployment.queue)
        self._queue = deployment.queue
        self._models = deployment.models

    async def post(self, request: UpstreamRequest, total_s: float, permit: SendPermit | None = None) -> HttpReply:
        request_id = messages.request_id(request.idempotency_key, request.attempt)
        try:
            await self._mailbox.queue.reach()
        except QueueAway as away:
            raise _never_started(away) from None
        if permit is not None:
            permit.begin_send()
        now_ms, token = self._office.clock.now_ms(), self._office.token()
        try:
            async with asyncio.timeout(total_s) as limit:
                await self._put(messages.queue_request(request, self._queue, token, now_ms, total_s))
                found = await self._wait(request_id)
        except TimeoutError:
            if not limit.expired():
                raise
        except asyncio.CancelledError:
            self._office.withdraw_later(self._mailbox, request_id)
            raise
        else:
            return await self._read(request.idempotency_key.partition("-")[0], found)
        raise await self._too_late(request_id, total_s)

    async def is_out(self, idempotency_key: str, attempt: int) -> bool:
        try:
            return await self._mailbox.queue.is_out(messages.request_id(idempotency_key, attempt))
        except QueueAway:
            return False

    async def get(self, url: URL, total_s: float) -> HttpReply:
        """Return the deployment's models if the queue is there.

        Only the queue's processor knows the health of the model server.
        """
        try:
            await self._mailbox.queue.reach()
        except QueueAway as away:
            raise _never_started(away) from None
        data = [{"id": model} for model in self._models]
        return HttpReply(200, {}, msgspec.json.encode({"object": "list", "data": data}))

    async def _put(self, request: QueueRequest) -> None:
        """Put a request into the queue.

        Once a put may have arrived, it is repeated until the queue answers; a repeated put has no
        effect.
        """
        is_unsure = False
        while True:
            try:
                put = await self._mailbox.queue.put(request)
            except QueueAway as away:
                is_unsure = is_unsure or away.is_unsure
                if not is_unsure:
                    raise _never_started(away) from None
                await asyncio.sleep(AGAIN_S)
            else:
                if put is Put.RECORDED:
                    raise _recorded_elsewhere()
                return

    async def _wait(self, request_id: str) -> Found:
        waiting = self._mailbox.wait_for(request_id)
        try:
            return await waiting
        finally:
            self._mailbox.stop_waiting(request_id, waiting)

    async def _read(self, item: str, found: Found) -> HttpReply:
        queue, request_id = self._mailbox.queue, found.request_id
        if found.kind is QueueKind.LOST:
            raise Ambiguous("the queue no longer knows this request: it was emptied")
        if found.kind is QueueKind.RECORDED:
            raise _recorded_elsewhere()
        try:
            if found.kind is QueueKind.TOO_LARGE:
                raise messages.too_large(self._office.answer_bytes_max)
            reply = messages.reply(request_id, found.message, self._office.answer_bytes_max)
            is_kept = messages.was_done(reply.status)
        except UpstreamError as error:
            if error.billed or isinstance(error, Refused):
                self._office.receipts.hold(item, queue, request_id)
            else:
                await self._discard(request_id)
            raise
        if is_kept:
            self._office.receipts.hold(item, queue, request_id)
        else:
            await self._discard(request_id)
        return reply

    async def _discard(self, request_id: str) -> None:
        """Discard the result of a request without work, so that the attempt may be queued again.

        If the queue is away, a later reader discards it.
        """
        with suppress(QueueAway):
            await self._mailbox.queue.discard([request_id])

    async def _too_late(self, request_id: str, total_s: float) -> UpstreamError:
        """End a request after its time. If no processor has taken it, it was never sent."""
        try:
            if self._mailbox.is_awaited(request_id):
                withdrawal = Withdrawal.NOT_OURS
            else:
                withdrawal = await self._mailbox.queue.withdraw(request_id)
        except QueueAway:
            self._office.withdraw_later(self._mailbox, request_id)
            withdrawal = Withdrawal.TAKEN
        if withdrawal is Withdrawal.WITHDRAWN:
            return Unavailable(
                f"no processor took the request from the queue within {total_s:.0f} s: is the processor running, and at this queue?",
                code="queue_not_taken",
            )
        return Ambiguous(f"the request was taken from the queue, and no answer came within {total_s:.0f} s")


class QueueTransport:
    """The transport that calls deployments with a queue through it, and all others over HTTP."""

    def __init__(self, http: Transport, office: Office) -> None:
        self._http = http
        self.pool_timeout_s = http.pool_timeout_s
        self.free_slots = http.free_slots
        self._office = office

    def client_for(self, deployment: Deployment) -> Client:
        return self._http.client_for(deployment) if deployment.queue is None else QueueClient(self._office, deployment)

    def recorded(self, items: Iterable[tuple[str, int]]) -> None:
        self._office.receipts.recorded(items)

    async def close(self) -> None:
        await self._office.close()
        await self._http.close()


def _recorded_elsewhere() -> RecordedElsewhere:
    return RecordedElsewhere("another process has recorded the answer of this request")


def _never_started(away: QueueAway) -> Unavailable:
    return Unavailable(f"the call never started: its queue cannot be reached ({away})", code="queue_away")
