"""The receivers of webhooks, and what must hold of the outbox: promise P24.

Each end of a job reaches every endpoint that its tenant has at least once, or is listed as failed after the last try; under one id, with a
signature that the endpoint's secret proves, and never with what another tenant owns.
"""

import base64
import hmac
import random
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

import apsw
import msgspec

from tests.simulation.world.customers import Customers
from tests.simulation.world.plan import Plan
from tests.simulation.world.process import Process
from tests.simulation.world.trace import Trace
from tidegate.core.callback_targets import CallbackReply
from tidegate.core.webhooks import ATTEMPTS_MAX

_SENT = """
select d.event_id, d.endpoint_id, d.job_id, d.event_type, d.state, d.attempt_count, e.tenant_id, e.url, j.tenant_id, j.state, j.kind,
    j.answered_count
from webhook_deliveries d join webhook_endpoints e on e.id = d.endpoint_id left join jobs j on j.id = d.job_id
"""


@dataclass(frozen=True, slots=True)
class Receipt:
    """One request that a receiver got, and whether it answered that it took the event."""

    url: str
    event_id: str
    event_type: str
    job_id: str
    is_taken: bool


class Receiver:
    def __init__(self, plan: Plan, customers: Customers, trace: Trace, broken: Callable[[str], None]) -> None:
        self._plan = plan
        self._customers = customers
        self._trace = trace
        self._broken = broken
        self._dice = random.Random(f"receivers/{plan.seed}")
        self._receipts: list[Receipt] = []

    def line_of(self, process: Process) -> "ProcessCallbacks":
        return ProcessCallbacks(self, process)

    def take(self, url: str, body: bytes, headers: Mapping[str, str], *, is_calm: bool) -> CallbackReply:
        event = msgspec.json.decode(body)
        self._check_signature(url, body, headers)
        if headers["webhook-id"] != event["id"]:
            self._broken(f"P24: {event} was sent under the id {headers['webhook-id']}")
        fails = not is_calm and self._dice.random() < self._plan.strength("receiver")
        status = self._dice.choice((500, 503, 0, 410 if self._dice.random() < 0.1 else 429)) if fails else 200
        # One that says nothing may have taken it all the same.
        is_taken = status == 200
        name = event["data"]["id"].partition("_")[2]
        self._receipts.append(Receipt(url, event["id"], event["type"], f"batch_{name}", is_taken))
        self._trace.note("receiver", "got", event["type"], event["data"]["id"], status)
        return CallbackReply(status, "" if status else "timed_out")

    def _check_signature(self, url: str, body: bytes, headers: Mapping[str, str]) -> None:
        content = b".".join((headers["webhook-id"].encode(), headers["webhook-timestamp"].encode(), body))
        right = base64.b64encode(hmac.new(self._customers.secrets[url], content, sha256).digest()).decode()
        if f"v1,{right}" not in headers["webhook-signature"].split():
            self._broken(f"P24: what {url} got is not signed with its secret")

    def is_done(self, connection: apsw.Connection) -> bool:
        return not connection.execute("select 1 from webhook_deliveries where state = 'pending'").fetchall()

    def judge(self, connection: apsw.Connection, gone: Collection[str]) -> None:
        """Look at what every job's end led to. Of one that is gone, what was delivered is gone too."""
        rows: list[Any] = connection.execute(_SENT).fetchall()
        found = set()
        for event_id, endpoint_id, job_id, event_type, state, attempts, owner, url, *job in rows:
            job_owner, job_state, kind, answered = job
            found.add((url, job_id))
            same = [one for one in self._receipts if (one.url, one.job_id) == (url, job_id)]
            if job_id not in gone and owner != job_owner:
                self._broken(f"P21: {endpoint_id} of {owner} gets the events of {job_id} of {job_owner}")
            is_right = job_id in gone or event_type == _type_of(kind, job_state, answered)
            if not is_right or {one.event_type for one in same} - {event_type}:
                self._broken(f"P24: {job_id} is {job_state}, and {url} got {event_type}")
            if {one.event_id for one in same} - {event_id}:
                self._broken(f"P24: {url} got the end of {job_id} under several ids")
            if state == "delivered" and not any(one.is_taken for one in same):
                self._broken(f"P24: the end of {job_id} counts as delivered, and {url} never took it")
            if state == "failed" and attempts < ATTEMPTS_MAX and not self._plan.strength("receiver"):
                self._broken(f"P24: the end of {job_id} was given up after {attempts} tries")
            if state == "pending":
                self._broken(f"P24: the end of {job_id} still waits to be sent to {url}")
        taken = {(one.url, one.job_id) for one in self._receipts if one.is_taken}
        for url, job_id in self._customers.awaited_events() - found:
            if job_id not in gone or (url, job_id) not in taken:
                self._broken(f"P24: {url} will never get the end of {job_id}")


def _type_of(kind: str, state: str, answered: int) -> str:
    """What the end of a job is called."""
    if kind == "batch":
        return f"batch.{state}"
    return "response.cancelled" if state == "cancelled" else "response.completed" if answered else "response.failed"


class ProcessCallbacks:
    """The Callbacks of one process."""

    def __init__(self, receiver: Receiver, process: Process) -> None:
        self._receiver = receiver
        self._process = process

    async def post(self, url: str, body: bytes, headers: Mapping[str, str], *, owner: str) -> CallbackReply:
        is_calm = self._process.weather.clear
        slow_s = self._process.weather.dice.uniform(0.01, 0.5)
        return await self._process.ask(lambda: self._receiver.take(url, body, headers, is_calm=is_calm), slow_s)
