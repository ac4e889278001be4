"""Where the planner's plan goes: shards and segments into the ledger, refused rows into part 0.

Part 0 is committed when the whole plan stands and before anything is dispatched, so the results folder can always be
read. A plan that was interrupted is made again: segments that stand are kept, and part 0 is written anew, whole.
"""

from __future__ import annotations

import hashlib

import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.ledger import REJECTS, JobLedger, LedgerError, segment_key, shard_key
from pipeline.pinning import source_files
from pipeline.planner import InvalidInput, PlanSummary, StoredShard, TokenCounter, open_source, plan
from pipeline.ports import StoreError, World
from pipeline.records import PartSummary
from pipeline.results import COMPRESSION, PartWriter
from schemas.job import Counts, Job, JobStatus, Manifest, PlanSegment
from schemas.tables import result_schema

PLANNER = "planner"


class LedgerPlanSink:
    """`PlanSink` over a ledger. One planner's attempt; `close` removes what it built and didn't commit."""

    def __init__(self, ledger: JobLedger, job: Job, world: World, carried: pa.Schema | None) -> None:
        self._ledger = ledger
        self._job = job
        self._world = world
        self._started_at = world.clock.now()
        self.attempt = world.random.token(8).hex()
        self._rejects = PartWriter(world.scratch / f"rejects-{self.attempt}.parquet", result_schema(carried))
        self._done = False

    def existing_segment(self, index: int) -> PlanSegment | None:
        """The segment that stands, if any."""
        return self._ledger.segment(index)

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
        """Append rows to part 0."""
        self._rejects.append(table)

    def commit_segment(self, segment: PlanSegment) -> PlanSegment:
        """Create the segment; returns the one that stands."""
        if self._ledger.create_segment(segment):
            return segment
        standing = self._ledger.segment(segment.index)
        if standing is None:
            raise LedgerError(
                f"{self._ledger.place(segment_key(segment.index))}: vanished; is something deleting here?"
            )
        return standing

    def commit_rejects(self) -> bool:
        """Make part 0 from what was refused; False when another planner's stands (it holds the same rows)."""
        self._done = True
        self._rejects.finish(
            PartSummary(
                job=self._job.id,
                part=REJECTS,
                attempt_id=self.attempt,
                worker=PLANNER,
                counts=self._rejects.counts(),
                started_at=self._started_at,
                committed_at=self._world.clock.now(),
            )
        )
        return self._ledger.create_part(REJECTS, self._rejects.path)

    def close(self) -> None:
        """Remove the part that was not committed."""
        if not self._done:
            self._rejects.abandon()


def plan_job(ledger: JobLedger, job: Job, world: World, count_tokens: TokenCounter | None = None) -> PlanSummary | None:
    """Plan a job, or what an interrupted planner left of it. None: the plan stands already, or the job has ended.

    Args:
        job: as `submit` returned it: the ledger's job, with the input where it lies now.
        count_tokens: of a text, with the job's tokenizer; None: a rule of thumb.

    Raises:
        InvalidInput: invalid lines stop the job (`on_invalid` "job"); it has ended as failed.
        InputError: the input can't be read, or is another than was accepted.
    """
    if ledger.manifest() is not None or (ledger.wanted_parts() is not None and ledger.has_part(REJECTS)):
        return None
    source = open_source(source_files(job.input), job.input.format, job.settings.limits, _default_model(job))
    sink = LedgerPlanSink(ledger, job, world, source.carried)
    try:
        summary = plan(source, job, sink, world, attempt=sink.attempt, counter=count_tokens)
        sink.commit_rejects()
    except InvalidInput as error:
        _end_as_failed(ledger, job, world, error)
        raise
    finally:
        sink.close()
    return summary


def _default_model(job: Job) -> str | None:
    """Parquet rows that name no model run on the job's, when it has one only."""
    return job.models[0].name if len(job.models) == 1 else None


def _end_as_failed(ledger: JobLedger, job: Job, world: World, error: InvalidInput) -> None:
    now = world.clock.now()
    ledger.create_manifest(
        Manifest(
            job=job.id,
            status=JobStatus.FAILED,
            counts=Counts(),
            created_at=job.created_at,
            finished_at=now,
            wall_seconds=max(0.0, (now - job.created_at).total_seconds()),
            models=job.models,
            errors=error.errors,
        )
    )
