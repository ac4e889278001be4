"""Where the planner's plan goes: shards, refused rows and segments into the ledger.

A segment's creation decides what counts for its rows, whoever else planned them; the part of its refused rows follows
at once, from what was stored before. A plan that was interrupted goes on at the first segment that is missing.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.active import tidy
from pipeline.inputs import PinnedInput, open_pinned
from pipeline.ledger import JobLedger, LedgerError, rejects_key, segment_key, shard_key
from pipeline.planner import (
    InputEstimate,
    InvalidInput,
    PlanSummary,
    StoredShard,
    TokenCounter,
    measure,
    open_source,
    plan,
)
from pipeline.ports import StoreError, World
from pipeline.records import PartSummary
from pipeline.rejects import commit_rejects
from pipeline.results import COMPRESSION, PartWriter
from pipeline.tracing import Span, trace_job, working_for
from schemas.inputs import InputRef
from schemas.job import Job
from schemas.outcome import Counts, JobError, JobStatus, Manifest
from schemas.plan import PlanSegment
from schemas.tables import result_schema

PLANNER = "planner"


class LedgerPlanSink:
    """`PlanSink` over a ledger. One planner's attempt; `close` removes what it built and didn't commit.

    Args:
        check_input: called before a segment is committed; raises when what was read for it may not be the job's input.
    """

    def __init__(
        self,
        ledger: JobLedger,
        job: Job,
        world: World,
        carried: pa.Schema | None,
        check_input: Callable[[], None],
    ) -> None:
        self._check_input = check_input
        self._ledger = ledger
        self._job = job
        self._world = world
        self._started_at = world.clock.now()
        self.attempt = world.random.token(8).hex()
        self._schema = result_schema(carried)
        self._rejects: PartWriter | None = None

    def existing_segment(self, index: int) -> PlanSegment | None:
        """The segment that stands, if any, with the part of its refused rows."""
        segment = self._ledger.segment(index)
        if segment is not None:
            if segment.job != self._job.id:
                raise LedgerError(
                    f"{self._ledger.place(segment_key(index))}: is of job {segment.job}, not of {self._job.id}, "
                    "which lies here; start anew with --fresh"
                )
            commit_rejects(self._ledger, segment, self._world)
        return segment

    def write_shard(self, number: int, table: pa.Table) -> StoredShard:
        """Store a shard under this attempt's name; counts once its segment stands."""
        key = shard_key(self.attempt, number)
        path = self._world.scratch / f"shard-{self.attempt}-{number:05d}.parquet"
        try:
            pq.write_table(table, path, compression=COMPRESSION)
            data = path.read_bytes()
        except OSError as error:
            path.unlink(missing_ok=True)
            raise StoreError(f"{path}: can't write a shard: {error.strerror or error}; free some space") from error
        stored = StoredShard(key, hashlib.sha256(data).hexdigest(), len(data))
        if not self._ledger.create(key, path):
            raise LedgerError(f"{self._ledger.place(key)}: a shard of this very planning stands already")
        return stored

    def write_rejected(self, table: pa.Table) -> None:
        """Append rows that the open segment refuses."""
        self._refused().append(table)

    def store_rejects(self, number: int) -> StoredShard:
        """Store what was refused under this attempt's name, ready to become part `number`."""
        writer = self._refused()
        writer.finish(
            PartSummary(
                job=self._job.id,
                part=number,
                attempt_id=self.attempt,
                worker=PLANNER,
                counts=writer.counts(),
                started_at=self._started_at,
                committed_at=self._world.clock.now(),
            )
        )
        key = rejects_key(self.attempt, number)
        with writer.path.open("rb") as stream:
            digest = hashlib.file_digest(stream, "sha256").hexdigest()
            stored = StoredShard(key, digest, stream.tell())
        if not self._ledger.create(key, writer.path):
            raise LedgerError(f"{self._ledger.place(key)}: refused rows of this very planning stand already")
        self._rejects = None
        return stored

    def commit_segment(self, segment: PlanSegment) -> PlanSegment:
        """Create the segment; returns the one that stands, with the part of its refused rows."""
        self._check_input()
        if self._ledger.create_segment(segment):
            commit_rejects(self._ledger, segment, self._world)
            return segment
        standing = self.existing_segment(segment.index)
        if standing is None:
            raise LedgerError(
                f"{self._ledger.place(segment_key(segment.index))}: vanished; is something deleting here?"
            )
        return standing

    def close(self) -> None:
        """Remove what was not stored."""
        if self._rejects is not None:
            self._rejects.abandon()

    def _refused(self) -> PartWriter:
        if self._rejects is None:
            path = self._world.scratch / f"rejects-{self.attempt}.parquet"
            self._rejects = PartWriter(path, self._schema)
        return self._rejects


def plan_job(
    ledger: JobLedger,
    job: Job,
    world: World,
    count_tokens: TokenCounter | None = None,
    most_segments: int | None = None,
    open_input: Callable[[InputRef], PinnedInput] = open_pinned,
) -> PlanSummary | None:
    """Plan a job, or what an interrupted planner left of it. None: the plan stands already, or the job has ended.

    Args:
        job: as `submit` returned it: the ledger's job, with the input where it lies now.
        count_tokens: of a text, with the job's tokenizer, for the first segment; None: a rule of thumb.
        most_segments: return when so many stand (`on_invalid` "job" plans the whole job all the same).
        open_input: makes the pinned input readable; with settings of its own where S3 needs them.

    Raises:
        InvalidInput: invalid lines stop the job (`on_invalid` "job"); it has ended as failed.
        InputError: the input can't be read, or is another than was accepted. What was committed by then stays.
    """
    if ledger.manifest() is not None:
        return None
    if ledger.wanted_parts() is not None:
        for segment in ledger.segments():
            commit_rejects(ledger, segment, world)
        return None
    span = world.traces.begin("plan", {"tokenmill.job.id": job.id}, parent=world.traces.of_job(job))
    with working_for(span):
        return _plan(ledger, job, world, count_tokens, most_segments, open_input(job.input), span)


def _plan(
    ledger: JobLedger,
    job: Job,
    world: World,
    count_tokens: TokenCounter | None,
    most_segments: int | None,
    watched: PinnedInput,
    span: Span,
) -> PlanSummary:
    source = open_source(watched.files(), job.input.format, job.settings.limits, _default_model(job))
    sink = LedgerPlanSink(ledger, job, world, source.carried, watched.check)
    try:
        made = plan(source, job, sink, world, attempt=sink.attempt, counter=count_tokens, most_segments=most_segments)
        span.end()
        return made
    except InvalidInput as error:
        watched.check()  # else the lines may be another file's
        _end_as_failed(ledger, job, world, error.errors)
        raise
    finally:
        sink.close()


def measure_job(job: Job, world: World, open_input: Callable[[InputRef], PinnedInput] = open_pinned) -> InputEstimate:
    """What planning the job would find; nothing is written. Raises as `plan_job`."""
    watched = open_input(job.input)
    found = measure(
        open_source(watched.files(), job.input.format, job.settings.limits, _default_model(job)), job, world
    )
    watched.check()
    return found


def _default_model(job: Job) -> str | None:
    """Parquet rows that name no model run on the job's, when it has one only."""
    return job.models[0].name if len(job.models) == 1 else None


def fail_job(ledger: JobLedger, job: Job, world: World, code: str, message: str) -> None:
    """End a job as failed of which nothing can be planned: its input as a whole can't be read."""
    _end_as_failed(ledger, job, world, (JobError(code=code, message=message),))


def _end_as_failed(ledger: JobLedger, job: Job, world: World, errors: tuple[JobError, ...]) -> None:
    now = world.clock.now()
    manifest = Manifest(
        job=job.id,
        status=JobStatus.FAILED,
        counts=Counts(),
        created_at=job.created_at,
        finished_at=now,
        wall_seconds=max(0.0, (now - job.created_at).total_seconds()),
        models=job.models,
        errors=errors,
    )
    if ledger.create_manifest(manifest):
        trace_job(world.traces, job, manifest)
    tidy(ledger)
