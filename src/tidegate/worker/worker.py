"""The worker: the services that keep the road moving in one process.

An item's way: `Leasing` adds it to `LeasedWork`, a `Runner` takes it from there through
`Performer.perform` to `Recorder.record`, and when its job has its last outcome, `Publishing` ships
the files. Another process can find all of a worker's state in the store.
"""

import asyncio

import msgspec

from tidegate import metrics
from tidegate.core.errors import WorkerBroken
from tidegate.core.policies import Policies
from tidegate.core.ports import Blobs, Clock, Entropy, FileSource, Upstream, Wakes
from tidegate.guards.guard import Guards
from tidegate.stages.ingest.ingest import IngestStage, RunPass
from tidegate.stages.lease import LeaseStage
from tidegate.stages.operate import OperateStage, job_verbs
from tidegate.stages.perform import Performer
from tidegate.stages.record import Recorder
from tidegate.stages.ship import LONG, QUICK, Ship
from tidegate.stages.tend.flows import FlowUpkeep
from tidegate.stages.tend.garbage import Garbage
from tidegate.stages.tend.lost_workers import LostWorkers
from tidegate.store.store import Store
from tidegate.worker.call_rules import KeyStates, KeyWatch, LeasedCallRules
from tidegate.worker.hand_back import HandBack
from tidegate.worker.heartbeat import Heartbeat
from tidegate.worker.ingesting import Ingesting
from tidegate.worker.leased_work import LeasedWork
from tidegate.worker.leasing import Leaser, LeaseRoom, Leasing, SliceReader, SliceSettler
from tidegate.worker.operating import Operating
from tidegate.worker.options import WorkerOptions
from tidegate.worker.registration import Registration
from tidegate.worker.runners import Runner, Runners
from tidegate.worker.scheduler import Scheduler
from tidegate.worker.shipping import Closing, Publishing
from tidegate.worker.supervisor import Supervisor
from tidegate.worker.trial import Trial
from tidegate.worker.upkeep import Sweeping, Upkeep

# While the files of one set of small inputs are made durable, the next set is read.
_SMALL_INGESTS = 3


class WorkerPorts(msgspec.Struct, frozen=True):
    """The ports through which a worker reaches the world."""

    store: Store
    blobs: Blobs
    upstream: Upstream
    clock: Clock
    entropy: Entropy
    wakes: Wakes
    files: FileSource | None = None


class Worker:
    def __init__(
        self, ports: WorkerPorts, me: Registration, options: WorkerOptions, policies: Policies, run_pass: RunPass
    ) -> None:
        store, blobs, upstream, clock, entropy = ports.store, ports.blobs, ports.upstream, ports.clock, ports.entropy
        poll_ms, grace_ms = options.poll_ms, options.grace_ms
        lease_wake, publish_due = ports.wakes.slices.listen(), asyncio.Event()
        self._me = me
        self._supervisor = Supervisor()
        self._guards = Guards(policies.rules, policies.reached_by)

        # Shared by the services.
        self._recorder = Recorder(store, blobs, upstream, options.flush, me.begin_blob, publish_due, ports.wakes.jobs)
        self._leased_work = LeasedWork(upstream, clock, self._recorder, self._supervisor)
        self._trial = Trial(store, self._leased_work, self._recorder, me, lease_wake)
        self._keys = KeyStates(store, clock, policies.model_of)
        settler = SliceSettler(self._leased_work, self._trial, self._recorder, lease_wake)
        self._room = LeaseRoom(store, upstream, clock, self._leased_work, self._trial, settler, options.hold_limits)
        rules = LeasedCallRules(self._leased_work, self._keys, policies, self._guards)
        leases = LeaseStage(store, blobs, clock, entropy)
        lost_workers = LostWorkers(store, blobs)
        flows = FlowUpkeep(store, policies)

        # Lease, perform.
        beat_due = self._recorder.job_stopped
        self._heartbeat = Heartbeat(
            me, leases, self._leased_work, settler, beat_due, options.heartbeat_ms, options.close_grace
        )
        self._key_watch = KeyWatch(self._keys, self._leased_work, me)
        self._scheduler = Scheduler(store, clock, policies, options.slice_items, options.heartbeat_ms)
        reader = SliceReader(leases, self._keys, rules, me, self._leased_work, settler)
        leaser = Leaser(leases, self._scheduler, self._room, self._trial, me, self._leased_work, reader)
        self._leasing = Leasing(leaser, self._leased_work, self._recorder, lost_workers, lease_wake, poll_ms)
        performer = Performer(upstream, clock, entropy, rules, grace_ms, ports.files)
        runner = Runner(self._leased_work, rules, performer, self._recorder, settler, self._room, lease_wake)
        self._runners = Runners(runner, self._supervisor, upstream, options.in_flight_max)
        upstream.on_room(self._leasing.look_again)
        metrics.worker_in_flight.set_function(lambda: self.in_flight)
        metrics.worker_in_flight_max.set(options.in_flight_max)
        metrics.worker_saturation_ratio.set_function(lambda: self.in_flight / options.in_flight_max)

        # Ingest, ship, tend.
        ingest = IngestStage(store, blobs, entropy, options.scratch, policies, run_pass, options.ingest)
        self._small_ingest = Ingesting(ingest.next_small, me, ports.wakes, self._supervisor, poll_ms)
        self._large_ingest = Ingesting(ingest.next_large, me, ports.wakes, self._supervisor, poll_ms)
        self._large_ingests = options.ingest.passes_max
        quick, long = (Ship(store, blobs, entropy, options.scratch, options.keep, turns) for turns in (QUICK, LONG))
        self._closing = Closing(store, quick, publish_due, grace_ms + 2 * options.heartbeat_ms, poll_ms)
        self._publishing = Publishing(quick, long, me, publish_due, ports.wakes.jobs, poll_ms)
        self._sweeping = Sweeping(lost_workers, flows, lease_wake, options.sweep_ms, 3 * options.heartbeat_ms)
        garbage = Garbage(store, blobs, clock, options.keep)
        self._upkeep = Upkeep(store, blobs, entropy, me, garbage, flows, options)
        operate = OperateStage(store, entropy, ports.wakes, job_verbs(entropy, options.keep.failed_ms))
        self._operating = Operating(operate, me, ports.wakes, self._supervisor, options.sweep_ms)
        self._hand_back = HandBack(me, leases, self._leased_work, settler, self._recorder, lost_workers, grace_ms)

    async def run(self, stop: asyncio.Event) -> None:
        """Work until `stop` is set or until an internal error.

        Then hand back unsent items, finish calls in flight and commit their answers. Raise
        WorkerBroken after an internal error.
        """
        metrics.worker_broken.set(0)
        start = self._supervisor.start
        try:
            start("heartbeat", self._heartbeat.run)
            start("leasing", self._leasing.run)
            start("keys", self._key_watch.run)
            start("mode", self._scheduler.run)
            start("record", self._recorder.run)
            start("trial", self._trial.run)
            for _ in range(_SMALL_INGESTS):
                start("small ingest", self._small_ingest.run)
            for _ in range(self._large_ingests):
                start("large ingest", self._large_ingest.run)
            start("close", self._closing.run)
            start("publish", self._publishing.run)
            start("long publish", self._publishing.run_long)
            start("sweep", self._sweeping.run)
            start("upkeep", self._upkeep.run)
            start("operations", self._operating.run)
            start("runners", self._runners.run)
            await self._supervisor.wait(stop)
            self._supervisor.stop()
            await self._hand_back.run()
        finally:
            await self._supervisor.cancel_services()
            self._guards.close()
        if self.broken:
            raise WorkerBroken(self.broken)

    @property
    def broken(self) -> str | None:
        """Return the internal error that ended this worker."""
        return self._supervisor.broken

    @property
    def in_flight(self) -> int:
        return self._leased_work.in_flight

    def is_idle_with_room(self, model: str) -> bool:
        """Return whether this worker holds no slice but would take items of this model."""
        return self._leased_work.slice_count == 0 and self._room.has_room(model)

    def trouble(self) -> str | None:
        """Return why this worker takes no new work; None if it does."""
        if self.broken:
            return f"ends after an internal error: {self.broken}"
        if self._recorder.failing:
            return "finished results cannot be stored now; they are kept and tried again"
        if not self._me.is_safe():
            return "the store does not answer heartbeats"
        return None
