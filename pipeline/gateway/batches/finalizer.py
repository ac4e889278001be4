"""The finalizer: it writes the output and error files of ended batches, where OpenAI's clients expect them.

A marker (`finalizing/JOB`) is created before the job and removed after the outcome is written, so any gateway completes
an interrupted finalization. File ids are derived from the job, and the bytes are deterministic: a second writer changes
nothing.
"""

from __future__ import annotations

import hashlib
import threading
from datetime import datetime
from pathlib import Path
from typing import Final, Literal

import structlog

from pipeline.gateway.batches.serialization import find_order, find_outcome, work_began
from pipeline.gateway.files.file_objects import READER_GRACE_PERIOD
from pipeline.gateway.files.service import Files
from pipeline.gateway.records import (
    BATCHES,
    FINALIZING,
    BatchOrder,
    BatchOutcome,
    StoredFile,
    derived_file_id,
)
from pipeline.ledger.active_index import ACTIVE
from pipeline.ledger.ledger import JOBS, JobLedger, ResultsRemoved
from pipeline.ports import Lease, PipelineError, World
from pipeline.results.export import export
from pipeline.runtime.leader_election import LeaderElection
from pipeline.runtime.supervision import reason_of
from schemas.jobs.job import Job
from schemas.jobs.outcome import Manifest

AT_ONCE_ROWS: Final = 1_000
"""Batches with at most this many rows are finalized within a request for the batch."""

_RETRY_SECONDS: Final = 30.0

logger = structlog.get_logger(__name__)


class Finalizer:
    """Writes the files of ended batches. Thread-safe, and several instances may run.

    Args:
        interval_seconds: the polling interval.
        lease: elects the one instance that polls; None: each polls.
    """

    def __init__(self, world: World, files: Files, interval_seconds: float = 1.0, lease: Lease | None = None) -> None:
        self._world = world
        self._store = world.store
        self._files = files
        self._interval_seconds = interval_seconds
        self._leading = LeaderElection(lease, world.clock, "finalizing")
        self._busy: set[str] = set()
        self._retry_at: dict[str, float] = {}
        self._lock = threading.Lock()

    def expect(self, job: str, order: BatchOrder) -> None:
        """Store the batch request and the marker of a job that is about to be created."""
        self._store.create(f"{BATCHES}{job}/order.json", order.to_json())
        self._store.create(FINALIZING + job, b"")

    def forget(self, job: str) -> None:
        """Remove the marker and the batch request of a job that isn't created."""
        self._store.delete(FINALIZING + job)
        self._store.delete(f"{BATCHES}{job}/order.json")

    def run(self, stop: threading.Event) -> None:
        """Finalize ended batches until `stop` is set."""
        try:
            while not stop.wait(self._interval_seconds):
                try:
                    if self._leading.now():
                        self.poll(stop)
                except PipelineError as error:
                    logger.error("finalizer_poll_failed", reason=str(error))
        finally:
            self._leading.give_up()

    def poll(self, stop: threading.Event | None = None) -> int:
        """Finalize all ended batches; returns their number. A batch that fails is retried later."""
        waiting = [info.key.removeprefix(FINALIZING) for info in self._store.list(FINALIZING)]
        if not waiting:
            return 0
        still_open = {info.key.removeprefix(ACTIVE) for info in self._store.list(ACTIVE)}
        ended = 0
        now = self._world.clock.monotonic()
        for job in waiting:
            if stop is not None and stop.is_set():
                break
            if job in still_open or self._retry_at.get(job, now) > now:
                continue
            try:
                ended += self.finish(job)
                self._retry_at.pop(job, None)
            except Exception as error:  # noqa: BLE001 - of one job; the others go on
                self._retry_at[job] = now + _RETRY_SECONDS
                reason = reason_of(error, "finalizer", self._world, job=job)
                logger.error("batch_not_finalized", job=job, reason=reason)
        return ended

    def finish(self, job: str, max_rows: int | None = None) -> bool:
        """Write the files of a batch, if it has ended; returns whether its outcome is committed now.

        Args:
            max_rows: leave batches with more rows to `run`.
        """
        with self._lock:
            if job in self._busy:
                return False
            self._busy.add(job)
        try:
            return self._finish(job, max_rows)
        finally:
            with self._lock:
                self._busy.discard(job)

    def _finish(self, job_id: str, max_rows: int | None) -> bool:
        order = find_order(self._store, job_id)
        if order is None:
            self._store.delete(FINALIZING + job_id)
            return False
        if find_outcome(self._store, job_id) is None:
            ledger = JobLedger(self._store, f"{JOBS}{job_id}/")
            job = ledger.find_job()
            if job is None:
                if order.at + READER_GRACE_PERIOD <= self._world.clock.now():
                    self.forget(job_id)
                return False
            manifest = ledger.manifest()
            if manifest is None or (max_rows is not None and manifest.counts.total > max_rows):
                return False
            self._write(ledger, job, manifest)
        self._store.delete(FINALIZING + job_id)
        return True

    def _write(self, ledger: JobLedger, job: Job, manifest: Manifest) -> None:
        """Write the files, and then the outcome."""
        outcome = BatchOutcome(in_progress_at=work_began(ledger), at=manifest.finished_at)
        if manifest.counts.total:  # also for a job that failed midway: its finished rows are exported
            try:
                output, errors = self._export(ledger, job, manifest)
                outcome = outcome.model_copy(update={"output_file_id": output, "error_file_id": errors})
            except ResultsRemoved as error:
                logger.warning("batch_without_files", job=job.id, reason=str(error))
        outcome = outcome.model_copy(update={"at": max(manifest.finished_at, self._world.clock.now())})
        self._store.create(f"{BATCHES}{job.id}/outcome.json", outcome.to_json())
        logger.info("batch_finalized", job=job.id, status=manifest.status.value)

    def _export(self, ledger: JobLedger, job: Job, manifest: Manifest) -> tuple[str | None, str | None]:
        name = f"finalize-{self._world.random.token(12).hex()}"
        good, bad = (self._world.scratch / f"{name}-{kind}.jsonl" for kind in ("output", "error"))
        try:
            written = export(ledger, good, errors_to=bad)
            at = manifest.finished_at
            output = self._add(job, at, "output", good) if written.succeeded else None
            errors = self._add(job, at, "error", bad) if written.others else None
        finally:
            good.unlink(missing_ok=True)
            bad.unlink(missing_ok=True)
        return output, errors

    def _add(self, job: Job, at: datetime, kind: Literal["output", "error"], path: Path) -> str:
        with path.open("rb") as stream:
            digest = hashlib.file_digest(stream, "sha256").hexdigest()
        life = job.output_expires_after
        made = StoredFile(
            id=derived_file_id(at, job.id, kind),
            tenant=job.tenant,
            filename=f"{job.id}_{kind}.jsonl",
            purpose="batch_output",
            size=path.stat().st_size,
            sha256=digest,
            created_at=at,
            expires_at=None if life is None else at + life,
            batch=job.id,
        )
        return self._files.add(made, path).id
