"""The worker's loop: keeps the engine full from several shards at once, and commits each shard when its last row ends.

This thread steps the engine and does nothing that waits. A reader takes the next shard and tokenizes it meanwhile. A
helper does all that writes, one task after the other: logs what is new every second or so, builds results, commits
parts; preparing a shard may take seconds, and must not hold those up. Heartbeats have threads of their own
(`heartbeats`): a write may wait minutes for the store. At most `max_open_shards` shards and one prepared one are in
memory.

A shard whose attempts keep dying before they get any further is taken with care: the rows that would run first are
computed apart, and noted durably before. If that is their attempt's last word, they are tried one by one; the one that
dies alone, twice, is not tried again.
"""

from __future__ import annotations

import threading
from bisect import insort
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from datetime import datetime, timedelta
from functools import partial
from typing import Final, TypeVar

import structlog

from engine.errors import ContextLengthExceeded, EngineError, EngineLost, RequestRefused
from engine.request import Completion
from pipeline.ledger.records import ShardReport
from pipeline.ports import Clock, StoreError
from pipeline.tracing import NO_TRACES, Traces
from pipeline.worker_client.protocol import (
    BY_URGENCY,
    RevokedShards,
    ShardSink,
    ShardSource,
    WorkerLoad,
)
from schemas.jobs.checkpoints import FinishedRows
from schemas.jobs.job import Tier
from schemas.requests.errors import RowError, RowErrorCode
from workers.model.loaded_model import LoadedModel, library_versions, speculation_facts
from workers.observability.metrics import MetricsReader
from workers.observability.progress import RateMeter, WorkerCounts, WorkerObserver, WorkerProgress
from workers.observability.tracing import ShardSpans, end_step
from workers.rows import ComputedRow, Envelope, PreparedRow, RefusedRow
from workers.settings import FIRST_CHECKPOINT_SECONDS, IDLE_SECONDS, WorkerSettings
from workers.shards.checkpointer import Checkpointer, ShardSnapshot
from workers.shards.cost_sharing import shares_of_step
from workers.shards.heartbeats import HEARTBEAT_THREADS, HeartbeatSender, Timer, thread_timer
from workers.shards.isolation import PROBE, Member, RowIsolation, probe
from workers.shards.lookahead import Lookahead, engine_has_all
from workers.shards.prefetch import ShardFetcher
from workers.shards.state import OpenShard, PreparedShard, ShardReader
from workers.side_work import NoSideWork, SideWork, run_out
from workers.translation.responses import ResponseBuilder, failure_of

Result = TypeVar("Result")

WAIT_SECONDS: Final = 0.1
"""Between two looks at the heartbeats, while the loop waits for a write."""

logger = structlog.get_logger(__name__)


class ShardWorker:
    """Works on shards of one loaded model until the source has no more."""

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
    ) -> None:
        """`helper` replaces the other threads; one that runs tasks at once makes the worker deterministic.
        `beside`: what is computed beside the shards.  `heartbeat_executor`: of the heartbeats, where it isn't the
        helper.  `heartbeat_timer`: repeats heartbeats where such an executor is given; None: nothing does there."""
        self._model = model
        self._engine = model.engine
        self._sink = sink
        self._clock = clock
        self._settings = settings or WorkerSettings()
        self._observer = observer
        self._given_helper = helper
        self._given_heartbeat_executor = heartbeat_executor or helper
        self._heartbeat_timer = heartbeat_timer or (nullcontext if self._given_heartbeat_executor else thread_timer)
        self._beside = beside or NoSideWork(clock)
        self._spans = ShardSpans(clock, model.name, traces, self._settings.traced_step_seconds)
        reader = ShardReader(model, self._settings.policies)
        self._fetcher = ShardFetcher(source, sink, reader, clock, self._settings.look_seconds)
        self._checkpointer = Checkpointer(model.engine, ResponseBuilder(model.tokenizer), sink)
        self._versions = library_versions()
        timed = self._settings.request_timeout is not None
        self._ahead = Lookahead(model.max_num_seqs, self._settings.watermark, timed=timed)
        self._zero = clock.now() - timedelta(seconds=self._engine.clock())
        self._shards: list[OpenShard] = []
        self._running: dict[str, tuple[OpenShard, PreparedRow]] = {}
        self._trials = RowIsolation(model.max_num_seqs)
        self._probe = probe(model)
        self._max_rows = model.max_num_seqs
        self._now = clock.monotonic
        self._committing: dict[Future[bool], OpenShard] = {}
        self._beginning: tuple[OpenShard, Future[None]] | None = None
        self._logging: Future[None] | None = None
        self._counts = WorkerCounts()
        self._rate = RateMeter()
        self._figures = MetricsReader(model.name, model.engine, clock.monotonic())
        self._heartbeats: HeartbeatSender | None = None
        self._next_report = 0.0
        self._next_log: float | None = None  # None: nothing is being computed

    def run(self, stop: threading.Event | None = None) -> WorkerProgress:
        """Work until the source is finished, or until `stop` is set; unfinished shards are then given back.

        Raises:
            BrokenEngineError: no request gets through the engine.  EngineLost: a part of it is gone.
            ModelMismatchError: a shard is pinned to another model.
            StoreError: the store can't be read or written.
        """
        with ExitStack() as pools:

            def pool(name: str, threads: int = 1) -> Executor:
                made = ThreadPoolExecutor(max_workers=threads, thread_name_prefix=f"worker-{name}")
                pools.callback(made.shutdown, wait=True, cancel_futures=True)
                return made

            helper = self._given_helper or pool("helper")
            reader = self._given_helper or pool("reader")
            executor = self._given_heartbeat_executor or pool("heartbeat", HEARTBEAT_THREADS)
            self._heartbeats = HeartbeatSender(self._sink, self._clock, executor, self._settings.stuck_seconds)
            pools.enter_context(self._heartbeat_timer(self._heartbeats.repeat))
            stopped = self._work(helper, reader, stop)
        progress = self._progress(stopped)
        if self._observer is not None:
            self._observer.progress(progress)
        return progress

    def _work(self, helper: Executor, reader: Executor, stop: threading.Event | None) -> bool:
        """Turn after turn to the end; whether it was told to stop."""
        stopped = False
        try:
            while not self._finished:
                stopped = stop is not None and stop.is_set()
                if stopped:
                    self._drain(helper)
                    break
                self._turn(helper, reader)
            else:
                self._run_out(helper)
        except Exception:
            self._abandon(helper)
            raise
        return stopped

    @property
    def _finished(self) -> bool:
        return self._fetcher.exhausted and not (self._shards or self._committing)

    def _turn(self, helper: Executor, reader: Executor) -> None:
        """One turn of the loop: at most one step of the engine."""
        self._collect(helper)
        self._fetch_ahead(reader)
        self._beside.turn(admit=not (self._trials or self._trials.trying))
        self._feed(helper)
        if self._engine.has_work:
            self._step()
        elif not self._trials and (self._fetcher.preparing or self._beginning or self._committing or not self._shards):
            self._beside.rest(IDLE_SECONDS)
        self._commit_done(helper)
        self._log(helper)
        self._tell()

    def _fetch_ahead(self, reader: Executor) -> None:
        """Open the prepared shard when there is too little left to do, and have the one after it fetched and prepared
        meanwhile: preparing takes time, in which the engine should not run dry."""
        room = len(self._shards) < self._settings.max_open_shards
        fetcher = self._fetcher
        if room and (fetcher.source_finished or self._ahead.wants_shard(self._shards, self._engine.num_waiting)):
            shard = fetcher.take()
            if shard is not None:
                self._open(shard)
        fetcher.fetch(reader, [shard.work.tier for shard in self._shards])

    def _open(self, shard: PreparedShard) -> None:
        """Behind those that are as urgent."""
        opened = OpenShard.open(shard)
        insort(self._shards, opened, key=lambda other: BY_URGENCY.index(other.work.tier))
        self._trials.open(opened)

    def _collect(self, helper: Executor) -> None:
        """Take over what the other threads have done; their exceptions surface here."""
        shard = self._fetcher.collect()
        if shard is not None:
            self._counts = self._counts.with_refused(sum(len(row.names) for row in shard.refused))
            self._figures.ended.note_refused(shard.work.tier, len(shard.refused))
            work, rows = shard.work, len(shard.work.table)
            logger.info("shard taken", job=work.job.id, shard=work.shard, rows=rows, **self._spans.taken(work))
            if shard is not self._fetcher.prepared:
                self._open(shard)
        for future in [future for future in self._committing if future.done()]:
            try:
                committed = future.result()
            except StoreError:
                raise
            except Exception as error:  # noqa: BLE001 - of one shard; the worker goes on with others
                self._give_up(self._committing.pop(future), error, helper)
                continue
            work = self._committing.pop(future).work
            self._counts = self._counts.with_part(len(work.table), committed)
            event = "shard committed" if committed else "shard was committed by another attempt"
            traced = self._spans.ended(work, "committed" if committed else "repeated")
            logger.info(event, job=work.job.id, shard=work.shard, rows=len(work.table), **traced)
        if self._logging is not None and self._logging.done():
            self._logging.result()
            self._logging = None
        for failed in [shard for shard in self._shards if shard.failure is not None]:
            self._end_attempt(failed, helper)
        if self._beginning is not None and self._beginning[1].done():
            (beginning, begun), self._beginning = self._beginning, None
            if self._is_written(beginning, begun, helper):
                beginning.begun = True
                self._log_soon()
        if self._heartbeats is not None:
            self._release_revoked(self._heartbeats.collect_revoked(), helper)

    def _release_revoked(self, revoked: RevokedShards, helper: Executor) -> None:
        """Stop computing these: their jobs are being closed, or others compute them."""
        names = revoked.to_release | revoked.committed
        prepared = self._fetcher.prepared
        if prepared is not None and (prepared.work.job.id, prepared.work.shard) in names:
            self._unprepare()
        for wanted, log in ((revoked.committed, False), (revoked.to_release, True)):
            shards = [shard for shard in self._shards if (shard.work.job.id, shard.work.shard) in wanted]
            if shards:
                self._give_back(shards, helper, log=log)

    def _feed(self, helper: Executor) -> None:
        """Give the engine rows, in the planner's order, as far ahead as it needs to choose well."""
        if self._trials or self._trials.trying:
            if self._engine.has_work:
                return
            if self._trials.undecided:
                self._engine.add(self._probe)
                return
            if self._trials.is_proving(self._now()):
                self._prove(helper)
                return
            if self._trials:
                self._try_apart(self._trials.next_group(), helper)
                return
            if self._trials.noted:
                # They survived. If the next rows end the process that must be known, or these are tried for ever.
                self._result_of(self._submit_log(self._shards, helper, final=False))
            self._trials.release()
            self._try_apart((), helper)
        last_open = self._fetcher.dry or self._fetcher.exhausted
        ahead = self._ahead.rows(last_open=last_open)
        for shard in self._shards:
            limit = ahead + self._giving_way_to(shard)
            if shard.waiting and self._engine.num_waiting < limit and not self._has_begun(shard, helper):
                break
            while shard.waiting and self._engine.num_waiting < limit:
                self._add(shard, shard.waiting.popleft())
        self._engine.settle(more_to_come=not engine_has_all(self._shards, last_open=last_open))

    def _giving_way_to(self, shard: OpenShard) -> int:
        """Rows in the engine that are less urgent than this shard's: these don't wait behind them."""
        if self._shards[-1].work.tier is shard.work.tier:
            return 0
        return sum(other.work.tier is not shard.work.tier for other, _ in self._running.values())

    def _has_begun(self, shard: OpenShard, helper: Executor) -> bool:
        """Whether it is durable that the shard is begun; if not, it is being written."""
        if not shard.begun and self._beginning is None:
            begun = helper.submit(self._sink.begin, shard.work)
            self._beginning = shard, begun
            if begun.done():
                self._collect(helper)
        return shard.begun

    def _prove(self, helper: Executor) -> None:
        """Compute a harmless request once more before the next row is tried. It is durable that no row is computed, so
        that a death in the meantime is no row's doing."""
        self._note((), helper)
        self._beside.rest(IDLE_SECONDS)
        self._engine.add(self._probe)

    def _try_apart(self, group: Sequence[Member], helper: Executor) -> None:
        """Compute these and no others, once that is durable."""
        for shard, _ in group:
            if not shard.begun and shard.failure is None:
                shard.begun = self._is_written(shard, helper.submit(self._sink.begin, shard.work), helper)
        self._note([member for member in group if member[0].failure is None], helper)
        for shard, row in group:
            if shard.failure is None:
                self._add(shard, row)
        if group:
            self._log_soon()

    def _note(self, group: Sequence[Member], helper: Executor) -> None:
        """Have what must be durable before the group is tried."""
        for shard, rows in self._trials.notes(group):
            self._is_written(shard, helper.submit(self._sink.note, shard.work, rows), helper)

    def _is_written(self, shard: OpenShard, written: Future[None], helper: Executor) -> bool:
        """Wait for a write that concerns this shard alone. One that fails for another reason than the store ends the
        shard's attempt, and nothing else."""
        try:
            self._result_of(written)
        except StoreError:
            raise
        except Exception as error:  # noqa: BLE001 - recorded; the worker goes on with others
            shard.failure = error
            self._end_attempt(shard, helper)
            return False
        return True

    def _add(self, shard: OpenShard, row: PreparedRow) -> None:
        request = row.request
        timeout = self._settings.request_timeout
        if timeout is not None:
            request = replace(request, deadline=self._engine.clock() + timeout)
        try:
            self._engine.add(request)
        except RequestRefused as error:
            too_long = isinstance(error, ContextLengthExceeded)
            code = RowErrorCode.CONTEXT_LENGTH_EXCEEDED if too_long else RowErrorCode.INVALID_REQUEST
            now = self._engine.clock()
            refused = RefusedRow(row.names, row.body.model, RowError(code, str(error)), now, now)
            self._checkpointer.finish(shard, refused)
            self._counts = self._counts.with_refused(len(row.names))
            self._figures.ended.note_refused(shard.work.tier, 1)
        else:
            self._running[request.request_id] = (shard, row)
            shard.in_engine += 1
            if self._next_log is None:
                self._log_soon()

    def _step(self) -> None:
        sample = self._spans.sample(self._shards)
        before = None if sample is None else self._engine.stats()
        shares, began = shares_of_step(self._engine, self._shards, len(self._running), self._max_rows), self._now()
        try:
            completions = self._engine.step()
        except EngineLost:
            raise  # no row's doing, and no row would get through
        except EngineError as error:
            logger.error("step failed", reason=str(error), running=self._engine.num_running)
            self._trials.step_failed(str(error))
            completions = self._engine.take_ended()
        seconds = self._now() - began
        for shard, share in shares:
            shard.busy_seconds += share * seconds
        if sample is not None and before is not None:
            end_step(sample, before, self._engine.stats())
        for completion in completions:
            self._end(completion)

    def _end(self, completion: Completion) -> None:
        """A request left the engine: note its outcome, or keep it as a suspect to be tried again."""
        if completion.request_id == PROBE:
            self._finish(self._trials.proved(completion.error))
            return
        if self._beside.take(completion):
            self._trials.doubt(completion.error)
            return
        found = self._running.pop(completion.request_id, None)
        if found is None:  # its shard was given back
            return
        shard, row = found
        shard.in_engine -= 1
        if failure_of(completion) is not None and self._trials.take(shard, row, completion):
            self._checkpointer.keep(shard, row, completion)
        else:
            self._finish([(shard, ComputedRow(row, completion))])

    def _finish(self, ended: Iterable[tuple[OpenShard, ComputedRow]]) -> None:
        """These rows have their outcome."""
        for shard, row in ended:
            self._checkpointer.finish(shard, row)
            failed = failure_of(row.completion) is not None
            self._counts = self._counts.with_computed(len(row.prepared.names), row.completion, failed)
            self._figures.ended.note(shard.work.tier, row.completion)

    def _commit_done(self, helper: Executor) -> None:
        for shard in [shard for shard in self._shards if shard.done]:
            self._shards.remove(shard)
            self._committing[helper.submit(self._commit, shard)] = shard

    def _commit(self, shard: OpenShard) -> bool:
        """On the helper: build the shard's results and commit them."""
        if shard.failure is not None:
            raise shard.failure
        self._checkpointer.build(shard, shard.finished, self._envelope(shard))
        report = ShardReport(
            generated=shard.generated + shard.unlogged,
            exposed=max(self._checkpointer.exposed, shard.unlogged),
            busy_seconds=shard.busy_seconds,
            engine_started_at=None if shard.first_start is None else self._wall(shard.first_start),
            engine_finished_at=None if shard.last_end is None else self._wall(shard.last_end),
            engine={
                **self._model.facts,
                **speculation_facts(self._engine.stats().speculation),
                **self._settings.policies.facts,
            },
            versions=self._versions,
        )
        return self._sink.commit(shard.work, FinishedRows(shard.built_rows, shard.built_usages), report)

    def _envelope(self, shard: OpenShard) -> Envelope:
        return Envelope(shard.work.job.id, shard.work.job.created_at, shard.work.attempt, self._wall)

    def _log_soon(self) -> None:
        """The first checkpoint of an attempt comes soon, whatever the interval: until then a death is silent, and may
        be a row's doing."""
        at = self._now() + min(FIRST_CHECKPOINT_SECONDS, self._settings.checkpoint_seconds)
        self._next_log = at if self._next_log is None else min(self._next_log, at)

    def _log(self, helper: Executor) -> None:
        """Have what is new made durable, when it is time."""
        if not self._shards:
            self._next_log = None
        now = self._clock.monotonic()
        if self._logging is None and self._next_log is not None and now >= self._next_log:
            self._next_log = now + self._settings.checkpoint_seconds
            self._logging = self._submit_log(self._shards, helper, final=False)

    def _submit_log(self, shards: list[OpenShard], helper: Executor, *, final: bool) -> Future[None]:
        return helper.submit(
            self._checkpointer.write, self._snapshots(shards), self._checkpointer.sampled(), final=final
        )

    def _snapshots(self, shards: list[OpenShard]) -> list[tuple[ShardSnapshot, Envelope]]:
        running: dict[int, list[PreparedRow]] = {id(shard): [] for shard in shards}
        for shard, row in self._running.values():
            if id(shard) in running:
                running[id(shard)].append(row)
        return [(self._checkpointer.snapshot(shard, running[id(shard)]), self._envelope(shard)) for shard in shards]

    def _result_of(self, future: Future[Result]) -> Result:
        """What a task of another thread came to. Heartbeats and reports go on while it is waited for."""
        self._wait_for(future)
        return future.result()

    def _wait_for(self, future: Future[Result]) -> None:
        while not future.done():
            self._tell()
            wait([future], timeout=WAIT_SECONDS)

    def _give_back(self, shards: list[OpenShard], helper: Executor, *, log: bool = True) -> None:
        """Log what there is of these shards (`log` false: count it only), forget them, and let others have them."""
        if log:
            self._result_of(self._submit_log(shards, helper, final=True))
        else:
            self._snapshots(shards)
        self._forget(shards)
        for shard in shards:
            if shard.failure is not None:
                self._give_up(shard, shard.failure, helper)
                continue
            self._result_of(helper.submit(self._sink.release, shard.work, shard.generated, shard.busy_seconds))
            self._spans.ended(shard.work, "given back")

    def _forget(self, shards: Sequence[OpenShard]) -> None:
        """Take the shards and their rows out of all that is computed."""
        gone = {id(shard) for shard in shards}
        for request_id in [name for name, (shard, _) in self._running.items() if id(shard) in gone]:
            self._engine.cancel(request_id)
            self._checkpointer.forget(request_id)
            del self._running[request_id]
        self._trials.drop(shards)
        if self._beginning is not None and id(self._beginning[0]) in gone:
            self._beginning = None
        for shard in shards:
            self._shards.remove(shard)

    def _end_attempt(self, shard: OpenShard, helper: Executor) -> None:
        """Give up the open shard that failed. What was logged of it before stands."""
        if shard.failure is not None and any(shard is other for other in self._shards):
            self._forget([shard])
            self._give_up(shard, shard.failure, helper)

    def _give_up(self, shard: OpenShard, error: Exception, helper: Executor) -> None:
        """The shard's part can't be made, for a reason that is the shard's own."""
        work, generated = shard.work, shard.generated + shard.unlogged
        self._result_of(helper.submit(self._sink.give_up, work, error, generated, shard.busy_seconds))
        self._spans.ended(work, "given up", type(error).__name__)

    def _abandon(self, helper: Executor) -> None:
        """The run ends with an error, which is no row's doing: have the attempts say that they ended, if they still
        can, so that nobody takes them for dead."""
        shards = [*self._shards, *self._committing.values()]
        ends: list[Callable[[], Future[None]]] = [lambda: self._submit_log(self._shards, helper, final=True)]
        ends += [
            partial(helper.submit, self._sink.release, s.work, s.generated + s.unlogged, s.busy_seconds) for s in shards
        ]
        for shard in shards:
            self._spans.ended(shard.work, "given back", "worker_failed")
        for end in ends:
            try:
                self._result_of(end())
            except Exception as error:  # noqa: BLE001 - the run ends with what failed first; this is most often the same
                logger.warning("the end of what was being computed could not be logged", why=str(error))

    def _wall(self, seconds: float) -> datetime:
        """UTC of a time on the engine's clock."""
        return self._zero + timedelta(seconds=seconds)

    def _tell(self) -> None:
        """Heartbeat and progress, when they are due."""
        now = self._clock.monotonic()
        if self._heartbeats is not None:
            self._heartbeats.note_turn()
        if self._heartbeats is not None and self._heartbeats.due:
            shards = [*self._shards, *self._committing.values()]
            held = [shard.work for shard in shards]
            held += [] if self._fetcher.prepared is None else [self._fetcher.prepared.work]
            unfinished = {(shard.work.job.id, shard.work.shard): shard.unfinished for shard in shards}
            queued: Counter[Tier] = Counter()
            for shard in self._shards:
                queued[shard.work.tier] += len(shard.waiting)
            figures = self._figures.read(now, queued, self._beside.figures())
            load = WorkerLoad(self._rate.look(now, self._engine.stats()), unfinished, figures)
            self._heartbeats.send(held, load)
        if self._observer is not None and now >= self._next_report:
            self._next_report = now + self._settings.report_seconds
            self._observer.progress(self._progress(stopped=False))

    def _progress(self, stopped: bool) -> WorkerProgress:
        queued = sum(len(shard.waiting) for shard in self._shards)
        held = len(self._shards) + len(self._committing)
        return WorkerProgress(self._counts, self._engine.stats(), queued, held, stopped)

    def _unprepare(self) -> None:
        """Count the prepared shard to the open ones, so that it is given back with them."""
        shard = self._fetcher.take()
        if shard is not None:
            self._shards.append(OpenShard.open(shard))

    def _drain(self, helper: Executor) -> None:
        """Commit what is done, log and give back the rest, and leave the engine empty."""
        self._commit_done(helper)
        self._shards += [OpenShard.open(shard) for shard in self._fetcher.take_all()]
        self._give_back(list(self._shards), helper)
        self._run_out(helper)
        for future in list(self._committing):
            self._wait_for(future)
        self._collect(helper)

    def _run_out(self, helper: Executor) -> None:
        """Let what is beside the shards end, and leave the engine empty."""
        run_out(self._beside, self._engine, self._step, self._tell, self._clock)
        while self._engine.has_work:
            self._engine.step()
