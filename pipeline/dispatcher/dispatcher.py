"""The dispatcher's reconcile loop queues each planned shard that is neither committed nor held by a live worker.

A queue may lose and repeat messages, workers may die and race, several dispatchers may run: each tick reads the state
again, so a lost message costs time and never a shard, and a repeated one costs a read. Shards are queued as soon as
their segment of the plan is committed. Complete jobs are ended; jobs that are cancelled or past their deadline are
closed.

Each model and tier has a queue, which stays short, so that urgent shards are never far from its head. Workers take from
the more urgent tiers first (`ShardClient`). The dispatcher decides the order within a queue (`dispatch_order`): jobs
whose deadline is at risk, then tenants by weight, then the tenant's jobs by deadline and age, then the planner's order.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from concurrent.futures import Executor
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime

import structlog

from pipeline.answers.index import AnswerIndex
from pipeline.dispatcher.dispatch_counts import DispatchMetrics
from pipeline.dispatcher.eta import EtaForecaster, Tokens
from pipeline.dispatcher.fair_share import FairShares
from pipeline.dispatcher.job_state import (
    MAX_RESUME_ATTEMPTS,
    NewPart,
    OpenJob,
    OpenJobSettings,
    QueuedShard,
    ShardId,
    estimated_tokens,
)
from pipeline.dispatcher.poller import StatePoller
from pipeline.dispatcher.shard_order import backlog_for, dispatch_order, is_deadline_at_risk
from pipeline.dispatcher.spend_limiter import SpendLimiter, SpendSettings
from pipeline.dispatcher.stalled_jobs import StalledJobs
from pipeline.jobs.event_sink import EventSink, NoEvents
from pipeline.jobs.lost_shards import RowsUnknown
from pipeline.ledger.active_index import clean_up, is_open, jobs_to_close
from pipeline.ledger.ledger import JOB, JobLedger, JobNotFound, PlanDamaged
from pipeline.ports import ComponentStopped, Heartbeats, ShardQueue, ShardTask, StoreError, World
from pipeline.runtime.availability import ServiceUnavailable
from pipeline.runtime.inline_executor import InlineExecutor
from pipeline.runtime.supervision import reason_of
from pipeline.tracing import trace_job
from pipeline.worker_client.ports import BY_URGENCY
from schemas.jobs.job import Closing, Job
from schemas.jobs.outcome import JobStatus, Manifest
from schemas.jobs.plan import ShardRef
from schemas.jobs.progress import Progress

logger = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class DispatchSettings(OpenJobSettings):
    """Settings of the dispatcher and of its open jobs; times in seconds.

    Attributes:
        backlog: shards that wait in a queue; few, so that order and priority can still change.
        backlog_per_worker: shards that wait in a queue for each worker of its model, where that is more than `backlog`:
            a large fleet would empty a short queue between two ticks, and idle.
        retry_timeout_seconds: time-out after which a queued shard that no worker holds is queued again; doubles with
            each retry.
        max_retry_timeout_seconds: upper bound of that time-out. It is shorter than a queue's message lifetime: else a
            shard that waits for its first worker is on no queue for most of the time, and occupies the backlog.
        settle_seconds: heartbeats must have been stored without loss for this long before a missing one counts as a
            lost shard.
        closing_budget_seconds: time in each tick for making the parts of jobs that are being closed; as long as the
            rest of the last tick took, if that is more.
        tick_interval_seconds: interval between two ticks, in `run`.
        weights: of tenants, for fair sharing of computed tokens; others have 1.
        spending: spending limits of tenants.
        isolate: a job that can't be read, or whose objects contradict each other, is paused and retried later, and the
            other jobs go on; else `tick` raises.
    """

    backlog: int = 2
    backlog_per_worker: float = 0.25
    retry_timeout_seconds: float = 30.0
    max_retry_timeout_seconds: float = 120.0
    settle_seconds: float = 0.0
    closing_budget_seconds: float = 0.5
    tick_interval_seconds: float = 0.2
    weights: Mapping[str, float] = field(default_factory=dict)
    spending: SpendSettings = field(default_factory=SpendSettings)
    isolate: bool = False


class Dispatcher:
    """Drives the jobs given to `add` to their end. `add`, `forget` and `tick` belong to one thread; the other methods
    may be called from any thread."""

    def __init__(
        self,
        world: World,
        queue: ShardQueue,
        heartbeats: Heartbeats,
        events: EventSink | None = None,
        settings: DispatchSettings | None = None,
        together: Executor | None = None,
        beside: Executor | None = None,
        metrics: DispatchMetrics | None = None,
        answers: AnswerIndex | None = None,
    ) -> None:
        """Args:
        together: executor for concurrent requests to the store; None: they run one after the other.
        beside: executor for requests in the background; it runs a few at a time, so that they don't delay the others.
        metrics: the metrics to update.
        answers: the answer store of ended jobs; None: none is used.
        """
        self._answers = answers
        self._world = world
        self._queue = queue
        self._heartbeats = heartbeats
        self._events = events or NoEvents()
        self._settings = settings or DispatchSettings()
        self._executor = together or InlineExecutor()
        self._background = beside or InlineExecutor()
        self._metrics = metrics or DispatchMetrics()
        self._since: datetime | None = None  # start of dispatching; None: another dispatcher leads
        self._jobs: dict[str, OpenJob] = {}
        self._outcomes: dict[str, Manifest] = {}
        self._stalled = StalledJobs()
        self._closing_seconds_left = self._other_seconds = 0.0  # seconds: left in this tick, spent in the last one
        self._forecaster = EtaForecaster(self._settings.weights)
        self._spend_limiter = SpendLimiter(world, self._settings.spending, self._settings.price_per_hour)
        self._next_forecast = self._next_closing = self._next_metrics = 0.0
        self._to_close: set[str] = set()
        self._serving: defaultdict[str, set[str]] = defaultdict(set)  # live workers, by model
        self._skipped: set[ShardId] = set()  # taken from their queue and skipped by a worker
        self._shares: defaultdict[str, FairShares] = defaultdict(lambda: FairShares(self._settings.weights))

    def add(self, ledger: JobLedger) -> bool:
        """Add a job; returns whether it was added. With `isolate` a job that can't be read is paused and retried later.
        Of an ended job only the manifest is cached, and an interrupted removal of its working files is completed.

        Raises:
            JobNotFound: there is no such job.  LedgerError: the job can't be read (without `isolate`).
        """
        if ledger.name in self._jobs:
            return True
        if self._stalled.is_paused(ledger.name):
            return False
        try:
            job, manifest = ledger.job(), ledger.manifest()
        except (StoreError, JobNotFound):
            raise
        except Exception as error:
            if not self._settings.isolate:
                raise
            reason = self._reason(ledger.name, error)
            self._stalled.record_failure(ledger.name, ledger, reason, self._world.clock.monotonic())
            logger.error("a job needs attention and is paused", job=ledger.name, reason=reason)
            return False
        if manifest is not None:
            self._outcomes[job.id] = manifest
            clean_up(ledger)
        elif job.id not in self._jobs:
            self._since = self._since or self._world.clock.now()
            open_job = self._jobs[job.id] = OpenJob(
                ledger, job, self._world, self._events, self._settings, self._background, self._answers,
                taken_over=job.created_at < self._since,
            )  # fmt: skip
            open_job.attention = self._stalled.reason(job.id)
        return True

    def is_paused(self, job: str) -> bool:
        """Whether the job is paused, since it can't be read or its objects contradict each other."""
        return self._stalled.is_paused(job)

    def forget(self, job: str) -> None:
        """Remove a job that another process has ended or removed."""
        self._jobs.pop(job, None)
        self._stalled.forget(job)

    def get_job(self, job: str) -> Job | None:
        """The order of an open job that was added."""
        open_job = self._jobs.get(job)
        return None if open_job is None else open_job.job

    def get_closing(self, job: str) -> Closing | None:
        """Why the job is being closed, if it is and that is known."""
        open_job = self._jobs.get(job)
        return None if open_job is None else open_job.closing

    def pause(self, job: str, error: Exception) -> None:
        """Pause an open job because of `error`, which concerns it alone. It is retried after a pause, which doubles
        with each failure in a row (`is_paused`). Raises `StoreError` when the store fails as a whole."""
        if isinstance(error, StoreError):
            jobs_to_close(self._world.store)  # reads no single job: raises when the store fails as a whole
        if (open_job := self._jobs.pop(job, None)) is None:
            return
        if _is_removed(open_job.ledger):
            self._stalled.forget(job)
        else:
            self._pause(open_job, error)

    def remove_ended(self, job: str, status: JobStatus = JobStatus.FAILED) -> None:
        """Remove a job that ended before its plan was complete."""
        self._stalled.forget(job)
        if (open_job := self._jobs.pop(job, None)) is not None:
            self._metrics.count_ended_unplanned(open_job.job, self._world.clock.now(), status)

    def stand_by(self) -> None:
        """Reset what is only valid while this dispatcher leads: another one leads."""
        self._since = None
        self._metrics.stand_by()
        self._spend_limiter.stand_by()

    def finished(self) -> bool:
        """Whether all jobs have ended."""
        return not self._jobs

    def outcome(self, job: str) -> Manifest | None:
        """The manifest of an ended job."""
        return self._outcomes.get(job)

    def progress(self, job: str) -> Progress | None:
        """The progress of an open job."""
        open_job = self._jobs.get(job)
        return None if open_job is None else open_job.progress()

    def forecast_end(self, job: Job, tokens: Tokens) -> datetime | None:
        """Forecast when a job that isn't planned yet finishes; None: there is no forecast yet. For the thread that
        calls `tick`."""
        return self._forecaster.forecast_end(job, tokens, self._world.clock.now())

    def run(self, stop: threading.Event) -> None:
        """Tick until all jobs have ended or `stop` is set. Raises what `tick` raises."""
        while not stop.is_set():
            self.tick()
            if self.finished():
                return
            self._world.clock.sleep(self._settings.tick_interval_seconds)

    def tick(self, planning: Container[str] | None = None, still: Callable[[], bool] = lambda: True) -> None:
        """Read the state of all jobs, queue missing shards, and end complete jobs. Raises `PipelineError` when the
        store or the broker fails, and (without `isolate`) the error of a single job.

        Args:
            planning: jobs whose plans may have grown; the plans of others are read now and then, and deferrable reads
                are spread over several ticks. None: everything is read.
            still: whether this dispatcher still leads; checked between two jobs. If not, the tick ends, and the leader
                handles the remaining jobs.
        """
        now = self._world.clock.monotonic()
        self._closing_seconds_left = share = max(self._settings.closing_budget_seconds, self._other_seconds)
        workers = self._heartbeats.workers()
        held = {shard for worker in workers for shard in worker.held}
        self._skipped = {shard for worker in workers for shard in worker.passed_over}
        self._serving = defaultdict(set)
        for worker in workers:
            for model in worker.models:
                self._serving[model].add(worker.name)
        if now >= self._next_closing:
            self._next_closing = now + self._settings.closing_interval_seconds
            self._to_close = jobs_to_close(self._world.store)
        self._retry_stalled(now)
        jobs = list(self._jobs.values())
        poller = StatePoller(self._executor, held, now, planning)
        poller.poll(jobs)
        for open_job in jobs:
            if not still():
                return
            with self._isolated(open_job):
                self._advance(open_job, poller, held, now)
        stored_seconds = self._heartbeats.since()
        self._spend_limiter.refresh(
            self._jobs.values(), workers, held, trusted=stored_seconds >= self._settings.settle_seconds
        )
        self._put_missing(held, now, stored_seconds)
        self._spend_limiter.close_jobs()
        if now >= self._next_forecast and self._heartbeats.since() >= self._settings.settle_seconds:
            self._next_forecast = now + self._settings.cache_interval_seconds
            self._forecaster.refresh(self._jobs.values(), workers, self._world.clock.now())
        if now >= self._next_metrics:
            self._next_metrics = now + self._settings.cache_interval_seconds
            self._metrics.refresh(self._jobs.values(), held, len(self._stalled))
        self._other_seconds = self._world.clock.monotonic() - now - (share - self._closing_seconds_left)

    @contextmanager
    def _isolated(self, open_job: OpenJob) -> Iterator[None]:
        """Pause the job when an error concerns it alone, so that the others go on; it is retried later. A failure of
        the whole store, or of the broker, is raised on."""
        try:
            yield
        except (ComponentStopped, ServiceUnavailable):
            raise
        except Exception as error:
            if not self._settings.isolate:
                raise
            self.pause(open_job.job.id, error)

    def _pause(self, open_job: OpenJob, error: Exception) -> None:
        job = open_job.job
        reason = self._reason(job.id, error)
        stalled = self._stalled.record_failure(job.id, open_job.ledger, reason, self._world.clock.monotonic())
        logger.error("a job needs attention and is paused", job=job.id, reason=reason, tries=stalled.tries)
        open_job.attention = reason
        try:
            if isinstance(error, RowsUnknown):  # several attempts have failed, or the job is to end anyway
                self._conclude(open_job, open_job.end_as_failed("shard_unreadable", reason))
            elif isinstance(error, PlanDamaged) and stalled.tries >= MAX_RESUME_ATTEMPTS:
                self._conclude(open_job, open_job.end_as_failed("plan_unreadable", reason))
            else:
                open_job.cache_attention()
        except Exception as more:  # noqa: BLE001 - concerns one job, which is retried in any case
            logger.error("a job's error can't be recorded", job=job.id, reason=self._reason(job.id, more))

    def _reason(self, job: str, error: Exception) -> str:
        return reason_of(error, "dispatcher", self._world, job=job)

    def _retry_stalled(self, now: float) -> None:
        """Retry the paused jobs that are due."""
        for name, stalled in self._stalled.due(now):
            open_job = self._jobs.get(name)
            if open_job is not None:
                self._stalled.forget(name)
                open_job.recover()
                continue
            try:
                if is_open(stalled.ledger):
                    self._stalled.start_retry(stalled, now)
                    self.add(stalled.ledger)
                else:
                    self._stalled.forget(name)
            except Exception as error:  # noqa: BLE001 - concerns one job; the tick goes on with the others
                self._stalled.postpone(stalled, now)
                logger.error("a job can't be retried now", job=name, reason=self._reason(name, error))

    def _advance(self, open_job: OpenJob, poller: StatePoller, held: set[ShardId], now: float) -> None:
        self._settle(open_job, poller.new_parts(open_job))
        if not open_job.is_complete:
            self._close(open_job, held, now)
        if not open_job.is_complete:
            open_job.report(now)
            return
        self._spend_limiter.record_end(open_job)
        self._conclude(open_job, open_job.end())

    def _conclude(self, open_job: OpenJob, manifest: Manifest) -> None:
        """Count, trace and remove a job that has its outcome."""
        self._metrics.count_ended(open_job, manifest, self._world.clock.now())
        trace_job(self._world.traces, open_job.job, manifest)
        if not self._settings.isolate:
            self._outcomes[open_job.job.id] = manifest
        self.forget(open_job.job.id)

    def _close(self, open_job: OpenJob, held: set[ShardId], now: float) -> None:
        """Make parts of a job that is being closed, within this tick's time for closing: other jobs wait."""
        clock, marked = self._world.clock, open_job.ledger.name in self._to_close
        begun = clock.monotonic()
        self._settle(open_job, open_job.close(held, now, marked=marked, until=begun + self._closing_seconds_left))
        self._closing_seconds_left -= clock.monotonic() - begun

    def _put_missing(self, held: set[ShardId], now: float, stored_seconds: float) -> None:
        """Fill each queue's backlog. `stored_seconds`: time that heartbeats have been stored without loss."""
        waiting: defaultdict[str, int] = defaultdict(int)
        wanted: defaultdict[str, list[tuple[OpenJob, list[int]]]] = defaultdict(list)
        for open_job in list(self._jobs.values()):
            if not open_job.is_dispatchable:
                continue
            with self._isolated(open_job):
                self._put_again(open_job, held, now, stored_seconds, waiting)
                for queue, numbers in self._unqueued(open_job, held).items():
                    wanted[queue].append((open_job, numbers))
        for queue in sorted(wanted, key=lambda queue: BY_URGENCY.index(wanted[queue][0][0].job.tier)):
            open_job, numbers = wanted[queue][0]
            depth = self._depth(open_job, open_job.open_shards[numbers[0]])
            self._fill(queue, wanted[queue], depth - waiting[queue])

    def _depth(self, open_job: OpenJob, shard: ShardRef) -> int:
        """Number of shards that may wait in the shard's queue."""
        workers = len(self._serving[open_job.key_of(shard)])
        return backlog_for(self._settings.backlog, workers, self._settings.backlog_per_worker)

    def _put_again(
        self, open_job: OpenJob, held: set[ShardId], now: float, stored_seconds: float, waiting: defaultdict[str, int]
    ) -> None:
        """Queue lost shards again, and count the shards that wait in each queue.

        `stored_seconds`: time since heartbeats were last lost. Queues may have been lost with them:
        shards that were queued before are queued again without waiting for their time-out.
        """
        trusted = stored_seconds >= self._settings.settle_seconds
        for number, put in list(open_job.queued.items()):
            shard = open_job.open_shards[number]
            if (open_job.job.id, number) in held:
                put.was_held = True
                continue
            gone = put.was_held or put.queued_at < now - stored_seconds
            late = now - put.queued_at >= put.retry_timeout_seconds
            lost = (gone or late) and trusted
            serving = self._serving[open_job.key_of(shard)]
            if lost and (found := open_job.give_up(number, serving)) is not None:
                self._settle(open_job, [found])
                continue
            if lost and not self._spend_limiter.allows_again(open_job, shard):
                del open_job.queued[number]
                continue
            if lost:
                longer = min(2 * put.retry_timeout_seconds, self._settings.max_retry_timeout_seconds)
                self._put(open_job, shard, put.retry_timeout_seconds if gone else longer)
            if (open_job.job.id, number) not in self._skipped:  # else a damaged job would fill the backlog
                waiting[open_job.queue_of(shard)] += 1

    def _unqueued(self, open_job: OpenJob, held: set[ShardId]) -> dict[str, list[int]]:
        """Shards to queue for the first time, by queue: as many as its backlog holds, in reverse order."""
        found: dict[str, list[int]] = {}
        for number, shard in open_job.open_shards.items():
            if number in open_job.queued or (open_job.job.id, number) in held:
                continue
            of_queue = found.setdefault(open_job.queue_of(shard), [])
            if len(of_queue) < self._depth(open_job, shard):
                of_queue.append(number)
            elif len(open_job.job.models) == 1:
                break
        for of_queue in found.values():
            of_queue.reverse()
        return found

    def _fill(self, queue: str, jobs: list[tuple[OpenJob, list[int]]], room: int) -> None:
        """Queue up to `room` shards of these jobs."""
        shares = self._shares[queue]
        now = self._world.clock.now()
        key = queue.rpartition(".")[0]
        loaded = jobs[0][0].base_key_of(key)
        shedding = self._forecaster.plan_shedding(loaded, jobs[0][0].job.tier)

        def is_lost(open_job: OpenJob) -> bool:
            return open_job.job.id in shedding.lost

        def is_at_risk(open_job: OpenJob) -> bool:
            job = open_job.job
            left = None if job.deadline is None or is_lost(open_job) else (job.deadline - now).total_seconds()
            rate, cumulative = self._forecaster.rate(loaded), shedding.cumulative_tokens.get(job.id, 0.0)
            return is_deadline_at_risk(left, open_job.tokens_left[key], cumulative, rate, shares.ahead(job.tenant))

        def is_allowed(open_job: OpenJob, number: int) -> bool:
            allows = False
            with self._isolated(open_job):
                allows = open_job.job.id in self._jobs and self._spend_limiter.allows(
                    open_job, open_job.open_shards[number]
                )
            return allows  # noqa: RET504 - the block may have ended early

        for open_job, number in dispatch_order(
            shares, jobs, room, lambda one: one.job, is_at_risk, is_lost, is_allowed
        ):
            shard = open_job.open_shards[number]
            self._put(open_job, shard, self._settings.retry_timeout_seconds)
            shares.charge(open_job.job.tenant, estimated_tokens(shard))

    def _put(self, open_job: OpenJob, shard: ShardRef, retry_timeout_seconds: float) -> None:
        self._queue.put(open_job.queue_of(shard), ShardTask(open_job.job.id, shard.number))
        open_job.queued[shard.number] = QueuedShard(self._world.clock.monotonic(), retry_timeout_seconds)

    def _settle(self, open_job: OpenJob, found: Iterable[NewPart]) -> None:
        """Correct the tenant's charge from the estimated to the actual cost of the new parts."""
        for entry, shard in found:
            self._metrics.count_part(open_job, (entry, shard))
            if shard is None:
                continue
            usage = entry.summary.usage
            computed = usage.prompt - usage.cached + usage.completion
            self._shares[open_job.queue_of(shard)].charge(open_job.job.tenant, computed - estimated_tokens(shard))


def _is_removed(ledger: JobLedger) -> bool:
    """Whether the job was removed while it was processed; a job that can't be read counts as present."""
    try:
        return ledger.store.info(ledger.prefix + JOB) is None
    except Exception as error:  # noqa: BLE001 - the caller reports the job
        logger.warning("a job's order can't be read", job=ledger.name, reason=str(error))
        return False
