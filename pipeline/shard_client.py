"""A worker's side of the pipeline: takes shard names from the queue, shards from the ledger, and commits parts.

Nothing here trusts the queue: a name that comes twice, too late or for a shard already done is dropped after one look
at the ledger.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Final

import pyarrow as pa
import pyarrow.parquet as pq
import structlog

from pipeline.availability import ServiceUnavailable
from pipeline.bulk_floor import BulkFloor
from pipeline.checkpoints import ShardHistory, checkpoint_key, note_key, read_history
from pipeline.ledger import JobLedger, JobNotFound, LedgerError
from pipeline.part_builder import PartMaker, commit_part
from pipeline.ports import Heartbeats, ObjectNotFound, ShardQueue, ShardTask, WorkerState, World, queue_name
from pipeline.records import AttemptRecord, EndRecord, NoteRecord
from pipeline.worker_api import BY_URGENCY, CheckpointWork, ShardReport, ShardWork, WorkerLoad
from schemas.checkpoints import CheckpointHead, FinishedRows, encode
from schemas.figures import WorkerFigures
from schemas.job import Job, Tier
from schemas.outcome import Worked
from schemas.plan import ShardRef

logger = structlog.get_logger(__name__)

MOST_JOBS: Final = 64
"""Jobs whose plans are remembered, beside those that something is held of."""

OpenLedger = Callable[[str], JobLedger]
"""The ledger of a job, by its id."""


class UnplannedShard(LedgerError):
    """Raised when a shard was asked for that the job's plan doesn't have."""


@dataclass(slots=True)
class _KnownJob:
    ledger: JobLedger
    job: Job
    shards: dict[int, ShardRef]
    segments: int = 0


class ShardClient:
    """`ShardSource` and `ShardSink` of one worker. Threads of the worker may share it.

    Args:
        worker: the worker's name, unique among those that live.
        models: what it can serve (`ModelPin.key`).
        no_more: tells that no shard will ever come again.
        price_per_hour: of the worker, for what its work costs; None: nobody has said.
    """

    def __init__(
        self,
        worker: str,
        world: World,
        open_ledger: OpenLedger,
        queue: ShardQueue,
        heartbeats: Heartbeats,
        no_more: Callable[[], bool],
        *,
        models: Collection[str],
        price_per_hour: float | None = None,
    ) -> None:
        self.worker = worker
        self._world = world
        self._open_ledger = open_ledger
        self._queue = queue
        self._heartbeats = heartbeats
        self._no_more = no_more
        self._models = frozenset(models)
        self._price = price_per_hour
        self._floor = BulkFloor()
        self._lock = threading.Lock()
        self._jobs: dict[str, _KnownJob] = {}
        self._held: set[tuple[str, int]] = set()
        self._load = WorkerLoad()
        self._session = world.random.token(8).hex()
        self._sequences: dict[str, int] = {}  # attempts that began -> notes and checkpoints written

    # -- ShardSource

    def take(self, timeout: float, tiers: Sequence[Tier] = BY_URGENCY) -> ShardWork | None:
        """The next shard that is neither committed nor held by anyone, or None after `timeout` seconds."""
        clock = self._world.clock
        until = clock.monotonic() + timeout
        floor = self._floor.due and set(tiers) == set(BY_URGENCY)
        order = tuple(reversed(tiers)) if floor else tiers
        queues = [queue_name(model, tier) for tier in order for model in sorted(self._models)]
        while (task := self._next_task(queues, max(0.0, until - clock.monotonic()))) is not None:
            if (task.job, task.shard) in self._held:
                continue
            try:
                known = self._known(task)
            except (JobNotFound, UnplannedShard) as error:  # it was removed, or somebody else wrote on the queue
                logger.warning("no such shard", job=task.job, shard=task.shard, reason=str(error))
                continue
            if known.ledger.has_part(task.shard) or known.ledger.closing() is not None or self._has_holder(task):
                continue
            self._hold(task.job, task.shard)
            try:
                return self._open(known, task.shard, floor=floor)
            except ObjectNotFound as error:
                self._let_go(task.job, task.shard)
                if known.ledger.find_job() is not None:
                    raise  # else it was removed while it was known here
                logger.warning("a job is gone", job=task.job, reason=str(error))
            except BaseException:
                self._let_go(task.job, task.shard)
                raise
        return None

    def _next_task(self, queues: Sequence[str], timeout: float) -> ShardTask | None:
        """A broker that can't be reached has nothing for us now; what is held goes on."""
        try:
            return self._queue.take(queues, timeout)
        except ServiceUnavailable as error:
            logger.warning("the queue can't be reached", reason=str(error))
            return None

    def _has_holder(self, task: ShardTask) -> bool:
        """Whether another worker says that it has the shard: its name was on the queue twice. If that one lets go of it
        undone, the dispatcher puts it again."""
        try:
            workers = self._heartbeats.workers()
        except ServiceUnavailable as error:
            logger.warning("nobody knows who holds what", reason=str(error))
            return False
        shard = (task.job, task.shard)
        return any(shard in worker.held for worker in workers if worker.name != self.worker)

    def finished(self) -> bool:
        """True when no shard will ever come again."""
        return self._no_more()

    # -- ShardSink

    def commit(self, work: ShardWork, finished: FinishedRows, report: ShardReport) -> bool:
        """Make the shard's part; False when another attempt's part stands. Raises `PipelineError`."""
        known = self._jobs[work.job.id]
        table = pa.concat_tables([work.history.finished, finished.table()])
        maker = PartMaker(work.attempt, work.attempt_id, self.worker, work.started_at, report, self._price)
        won = commit_part(known.ledger, self._world, work.job.id, work.shard, work.table, table, work.history, maker)
        if not won:
            self._record_end(known.ledger, work, report.generated, report.busy_seconds)
        self._forget(known.ledger, work, won=won)
        return won

    def begin(self, work: ShardWork) -> None:
        """Record the attempt: from here on rows of the shard may be in the engine."""
        self._jobs[work.job.id].ledger.begin_attempt(
            work.shard,
            lambda number: AttemptRecord(
                attempt=number,
                attempt_id=work.attempt_id,
                worker=self.worker,
                session=self._session,
                started_at=self._world.clock.now(),
            ),
            first=work.attempt,
        )
        self._sequences.setdefault(work.attempt_id, 0)

    def checkpoint(self, work: ShardWork, new: CheckpointWork) -> None:
        """Make durable what is new."""
        head = CheckpointHead(
            job=work.job.id,
            shard=work.shard,
            attempt_id=work.attempt_id,
            sequence=self._next(work),
            final=new.final,
            generated=new.generated,
            exposed=new.exposed,
            worked=self._worked(new.busy_seconds),
        )
        key = checkpoint_key(work.shard, work.attempt_id, head.sequence)
        known = self._jobs[work.job.id]
        known.ledger.create(key, encode(head, new.finished, new.running))

    def note(self, work: ShardWork, rows: Sequence[int]) -> None:
        """Note durably that these rows are computed, and no others."""
        key = note_key(work.shard, work.attempt_id, self._next(work))
        self._jobs[work.job.id].ledger.create(key, NoteRecord(rows=tuple(rows)).to_json())

    def release(self, work: ShardWork, generated: int, busy_seconds: float = 0.0) -> None:
        """Give the shard back undone; `generated` tokens were sampled by this attempt, in `busy_seconds`."""
        self._record_end(self._jobs[work.job.id].ledger, work, generated, busy_seconds)
        self._sequences.pop(work.attempt_id, None)
        self._let_go(work.job.id, work.shard)

    def holding(self, shards: Sequence[ShardWork], load: WorkerLoad | None = None) -> frozenset[str]:
        """The heartbeat: the worker lives and works on these; returns the jobs that are being closed. A shard that was
        taken, and that the worker has not begun, is held too. `load` None: as it was."""
        with self._lock:
            self._load = load or self._load
            held = self._held | {(work.job.id, work.shard) for work in shards}
            self._beat(held)
            ledgers = {job: self._jobs[job].ledger for job, _ in held}
        if load is not None and load.figures is not None:
            self._tell(load.figures)
        return frozenset(job for job, ledger in ledgers.items() if ledger.closing() is not None)

    # -- inside

    def _known(self, task: ShardTask) -> _KnownJob:
        known = self._jobs.get(task.job)
        if known is None:
            ledger = self._open_ledger(task.job)
            self._forget_jobs()
            known = self._jobs[task.job] = _KnownJob(ledger, ledger.job(), {})
        if task.shard not in known.shards:
            for segment in known.ledger.segments(known.segments):
                known.shards.update((shard.number, shard) for shard in segment.shards)
                known.segments = segment.index + 1
        if task.shard not in known.shards:
            raise UnplannedShard(f"{known.ledger.place()}: shard {task.shard} was queued, but no plan segment has it")
        return known

    def _forget_jobs(self) -> None:
        """Those known for longest, where nothing is held of them: a worker may live for months."""
        with self._lock:
            held = {job for job, _ in self._held}
        idle = [job for job in self._jobs if job not in held]
        for job in idle[: max(0, len(self._jobs) - MOST_JOBS)]:
            del self._jobs[job]

    def _open(self, known: _KnownJob, shard: int, *, floor: bool) -> ShardWork:
        planned, tier = known.shards[shard], known.job.tier
        self._floor.took(tier, planned.prompt_tokens + planned.expected_tokens)
        data = known.ledger.read_shard(planned)
        table = pq.read_table(pa.BufferReader(data))
        attempts = known.ledger.attempts(shard)
        # The first attempt has nothing behind it, and saves the look.
        history = read_history(known.ledger, shard) if attempts else ShardHistory()
        attempt = max((record.attempt for record in attempts), default=0) + 1
        attempt_id = self._world.random.token(8).hex()
        as_tier = Tier.STANDARD if floor and tier is Tier.BULK else None
        return ShardWork(known.job, shard, attempt, attempt_id, table, self._world.clock.now(), history, as_tier)

    def _record_end(self, ledger: JobLedger, work: ShardWork, generated: int, busy_seconds: float) -> None:
        """Of an attempt that had begun."""
        if work.attempt_id in self._sequences:
            worked = self._worked(busy_seconds)
            ledger.record_end(work.shard, EndRecord(attempt_id=work.attempt_id, generated=generated, worked=worked))

    def _worked(self, busy_seconds: float) -> Worked:
        return Worked(seconds=busy_seconds, price_per_hour=self._price)

    def _forget(self, ledger: JobLedger, work: ShardWork, *, won: bool) -> None:
        """Drop what is accounted for now: the checkpoints of this attempt and, if its part stands, of those it went on
        from. What another's part went on from is not known here."""
        keys = [key for keys in work.history.keys.values() for key in keys] if won else []
        keys += [checkpoint_key(work.shard, work.attempt_id, n) for n in range(self._sequences.pop(work.attempt_id, 0))]
        for key in keys:
            ledger.store.delete(ledger.prefix + key)
        self._let_go(work.job.id, work.shard)

    def _next(self, work: ShardWork) -> int:
        """Number of the attempt's next note."""
        number = self._sequences.get(work.attempt_id, 0)
        self._sequences[work.attempt_id] = number + 1
        return number

    def _hold(self, job: str, shard: int) -> None:
        with self._lock:
            self._held.add((job, shard))
            self._beat(self._held)

    def _let_go(self, job: str, shard: int) -> None:
        with self._lock:
            self._held.discard((job, shard))
            self._beat(self._held)

    @property
    def figures(self) -> WorkerFigures | None:
        """What the worker told last."""
        return self._load.figures

    def close(self) -> None:
        """Say that this worker ends, and holds nothing any more."""
        try:
            self._heartbeats.leave(self.worker)
        except ServiceUnavailable as error:
            logger.warning("the end can't be told", reason=str(error))

    def _beat(self, held: set[tuple[str, int]]) -> None:
        """A heart that isn't heard costs work done twice, at most."""
        try:
            self._heartbeats.beat(self._state(held))
        except ServiceUnavailable as error:
            logger.warning("the heartbeat can't be told", reason=str(error))

    def _tell(self, figures: WorkerFigures) -> None:
        try:
            self._heartbeats.tell(self.worker, figures)
        except ServiceUnavailable as error:
            logger.warning("figures can't be told", reason=str(error))

    def _state(self, held: set[tuple[str, int]]) -> WorkerState:
        waiting = 0.0
        for job, number in held:
            shard = self._jobs[job].shards.get(number) if job in self._jobs else None
            if shard is not None:
                tokens = shard.prompt_tokens + shard.expected_tokens
                waiting += tokens * self._load.unfinished.get((job, number), 1.0)
        return WorkerState(
            self.worker, self._models, frozenset(held), round(waiting), self._load.tokens_per_second,
            price_per_hour=self._price,
        )  # fmt: skip
