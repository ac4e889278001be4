"""A whole embedded run with a worker that answers at once: for tests that kill it as a child process."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Protocol

from pipeline.adapters.folder.locks import RunLock
from pipeline.adapters.folder.store import FolderStore
from pipeline.adapters.memory.heartbeats import MemoryHeartbeats
from pipeline.adapters.memory.shard_queue import MemoryQueue
from pipeline.adapters.system_clock import SystemClock, SystemRandomness
from pipeline.dispatcher.dispatcher import Dispatcher, DispatchSettings
from pipeline.inputs.pinning import pin_input
from pipeline.jobs.planning import plan_job
from pipeline.jobs.submit import submit
from pipeline.ledger.ledger import JobLedger
from pipeline.ports import World
from pipeline.worker_client.shard_client import ShardClient
from schemas.jobs.job import JobSettings
from schemas.jobs.outcome import Manifest
from schemas.requests.limits import PlanSettings
from tests.pipeline.made_jobs import MODELS, computed, order, report


class Permits(Protocol):
    """A semaphore, of threads or of processes."""

    def acquire(self) -> bool: ...


def run_a_job(out: Path, source: Path, *, permits: Permits | None = None, fresh: bool = False) -> Manifest | None:
    """Submit, plan, work, end: the same call again goes on. Each commit waits for one of the permits, if there are
    any: so a run can't end before the test permits it, however fast the machine is."""
    settings = JobSettings(plan=PlanSettings(shard_tokens=160, segment_rows=20))
    with FolderStore(out) as store, RunLock(out):
        world, ledger = World(store, SystemClock(), SystemRandomness(), store.scratch), JobLedger(store)
        job = submit(order(input=pin_input(source), settings=settings), ledger, world, fresh=fresh).job
        plan_job(ledger, job, world)
        queue, beats = MemoryQueue(), MemoryHeartbeats(world.clock, 60.0)
        dispatcher = Dispatcher(world, queue, beats, settings=DispatchSettings(tick_interval_seconds=0.002))
        dispatcher.add(ledger)
        client = ShardClient("w", world, lambda _: ledger, queue, beats, dispatcher.finished, models=MODELS)
        thread = threading.Thread(target=dispatcher.run, args=(threading.Event(),))
        thread.start()
        while not client.finished() and thread.is_alive():
            work = client.take(0.002)
            if work is not None:
                if permits is not None:
                    permits.acquire()
                client.commit(work, computed(work), report(work))
        thread.join()
        return dispatcher.outcome(job.id)
