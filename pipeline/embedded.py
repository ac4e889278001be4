"""The pipeline in one process, without any server: a folder, an in-process queue, the system's clock.

`Output` is one job's output folder, held by one run at a time. The dispatcher runs in a thread beside the worker, so a
long engine step never delays it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from pipeline.adapters.folder import FolderStore
from pipeline.adapters.locks import RunLock
from pipeline.adapters.memory_heartbeats import MemoryHeartbeats
from pipeline.adapters.memory_queue import MemoryQueue
from pipeline.adapters.system import SystemClock, SystemRandomness
from pipeline.dispatcher import Dispatcher, DispatchSettings
from pipeline.events import EventSink
from pipeline.ledger import JobLedger
from pipeline.planner import PlanSummary, TokenCounter
from pipeline.planning import plan_job
from pipeline.ports import World
from pipeline.shard_client import ShardClient
from pipeline.submit import Order, Submitted, submit
from pipeline.worker_api import HEARTBEAT_SECONDS
from schemas.job import Job, Manifest

WORKER = "local"
SILENCE = 20 * HEARTBEAT_SECONDS
"""Seconds without a heartbeat after which the one worker counts as gone: generous, its thread can only be slow."""


@dataclass(frozen=True, slots=True)
class Output:
    """One job's output folder, open for a run. Made by `open_output`."""

    world: World
    ledger: JobLedger

    def submit(self, order: Order, *, fresh: bool = False) -> Submitted:
        """Accept the order, or find the job it made before; see `pipeline.submit.submit`."""
        return submit(order, self.ledger, self.world, fresh=fresh)

    def plan(self, job: Job, count_tokens: TokenCounter | None = None) -> PlanSummary | None:
        """Plan what isn't planned yet; see `pipeline.planning.plan_job`."""
        return plan_job(self.ledger, job, self.world, count_tokens)

    def run(
        self,
        work: Callable[[ShardClient], object],
        *,
        events: EventSink | None = None,
        settings: DispatchSettings | None = None,
    ) -> Manifest | None:
        """Dispatch the planned job's open shards to `work`, in this thread, until the job ends or `work` returns.

        Args:
            work: a worker's loop over the client, which is its source and its sink; not called (so no model need be
                loaded) when no shard is open.

        Returns:
            The outcome; None when `work` returned early. The same call later goes on.

        Raises:
            PipelineError: the job contradicts itself or can't be written; and whatever `work` raises.
        """
        heartbeats = MemoryHeartbeats(self.world.clock, SILENCE)
        queue = MemoryQueue()
        dispatcher = Dispatcher(self.world, queue, heartbeats, events, settings)
        job = self.ledger.job().id
        dispatcher.add(self.ledger)
        if not dispatcher.finished():
            dispatcher.tick()
        if not dispatcher.finished():
            with _running(dispatcher) as ended:
                work(ShardClient(WORKER, self.world, lambda _: self.ledger, queue, heartbeats, ended.is_set))
        return dispatcher.outcome(job)


@contextmanager
def open_output(folder: Path) -> Iterator[Output]:
    """Hold an output folder for one run.

    Raises:
        StoreError: it can't be written, or its file system can't keep the promise.
        OutputLocked: another run is at it.
    """
    with FolderStore(folder) as store, RunLock(folder):
        world = World(store, SystemClock(), SystemRandomness(), store.scratch)
        yield Output(world, JobLedger(store))


@contextmanager
def _running(dispatcher: Dispatcher) -> Iterator[threading.Event]:
    """The dispatcher in a thread; yields an event that is set when it has ended, for better or worse. Its error, if
    any, is raised when the block is left."""
    stop, ended = threading.Event(), threading.Event()
    errors: list[BaseException] = []

    def run() -> None:
        try:
            dispatcher.run(stop)
        except BaseException as error:  # noqa: BLE001 - raised again below, in the caller's thread
            errors.append(error)
        finally:
            ended.set()

    thread = threading.Thread(target=run, name="dispatcher")
    thread.start()
    try:
        yield ended
    finally:
        stop.set()
        thread.join()
    if errors:
        raise errors[0]
