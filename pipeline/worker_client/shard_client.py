"""A worker's client of the pipeline: takes tasks from the queue, reads shards from the ledger, and commits parts.

The client doesn't trust the queue: a task that comes twice, too late or for a finished shard is dropped after one check
of the ledger.
"""

from __future__ import annotations

import math
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Final

import pyarrow as pa
import structlog

from pipeline.jobs.lost_shards import read_table
from pipeline.ledger.ledger import JOB, ClosingDamaged, JobLedger, JobNotFound, LaterVersion, LedgerError
from pipeline.ledger.records import AttemptRecord, EndRecord, NoteRecord, ShardReport, UnreadableRecord
from pipeline.ports import (
    Heartbeats,
    ObjectNotFound,
    ShardQueue,
    ShardTask,
    StoreError,
    WorkerState,
    World,
    queue_name,
)
from pipeline.results.part_builder import PartMaker, commit_part
from pipeline.results.part_files import read_part
from pipeline.results.shard_history import ShardHistory, checkpoint_key, note_key, read_history
from pipeline.runtime.availability import ServiceUnavailable
from pipeline.runtime.supervision import reason_of
from pipeline.worker_client.bulk_reserve import BulkReserve
from pipeline.worker_client.ports import BY_URGENCY, CheckpointWork, RevokedShards, ShardWork, WorkerLoad
from schemas.jobs.checkpoints import CheckpointHead, FinishedRows, encode
from schemas.jobs.job import Job, Tier
from schemas.jobs.outcome import WorkerTime
from schemas.jobs.plan import ShardRef
from schemas.settings.kv_transfer import Role
from schemas.workers.metrics import WorkerMetrics

logger = structlog.get_logger(__name__)

MAX_JOBS: Final = 64
"""Maximum number of cached plans, except those of jobs with held shards."""

PASS_OVER_SECONDS: Final = 20.0
"""For so long a worker doesn't take a shard again that it could not work on: less than the time after which a shard
without a holder is put on the queue again."""

OpenLedger = Callable[[str], JobLedger]
"""Opens the ledger of a job by its id."""


class UnplannedShard(LedgerError):
    """Raised when a task names a shard that the job's plan doesn't have."""


@dataclass(slots=True)
class _KnownJob:
    ledger: JobLedger
    job: Job
    shards: dict[int, ShardRef]
    segments: int = 0


class ShardClient:
    """`ShardSource` and `ShardSink` of one worker. Threads of the worker may share it.

    Args:
        worker: the worker's name, unique among live workers.
        models: the models that it can serve (`ModelPin.key`). Of a tier, each comes first in turn.
        no_more: returns whether no shard will ever come again.
        price_per_hour: the worker's price, for the cost of its work; None: not configured.
        takes_lane_requests: returns whether the worker takes interactive requests now.
        role: what it computes of them.
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
        takes_lane_requests: Callable[[], bool] = lambda: False,
        role: Role = "both",
    ) -> None:
        self.worker = worker
        self._takes_lane_requests = takes_lane_requests
        self._role: Role = role
        self._world = world
        self._open_ledger = open_ledger
        self._queue = queue
        self._heartbeats = heartbeats
        self._no_more = no_more
        self._models = frozenset(models)
        self._turns = deque(sorted(self._models))
        self._price_per_hour = price_per_hour
        self._bulk_reserve = BulkReserve()
        self._lock = threading.Lock()
        self._jobs: dict[str, _KnownJob] = {}
        self._held: set[tuple[str, int]] = set()
        self._load = WorkerLoad()
        self._last_heartbeat: float | None = None  # monotonic, of the last one that was delivered
        self._fenced_until = -math.inf
        self._checked_silence = -math.inf  # `_fenced_until` of the last silence whose shards were checked
        self._session = world.random.token(8).hex()
        self._passed_over: dict[tuple[str, int], float] = {}  # unusable shards -> until when (monotonic)
        self._damaged_closings: set[str] = set()
        self._uncertain: set[str] = set()  # attempts whose commit has begun and may not have completed
        self._sequences: dict[str, int] = {}  # attempts that began -> number of notes and checkpoints

    # -- ShardSource

    def take(self, timeout: float, tiers: Sequence[Tier] = BY_URGENCY) -> ShardWork | None:
        """The next shard that is neither committed nor held by any worker, or None after `timeout` seconds."""
        clock = self._world.clock
        until = clock.monotonic() + timeout
        floor = self._bulk_reserve.due and set(tiers) == set(BY_URGENCY)
        order = tuple(reversed(tiers)) if floor else tiers
        self._turns.rotate(-1)
        queues = [queue_name(model, tier) for tier in order for model in self._turns]
        while (task := self._next_task(queues, max(0.0, until - clock.monotonic()))) is not None:
            if (task.job, task.shard) in self._held:
                continue
            if clock.monotonic() < self._passed_over.get((task.job, task.shard), -math.inf):
                continue
            if (work := self._take(task, floor=floor)) is not None:
                return work
        return None

    def _take(self, task: ShardTask, *, floor: bool) -> ShardWork | None:
        """The shard, if it is available. A shard whose objects can't be read is skipped for a while: a job's damage
        must not stop the worker. Raises `StoreError`, which concerns the store and not the job."""
        try:
            known = self._known(task)
            ledger = known.ledger
            if ledger.has_part(task.shard) or ledger.closing() is not None or ledger.has_ended():
                return None
            if self._has_holder(task):
                return None
            self._hold(task.job, task.shard)
            return self._open(known, task.shard, floor=floor)
        except (JobNotFound, UnplannedShard) as error:  # the job was removed, or another program wrote to the queue
            logger.warning("no such shard", job=task.job, shard=task.shard, reason=str(error))
        except StoreError:
            self._release_held(task.job, task.shard)
            raise
        except Exception as error:  # noqa: BLE001 - recorded; the worker goes on with other shards
            self._pass_over(task.job, task.shard, self._world.random.token(8).hex(), error)
        return None

    def _pass_over(self, job: str, shard: int, attempt_id: str, error: Exception) -> None:
        """Release an unusable shard, record the reason, and don't take it again for a while."""
        now = self._world.clock.monotonic()
        with self._lock:
            self._passed_over = {one: until for one, until in self._passed_over.items() if until > now}
            self._passed_over[job, shard] = now + PASS_OVER_SECONDS
        self._release_held(job, shard)
        ledger = self._open_ledger(job)
        if ledger.store.info(ledger.prefix + JOB) is None:
            logger.warning("a job is gone", job=job, reason=str(error))
            return
        reason = reason_of(error, "worker", self._world, job=job, shard=shard)
        logger.error("a shard can't be worked on, and is passed over", job=job, shard=shard, reason=reason)
        if not isinstance(error, ClosingDamaged | LaterVersion | MemoryError):  # these are no fault of the shard
            record = UnreadableRecord(worker=self.worker, at=self._world.clock.now(), reason=reason)
            ledger.record_unreadable(shard, attempt_id, record)

    def _next_task(self, queues: Sequence[str], timeout: float) -> ShardTask | None:
        """The next task; None while the broker can't be reached: held shards continue."""
        try:
            return self._queue.take(queues, timeout)
        except ServiceUnavailable as error:
            logger.warning("the queue can't be reached", reason=str(error))
            return None

    def _has_holder(self, task: ShardTask) -> bool:
        """Whether another worker reports that it holds the shard: its task was on the queue twice. If that worker
        releases it undone, the dispatcher puts it on the queue again."""
        try:
            workers = self._heartbeats.workers()
        except ServiceUnavailable as error:
            logger.warning("the holders of shards can't be read", reason=str(error))
            return False
        shard = (task.job, task.shard)
        return any(shard in worker.held for worker in workers if worker.name != self.worker)

    def finished(self) -> bool:
        """Whether no shard will ever come again."""
        return self._no_more()

    # -- ShardSink

    def commit(self, work: ShardWork, finished: FinishedRows, report: ShardReport) -> bool:
        """Commit the shard's part; False when another attempt's part exists, or the job has ended without one: its
        manifest lists the parts that count. Raises `PipelineError`."""
        known = self._jobs[work.job.id]
        table = pa.concat_tables([work.history.finished, finished.table()])
        maker = PartMaker(work.attempt, work.attempt_id, self.worker, work.started_at, report, self._price_per_hour)
        is_retry = work.attempt_id in self._uncertain
        self._uncertain.add(work.attempt_id)
        won = not known.ledger.has_ended() and commit_part(
            known.ledger, self._world, work.job.id, work.shard, work.table, table, work.history, maker
        )
        if is_retry and not won and known.ledger.has_part(work.shard):  # perhaps its own, and the confirmation was lost
            won = read_part(known.ledger, work.shard).summary.attempt_id == work.attempt_id
        if not won:
            self._record_end(known.ledger, work, report.generated, report.busy_seconds)
        self._forget(known.ledger, work, won=won)
        self._uncertain.discard(work.attempt_id)
        return won

    def begin(self, work: ShardWork) -> None:
        """Record the attempt: from now on rows of the shard may be in the engine."""
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
        """Write a durable checkpoint."""

        def make(sequence: int) -> tuple[str, bytes]:
            head = CheckpointHead(
                job=work.job.id,
                shard=work.shard,
                attempt_id=work.attempt_id,
                sequence=sequence,
                final=new.final,
                generated=new.generated,
                exposed=new.exposed,
                worked=self._worker_time(new.busy_seconds),
            )
            return checkpoint_key(work.shard, work.attempt_id, sequence), encode(head, new.finished, new.running)

        self._append(work, make)

    def record(self, work: ShardWork, rows: Sequence[int]) -> None:
        """Record durably that only these rows are computed."""
        data = NoteRecord(rows=tuple(rows)).to_json()
        self._append(work, lambda sequence: (note_key(work.shard, work.attempt_id, sequence), data))

    def release(self, work: ShardWork, generated: int, busy_seconds: float = 0.0) -> None:
        """Release the shard undone; this attempt sampled `generated` tokens in `busy_seconds`."""
        self._record_end(self._jobs[work.job.id].ledger, work, generated, busy_seconds)
        self._sequences.pop(work.attempt_id, None)
        self._release_held(work.job.id, work.shard)

    def send_heartbeat(self, shards: Sequence[ShardWork], load: WorkerLoad | None = None) -> None:
        """Send a heartbeat with these running shards. Shards that were taken and not begun are held too. `load` None:
        unchanged."""
        with self._lock:
            self._load = load or self._load
            self._beat(self._held | {(work.job.id, work.shard) for work in shards})
        if load is not None and load.metrics is not None:
            self._report_metrics(load.metrics)

    def give_up(self, work: ShardWork, error: Exception, generated: int = 0, busy_seconds: float = 0.0) -> None:
        """Release the shard because this attempt can't continue with it, and record the reason."""
        self._record_end(self._jobs[work.job.id].ledger, work, generated, busy_seconds)
        self._sequences.pop(work.attempt_id, None)
        self._pass_over(work.job.id, work.shard, work.attempt_id, error)

    def find_revoked(self, shards: Sequence[ShardWork]) -> RevokedShards:
        """Find shards whose job is being closed or has ended. After a silence of this worker that was longer than
        `Heartbeats.lifetime`, also shards with a part, and shards that another worker took over. Shards released
        meanwhile are left out."""
        with self._lock:
            jobs = {work.job.id: self._jobs.get(work.job.id) for work in shards}
            fenced, silence = self._is_fenced(), self._fenced_until
        ledgers = {job: known.ledger for job, known in jobs.items() if known is not None}
        closing = {job for job, ledger in ledgers.items() if self._is_closing(job, ledger)}
        to_release = {(work.job.id, work.shard) for work in shards if work.job.id in closing}
        committed: set[tuple[str, int]] = set()
        if fenced:
            holders = self._other_holders()
            for work in shards:
                name = work.job.id, work.shard
                if (ledger := ledgers.get(work.job.id)) is None:
                    continue
                if ledger.has_part(work.shard):
                    committed.add(name)
                elif self._is_taken_over(ledger, work, holders):
                    to_release.add(name)
            if committed or to_release:
                logger.warning(
                    "this worker was silent: shards were taken over",
                    worker=self.worker, released=len(to_release), committed=len(committed),
                )  # fmt: skip
        self._checked_silence = silence
        return RevokedShards(frozenset(to_release - committed), frozenset(committed))

    # -- inside

    def _is_closing(self, job: str, ledger: JobLedger) -> bool:
        """Whether the job is being closed or has ended. An unreadable closing counts as none: the dispatcher reports
        it."""
        try:
            return ledger.closing() is not None or ledger.has_ended()
        except StoreError:
            raise
        except Exception as error:  # noqa: BLE001 - of one job; the others continue
            if job not in self._damaged_closings:
                self._damaged_closings.add(job)
                logger.error("a job's closing can't be read", job=job, reason=str(error))
            return False

    def _is_fenced(self) -> bool:
        """Whether others may have taken this worker's shards: it is silent now, or was until a lifetime ago, or was and
        has not checked since. A worker that is about to take a shard may not have read the first heartbeat after the
        silence."""
        now = self._world.clock.monotonic()
        silent = self._last_heartbeat is not None and now - self._last_heartbeat > self._heartbeats.lifetime
        return silent or now < self._fenced_until or self._fenced_until > self._checked_silence

    def _other_holders(self) -> Mapping[tuple[str, int], Set[str]] | None:
        """The other live workers that hold each shard; None: the heartbeats can't be read."""
        holders: defaultdict[tuple[str, int], set[str]] = defaultdict(set)
        try:
            workers = self._heartbeats.workers()
        except ServiceUnavailable as error:
            logger.warning("the holders of shards can't be read", reason=str(error))
            return None
        for worker in workers:
            if worker.name != self.worker:
                for name in worker.held:
                    holders[name].add(worker.name)
        return holders

    def _is_taken_over(
        self, ledger: JobLedger, work: ShardWork, holders: Mapping[tuple[str, int], Set[str]] | None
    ) -> bool:
        """Whether another worker computes the shard. If both were silent, the later attempt continues."""
        others = None if holders is None else holders.get((work.job.id, work.shard), frozenset())
        if others is not None and not others:
            return False
        try:
            attempts = ledger.attempts(work.shard)
        except LaterVersion as error:  # a newer worker wrote there
            logger.warning("attempts can't be read", job=work.job.id, shard=work.shard, reason=str(error))
            return True
        own = next((record.attempt for record in attempts if record.attempt_id == work.attempt_id), None)
        if others is None:  # a later attempt counts as its worker's claim
            return own is not None and any(record.attempt > own for record in attempts)
        earlier = set() if own is None else {record.worker for record in attempts if record.attempt < own}
        return bool(others - earlier)

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
            raise UnplannedShard(
                f"{known.ledger.location()}: shard {task.shard} was queued, but no plan segment has it"
            )
        return known

    def _forget_jobs(self) -> None:
        """Evict the oldest cached plans of jobs without held shards: a worker may run for months."""
        with self._lock:
            held = {job for job, _ in self._held}
        idle = [job for job in self._jobs if job not in held]
        for job in idle[: max(0, len(self._jobs) - MAX_JOBS)]:
            del self._jobs[job]

    def _open(self, known: _KnownJob, shard: int, *, floor: bool) -> ShardWork:
        planned, tier = known.shards[shard], known.job.tier
        self._bulk_reserve.took(tier, planned.prompt_tokens + planned.expected_tokens)
        table = read_table(known.ledger, planned)
        attempts = known.ledger.attempts(shard)
        # The first attempt has no history, and saves the listing.
        history = read_history(known.ledger, shard) if attempts else ShardHistory()
        attempt = max((record.attempt for record in attempts), default=0) + 1
        attempt_id = self._world.random.token(8).hex()
        as_tier = Tier.STANDARD if floor and tier is Tier.BULK else None
        return ShardWork(known.job, shard, attempt, attempt_id, table, self._world.clock.now(), history, as_tier)

    def _record_end(self, ledger: JobLedger, work: ShardWork, generated: int, busy_seconds: float) -> None:
        """Record the end of the attempt, if it has begun."""
        if work.attempt_id in self._sequences:
            worked = self._worker_time(busy_seconds)
            ledger.record_end(work.shard, EndRecord(attempt_id=work.attempt_id, generated=generated, worked=worked))

    def _worker_time(self, busy_seconds: float) -> WorkerTime:
        return WorkerTime(seconds=busy_seconds, price_per_hour=self._price_per_hour)

    def _forget(self, ledger: JobLedger, work: ShardWork, *, won: bool) -> None:
        """Delete checkpoints that are accounted for: those of this attempt and, if its part was committed, of the
        attempts that it resumed. Those that another's part resumed are not known here."""
        keys = [key for keys in work.history.keys.values() for key in keys] if won else []
        keys += [checkpoint_key(work.shard, work.attempt_id, n) for n in range(self._sequences.pop(work.attempt_id, 0))]
        for key in keys:
            ledger.store.delete(ledger.prefix + key)
        self._release_held(work.job.id, work.shard)

    def _append(self, work: ShardWork, make: Callable[[int], tuple[str, bytes]]) -> None:
        """Create the attempt's next note or checkpoint, `make(its number)`. The number is used once the object exists:
        a write that is retried because its confirmation was lost finds its own object."""
        ledger, number = self._jobs[work.job.id].ledger, self._sequences.get(work.attempt_id, 0)
        while True:
            key, data = make(number)
            if ledger.create(key, data):
                break
            try:
                if ledger.store.read(ledger.prefix + key) == data:
                    break
            except ObjectNotFound:  # it has just been deleted
                continue
            number += 1
        self._sequences[work.attempt_id] = number + 1

    def _hold(self, job: str, shard: int) -> None:
        with self._lock:
            self._held.add((job, shard))
            self._beat(self._held)

    def _release_held(self, job: str, shard: int) -> None:
        with self._lock:
            self._held.discard((job, shard))
            self._beat(self._held)

    @property
    def metrics(self) -> WorkerMetrics | None:
        """The worker's latest metrics."""
        return self._load.metrics

    def close(self) -> None:
        """Report that this worker ends and holds no shards any more."""
        try:
            self._heartbeats.leave(self.worker)
        except ServiceUnavailable as error:
            logger.warning("the worker's end can't be reported", reason=str(error))

    def _beat(self, held: set[tuple[str, int]]) -> None:
        """Send the heartbeat; a lost one causes duplicate work at most. Called with the lock held."""
        now = self._world.clock.monotonic()
        try:
            self._heartbeats.send_heartbeat(self._state(held))
        except ServiceUnavailable as error:
            logger.warning("the heartbeat can't be sent", reason=str(error))
            return
        lifetime = self._heartbeats.lifetime
        if self._last_heartbeat is not None and now - self._last_heartbeat > lifetime:
            logger.warning("this worker was silent", worker=self.worker, seconds=round(now - self._last_heartbeat, 1))
            self._fenced_until = self._world.clock.monotonic() + lifetime
        self._last_heartbeat = now

    def _report_metrics(self, metrics: WorkerMetrics) -> None:
        try:
            self._heartbeats.report_metrics(self.worker, metrics)
        except ServiceUnavailable as error:
            logger.warning("metrics can't be sent", reason=str(error))

    def _state(self, held: set[tuple[str, int]]) -> WorkerState:
        waiting, now = 0.0, self._world.clock.monotonic()
        for job, number in held:
            known = self._jobs.get(job)
            shard = None if known is None else known.shards.get(number)
            if shard is not None:
                tokens = shard.prompt_tokens + shard.expected_tokens
                waiting += tokens * self._load.unfinished.get((job, number), 1.0)
        return WorkerState(
            self.worker, self._models, frozenset(held), round(waiting), self._load.tokens_per_second,
            price_per_hour=self._price_per_hour,
            passed_over=frozenset(one for one, until in self._passed_over.items() if until > now),
            max_num_seqs=self._load.max_num_seqs,
            takes_lane_requests=self._takes_lane_requests(),
            role=self._role,
        )  # fmt: skip
