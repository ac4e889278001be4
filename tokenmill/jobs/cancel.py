"""Cancellation of a job: it writes the job's closing, and then ends the job or waits for its end.

In a root a dispatcher ends the job, and this process waits. In a folder of its own an active run holds the lock and
ends the job itself, since it alone has the progress of its rows. Without an active run the job is ended here, without
loading a model. The lock is tried repeatedly, so a run may start or die meanwhile.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

from pipeline.adapters.folder.locks import RunLock
from pipeline.adapters.folder.store import FolderStore
from pipeline.adapters.memory.heartbeats import MemoryHeartbeats
from pipeline.adapters.memory.shard_queue import MemoryQueue
from pipeline.adapters.system_clock import SystemClock, SystemRandomness
from pipeline.dispatcher.dispatcher import Dispatcher, DispatchSettings
from pipeline.inputs.pinning import pin_again
from pipeline.jobs.planning import plan_job
from pipeline.jobs.summaries import find_ledger
from pipeline.ledger.ledger import JobLedger
from pipeline.ledger.records import RunRecord
from pipeline.ports import OutputLocked, World
from schemas.jobs.job import Closing
from schemas.jobs.outcome import Manifest
from tokenmill.config.inputs import in_s3, open_input
from tokenmill.output import say
from tokenmill.root import Root

WAIT_SECONDS: Final = 60.0
"""Time for an active run to end its job; it may still be planning."""

POLL_SECONDS: Final = 0.2
ROOT_POLL_SECONDS: Final = 0.5


@dataclass(frozen=True, slots=True)
class Cancelled:
    """The outcome of a cancellation.

    Attributes:
        manifest: None: the run that holds the folder, or the root's dispatcher, has not ended the job yet.
        before: the job had ended already, and nothing was changed.
    """

    job: str
    manifest: Manifest | None
    before: bool


def cancel_job(folder: Path, price_per_hour: float | None = None, wait: float = WAIT_SECONDS) -> Cancelled:
    """Cancel the job in `folder`, which must hold one; waits up to `wait` seconds for an active run.

    Raises:
        JobNotFound: there is no job, or there are several.
        PipelineError: the folder can't be written, or the rest of the input, which the plan needs, can't be read or has
            changed; the job stays cancelled, and the next attempt ends it.
    """
    with FolderStore(folder, read_only=True) as readable:
        ledger = find_ledger(readable)
        job, manifest = ledger.job(), ledger.manifest()
        prefix = ledger.prefix
    if manifest is not None:
        return Cancelled(job.id, manifest, before=True)
    with FolderStore(folder) as store:
        world = World(store, SystemClock(), SystemRandomness(), store.scratch)
        ledger, lock = JobLedger(store, prefix), RunLock(folder, retry_timeout_seconds=0.0)
        ledger.create_closing(Closing(kind="cancel", at=world.clock.now()))
        until, reported = world.clock.monotonic() + wait, False
        while (manifest := ledger.manifest()) is None and world.clock.monotonic() < until:
            try:
                lock.acquire()
            except OutputLocked:
                if not reported:
                    say(f"{folder}: a run is at this job; it ends it, and keeps what is finished")
                reported = True
                world.clock.sleep(POLL_SECONDS)
                continue
            try:
                manifest = _end(ledger, world, price_per_hour)
                break
            finally:
                lock.release()
        return Cancelled(job.id, manifest, before=False)


def cancel_in_root(root: Root, job: str, wait: float = WAIT_SECONDS) -> Cancelled:
    """Cancel the job of this id in a root, and wait up to `wait` seconds for a dispatcher to end it.

    Raises:
        PipelineError: the job can't be read, or the root can't be written.
    """
    ledger, clock = root.ledger(job), root.world.clock
    manifest = ledger.manifest()
    if manifest is not None:
        return Cancelled(job, manifest, before=True)
    ledger.create_closing(Closing(kind="cancel", at=clock.now()))
    until, reported = clock.monotonic() + wait, False
    while (manifest := ledger.manifest()) is None and clock.monotonic() < until:
        if not reported:
            say(f"{job}: cancelled; waiting for the dispatcher to end it")
        reported = True
        clock.sleep(ROOT_POLL_SECONDS)
    return Cancelled(job, manifest, before=False)


def _end(ledger: JobLedger, world: World, price_per_hour: float | None) -> Manifest | None:
    """End a closed job without an active run. Each line gets a row, so the rest of the input is planned first."""
    job = ledger.job()
    # The time since the last run is not billed.
    ledger.record_run(world.random.token(8).hex(), RunRecord(started_at=world.clock.now()))
    if ledger.planned_parts() is None and not in_s3(job.input.uri):  # an object is only read as it was pinned
        job = job.model_copy(update={"input": pin_again(job.input)})
    plan_job(ledger, job, world, open_input=open_input)
    no_workers = MemoryHeartbeats(world.clock, 0.0)
    dispatcher = Dispatcher(world, MemoryQueue(), no_workers, settings=DispatchSettings(price_per_hour=price_per_hour))
    dispatcher.add(ledger)
    while not dispatcher.finished():
        dispatcher.tick()
    return dispatcher.outcome(job.id)
