"""A root with a dispatcher and a worker as threads of this process; the worker answers at once, as `made_jobs` has
it."""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import structlog

from pipeline.adapters.memory.heartbeats import MemoryHeartbeats
from pipeline.adapters.memory.shard_queue import MemoryQueue
from pipeline.adapters.s3.client import S3Connection
from pipeline.adapters.system_clock import SystemClock, SystemRandomness
from pipeline.dispatcher.controller import JobController, JobControllerSettings
from pipeline.dispatcher.dispatcher import Dispatcher, DispatchSettings
from pipeline.ingest.files.source import FileIngestSource
from pipeline.inputs.open import open_pinned
from pipeline.inputs.pinning import pin_input
from pipeline.jobs.submit import new_job_id, submit
from pipeline.ledger.ledger import JOBS, JobLedger
from pipeline.models.catalog import Catalog
from pipeline.ports import ObjectStore, World
from pipeline.worker_client.shard_client import ShardClient
from schemas.jobs.job import JobSettings, OnInvalid
from schemas.models import CatalogEntry
from schemas.requests.limits import PlanSettings
from tests.pipeline.made_jobs import MODELS, PIN, computed, order, report
from tests.waiting import HANG_SECONDS

ROWS_IN_SHARD = 4


class Installation:
    """Others share the root with the command line. `url`: how it is named."""

    def __init__(self, url: str, store: ObjectStore, scratch: Path, inputs: Path) -> None:
        self.url = url
        self.inputs = inputs
        self.world = World(store, SystemClock(), SystemRandomness(), scratch)
        self.queue, self.beats = MemoryQueue(), MemoryHeartbeats(self.world.clock, 10.0)
        self.stop = threading.Event()
        self.threads: list[threading.Thread] = []
        Catalog(store).publish(CatalogEntry(pin=PIN, max_model_len=64))

    def ledger(self, job: str) -> JobLedger:
        return JobLedger(self.world.store, f"{JOBS}{job}/")

    def submit(self, rows: int = 10, *more: str, on_invalid: OnInvalid = OnInvalid.ROW) -> str:
        """A job of so many requests and the lines given; its id. Each fifth request will fail."""
        job = new_job_id(self.world.clock.now(), self.world.random)
        lines = [
            json.dumps(
                {
                    "custom_id": f"r{row}", "method": "POST", "url": "/v1/completions",
                    "body": {"model": "tiny", "prompt": f"number {row}", "max_tokens": 5},
                }
            )
            for row in range(rows)
        ]  # fmt: skip
        source = self.inputs / f"{job}.jsonl"
        source.write_text("".join(line + "\n" for line in (*lines, *more)))
        settings = JobSettings(plan=PlanSettings(max_shard_rows=ROWS_IN_SHARD), on_invalid=on_invalid)
        submit(order(input=pin_input(source), settings=settings), self.ledger(job), self.world, job_id=job)
        return job

    def await_plan(self, job: str) -> None:
        """Until the job is planned: one that is cancelled before has no rows."""
        until = time.monotonic() + HANG_SECONDS
        while self.ledger(job).planned_parts() is None:
            assert time.monotonic() < until, "the job was not planned"
            time.sleep(0.01)

    def start_ingest(self, source: FileIngestSource) -> None:
        """Jobs are made of the source's files."""

        def ingest() -> None:
            while not self.stop.wait(0.1):
                source.sweep()

        self._start(ingest)

    def start_dispatcher(self, s3: S3Connection | None = None) -> None:
        """`s3`: reads inputs in buckets."""
        settings = DispatchSettings(isolate=True, sweep_interval_seconds=0.2, tick_interval_seconds=0.01)
        dispatcher = Dispatcher(self.world, self.queue, self.beats, settings=settings)
        controller_settings = JobControllerSettings(
            tick_interval_seconds=0.01, refresh_interval_seconds=0.05, retry_delay_seconds=0.1
        )
        controller = JobController(
            self.world, dispatcher, lambda pinned: open_pinned(pinned, s3), settings=controller_settings
        )
        self._start(lambda: controller.run(self.stop))

    def start_worker(self, permits: threading.Semaphore | None = None) -> None:
        """Each shard is committed only with a permit, if permits are used."""

        def work() -> None:
            client = ShardClient("w", self.world, self.ledger, self.queue, self.beats, lambda: False, models=MODELS)
            while not self.stop.is_set():
                shard = client.take(0.01)
                if shard is not None:
                    client.begin(shard)
                    while permits is not None and not permits.acquire(timeout=0.05):
                        if self.stop.is_set():
                            return
                    client.commit(shard, computed(shard), report(shard))

        self._start(work)

    def _start(self, work: Callable[[], None]) -> None:
        self.threads.append(threading.Thread(target=work))
        self.threads[-1].start()


@contextmanager
def installation(url: str, store: ObjectStore, scratch: Path, inputs: Path) -> Iterator[Installation]:
    """The end of the block ends the processes that were started in it."""
    inputs.mkdir(exist_ok=True)
    # What its threads log would stand between what the command says.
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    made = Installation(url, store, scratch, inputs)
    try:
        yield made
    finally:
        made.stop.set()
        for thread in made.threads:
            thread.join(HANG_SECONDS)
        structlog.reset_defaults()
