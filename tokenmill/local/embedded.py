"""The pipeline in one process, without servers: a folder, an in-process queue, the system's clock.

Its parts are the same as in an installation, with local adapters. The worker's loop runs on the calling thread and the
dispatcher on its own, so that a long engine step never delays it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from pipeline.adapters.folder.locks import RunLock
from pipeline.adapters.folder.store import FolderStore
from pipeline.adapters.memory.heartbeats import MemoryHeartbeats
from pipeline.adapters.memory.shard_queue import MemoryQueue
from pipeline.adapters.system_clock import SystemClock, SystemRandomness
from pipeline.dispatcher.dispatcher import Dispatcher, DispatchSettings
from pipeline.ledger.ledger import JobLedger
from pipeline.ports import World
from pipeline.worker_client.ports import HEARTBEAT_SECONDS
from pipeline.worker_client.shard_client import ShardClient
from schemas.jobs.outcome import Manifest
from schemas.jobs.progress import Progress
from schemas.models import ModelPin

WORKER = "local"

SILENCE = 20 * HEARTBEAT_SECONDS
"""Seconds without a heartbeat after which the worker counts as dead; it is long, since its thread can only be slow."""

TICK_SECONDS = 0.05
"""A short interval: in one process a poll is cheap, and a small job should not wait for it."""


@dataclass(frozen=True, slots=True)
class Output:
    """One job's output folder, held by this process. Made by `open_output`."""

    world: World
    ledger: JobLedger
    lock: RunLock


ProgressOf = Callable[[str], Progress | None]
"""The progress of a job by its id; None: it has ended."""


@contextmanager
def open_output(folder: Path) -> Iterator[Output]:
    """Open and lock an output folder for one run.

    Raises:
        StoreError: it can't be written, or its file system lacks a required guarantee.
        OutputLocked: another run holds it.
    """
    with FolderStore(folder) as store, RunLock(folder) as lock:
        yield Output(World(store, SystemClock(), SystemRandomness(), store.scratch), JobLedger(store), lock)


@dataclass(frozen=True, slots=True)
class EmbeddedWork:
    """The interface of the open jobs for their workers.

    Attributes:
        ledgers: of the jobs, by id.
        queue, heartbeats: of this process.  finished: whether the jobs have ended.
        price_per_hour: of a worker.
    """

    output: Output
    ledgers: Mapping[str, JobLedger]
    queue: MemoryQueue
    heartbeats: MemoryHeartbeats
    finished: Callable[[], bool]
    price_per_hour: float | None = None

    def client(self, pins: Sequence[ModelPin]) -> ShardClient:
        """A client for a worker in this process, with those of the jobs' models."""
        return ShardClient(
            WORKER, self.output.world, self.ledgers.__getitem__, self.queue, self.heartbeats, self.finished,
            models=[pin.key for pin in pins], price_per_hour=self.price_per_hour,
        )  # fmt: skip


def dispatch(
    output: Output,
    begin: Callable[[Progress], None],
    work: Callable[[EmbeddedWork], None],
    price_per_hour: float | None,
    workers: int = 1,
) -> Manifest | None:
    """Dispatch the folder's job; see `dispatch_jobs`. `begin` gets its progress."""
    job = output.ledger.job().id

    def begin_job(progress_of: ProgressOf) -> None:
        progress = progress_of(job)
        assert progress is not None, "it is open"
        begin(progress)

    return dispatch_jobs(output, {job: output.ledger}, begin_job, work, price_per_hour, workers).get(job)


def dispatch_jobs(
    output: Output,
    ledgers: Mapping[str, JobLedger],
    begin: Callable[[ProgressOf], None],
    work: Callable[[EmbeddedWork], None],
    price_per_hour: float | None,
    workers: int = 1,
) -> dict[str, Manifest]:
    """Dispatch the open shards of jobs to `work`, on this thread, until all jobs end or `work` returns. Shards may
    still be planned meanwhile.

    Args:
        ledgers: of the jobs, by id, all in the store of `output`.
        begin: called before `work`, with a function that returns the progress of an open job; any thread may call it.
        work: a worker's loop over a client, which is its source and its sink. Not called when no shard is open, so that
            no model is loaded for a job that lacks only its manifest.
        price_per_hour: of each worker.  workers: their number in `work`.

    Returns the outcomes of the jobs that have ended. Raises what either side raises; when the dispatcher fails, the
    worker ends with the shards that it holds.
    """
    heartbeats = MemoryHeartbeats(output.world.clock, SILENCE)
    queue = MemoryQueue()
    backlog = DispatchSettings().backlog * workers
    settings = DispatchSettings(backlog=backlog, tick_interval_seconds=TICK_SECONDS, price_per_hour=price_per_hour)
    dispatcher = Dispatcher(output.world, queue, heartbeats, settings=settings)
    for ledger in ledgers.values():
        dispatcher.add(ledger)
    dispatcher.tick()
    if not dispatcher.finished():
        begin(dispatcher.progress)
        stop = threading.Event()
        with ThreadPoolExecutor(max_workers=1, thread_name_prefix="dispatcher") as pool:
            dispatching = pool.submit(dispatcher.run, stop)
            try:
                work(EmbeddedWork(output, ledgers, queue, heartbeats, dispatching.done, price_per_hour))
            finally:
                stop.set()
        dispatching.result()
    outcomes = {job: dispatcher.outcome(job) for job in ledgers}
    return {job: outcome for job, outcome in outcomes.items() if outcome is not None}
