"""The processes of a simulated history: planners, dispatchers and workers, each the real parts over simulated ports."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

from pipeline.adapters.folder.store import FolderStore
from pipeline.dispatcher.dispatcher import Dispatcher, DispatchSettings
from pipeline.jobs.planning import plan_job
from pipeline.jobs.submit import JobOrder, submit
from pipeline.ledger.ledger import JobLedger
from pipeline.ports import World
from pipeline.runtime.inline_executor import InlineExecutor
from pipeline.worker_client.shard_client import ShardClient
from schemas.jobs.inputs import InputRef
from schemas.jobs.job import Closing, JobSettings
from schemas.requests.limits import PlanSettings
from tests.simulation import model
from tests.simulation.disk import Device, ProcessDisk
from tests.simulation.machine import START, Machine, Process, ProcessClock, ProcessRandomness
from tests.simulation.ports import Broker, ProcessHeartbeats, ProcessQueue, ProcessStore
from tests.simulation.scenario import Scenario
from tests.simulation.threads import SecondThread, timer_of
from tests.simulation.watch import Watch, row_of
from workers.settings import WorkerSettings
from workers.shards.worker import ShardWorker

JOB = "job-1"
PREFIX = f"jobs/{JOB}/"
IDLE_SECONDS = 0.5
"""Poll interval of an idle worker: a machine may sleep for longer than requested."""


@dataclass
class ProcessPorts:
    """The simulated ports of one life of a process."""

    process: Process
    world: World
    ledger: JobLedger
    queue: ProcessQueue
    heartbeats: ProcessHeartbeats


@dataclass
class JobHarness:
    """The state that the processes of one history share.

    Attributes:
        input: the job's, pinned.  acknowledged: objects whose creation was reported to a process.
        starting_anew: an ingest source is to start the job afresh and has not done so yet; it holds the lock then.
        over: planners and dispatchers have come to their end, so the workers may go.
    """

    scenario: Scenario
    machine: Machine
    device: Device
    broker: Broker
    input: InputRef
    acknowledged: set[str]
    watch: Watch
    starting_anew: bool = False

    def build(self) -> None:
        """Add the processes to the machine."""
        chance = self.machine.chance
        for number in range(self.scenario.planners):
            self.machine.add(
                "planner" + "-again" * number, self.plan, chance.choice((0.0, 0.05, 5.0)) if number else 0.0
            )
        for number in range(self.scenario.dispatchers):
            self.machine.add(f"dispatcher{number}", self.dispatch)
        for number in range(self.scenario.workers):
            self.machine.add(f"worker{number}", self.work)

    @property
    def over(self) -> bool:
        return all(process.done for process in self.machine.processes if not process.name.startswith("worker"))

    @contextmanager
    def ports(self, process: Process, idle: float = 0.0) -> Iterator[ProcessPorts]:
        """Open the store, as a process does when it begins."""
        disk = ProcessDisk(self.device, process)
        with FolderStore(self.device.root, disk=disk) as folder:
            store = ProcessStore(folder, process, self.acknowledged, self.watch)
            randomness = ProcessRandomness(self.scenario.seed, process)
            world = World(store, ProcessClock(process, idle), randomness, folder.scratch)
            queue, heartbeats = ProcessQueue(self.broker, process, self.watch), ProcessHeartbeats(self.broker, process)
            yield ProcessPorts(process, world, JobLedger(store, PREFIX), queue, heartbeats)

    def order(self) -> JobOrder:
        """The job that every ingest source orders."""
        scenario = self.scenario
        settings = PlanSettings(
            segment_rows=scenario.segment_rows, max_shard_rows=scenario.shard_rows, shard_tokens=scenario.shard_tokens
        )
        deadline = self.scenario.deadline
        return JobOrder(
            input=self.input,
            models=(model.PIN,),
            settings=JobSettings(plan=settings),
            deadline=None if deadline is None else START + timedelta(seconds=deadline),
        )

    def plan(self, process: Process) -> None:
        """An ingest source and its planner: first segment, then the rest. Each life counts tokens in its own way, so
        plans that race are different ones."""
        self._wait_for_the_lock(process)
        with self.ports(process) as ports:
            job = submit(self.order(), ports.ledger, ports.world, job_id=JOB, fresh=self.starting_anew).job
            self.starting_anew = False
            longer = (process.life + len(process.name)) % 3
            plan_job(ports.ledger, job, ports.world, lambda text: len(text) << longer, max_segments=1)
            plan_job(ports.ledger, job, ports.world)

    def dispatch(self, process: Process) -> None:
        """A dispatcher, until the job has ended."""
        self._wait_for_the_lock(process)
        with self.ports(process, idle=0.2) as ports:
            settings = DispatchSettings(
                backlog=self.scenario.backlog,
                retry_timeout_seconds=5.0,
                sweep_interval_seconds=6.0,
                cache_interval_seconds=1.0,
                tick_interval_seconds=0.5,
                grace_seconds=8.0,
            )
            dispatcher = Dispatcher(ports.world, ports.queue, ports.heartbeats, settings=settings)
            while ports.ledger.find_job() is None:
                ports.world.clock.sleep(1.0)
            dispatcher.add(ports.ledger)
            dispatcher.run(cast(Any, _NeverStopped()))

    def work(self, process: Process) -> None:
        """A worker, until the others have ended."""
        self._wait_for_the_lock(process)
        with self.ports(process, idle=IDLE_SECONDS) as ports:
            client = ShardClient(
                f"{process.name}-{process.life}",
                ports.world,
                lambda _: ports.ledger,
                ports.queue,
                ports.heartbeats,
                lambda: self.over,
                models=(model.PIN.key,),
            )
            settings = WorkerSettings(
                max_open_shards=self.scenario.max_open_shards, checkpoint_seconds=self.scenario.checkpoint_seconds
            )
            facts = model.EngineFacts(self.scenario.max_num_seqs, self.scenario.step_seconds)
            poisonous = self.scenario.poisonous
            loaded = model.load(process, facts, lambda request: poisonous.get(row_of(request)), self.watch)
            process.threaded = self.scenario.threaded
            helper = SecondThread(process) if process.threaded else InlineExecutor()
            heart = SecondThread(process) if process.threaded else InlineExecutor()
            worker = ShardWorker(
                loaded, client, client, ports.world.clock, settings, None, helper, heartbeat_executor=heart,
                heartbeat_timer=timer_of(process) if process.threaded else None,
            )  # fmt: skip
            try:
                worker.run(cast(Any, _StopRequested(process)))
            finally:
                if isinstance(helper, SecondThread):
                    self.watch.waited(process, helper.longest)
                heart.shutdown(cancel_futures=True)
                helper.shutdown(cancel_futures=True)

    def cancel(self, process: Process) -> None:
        """A user who cancels the job."""
        self._wait_for_the_lock(process)
        with self.ports(process) as ports:
            while ports.ledger.find_job() is None:
                ports.world.clock.sleep(1.0)
            if ports.ledger.manifest() is None:
                ports.ledger.create_closing(Closing(kind="cancel", at=ports.world.clock.now()))

    def _wait_for_the_lock(self, process: Process) -> None:
        """While a job is started afresh, no other process works on it."""
        while self.starting_anew and process.name != "planner":
            process.sleep(1.0)

    def sweep(self, process: Process) -> None:
        """The same order once more, after the end."""
        with self.ports(process) as ports:
            submit(self.order(), ports.ledger, ports.world, job_id=JOB)


class _NeverStopped:
    def is_set(self) -> bool:
        return False


class _StopRequested:
    """Set once the process is to stop."""

    def __init__(self, process: Process) -> None:
        self._process = process

    def is_set(self) -> bool:
        return self._process.stopping


def input_file(folder: Path, scenario: Scenario) -> Path:
    """The job's input as a file."""
    path = folder / "in.jsonl"
    path.write_text("".join(line.text + "\n" for line in scenario.lines))
    return path
