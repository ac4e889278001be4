"""The processes of a root's history: intakes, consumers, job controllers, workers, publishers, collectors and users.
Each runs the real parts over simulated ports."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, cast

from pipeline.adapters.folder.store import FolderStore
from pipeline.dispatcher.controller import JobController, JobControllerSettings
from pipeline.dispatcher.dispatcher import Dispatcher, DispatchSettings
from pipeline.egress.publisher import Publisher, PublisherSettings
from pipeline.ingest.files.source import FileIngestSource
from pipeline.ingest.files.watcher import FileIngestWatcher, WatchSettings
from pipeline.ingest.intake import Intake, IntakeSettings
from pipeline.inputs.open import PinnedInput, open_pinned
from pipeline.ledger.ledger import JobLedger
from pipeline.maintenance.retention import RetentionSettings, RetentionSweep
from pipeline.models.catalog import Catalog
from pipeline.ports import PipelineError, World
from pipeline.runtime.inline_executor import InlineExecutor
from pipeline.worker_client.shard_client import ShardClient
from schemas.jobs.inputs import InputRef
from schemas.models import CatalogEntry, ModelPin
from schemas.requests.limits import PlanSettings
from tests.simulation import model
from tests.simulation.disk import Device, ProcessDisk
from tests.simulation.machine import Machine, Process, ProcessClock, ProcessRandomness
from tests.simulation.root.ingest import Consumer, Events, Inbox
from tests.simulation.root.oracle import RootOracle
from tests.simulation.root.ports import (
    Broker,
    RootHeartbeats,
    RootLease,
    RootMessages,
    RootQueue,
    RootStore,
)
from tests.simulation.root.scenario import MODELS, RootScenario
from tests.simulation.root.watch import RootWatch
from tests.simulation.threads import SecondThread, timer_of
from workers.settings import WorkerSettings
from workers.shards.worker import ShardWorker

IDLE_SECONDS = 0.5
"""Poll interval of an idle process."""

SETTLE = 6.0
"""Seconds of heartbeats without a break, before silence means anything: two of them."""

PINS = {
    name: ModelPin(name=name, source=name, digest=f"sha256:{number}", dtype="float32")
    for number, name in enumerate(MODELS, start=1)
}


@dataclass
class ProcessPorts:
    """The simulated ports of one life of a process."""

    process: Process
    world: World
    broker: Broker
    watch: RootWatch

    def ledger(self, job: str) -> JobLedger:
        """The job of this id."""
        return JobLedger(self.world.store, f"jobs/{job}/")

    @property
    def queue(self) -> RootQueue:
        return RootQueue(self.broker, self.process, self.watch)

    @property
    def heartbeats(self) -> RootHeartbeats:
        return RootHeartbeats(self.broker, self.process)


@dataclass
class RootHarness:
    """The state that the processes of one history share.

    Attributes:
        bucket: the store, where it is one; else each process opens the folder, as on a machine.
        oracle: says when all has ended.
    """

    scenario: RootScenario
    machine: Machine
    device: Device
    bucket: FolderStore | None
    broker: Broker
    oracle: RootOracle
    watch: RootWatch

    def build(self) -> None:
        """Add the processes to the machine."""
        scenario, add = self.scenario, self.machine.add
        if len(set(scenario.worker_models)) > 1:  # else the first jobs wait for the first worker
            add("catalog", self.publish_catalog)
        delays = (0.0, 0.0, 0.3, 4.0)
        for number in range(scenario.intakes):
            add(f"intake{number}", self.take_in(number), self.machine.chance.choice(delays))
        if scenario.records:
            for number in range(scenario.intakes):
                add(f"consumer{number}", self.consume)
        for number in range(scenario.foremen):
            add(f"foreman{number}", self.control_jobs)
        for number, name in enumerate(scenario.worker_models):
            add(f"worker{number}", self.work(PINS[name]), self.machine.chance.choice(delays))
        for number in range(scenario.announcers):
            add(f"announcer{number}", self.publish_messages)
        for number in range(scenario.collectors):
            add(f"collector{number}", self.collect)

    @contextmanager
    def ports(self, process: Process, idle: float = 0.0) -> Iterator[ProcessPorts]:
        """Open the store, as a process does when it begins."""
        with ExitStack() as closing:
            folder = self.bucket
            if folder is None:
                disk = ProcessDisk(self.device, process)
                folder = closing.enter_context(FolderStore(self.device.root, disk=disk))
            store = RootStore(folder, self.broker, process, self.watch)
            randomness = ProcessRandomness(self.scenario.seed, process)
            world = World(store, ProcessClock(process, idle), randomness, folder.scratch)
            yield ProcessPorts(process, world, self.broker, self.watch)

    def stop(self, process: Process) -> Any:
        """Set when the process is to stop, or all jobs have ended."""
        return cast(Any, _Stop(process, lambda: process.stopping or self.oracle.over))

    def publish_catalog(self, process: Process) -> None:
        """Workers of an earlier run have published their models."""
        with self.ports(process) as ports:
            for name in self.scenario.worker_models:
                Catalog(ports.world.store).publish(CatalogEntry(pin=PINS[name], max_model_len=model.CONTEXT))

    def intake(self, ports: ProcessPorts) -> Intake:
        """The intake of all ingest sources. Its settings change between lives: jobs that exist stay as they are."""
        scenario, changed = self.scenario, ports.process.life % 2
        plan = PlanSettings(
            segment_rows=scenario.segment_rows, max_shard_rows=scenario.shard_rows, shard_tokens=100_000
        )
        caps = IntakeSettings().caps
        return Intake(ports.world, IntakeSettings(plan=plan, caps=caps, default_max_tokens=4_096 + changed))

    def take_in(self, number: int) -> Callable[[Process], None]:
        """The ingest sources of dropped files, one for each tenant's folder."""

        def run(process: Process) -> None:
            with self.ports(process) as ports:
                if len(set(self.scenario.worker_models)) > 1:
                    self._wait_for_models(ports)
                intake = self.intake(ports)
                tenants = sorted({drop.tenant for drop in self.scenario.drops})
                inboxes = {tenant: Inbox(tenant, self.scenario.drops, process) for tenant in tenants}
                sources = {tenant: FileIngestSource(inbox, intake, ports.world) for tenant, inbox in inboxes.items()}
                events = Events(number, self.scenario.drops, sources, process, self.oracle.settled)
                watch = WatchSettings(sweep_interval_seconds=20.0, retry_seconds=1.0)
                FileIngestWatcher(list(sources.values()), ports.world, watch, events).run(self.stop(process))

        return run

    def consume(self, process: Process) -> None:
        """One of a group's consumers; it happens that two have the partition."""
        with self.ports(process) as ports:
            if len(set(self.scenario.worker_models)) > 1:
                self._wait_for_models(ports)
            records, messages = self.scenario.records, RootMessages(self.broker, process)
            Consumer(records, ports.world, self.intake(ports), messages, self.broker, process).run(self.stop(process))

    def control_jobs(self, process: Process) -> None:
        """A job controller with its dispatcher: plans and dispatches open jobs."""
        with self.ports(process, idle=IDLE_SECONDS) as ports:
            settings = DispatchSettings(
                backlog=self.scenario.backlog, retry_timeout_seconds=20.0, settle_seconds=SETTLE,
                sweep_interval_seconds=6.0, cache_interval_seconds=1.0, grace_seconds=8.0, isolate=True,
            )  # fmt: skip
            dispatcher = Dispatcher(ports.world, ports.queue, ports.heartbeats, settings=settings)
            process.threaded = self.scenario.threaded
            planners = SecondThread(process) if process.threaded else InlineExecutor()
            controller = JobController(
                ports.world,
                dispatcher,
                self.open_input,
                JobControllerSettings(
                    refresh_interval_seconds=1.0,
                    sweep_interval_seconds=60.0,
                    retry_delay_seconds=5.0,
                    renew_interval_seconds=2.0,
                ),
                RootLease(self.broker, process),
                planners,
            )
            controller.run(self.stop(process))

    def work(self, pin: ModelPin) -> Callable[[Process], None]:
        """A worker that owns a model."""

        def run(process: Process) -> None:
            with self.ports(process, idle=IDLE_SECONDS) as ports:
                scenario = self.scenario
                Catalog(ports.world.store).publish(CatalogEntry(pin=pin, max_model_len=model.CONTEXT))
                client = ShardClient(
                    f"{process.name}-{process.life}", ports.world, ports.ledger, ports.queue, ports.heartbeats,
                    lambda: False, models=(pin.key,),
                )  # fmt: skip
                settings = WorkerSettings(
                    max_open_shards=scenario.max_open_shards, checkpoint_seconds=scenario.checkpoint_seconds
                )
                facts = model.EngineFacts(scenario.max_num_seqs, scenario.step_seconds)
                loaded = model.load(process, facts, self.oracle.poison_of, self.watch, pin)
                process.threaded = scenario.threaded
                helper = SecondThread(process) if process.threaded else InlineExecutor()
                heart = SecondThread(process) if process.threaded else InlineExecutor()
                worker = ShardWorker(
                    loaded, client, client, ports.world.clock, settings, None, helper, heartbeat_executor=heart,
                    heartbeat_timer=timer_of(process) if process.threaded else None,
                )  # fmt: skip
                try:
                    worker.run(self.stop(process))
                finally:
                    heart.shutdown(cancel_futures=True)
                    helper.shutdown(cancel_futures=True)
                    client.close()

        return run

    def publish_messages(self, process: Process) -> None:
        """Publishes messages about all jobs."""
        with self.ports(process) as ports:
            settings = PublisherSettings(
                all_jobs=True, poll_interval_seconds=1.0, sweep_interval_seconds=40.0, rows_at_once=3
            )
            Publisher(ports.world, RootMessages(self.broker, process), settings).run(self.stop(process))

    def collect(self, process: Process) -> None:
        """Removes objects that are not needed any more, at intervals."""
        with self.ports(process) as ports:
            stop = self.stop(process)
            while not stop.is_set():
                self.collect_once(ports)
                stop.wait(15.0)

    def collect_once(self, ports: ProcessPorts) -> None:
        """One collection."""
        seconds = self.scenario.kept
        outputs = None if seconds is None else timedelta(seconds=seconds)
        try:
            RetentionSweep(ports.world, RetentionSettings(outputs=outputs)).run()
        except PipelineError:
            self.machine.counters["collections that failed"] += 1

    def open_input(self, pinned: InputRef) -> PinnedInput:
        """The input at its real path."""
        files = tuple(file.model_copy(update={"uri": str(self.oracle.path_of(file.uri))}) for file in pinned.files)
        return open_pinned(pinned.model_copy(update={"files": files}))

    def _wait_for_models(self, ports: ProcessPorts) -> None:
        """Wait until all models are published: which model a row may name depends on it."""
        wanted = set(self.scenario.worker_models)
        while True:
            try:
                if {entry.pin.name for entry in Catalog(ports.world.store).entries()} >= wanted:
                    return
            except PipelineError:
                self.machine.counters["reads of the catalog that failed"] += 1
            ports.world.clock.sleep(1.0)


class _Stop:
    """`threading.Event`, as the parts use it."""

    def __init__(self, process: Process, is_stopping: Callable[[], bool]) -> None:
        self._process = process
        self._is_stopping = is_stopping

    def is_set(self) -> bool:
        return self._is_stopping()

    def wait(self, timeout: float) -> bool:
        self._process.point("clock.sleep")
        self._process.sleep(timeout)
        return self._is_stopping()
