"""The pipeline in one process, without servers: a folder, an in-process queue, the system's clock.

Its parts are the same as in an installation, with local adapters. The worker's loop runs on the calling thread and the
dispatcher on its own, so that a long engine step never delays it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
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
    """The interface of the open job for its workers.

    Attributes:
        queue, heartbeats: of this process.  finished: whether the job has ended.
        price_per_hour: of a worker.
    """

    output: Output
    queue: MemoryQueue
    heartbeats: MemoryHeartbeats
    finished: Callable[[], bool]
    price_per_hour: float | None = None

    def client(self, pins: Sequence[ModelPin]) -> ShardClient:
        """A client for a worker in this process, with those of the job's models."""
        return ShardClient(
            WORKER, self.output.world, lambda _: self.output.ledger, self.queue, self.heartbeats, self.finished,
            models=[pin.key for pin in pins], price_per_hour=self.price_per_hour,
        )  # fmt: skip


def dispatch(
    output: Output,
    begin: Callable[[Progress], None],
    work: Callable[[EmbeddedWork], None],
    price_per_hour: float | None,
    workers: int = 1,
) -> Manifest | None:
    """Dispatch the job's open shards to `work`, on this thread, until the job ends or `work` returns. Shards may still
    be planned meanwhile.

    Args:
        begin: called with the job's progress, before `work`.
        work: a worker's loop over a client, which is its source and its sink. Not called when no shard is open, so that
            no model is loaded for a job that lacks only its manifest.
        price_per_hour: of each worker.  workers: their number in `work`.

    Returns the outcome, or None when `work` returned early. Raises what either side raises; when the dispatcher fails,
    the worker ends with the shards that it holds.
    """
    heartbeats = MemoryHeartbeats(output.world.clock, SILENCE)
    queue = MemoryQueue()
    backlog = DispatchSettings().backlog * workers
    settings = DispatchSettings(backlog=backlog, tick_interval_seconds=TICK_SECONDS, price_per_hour=price_per_hour)
    dispatcher = Dispatcher(output.world, queue, heartbeats, settings=settings)
    job = output.ledger.job()
    dispatcher.add(output.ledger)
    dispatcher.tick()
    progress = dispatcher.progress(job.id)
    if progress is not None:
        begin(progress)
        stop = threading.Event()
        with ThreadPoolExecutor(max_workers=1, thread_name_prefix="dispatcher") as pool:
            dispatching = pool.submit(dispatcher.run, stop)
            try:
                work(EmbeddedWork(output, queue, heartbeats, dispatching.done, price_per_hour))
            finally:
                stop.set()
        dispatching.result()
    return dispatcher.outcome(job.id)
