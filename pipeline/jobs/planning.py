"""Planning of a job into the ledger: shards, rows that end in planning, and segments.

The creation of a segment decides the plan of its rows, even if several planners planned them; the part of its refused
and reused rows follows at once, from the stored rows. An interrupted plan resumes at the first missing segment.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Final, Literal

import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.inputs.open import PinnedInput, open_pinned
from pipeline.jobs.closing import find_closing
from pipeline.jobs.manifest import failed_manifest
from pipeline.ledger.active_index import clean_up
from pipeline.ledger.ledger import JobLedger, LedgerError, rejects_key, segment_key, shard_key
from pipeline.ledger.records import PartSummary
from pipeline.planner import (
    BrokenInput,
    FormerAnswers,
    InputError,
    InputEstimate,
    InvalidInput,
    ModelRouting,
    PlanSummary,
    RowSource,
    StoredShard,
    TokenCounter,
    TooManyRows,
    measure,
    open_source,
    plan,
)
from pipeline.ports import PipelineError, StoreError, World
from pipeline.results.part_files import COMPRESSION, PartWriter, read_part
from pipeline.results.rejected_part import commit_rejects
from pipeline.routing.requests import RoutedRequest
from pipeline.routing.rules import RuleRouter
from pipeline.tracing import Span, trace_job, working_for
from schemas.jobs.arrow_schemas import result_schema
from schemas.jobs.inputs import InputRef
from schemas.jobs.job import Closing, Job
from schemas.jobs.outcome import Counts, JobError, JobStatus, Manifest
from schemas.jobs.plan import PlanSegment
from schemas.requests.parsing import Body

PLANNER = "planner"
INPUT_UNREADABLE: Final = "input_unreadable"
TOO_MANY_ROWS: Final = "too_many_rows"
OpenAnswers = Callable[[Job], AbstractContextManager[FormerAnswers | None]]
"""Opens the answers that rows of a job may take; None: there are none for it."""
EndedUnplanned = Literal[JobStatus.FAILED, JobStatus.CANCELLED, JobStatus.EXPIRED]


class PlanningFailed(Exception):
    """Raised when planning a job failed in another process, or with that process, for an unexpected reason.

    Attributes:
        trace: the stack trace, as far as that process could report it.
    """

    def __init__(self, reason: str, trace: str = "") -> None:
        super().__init__(reason)
        self.trace = trace


class PlanningCancelled(PipelineError):
    """Raised when planning was stopped because the job is closed. It is no failure of the job."""


@dataclass(frozen=True, slots=True)
class PlanOutcome:
    """The outcome of planning an open job; nothing set: the whole plan exists, or the job had ended before.

    Attributes:
        refused: the job has ended as failed, for this reason.
        closed: the job has ended with this status, because it was closed before any of it was planned.
        tokens_of_models: the job was only measured; its tokens by model name.
    """

    refused: str | None = None
    closed: EndedUnplanned | None = None
    tokens_of_models: Mapping[str, int] | None = None


class LedgerPlanSink:
    """`PlanSink` over a ledger. One planner's attempt; `close` removes files that it built and didn't commit.

    Args:
        check_input: called before a segment is committed; raises when the bytes read may not be the job's input.
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
        """The committed segment, if any; ensures the part of its refused rows."""
        segment = self._ledger.segment(index)
        if segment is not None:
            if segment.job != self._job.id:
                raise LedgerError(
                    f"{self._ledger.location(segment_key(index))}: is of job {segment.job}, not of {self._job.id}, "
                    "which lies here; start anew with --fresh"
                )
            commit_rejects(self._ledger, segment, self._world)
        return segment

    def write_shard(self, number: int, table: pa.Table) -> StoredShard:
        """Store a shard under this attempt's name; it counts once its segment is committed."""
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
            raise LedgerError(f"{self._ledger.location(key)}: a shard of this planning attempt exists already")
        self._world.on_progress()
        return stored

    def reused_keys(self, segment: PlanSegment) -> list[bytes]:
        """The request keys of a committed segment's rows that took answers of a former job."""
        if not segment.reused or segment.rejects is None:
            return []
        with self._ledger.store.open(self._ledger.prefix + segment.rejects.key) as stream:
            # On this thread, as elsewhere: Arrow's own may outlive the call, with the file.
            rows = pq.ParquetFile(stream).read(["request_key", "reused_from"], use_threads=False)
        keys = rows["request_key"].filter(rows["reused_from"].is_valid())
        return [bytes.fromhex(key) for key in keys.to_pylist()]

    def write_results(self, table: pa.Table) -> None:
        """Append results of the open segment that planning makes."""
        self._rejects_writer().append(table)

    def store_results(self, number: int) -> StoredShard:
        """Store these results under this attempt's name, ready to become part `number`."""
        writer = self._rejects_writer()
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
            raise LedgerError(f"{self._ledger.location(key)}: results of this planning attempt exist already")
        self._rejects = None
        return stored

    def commit_segment(self, segment: PlanSegment) -> PlanSegment:
        """Create the segment; returns the committed one. Ensures the part of its refused rows."""
        self._check_input()
        if self._ledger.create_segment(segment):
            commit_rejects(self._ledger, segment, self._world)
            return segment
        standing = self.existing_segment(segment.index)
        if standing is None:
            raise LedgerError(
                f"{self._ledger.location(segment_key(segment.index))}: vanished; is something deleting here?"
            )
        return standing

    def close(self) -> None:
        """Remove files that were not stored."""
        if self._rejects is not None:
            self._rejects.abandon()

    def _rejects_writer(self) -> PartWriter:
        if self._rejects is None:
            path = self._world.scratch / f"rejects-{self.attempt}.parquet"
            self._rejects = PartWriter(path, self._schema)
        return self._rejects


def plan_job(
    ledger: JobLedger,
    job: Job,
    world: World,
    count_tokens: TokenCounter | None = None,
    max_segments: int | None = None,
    open_input: Callable[[InputRef], PinnedInput] = open_pinned,
    router: RuleRouter | None = None,
    former: FormerAnswers | None = None,
    source: RowSource | None = None,
) -> PlanSummary | None:
    """Plan a job, or the rest of an interrupted plan. None: the plan is complete already, or the job has ended.

    Args:
        job: as `submit` returned it: the ledger's job, with the input's current location.
        count_tokens: counts a text's tokens with the job's tokenizer, for the first segment; None: a rule of thumb.
        max_segments: return when this many segments exist (`on_invalid` "job" plans the whole job regardless).
        open_input: makes the pinned input readable; with settings of its own where S3 needs them.
        router: applies the rules of the job's virtual models; None: one without loads and labels.
        former: answers that rows with the same keys take, so that they are not computed.
        source: makes the rows; None: the input has them.

    Raises:
        InvalidInput: invalid lines stop the job (`on_invalid` "job"); it has ended as failed.
        InputError: the input can't be read, or isn't the accepted one. Segments committed by then stay.
    """
    if ledger.manifest() is not None:
        return None
    if ledger.planned_parts() is not None:
        for segment in ledger.segments():
            commit_rejects(ledger, segment, world)
        return None
    span = world.traces.begin("plan", {"tokenmill.job.id": job.id}, parent=world.traces.of_job(job))
    with working_for(span):
        routing = model_routing(job, world, router)
        watched = open_input(job.input)
        return _plan(ledger, job, world, count_tokens, max_segments, watched, span, routing, former, source)


def _plan(
    ledger: JobLedger,
    job: Job,
    world: World,
    count_tokens: TokenCounter | None,
    max_segments: int | None,
    watched: PinnedInput,
    span: Span,
    routing: ModelRouting,
    former: FormerAnswers | None,
    source: RowSource | None,
) -> PlanSummary:
    if source is None:
        with _of_this_input(watched):
            source = open_source(watched.files(), job.input.format, job.settings.limits, job.only_model)
    sink = LedgerPlanSink(ledger, job, world, source.carried, watched.check)
    try:
        with _of_this_input(watched):
            made = plan(
                source, job, sink, world, attempt=sink.attempt, counter=count_tokens, max_segments=max_segments,
                routing=routing, former=former,
            )  # fmt: skip
        span.end()
        return made
    except InvalidInput as error:
        _end_as_failed(ledger, job, world, error.errors)
        raise
    finally:
        sink.close()


@contextmanager
def _of_this_input(watched: PinnedInput) -> Iterator[None]:
    """Pass on errors in an input only if the bytes read are those of the pinned input; else raise `InputError`."""
    try:
        yield
    except (InvalidInput, BrokenInput):
        watched.check()
        raise


def plan_open_job(
    ledger: JobLedger,
    world: World,
    open_input: Callable[[InputRef], PinnedInput],
    *,
    in_time: bool,
    router: RuleRouter | None = None,
    open_answers: OpenAnswers = lambda _: nullcontext(),
) -> PlanOutcome:
    """Plan a job of a root. A job that was closed before any of it was planned ends instead. A job with `refuse_late`
    is only measured, unless `in_time`.

    An input that was never readable, whose bytes can't be decoded, or that has too many rows, ends the job as failed.
    If an input becomes unreadable while a part of it is planned, planning is retried later: finished work is retained.

    Raises:
        PipelineError: the job can't be planned now; try again.
    """
    job = ledger.job()
    closing = find_closing(ledger, job, world.clock.now())
    if closing is not None and ledger.manifest() is None and ledger.segment(0) is None:
        return PlanOutcome(closed=end_unplanned(ledger, job, closing, world))
    try:
        if job.refuse_late and not in_time and ledger.manifest() is None and ledger.segment(0) is None:
            return PlanOutcome(tokens_of_models=measure_job(job, world, open_input, router).tokens_of_models)
        with open_answers(job) as former:
            plan_job(ledger, job, world, open_input=open_input, router=router, former=former)
        return PlanOutcome()
    except InvalidInput as error:
        return PlanOutcome(refused=str(error))
    except InputError as error:
        if ledger.segment(0) is not None and not isinstance(error, BrokenInput):
            raise
        code = TOO_MANY_ROWS if isinstance(error, TooManyRows) else INPUT_UNREADABLE
        fail_job(ledger, job, world, code, str(error))
        return PlanOutcome(refused=str(error))


def measure_job(
    job: Job,
    world: World,
    open_input: Callable[[InputRef], PinnedInput] = open_pinned,
    router: RuleRouter | None = None,
) -> InputEstimate:
    """Estimate the job's plan without writing it. Raises as `plan_job`."""
    watched = open_input(job.input)
    with _of_this_input(watched):
        source = open_source(watched.files(), job.input.format, job.settings.limits, job.only_model)
        found = measure(source, job, world, routing=model_routing(job, world, router))
    watched.check()
    return found


def model_routing(job: Job, world: World, router: RuleRouter | None = None) -> ModelRouting:
    """The rules of the job's virtual models, for the planner. Conditions on time and load are decided when a row is
    planned."""
    router = router or RuleRouter()
    virtual_models = {virtual.name: virtual for virtual in job.settings.virtual_models or ()}
    keys = {pin.name: pin.key for pin in job.models}

    def choose(name: str, requests: Sequence[tuple[Body, int]]) -> Sequence[str]:
        now = world.clock.now()
        routed = [RoutedRequest(body, tokens, job.tenant, job.tier, now) for body, tokens in requests]
        return router.choose(virtual_models[name], keys, routed)

    return choose


def fail_job(ledger: JobLedger, job: Job, world: World, code: str, message: str) -> None:
    """End a job that can't be planned as a whole as failed."""
    _end_as_failed(ledger, job, world, (JobError(code=code, message=message),))


def end_unplanned(ledger: JobLedger, job: Job, closing: Closing, world: World) -> EndedUnplanned:
    """End a job that was closed before any of it was planned; returns its final status. It has no rows."""
    status: EndedUnplanned = JobStatus.EXPIRED if closing.kind == "expire" else JobStatus.CANCELLED
    now = world.clock.now()
    manifest = Manifest(
        job=job.id,
        status=status,
        counts=Counts(),
        created_at=job.created_at,
        finished_at=now,
        wall_seconds=max(0.0, (now - job.created_at).total_seconds()),
        models=job.models,
        ended_by=closing.kind,
    )
    _end(ledger, job, world, manifest)
    return status


def _end_as_failed(ledger: JobLedger, job: Job, world: World, errors: tuple[JobError, ...]) -> None:
    """End the job as failed. Committed parts stay and count; parts committed later don't (`JobLedger.result_parts`)."""
    parts = {number: read_part(ledger, number) for number, _ in ledger.parts()}
    _end(ledger, job, world, failed_manifest(ledger, job, parts, world.clock.now(), errors))


def _end(ledger: JobLedger, job: Job, world: World, manifest: Manifest) -> None:
    if ledger.create_manifest(manifest):
        trace_job(world.traces, job, manifest)
    clean_up(ledger)
