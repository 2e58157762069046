"""The worker: the services that keep the road moving in one process.

An item's way: `Leasing` adds it to `LeasedWork`, a `Runner` takes it from there through
`Performer.perform` to `Recorder.record`, and when its job has its last outcome, `Publishing` ships
the files. Another process can find all of a worker's state in the store.

    ItemServices    take items to the model servers
    JobServices     what comes before and after: inputs, results, upkeep
"""

import asyncio

import msgspec

from tidegate import metrics
from tidegate.core.errors import WorkerBroken
from tidegate.core.policies import Policies
from tidegate.core.ports import Blobs, Clock, Entropy, FileSource, Listener, Upstream, Wakes
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


class WorkerSignals(msgspec.Struct, frozen=True):
    """What the services of one worker tell each other: stop, lease again, publish."""

    supervisor: Supervisor
    lease_wake: Listener
    publish_due: asyncio.Event


class ItemServices:
    """The services that take items to the model servers: lease, perform, record."""

    def __init__(
        self, ports: WorkerPorts, me: Registration, options: WorkerOptions, policies: Policies, signals: WorkerSignals
    ) -> None:
        store, blobs, upstream, clock, entropy = ports.store, ports.blobs, ports.upstream, ports.clock, ports.entropy
        supervisor, lease_wake = signals.supervisor, signals.lease_wake
        self._supervisor = supervisor
        self._guards = Guards(policies.rules, policies.reached_by)
        self.recorder = Recorder(
            store, blobs, upstream, options.flush, me.begin_blob, signals.publish_due, ports.wakes.jobs
        )
        self.leased_work = LeasedWork(upstream, clock, self.recorder, supervisor)
        self.keys = KeyStates(store, clock, policies.model_of)
        self._trial = Trial(store, self.leased_work, self.recorder, me, lease_wake)
        settler = SliceSettler(self.leased_work, self._trial, self.recorder, lease_wake)
        self.room = LeaseRoom(store, upstream, clock, self.leased_work, self._trial, settler, options.hold_limits)
        rules = LeasedCallRules(self.leased_work, self.keys, policies, self._guards)
        leases = LeaseStage(store, blobs, clock, entropy)
        lost_workers = LostWorkers(store, blobs)

        beat_due = self.recorder.job_stopped
        self._heartbeat = Heartbeat(
            me, leases, self.leased_work, settler, beat_due, options.heartbeat_ms, options.close_grace
        )
        self._key_watch = KeyWatch(self.keys, self.leased_work, me)
        self._scheduler = Scheduler(store, clock, policies, options.slice_items, options.heartbeat_ms)
        reader = SliceReader(leases, self.keys, rules, me, self.leased_work, settler)
        leaser = Leaser(leases, self._scheduler, self.room, self._trial, me, self.leased_work, reader)
        self._leasing = Leasing(leaser, self.leased_work, self.recorder, lost_workers, lease_wake, options.poll_ms)
        performer = Performer(upstream, clock, entropy, rules, options.grace_ms, ports.files)
        runner = Runner(self.leased_work, rules, performer, self.recorder, settler, self.room, lease_wake)
        self._runners = Runners(runner, supervisor, upstream, options.in_flight_max)
        self._hand_back = HandBack(me, leases, self.leased_work, settler, self.recorder, lost_workers, options.grace_ms)
        upstream.on_room(self._leasing.look_again)

    def start(self) -> None:
        start = self._supervisor.start
        start("heartbeat", self._heartbeat.run)
        start("leasing", self._leasing.run)
        start("keys", self._key_watch.run)
        start("mode", self._scheduler.run)
        start("record", self.recorder.run)
        start("trial", self._trial.run)
        start("runners", self._runners.run)

    async def hand_back(self) -> None:
        """Hand back unsent items, finish calls in flight and commit their answers."""
        await self._hand_back.run()

    def close(self) -> None:
        self._guards.close()


class JobServices:
    """The services for what comes before and after a job's items: ingest, ship, tend, operate."""

    def __init__(
        self,
        ports: WorkerPorts,
        me: Registration,
        options: WorkerOptions,
        policies: Policies,
        signals: WorkerSignals,
        run_pass: RunPass,
    ) -> None:
        store, blobs, entropy, poll_ms = ports.store, ports.blobs, ports.entropy, options.poll_ms
        supervisor, publish_due = signals.supervisor, signals.publish_due
        self._supervisor = supervisor
        ingest = IngestStage(store, blobs, entropy, options.scratch, policies, run_pass, options.ingest)
        self._small_ingest = Ingesting(ingest.next_small, me, ports.wakes, supervisor, poll_ms)
        self._large_ingest = Ingesting(ingest.next_large, me, ports.wakes, supervisor, poll_ms)
        self._large_ingests = options.ingest.passes_max
        quick, long = (Ship(store, blobs, entropy, options.scratch, options.keep, turns) for turns in (QUICK, LONG))
        close_after_ms = options.grace_ms + 2 * options.heartbeat_ms
        self._closing = Closing(store, quick, publish_due, close_after_ms, poll_ms)
        self._publishing = Publishing(quick, long, me, publish_due, ports.wakes.jobs, poll_ms)
        flows, lost_workers = FlowUpkeep(store, policies), LostWorkers(store, blobs)
        self._sweeping = Sweeping(lost_workers, flows, signals.lease_wake, options.sweep_ms, 3 * options.heartbeat_ms)
        garbage = Garbage(store, blobs, ports.clock, options.keep)
        self._upkeep = Upkeep(store, blobs, entropy, me, garbage, flows, options)
        operate = OperateStage(store, entropy, ports.wakes, job_verbs(entropy, options.keep.failed_ms))
        self._operating = Operating(operate, me, ports.wakes, supervisor, options.sweep_ms)

    def start(self) -> None:
        start = self._supervisor.start
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


class Worker:
    def __init__(
        self, ports: WorkerPorts, me: Registration, options: WorkerOptions, policies: Policies, run_pass: RunPass
    ) -> None:
        self._me = me
        self._supervisor = Supervisor()
        signals = WorkerSignals(self._supervisor, ports.wakes.slices.listen(), asyncio.Event())
        self._items = ItemServices(ports, me, options, policies, signals)
        self._jobs = JobServices(ports, me, options, policies, signals, run_pass)
        metrics.worker_in_flight.set_function(lambda: self.in_flight)
        metrics.worker_in_flight_max.set(options.in_flight_max)
        metrics.worker_saturation_ratio.set_function(lambda: self.in_flight / options.in_flight_max)

    async def run(self, stop: asyncio.Event) -> None:
        """Work until `stop` is set or until an internal error.

        Then hand back unsent items, finish calls in flight and commit their answers. Raise
        WorkerBroken after an internal error.
        """
        metrics.worker_broken.set(0)
        try:
            self._items.start()
            self._jobs.start()
            await self._supervisor.wait(stop)
            self._supervisor.stop()
            await self._items.hand_back()
        finally:
            await self._supervisor.cancel_services()
            self._items.close()
        if self.broken:
            raise WorkerBroken(self.broken)

    @property
    def broken(self) -> str | None:
        """Return the internal error that ended this worker."""
        return self._supervisor.broken

    @property
    def in_flight(self) -> int:
        return self._items.leased_work.in_flight

    def is_idle_with_room(self, model: str) -> bool:
        """Return whether this worker holds no slice but would take items of this model."""
        return self._items.leased_work.slice_count == 0 and self._items.room.has_room(model)

    def trouble(self) -> str | None:
        """Return why this worker takes no new work; None if it does."""
        if self.broken:
            return f"ends after an internal error: {self.broken}"
        if self._items.recorder.failing:
            return "finished results cannot be stored now; they are kept and tried again"
        if not self._me.is_safe():
            return "the store does not answer heartbeats"
        return None
