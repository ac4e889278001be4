"""The retention sweep removes expired and leftover objects from a root. It is slow, rarely needed, and always safe.

It removes:
- of an ended job: leftovers of its attempts, and shards of planners that lost a race, immediately;
- results and plan of a job, once the job's own retention, or else the installation's, has passed since its end. A
  tombstone is written first, so that readers find the reason;
- an intake batch (a job's input that only the root holds), once the job's results are removed and the batch is so old
  that its source can't deliver the same events again;
- an intake ticket (which identifies a repeated task), at the same age, if its job has ended or never existed;
- a file of the HTTP gateway, once it has expired and no open job reads it, and leftovers of uploads and removals; the
  gateway's idempotency records, at the age of intake tickets;
- a dead letter, after its retention;
- answers of the answer store that are older than its retention, and the oldest of a tenant with too many;
- the marker of an ingested file, once the file is gone;
- parts of abandoned uploads, where the store supports multipart uploads.

A job without an outcome is never touched. A job's records (order, outcome, tombstone) stay for ever: a job's id is
derived from its event, so these records make an event that is repeated years later harmless, without a marker. Each
removal is decided by stored objects, so the next sweep completes an interrupted one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from enum import StrEnum
from itertools import takewhile
from typing import Final, Protocol, TypeVar, runtime_checkable

from pipeline.answers.retention import old_answers
from pipeline.ingest.celery.tasks import INTAKE as TASKS
from pipeline.ingest.celery.tasks import TICKET, load_ticket
from pipeline.ingest.dead_letters import DeadLetters, list_dead_letter_objects
from pipeline.ingest.files.source import marker_name_prefix, marker_prefix
from pipeline.jobs.tenant_spend import list_old_spending
from pipeline.ledger.active_index import ACTIVE, sweep
from pipeline.ledger.ledger import JOBS, OWN_FOLDERS, PROGRESS, SHARDS, WORK, JobLedger
from pipeline.ledger.records import Tombstone
from pipeline.maintenance.gateway_retention import expired_files, old_idempotency_records
from pipeline.ports import ObjectInfo, World
from schemas.jobs.job import Job
from schemas.jobs.outcome import Manifest
from schemas.settings.answers import AnswerOptions

INTAKE: Final = "intake/"
INCOMING: Final = "incoming/"

T = TypeVar("T")


class RemovedKind(StrEnum):
    """The kind of a removed object."""

    WORK = "work"
    LOST_PLAN = "lost_plan"
    RESULTS = "results"
    BATCH = "batch"
    TICKET = "ticket"
    LETTER = "letter"
    MARKER = "marker"
    UPLOAD = "upload"
    FILE = "file"
    ANSWERS = "answers"


@dataclass(frozen=True, slots=True)
class RetentionSettings:
    """Retention times.

    Attributes:
        outputs: results, from the end of a job without its own retention; None: for ever.
        dead_letters: dead letters, from their writing; None: for ever.
        intake: intake batches, from the job's acceptance, and tickets; minimum retention. Longer than any ingest source
            redelivers: SQS keeps messages for 14 days at most, a Kafka topic for its retention.
        uploads: multipart uploads, from their beginning.
        answers: the bounds of the answer store; None: nothing is removed from it.
    """

    outputs: timedelta | None = None
    dead_letters: timedelta | None = None
    intake: timedelta = timedelta(days=30)
    uploads: timedelta = timedelta(days=2)
    answers: AnswerOptions | None = None


@dataclass(slots=True)
class RetentionCounts:
    """Objects and bytes that were (or would be) removed, by kind, and jobs whose results were removed."""

    objects: Counter[RemovedKind] = field(default_factory=Counter)
    num_bytes: Counter[RemovedKind] = field(default_factory=Counter)
    jobs: list[str] = field(default_factory=list)


@runtime_checkable
class UploadStore(Protocol):
    """A store with multipart uploads, which can be left unfinished."""

    def abort_stale_uploads(self, before: datetime) -> int:
        """Abort unfinished uploads that began before this time; returns their number."""
        ...


class RetentionSweep:
    """Removes expired and leftover objects of a root. Several may run.

    Args:
        dry_run: only count.
        stopped: checked between objects; once it is true, the next sweep removes the others.
    """

    def __init__(
        self,
        world: World,
        settings: RetentionSettings | None = None,
        *,
        dry_run: bool = False,
        stopped: Callable[[], bool] = lambda: False,
    ) -> None:
        self._world = world
        self._store = world.store
        self._now = world.clock.now
        self._settings = settings or RetentionSettings()
        self._dry_run = dry_run
        self._stopped = stopped
        self._collected = RetentionCounts()

    def run(self) -> RetentionCounts:
        """Run one sweep. Raises `PipelineError` when the store fails or a record can't be read; earlier removals stay,
        and the next sweep resumes."""
        self._collected = RetentionCounts()
        if not self._dry_run:
            sweep(self._store)
        for prefix in self._unless_stopped(self._store.folders(JOBS)):
            self._collect_job(JobLedger(self._store, prefix))
        self._collect_tickets()
        self._collect_files()
        self._collect_dead_letters()
        self._collect_spending()
        self._collect_answers()
        self._collect_markers()
        if isinstance(self._store, UploadStore) and not self._dry_run:
            self._collected.objects[RemovedKind.UPLOAD] += self._store.abort_stale_uploads(
                self._now() - self._settings.uploads
            )
        return self._collected

    def _unless_stopped(self, found: Iterable[T]) -> Iterator[T]:
        return takewhile(lambda _: not self._stopped(), found)

    def _collect_job(self, ledger: JobLedger) -> None:
        # A marked job is open, or being ended; and what isn't marked is looked at before anything is touched.
        if self._store.info(ACTIVE + ledger.name) is not None:
            return
        manifest = ledger.manifest()
        if manifest is None:
            return
        tombstone = ledger.tombstone()
        if tombstone is None and not self._has_expired(ledger.job(), manifest):
            self._collect_leftovers(ledger)
            return
        if tombstone is None:
            self._collected.jobs.append(ledger.name)
            if not self._dry_run:
                ledger.create_tombstone(Tombstone(job=manifest.job, at=self._now()))
        for name, info in _objects(ledger):
            if name == PROGRESS or name.startswith(OWN_FOLDERS):
                self._remove(RemovedKind.RESULTS, info)
        self._collect_batches(ledger)

    def _has_expired(self, job: Job, manifest: Manifest) -> bool:
        period = self._settings.outputs if job.output_expires_after is None else job.output_expires_after
        return period is not None and manifest.finished_at + period <= self._now()

    def _collect_leftovers(self, ledger: JobLedger) -> None:
        """Remove leftovers of attempts, written after the outcome, and planner files that no segment names."""
        found = {SHARDS: list[tuple[str, ObjectInfo]](), WORK: list[tuple[str, ObjectInfo]]()}
        for folder, objects in found.items():
            objects += _objects(ledger, folder)
        for name, info in found[WORK]:
            if name.removeprefix(WORK).partition("/")[0].isdigit():
                self._remove(RemovedKind.WORK, info)
        if found[SHARDS]:
            segments = list(ledger.segments())
            named = {shard.key for segment in segments for shard in segment.shards}
            named |= {segment.rejects.key for segment in segments if segment.rejects is not None}
            for name, info in found[SHARDS]:
                if name not in named:
                    self._remove(RemovedKind.LOST_PLAN, info)

    def _collect_batches(self, ledger: JobLedger) -> None:
        job = ledger.job()
        if job.created_at + self._settings.intake > self._now():
            return
        ours = self._store.locate(INTAKE.rstrip("/")) + "/"
        for file in job.input.files:
            if file.uri.startswith(ours):
                key = INTAKE + file.uri.removeprefix(ours)
                info = self._store.info(key)
                if info is not None:
                    self._remove(RemovedKind.BATCH, info)
                self._collect_companions(key)

    def _collect_companions(self, key: str) -> None:
        """Remove an intake's companion objects of a batch of lines (same key up to the "-"), unless lines of that batch
        remain: another job may read them."""
        beginning, dash, _ = key.rpartition("-")
        companions = [info for info in self._store.list(beginning + dash) if info.key != key] if dash else []
        if not any(info.key.endswith(".jsonl") for info in companions):
            for info in companions:
                self._remove(RemovedKind.BATCH, info)

    def _collect_tickets(self) -> None:
        """Remove tickets of tasks that are too old to be redelivered. A task's own lines are its job's input; without a
        job they are removed with the ticket, and before it."""
        for info in self._unless_stopped(list(self._store.list(TASKS))):
            if not info.key.endswith(TICKET):
                continue
            ticket = load_ticket(self._store, info.key)
            if ticket is None or ticket.at + self._settings.intake > self._now():
                continue
            ledger = JobLedger(self._store, f"{JOBS}{ticket.job_id}/")
            if ledger.find_job() is None:
                for companion in list(self._store.list(info.key.removesuffix(TICKET))):
                    if companion.key != info.key:
                        self._remove(RemovedKind.BATCH, companion)
            elif ledger.manifest() is None:
                continue
            self._remove(RemovedKind.TICKET, info)

    def _collect_files(self) -> None:
        now = self._now()
        for info in self._unless_stopped(expired_files(self._store, now, self._settings.uploads, self._dry_run)):
            self._remove(RemovedKind.FILE, info)
        for info in self._unless_stopped(old_idempotency_records(self._store, now - self._settings.intake)):
            self._remove(RemovedKind.TICKET, info)

    def _collect_dead_letters(self) -> None:
        if self._settings.dead_letters is None:
            return
        before = self._now() - self._settings.dead_letters
        old = [
            found.dead_letter.id
            for found in DeadLetters(self._world).dead_letters()
            if found.dead_letter.recorded_at <= before
        ]
        for dead_letter in self._unless_stopped(old):
            for info in list_dead_letter_objects(self._store, dead_letter):
                self._remove(RemovedKind.LETTER, info)

    def _collect_spending(self) -> None:
        for info in self._unless_stopped(list_old_spending(self._store, self._now().date())):
            self._remove(RemovedKind.MARKER, info)

    def _collect_answers(self) -> None:
        if self._settings.answers is not None:
            for info in self._unless_stopped(old_answers(self._store, self._settings.answers, self._now())):
                self._remove(RemovedKind.ANSWERS, info)

    def _collect_markers(self) -> None:
        """Remove markers of the root's own incoming folder. Files of other folders can't be checked from here, so their
        markers stay."""
        markers = marker_prefix(self._store.locate(INCOMING))
        there: set[str] | None = None
        for info in self._unless_stopped(self._store.list(markers)):
            if there is None:
                there = {marker_name_prefix(self._store.locate(found.key)) for found in self._store.list(INCOMING)}
            if info.key.removeprefix(markers).partition("-")[0] not in there:
                self._remove(RemovedKind.MARKER, info)

    def _remove(self, kind: RemovedKind, info: ObjectInfo) -> None:
        self._collected.objects[kind] += 1
        self._collected.num_bytes[kind] += info.size
        if not self._dry_run:
            self._store.delete(info.key)


def _objects(ledger: JobLedger, below: str = "") -> Iterator[tuple[str, ObjectInfo]]:
    """A job's objects, with their keys relative to the job."""
    for info in list(ledger.store.list(ledger.prefix + below)):
        yield info.key.removeprefix(ledger.prefix), info
