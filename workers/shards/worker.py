"""The worker's loop: fills the engine with the rows of several shards, and commits each shard when its last row ends.

The loop's thread steps the engine and never waits for I/O, except where a record must be durable first. These threads
run in parallel:

- The fetch thread takes the next shard and tokenizes it (`prefetch`), which may take seconds.
- The writer thread makes all writes, one after the other (`writer`): checkpoints every second or so, and parts.
- The heartbeat threads send heartbeats (`heartbeats`): a write may wait minutes for the store.

At most `max_open_shards` open shards and one prepared shard are in memory.

When several attempts at a shard died before they got any further, one of its rows may have ended the process. The rows
that would run first are then computed apart from all others, after a durable note of which rows these are
(`isolation`). If that attempt dies too, these rows are tried one by one. A row that dies alone repeatedly is not tried
again.
"""

from __future__ import annotations

import threading
from bisect import insort
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import Executor, Future
from dataclasses import replace
from functools import partial

import structlog

from engine.errors import ContextLengthExceeded, EngineError, EngineLost, RequestRefused
from engine.request import Completion
from pipeline.ports import Clock, StoreError
from pipeline.tracing import NO_TRACES, Traces
from pipeline.worker_client.ports import BY_URGENCY, RevokedShards, ShardSink, ShardSource
from schemas.requests.errors import RowError, RowErrorCode
from schemas.settings.overload import StepName
from workers.model.loaded_model import LoadedModel
from workers.observability.progress import WorkerObserver, WorkerProgress
from workers.observability.tracing import ShardSpans, end_step
from workers.policies.retry import JudgingInterrupted, PolicyRetry
from workers.rows import ComputedRow, PreparedRow, RejectedRow
from workers.settings import IDLE_SECONDS, WorkerSettings
from workers.shards.answer_judge import AnswerJudge
from workers.shards.cost_sharing import shares_of_step
from workers.shards.degradation import ShardDegradation, no_steps
from workers.shards.executors import worker_executors
from workers.shards.heartbeats import HeartbeatSender, Timer
from workers.shards.isolation import PROBE, Member, RowIsolation, probe
from workers.shards.lookahead import Lookahead, engine_has_all
from workers.shards.open_shard import OpenShard, PreparedShard
from workers.shards.prefetch import ShardFetcher
from workers.shards.reporter import WorkerReporter
from workers.shards.resume import resume_failed
from workers.shards.shard_reader import ShardReader
from workers.shards.write_queue import RunningRow, ShardWriter
from workers.side_work import NoSideWork, SideWork, drain_side_work
from workers.translation.responses import failure_of
from workers.translation.tries import error_of_refused_retry

logger = structlog.get_logger(__name__)


class ShardWorker:
    """Computes shards with one loaded model until the source has no more."""

    def __init__(
        self,
        model: LoadedModel,
        source: ShardSource,
        sink: ShardSink,
        clock: Clock,
        settings: WorkerSettings | None = None,
        observer: WorkerObserver | None = None,
        helper: Executor | None = None,
        beside: SideWork | None = None,
        traces: Traces = NO_TRACES,
        heartbeat_executor: Executor | None = None,
        heartbeat_timer: Timer | None = None,
        degradation: Callable[[], Collection[StepName]] = no_steps,
    ) -> None:
        """
        Args:
            helper: replaces the other threads. An inline executor makes the worker deterministic.
            beside: requests that the engine computes in the same batch as the shards' rows.
            heartbeat_executor: sends the heartbeats; None: `helper` does.
            heartbeat_timer: repeats heartbeats; None: nothing repeats them where one of the executors is given.
            degradation: the active steps of degradation.
        """
        self._model = model
        self._engine = model.engine
        self._sink = sink
        self._clock = clock
        self._now = clock.monotonic
        self._settings = settings or WorkerSettings()
        self._executors = partial(worker_executors, helper, heartbeat_executor, heartbeat_timer)
        self._side_work = beside or NoSideWork(clock)
        self._spans = ShardSpans(clock, model.name, traces, self._settings.trace_interval_seconds)
        self._is_stopping = False
        retry = PolicyRetry(clock, lambda: not self._is_stopping)
        reader = ShardReader(model, self._settings.policies, retry)
        self._fetcher = ShardFetcher(source, sink, reader, clock, self._settings.poll_interval_seconds)
        self._writer = ShardWriter(model, sink, clock, self._settings, self._report)
        self._checkpointer = self._writer.checkpointer
        self._judge = AnswerJudge(reader, self._writer.builder, self._settings.check_of)
        self._reporter = WorkerReporter(
            model, clock, self._side_work, observer, self._settings.report_interval_seconds,
            self._settings.policies.counts,
        )  # fmt: skip
        timed = self._settings.request_timeout_seconds is not None
        self._lookahead = Lookahead(model.max_num_seqs, self._settings.watermark, timed=timed)
        self._shards: list[OpenShard] = []  # the most urgent ones first
        self._running: dict[str, RunningRow] = {}  # by request id
        self._isolation = RowIsolation(model.engine, model.max_num_seqs)
        self._probe = probe(model)
        self._degradation = ShardDegradation(model.engine, degradation)

    def run(self, stop: threading.Event | None = None) -> WorkerProgress:
        """Compute shards until the source is finished or `stop` is set; then unfinished shards are released.

        Raises:
            BrokenEngineError: no request gets through the engine.  EngineLost: a part of it is gone.
            ModelMismatchError: a shard is pinned to another model.
            StoreError: the store can't be read or written.
        """
        with self._executors() as executors:
            self._writer.start(executors.writer)
            heartbeats = HeartbeatSender(self._sink, self._clock, executors.heartbeat, self._settings.stuck_seconds)
            self._reporter.start(heartbeats)
            with executors.heartbeat_timer(heartbeats.repeat):
                stopped = self._run_loop(executors.fetcher, stop)
        self._judge.log_failures()
        return self._reporter.report_end(self._shards, self._writer.committing, stopped=stopped)

    # -- The loop

    def _run_loop(self, fetch_executor: Executor, stop: threading.Event | None) -> bool:
        """Iterate until the source is finished or `stop` is set; returns whether it was `stop`."""
        stopped = False
        try:
            while not self._is_finished:
                stopped = stop is not None and stop.is_set()
                if stopped:
                    self._drain()
                    break
                self._iterate(fetch_executor)
            else:
                self._drain_side_work()
        except Exception:
            self._is_stopping = True
            self._abandon()
            raise
        return stopped

    @property
    def _is_finished(self) -> bool:
        return self._fetcher.is_exhausted and not (self._shards or self._writer.committing)

    def _iterate(self, fetch_executor: Executor) -> None:
        """One iteration of the loop: at most one step of the engine."""
        self._collect()
        self._degradation.refresh()
        if self._fetcher.is_source_finished:
            self._release_paused()
        self._fetch_ahead(fetch_executor)
        self._side_work.poll(admit=not (self._isolation or self._isolation.is_trying))
        self._feed_engine()
        if self._engine.has_work:
            self._step()
        elif not self._isolation and (
            self._fetcher.is_preparing
            or self._writer.is_pending
            or not self._shards
            or self._degradation.is_bulk_paused
        ):
            self._side_work.wait(IDLE_SECONDS)
        self._commit_done()
        self._writer.checkpoint_if_due(self._shards, self._running.values())
        self._report()

    def _report(self) -> None:
        self._reporter.report_if_due(self._shards, self._writer.committing, self._fetcher.prepared)

    # -- Opening shards

    def _fetch_ahead(self, fetch_executor: Executor) -> None:
        """Open the prepared shard when too few rows are left, and start to fetch the one after it: preparing a shard
        takes time in which the engine should not run dry."""
        computed = [shard for shard in self._shards if not self._degradation.pauses(shard.work)]
        prepared = self._fetcher.prepared
        is_paused = prepared is not None and self._degradation.pauses(prepared.work)
        if (
            len(computed) < self._settings.max_open_shards
            and not is_paused
            and (self._fetcher.is_source_finished or self._lookahead.wants_shard(computed, self._engine.num_waiting))
        ):
            shard = self._fetcher.take()
            if shard is not None:
                self._open(shard)
        self._fetcher.fetch(fetch_executor, [shard.work.tier for shard in self._shards], self._degradation.tiers)

    def _open(self, shard: PreparedShard) -> None:
        """Insert the shard after those that are as urgent."""
        opened = OpenShard.open(shard)
        insort(self._shards, opened, key=lambda other: BY_URGENCY.index(other.work.tier))
        self._isolation.open(opened)

    # -- Collecting outcomes of the other threads

    def _collect(self) -> None:
        """Process the outcomes of the other threads' tasks, and raise their exceptions."""
        self._collect_fetched()
        self._collect_commits()
        self._writer.collect_checkpoint()
        for failed in [shard for shard in self._shards if shard.failure is not None]:
            self._end_failed_attempt(failed)
        self._collect_begin()
        self._release_revoked(self._reporter.collect_revoked())

    def _collect_fetched(self) -> None:
        shard = self._fetcher.collect()
        if shard is None:
            return
        work, rows = shard.work, len(shard.work.table)
        self._reporter.count_rejected(work.tier, shard.rejected)
        self._reporter.count_restored(work.history.finished.num_rows)
        logger.info("shard taken", job=work.job.id, shard=work.shard, rows=rows, **self._spans.taken(work))
        if shard is not self._fetcher.prepared:
            self._open(shard)

    def _collect_commits(self) -> None:
        for shard, outcome in self._writer.collect_commits():
            work, rows = shard.work, len(shard.work.table)
            if isinstance(outcome, Exception):
                self._give_up(shard, outcome)
                continue
            self._reporter.count_part(rows, outcome)
            event = "shard committed" if outcome else "shard was committed by another attempt"
            traced = self._spans.ended(work, "committed" if outcome else "repeated")
            logger.info(event, job=work.job.id, shard=work.shard, rows=rows, **traced)

    def _collect_begin(self) -> None:
        begin = self._writer.collect_begin()
        if begin is not None:
            shard, written = begin
            if self._is_written(shard, written):
                shard.is_begun = True
                self._writer.schedule_checkpoint()

    def _release_revoked(self, revoked: RevokedShards) -> None:
        """Stop computing these shards: their jobs are being closed, or other workers have them."""
        names = revoked.to_release | revoked.committed
        prepared = self._fetcher.prepared
        if prepared is not None and (prepared.work.job.id, prepared.work.shard) in names:
            self._open_prepared()
        for revoked_names, is_logged in ((revoked.committed, False), (revoked.to_release, True)):
            shards = [shard for shard in self._shards if (shard.work.job.id, shard.work.shard) in revoked_names]
            if shards:
                self._release(shards, is_logged=is_logged)

    def _release_paused(self) -> None:
        """Release the paused shards of a source that is finished: another model's turn has come at this worker, and its
        requests may be the load that the pause lasts for."""
        prepared = self._fetcher.prepared
        if prepared is not None and self._degradation.pauses(prepared.work):
            self._open_prepared()
        paused = [shard for shard in self._shards if self._degradation.pauses(shard.work)]
        if paused:
            self._release(paused)

    def _open_prepared(self) -> None:
        """Move the prepared shard to the open ones, so that it is released with them."""
        shard = self._fetcher.take()
        if shard is not None:
            self._shards.append(OpenShard.open(shard))

    # -- Feeding the engine

    def _feed_engine(self) -> None:
        """Add rows to the engine, in the planner's order, as far ahead as it needs to choose well."""
        if self._isolation or self._isolation.is_trying:
            if self._engine.has_work:
                return
            if self._isolation.is_undecided:
                self._engine.add(self._probe)
                return
            if self._isolation.is_proving(self._now()):
                self._prove_engine()
                return
            if self._isolation:
                self._try_apart(self._isolation.next_group())
                return
            if self._isolation.has_notes:
                # The isolated rows survived. Unless that is durable before the next rows start, a death of the process
                # would be blamed on the isolated rows again, and they would be tried for ever.
                self._writer.result_of(self._writer.write_checkpoint(self._shards, self._running.values(), final=False))
            self._isolation.release()
            self._try_apart(())
        self._degradation.remove_paused(self._running)
        last_open = self._fetcher.is_dry or self._fetcher.is_exhausted
        ahead = self._lookahead.rows(last_open=last_open)
        for shard in self._shards:
            if self._degradation.pauses(shard.work):
                continue
            limit = ahead + self._num_less_urgent_rows(shard)
            if shard.waiting and self._engine.num_waiting < limit and not self._has_begun(shard):
                break
            while shard.waiting and (self._engine.num_waiting < limit or shard.is_asking_again):
                self._add(shard, shard.waiting.popleft())
        self._engine.settle(more_to_come=not engine_has_all(self._shards, last_open=last_open))

    def _num_less_urgent_rows(self, shard: OpenShard) -> int:
        """Rows in the engine that are less urgent than this shard's rows, which don't wait behind them."""
        if self._shards[-1].work.tier is shard.work.tier:
            return 0
        return sum(other.work.tier is not shard.work.tier for other, _ in self._running.values())

    def _has_begun(self, shard: OpenShard) -> bool:
        """Whether the shard's begin record is durable; if not, the record is being written."""
        if not shard.is_begun and self._writer.submit_begin(shard):
            self._collect()
        return shard.is_begun

    def _prove_engine(self) -> None:
        """Compute a harmless request once more before the next row is tried. A durable note records that no row is
        being computed, so that no row is blamed for a death of the process meanwhile."""
        self._write_notes(())
        self._side_work.wait(IDLE_SECONDS)
        self._engine.add(self._probe)

    def _try_apart(self, group: Sequence[Member]) -> None:
        """Compute these rows and no others, after a durable note of it."""
        for shard, _ in group:
            if not shard.is_begun and shard.failure is None:
                shard.is_begun = self._is_written(shard, self._writer.write_begin(shard))
        self._write_notes([member for member in group if member[0].failure is None])
        for shard, row in group:
            if shard.failure is None:
                self._add(shard, row)
        if group:
            self._writer.schedule_checkpoint()

    def _write_notes(self, group: Sequence[Member]) -> None:
        """Write the notes that must be durable before the group is tried."""
        for shard, rows in self._isolation.notes(group):
            self._is_written(shard, self._writer.write_note(shard, rows))

    def _is_written(self, shard: OpenShard, written: Future[None]) -> bool:
        """Wait for a write that concerns this shard alone. A failure ends the shard's attempt and nothing else, unless
        the store fails: then it is raised (`StoreError`)."""
        try:
            self._writer.result_of(written)
        except StoreError:
            raise
        except Exception as error:  # noqa: BLE001 - recorded; the worker continues with others
            shard.failure = error
            self._end_failed_attempt(shard)
            return False
        return True

    def _add(self, shard: OpenShard, row: PreparedRow) -> None:
        """Add the row to the engine. A row that the engine refuses has its outcome."""
        request = row.request
        timeout = self._settings.request_timeout_seconds
        if timeout is not None:
            request = replace(request, deadline=self._engine.clock() + timeout)
        try:
            self._engine.add(request)
        except RequestRefused as error:
            too_long = isinstance(error, ContextLengthExceeded)
            code = RowErrorCode.CONTEXT_LENGTH_EXCEEDED if too_long else RowErrorCode.INVALID_REQUEST
            refused = error_of_refused_retry(row.tries, RowError(code, str(error)))
            now = self._engine.clock()
            rejected = RejectedRow(row.names, row.body.model, refused, now, now, row.report, row.tries)
            self._checkpointer.finish(shard, rejected)
            self._reporter.count_rejected(shard.work.tier, [rejected])
        else:
            self._running[request.request_id] = (shard, row)
            shard.num_in_engine += request.num_choices
            self._writer.schedule_first_checkpoint()

    # -- Stepping the engine

    def _step(self) -> None:
        """Run one step of the engine, charge it to the shards, and process the completions."""
        sample = self._spans.sample(self._shards)
        stats_before = None if sample is None else self._engine.stats()
        shares = shares_of_step(self._engine, self._shards, self._model.max_num_seqs)
        began = self._now()
        try:
            completions = self._engine.step()
        except EngineLost:
            raise  # no row caused it, and no row would get through
        except EngineError as error:
            logger.error("step failed", reason=str(error), running=self._engine.num_running)
            self._isolation.step_failed(str(error))
            completions = self._engine.take_ended()
        seconds = self._now() - began
        for shard, share in shares:
            shard.busy_seconds += share * seconds
        if sample is not None and stats_before is not None:
            end_step(sample, stats_before, self._engine.stats())
        for completion in completions:
            self._process_completion(completion)

    def _process_completion(self, completion: Completion) -> None:
        """A request left the engine: record its row's outcome, or isolate the row to try it again."""
        if completion.request_id == PROBE:
            self._finish(self._isolation.proved(completion.error))
            return
        if self._side_work.take(completion):
            self._isolation.suspect_engine(completion.error)
            return
        found = self._running.pop(completion.request_id, None)
        is_removed = self._degradation.has_removed(completion)
        if found is None:  # its shard was released
            return
        shard, row = found
        shard.num_in_engine -= row.request.num_choices
        if is_removed:
            self._checkpointer.retain(shard, row, completion)
            shard.waiting.appendleft(resume_failed(self._engine, row, completion))
        elif failure_of(completion) is not None and self._isolation.take(shard, row, completion):
            self._checkpointer.retain(shard, row, completion)
        else:
            self._end_try(shard, ComputedRow(row, completion))

    def _end_try(self, shard: OpenShard, row: ComputedRow) -> None:
        """Record the outcome of a row whose answer is accepted; any other is asked again at once, while the blocks of
        its prompt are in the cache."""
        judged = self._judge.judge(shard.work, row)
        if isinstance(judged, PreparedRow):
            self._checkpointer.end_try(shard, judged, row.completion)
            self._reporter.count_try(row.completion)
            shard.waiting.appendleft(judged)
        else:
            self._finish([(shard, judged)])

    def _finish(self, ended: Iterable[tuple[OpenShard, ComputedRow]]) -> None:
        """Record the outcome of these rows."""
        for shard, row in ended:
            self._checkpointer.finish(shard, row)
            self._reporter.count_computed(shard.work.tier, row)

    # -- Ending shards

    def _commit_done(self) -> None:
        for shard in [shard for shard in self._shards if shard.is_done]:
            self._shards.remove(shard)
            self._writer.submit_commit(shard)

    def _release(self, shards: list[OpenShard], *, is_logged: bool = True) -> None:
        """Write a last checkpoint of these shards (`is_logged` false: count their tokens only), and release them."""
        running = self._running.values()
        if is_logged:
            self._writer.result_of(self._writer.write_checkpoint(shards, running, final=True))
        else:
            self._writer.take_snapshots(shards, running)
        self._remove(shards)
        for shard in shards:
            if shard.failure is not None:
                self._give_up(shard, shard.failure)
                continue
            self._writer.result_of(self._writer.release(shard, shard.generated))
            self._spans.ended(shard.work, "given back")

    def _remove(self, shards: Sequence[OpenShard]) -> None:
        """Remove the shards and their rows from the loop, the engine, the isolation and the writer."""
        removed = {id(shard) for shard in shards}
        for request_id in [name for name, (shard, _) in self._running.items() if id(shard) in removed]:
            self._engine.cancel(request_id)
            self._checkpointer.forget(request_id)
            del self._running[request_id]
        self._isolation.remove(shards)
        self._writer.forget(shards)
        for shard in shards:
            self._shards.remove(shard)

    def _end_failed_attempt(self, shard: OpenShard) -> None:
        """Give up the open shard whose attempt failed. Its earlier checkpoints remain valid."""
        if shard.failure is not None and any(shard is other for other in self._shards):
            self._remove([shard])
            self._give_up(shard, shard.failure)

    def _give_up(self, shard: OpenShard, error: Exception) -> None:
        """Record that this attempt can't write the shard's part, for a reason that concerns this shard alone."""
        if isinstance(error, JudgingInterrupted):  # no fault of the shard
            self._writer.result_of(self._writer.release(shard, shard.generated + shard.unlogged))
            self._spans.ended(shard.work, "given back")
            return
        self._writer.result_of(self._writer.give_up(shard, error))
        self._spans.ended(shard.work, "given up", type(error).__name__)

    # -- Ending the worker

    def _drain(self) -> None:
        """Commit finished shards, checkpoint and release the others, and empty the engine."""
        self._is_stopping = True
        self._commit_done()
        self._shards += [OpenShard.open(shard) for shard in self._fetcher.take_all()]
        self._release(list(self._shards))
        self._drain_side_work()
        self._writer.wait_for_commits()
        self._collect()

    def _drain_side_work(self) -> None:
        """Let the side work end, and empty the engine."""
        drain_side_work(self._side_work, self._engine, self._step, self._report, self._clock)
        while self._engine.has_work:
            self._engine.step()

    def _abandon(self) -> None:
        """The run ends with an error that no row caused. Record the end of each attempt where that is still possible,
        so that the attempts don't count as died."""
        shards = [*self._shards, *self._writer.committing]
        writes: list[Callable[[], Future[None]]] = [
            partial(self._writer.write_checkpoint, self._shards, self._running.values(), final=True)
        ]
        writes += [partial(self._writer.release, shard, shard.generated + shard.unlogged) for shard in shards]
        for shard in shards:
            self._spans.ended(shard.work, "given back", "worker_failed")
        for write in writes:
            try:
                self._writer.result_of(write())
            except Exception as error:  # noqa: BLE001 - the run ends with the first error; this is most often the same
                logger.warning("end of an attempt could not be logged", why=str(error))
