"""All the open jobs of a root: each is found, planned, and driven to its end.

Several may run, on one machine or on many. A lease has one of them work at a time; where it fails they race for plan
segments and outcomes, each of which is written once, and shards are put twice, which may cost work done twice. A job
that can't be planned or contradicts itself is told of and left alone; the others go on. Whatever planning a job raises
is that job's: it is logged, counted in the job's ledger, and tried again a few times before the job ends as failed. A
failure that can't be written is remembered: the job is not planned again for it.
"""

from __future__ import annotations

import threading
import traceback
from collections.abc import Callable, Mapping
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from itertools import islice
from typing import Final, Protocol

import structlog

from pipeline.dispatcher.dispatcher import Dispatcher
from pipeline.dispatcher.planning_queue import PlanningQueue
from pipeline.inputs.open import PinnedInput, open_pinned
from pipeline.jobs.planning import (
    PlanningCancelled,
    PlanningFailed,
    PlanOutcome,
    end_unplanned,
    fail_job,
    plan_open_job,
)
from pipeline.ledger.active_index import SweepResult, is_open, marked_jobs, sweep
from pipeline.ledger.ledger import JobLedger
from pipeline.ledger.records import PlanningFailure
from pipeline.ports import Lease, PartStopped, PipelineError, World
from pipeline.runtime.leader_election import RENEW_SECONDS, Leading
from schemas.jobs.inputs import InputRef
from schemas.jobs.outcome import JobStatus

PLANNING_FAILED: Final = "planning_failed"
DEADLINE_UNREACHABLE: Final = "deadline_unreachable"

LOOKED_AT: Final = 5
"""Of the jobs that are known so many are asked in each look whether they are open still."""

MAX_PLANNING_FAILURES: Final = 3
"""After so many failures that were not foreseen a job ends as failed."""

logger = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class JobControllerSettings:
    """How a root is looked after; times in seconds.

    Attributes:
        tick_every: between two looks at the open jobs.
        look_every: between two listings of which jobs are open.
        sweep_every: between two looks through all jobs that ever were, for markers that are missing or stale.
        planners: jobs planned at once; one tenant occupies at most all of them but one (`planning_order`).
        retry_after: a job that couldn't be planned now is tried again after this long; doubles each time,
        max_retry_after: up to so long.
        renew_every: between two renewals of the lease.
        taking_up: the time that a look may take for jobs that are new.
    """

    tick_every: float = 0.2
    look_every: float = 1.0
    sweep_every: float = 3_600.0
    planners: int = 2
    retry_after: float = 15.0
    max_retry_after: float = 300.0
    renew_every: float = RENEW_SECONDS
    taking_up: float = 0.25


class JobPlanner(Protocol):
    """Plans jobs of the root. Threads share it."""

    def plan(self, ledger: JobLedger, *, in_time: bool) -> PlanOutcome:
        """See `plan_open_job`. What else it raises counts as a failure of this job."""
        ...

    def cancel(self, job: str) -> None:
        """End planning of this job, if it is under way and that can be done at once; returns before it has ended.
        `plan` then raises `PlanningCancelled`. May be called again."""
        ...

    def end_stuck(self) -> None:
        """End planning that has made no progress for too long; `plan` then raises. Called at each tick."""
        ...

    def close(self) -> None:
        """End what is being planned, where that can be done at once."""
        ...


class InProcessPlanner:
    """Plans on the calling thread, with nothing between a job and the others."""

    def __init__(self, world: World, open_input: Callable[[InputRef], PinnedInput]) -> None:
        self._world = world
        self._open_input = open_input

    def plan(self, ledger: JobLedger, *, in_time: bool) -> PlanOutcome:
        """See `JobPlanner`."""
        return plan_open_job(ledger, self._world, self._open_input, in_time=in_time)

    def cancel(self, job: str) -> None:
        """A thread can't be ended."""

    def end_stuck(self) -> None:
        """A thread can't be ended."""

    def close(self) -> None:
        """A thread can't be ended."""


@dataclass(slots=True)
class _Failure:
    """Planning has failed for a reason that was not foreseen.

    Attributes:
        number: how often it has; None: this time is not recorded yet.
    """

    error: Exception
    number: int | None = None


@dataclass(slots=True)
class _Known:
    """A job that was found.

    Attributes:
        tenant, created_at: of the job; they decide when it is planned.
        planning: under way; None: the plan stands, or it is to be tried again at `retry_at`.
        failure: of the last try, until it is recorded, and, if that was the last one, the job has ended as failed.
        begun: a segment of the plan stands.
        tries: how often in a row it could not be planned now.
        in_time: it can be done in time, or that doesn't matter.
    """

    ledger: JobLedger
    tenant: str
    created_at: datetime
    planned: bool = False
    planning: Future[PlanOutcome] | None = None
    failure: _Failure | None = None
    begun: bool = False
    tries: int = 0
    retry_at: float = 0.0
    in_time: bool = False

    @property
    def is_being_planned(self) -> bool:
        """Its turn has come."""
        return self.planning is not None and (self.planning.running() or self.planning.done())


class JobController:
    """Plans and dispatches what is open in the root that `world.store` is.

    Args:
        open_input: how a job's input is opened for planning.
        lease: one that others contend for; None: nobody else is there.
        planners: where jobs are planned, instead of threads of its own; shut down by `close`.
        planner: what plans them there, instead of this process; closed by `close`.
    """

    def __init__(
        self,
        world: World,
        dispatcher: Dispatcher,
        open_input: Callable[[InputRef], PinnedInput] = open_pinned,
        settings: JobControllerSettings | None = None,
        lease: Lease | None = None,
        planners: Executor | None = None,
        planner: JobPlanner | None = None,
    ) -> None:
        self._world = world
        self._dispatcher = dispatcher
        self._planner = planner or InProcessPlanner(world, open_input)
        self._settings = settings or JobControllerSettings()
        self._known: dict[str, _Known] = {}
        self._planners = planners or ThreadPoolExecutor(self._settings.planners, thread_name_prefix="planner")
        self._planning = PlanningQueue(self._planners, self._settings.planners)
        self._sweeper = planners or ThreadPoolExecutor(1, thread_name_prefix="sweeper")
        self._leading = Leading(lease, world.clock, "dispatching", self._settings.renew_every)
        self._next_look = self._next_sweep = 0.0
        self._sweeping: Future[SweepResult] | None = None

    def run(self, stop: threading.Event) -> None:
        """Tick until `stop` is set. What the store or the broker fails to do now is logged and tried again. Raises
        `PartStopped`: trying again can't help."""
        try:
            while not stop.is_set():
                try:
                    self.tick()
                except PartStopped:
                    raise
                except PipelineError as error:
                    logger.warning("a look failed", reason=str(error))
                    self._world.clock.sleep(self._settings.look_every)
                self._world.clock.sleep(self._settings.tick_every)
        finally:
            self.close()

    def tick(self) -> None:
        """Find what is open, plan what isn't planned, dispatch. Raises `PipelineError` when the store or the broker
        can't be reached."""
        now = self._world.clock.monotonic()
        self._planner.end_stuck()
        if not self._leading.now():
            self._dispatcher.stand_by()
            return
        self._sweep(now)
        if now >= self._next_look:
            self._next_look = now + self._settings.look_every
            self._look()
        for name, known in self._known.items():
            self._plan(name, known, now)
        planning = {name for name, known in self._known.items() if known.planned or known.is_being_planned}
        self._dispatcher.tick(planning, self._leading.now)

    def close(self) -> None:
        """Wait for what is being planned and can't be ended; the rest is left to the next one."""
        self._planning.close()
        self._planner.close()
        self._planners.shutdown(wait=True, cancel_futures=True)
        self._sweeper.shutdown(wait=True, cancel_futures=True)
        self._leading.give_up()

    def _look(self) -> None:
        """Take up jobs that are new, and forget those that have ended. Markers tell of both; whether a job is open is
        only asked where it is new, and of the others in turn: a marker may outlive its job."""
        clock = self._world.clock
        marked = {ledger.name: ledger for ledger in marked_jobs(self._world.store)}
        turn = set(islice(self._known, LOOKED_AT))
        for name in [name for name in self._known if name not in marked or name in turn]:
            known = self._known.pop(name)
            if known.planning is not None or (name in marked and self._is_open(known.ledger)):
                self._known[name] = known  # behind the others
            else:
                self._dispatcher.forget(name)
                logger.info("job ended", job=name)
        until = clock.monotonic() + self._settings.taking_up
        for name, ledger in marked.items():
            if name in self._known or self._dispatcher.rests(name):
                continue
            if clock.monotonic() > until:
                self._next_look = 0.0  # those at work must not wait for this; the rest comes with the next tick
                return
            if self._is_open(ledger):
                self._take_up(name, ledger)

    def _is_open(self, ledger: JobLedger) -> bool:
        """A job that can't be looked at is taken for open."""
        try:
            return is_open(ledger)
        except Exception as error:  # noqa: BLE001 - one job must not keep the others from being looked at
            logger.warning("a job can't be looked at now", job=ledger.name, reason=_reason(error))
            return True

    def _take_up(self, name: str, ledger: JobLedger) -> None:
        try:
            job = self._dispatcher.job_of(name) if self._dispatcher.add(ledger) else None
        except PartStopped:
            raise
        except PipelineError as error:  # the next look comes to it again
            logger.warning("a job can't be read now", job=name, reason=str(error))
            return
        if job is not None:
            self._known[name] = _Known(ledger, job.tenant, job.created_at)
            logger.info("job taken up", job=name)

    def _sweep(self, now: float) -> None:
        """Have all jobs that ever were looked through when it is time; beside the loop, for there may be very many."""
        if self._sweeping is None and now >= self._next_sweep:
            self._sweeping = self._sweeper.submit(sweep, self._world.store)
        elif self._sweeping is not None and self._sweeping.done():
            sweeping, self._sweeping = self._sweeping, None
            self._next_sweep = now + self._settings.retry_after
            try:
                swept = sweeping.result()
            except PipelineError:
                raise
            except Exception as error:  # noqa: BLE001 - markers are mended another time; open jobs go on
                logger.error("a sweep failed", reason=_reason(error), traceback=_trace(error))
                return
            self._next_sweep = now + self._settings.sweep_every
            if swept.marked or swept.removed:
                logger.info("markers mended", marked=swept.marked, removed=swept.removed)

    def _plan(self, name: str, known: _Known, now: float) -> None:
        if known.planned or self._dispatcher.rests(name):
            return
        self._end_unplanned(name, known, now)
        if known.planned or known.failure is not None or now < known.retry_at or self._dispatcher.rests(name):
            return
        try:
            self._plan_on(name, known)
        except PartStopped:
            raise
        except PlanningCancelled:
            logger.info("planning was cancelled", job=name)  # the next tick ends the job
        except PipelineError as error:
            pause = min(self._settings.max_retry_after, self._settings.retry_after * 2.0 ** min(known.tries, 32))
            known.tries, known.retry_at = known.tries + 1, now + pause
            logger.warning("planning failed, and is tried again", job=name, reason=str(error), seconds=pause)
        except Exception as error:  # noqa: BLE001 - whatever planning a job raises is that job's
            known.failure = _Failure(error)
            self._end_unplanned(name, known, now)

    def _end_unplanned(self, name: str, known: _Known, now: float) -> None:
        """End a job that is not to be planned any more. One that can't be ended is left alone for longer and longer,
        and is not planned meanwhile."""
        try:
            self._end_closed(name, known)
            if known.failure is not None and not known.planned:
                self._count_failure(name, known, known.failure, now)
        except PartStopped:
            raise
        except Exception as error:  # noqa: BLE001 - of one job; the others go on
            self._dispatcher.leave_alone(name, error)

    def _plan_on(self, name: str, known: _Known) -> None:
        """Begin to plan, or take in what planning came to; raises what it raised."""
        if known.planning is None:
            plan = partial(self._planner.plan, known.ledger, in_time=known.in_time)
            known.planning = self._planning.submit(known.tenant, known.created_at, plan)
        elif known.planning.done():
            planning, known.planning = known.planning, None
            outcome = planning.result()
            if outcome.refused is not None:
                known.planned = True
                self._dispatcher.failed(name)
                logger.info("job refused", job=name, reason=outcome.refused)
            elif outcome.closed is not None:
                self._report_closed(name, known, outcome.closed)
            elif outcome.tokens_of_models is not None:
                known.in_time = True
                known.planned = self._refuse_late(known.ledger, outcome.tokens_of_models)
            else:
                known.planned = True

    def _end_closed(self, name: str, known: _Known) -> None:
        """End a job that was closed before any of it was planned, and what is planning it: it need not be planned any
        more. What is begun is planned to its end, so that each row of the input gets a result."""
        closing = self._dispatcher.closing_of(name)
        if closing is None or known.begun:
            return
        known.begun = known.ledger.segment(0) is not None
        if known.begun:
            return
        if known.planning is not None and not known.planning.cancel():
            self._planner.cancel(name)
            return
        known.planning = None
        self._report_closed(name, known, end_unplanned(known.ledger, known.ledger.job(), closing, self._world))

    def _report_closed(self, name: str, known: _Known, status: JobStatus) -> None:
        known.planned = True
        self._dispatcher.failed(name, status)
        logger.info("job ended before it was planned", job=name, status=status.value)

    def _count_failure(self, name: str, known: _Known, failure: _Failure, now: float) -> None:
        """Count a failure that was not foreseen, in the ledger: how often a job failed survives any restart. Raises
        when it can't be written; what was written by then is not written again."""
        reason, at = _reason(failure.error), self._world.clock.now()
        if failure.number is None:
            failure.number = known.ledger.record_planning_failure(
                lambda number: PlanningFailure(attempt=number, error=reason, at=at)
            )
            trace = _trace(failure.error)
            logger.error("planning failed", job=name, attempt=failure.number, reason=reason, traceback=trace)
        if failure.number < MAX_PLANNING_FAILURES:
            known.failure, known.retry_at = None, now + self._settings.retry_after
            return
        message = f"planning failed {failure.number} times, the last time with: {reason}; the log says where"
        fail_job(known.ledger, known.ledger.job(), self._world, PLANNING_FAILED, message)
        known.planned, known.failure = True, None
        self._dispatcher.failed(name)
        logger.info("job refused", job=name, reason=message)

    def _refuse_late(self, ledger: JobLedger, tokens: Mapping[str, int]) -> bool:
        """End a job as failed that would be late, by what is known now; whether it has ended so."""
        job = ledger.job()
        keys = {pin.name: pin.key for pin in job.models}
        end = self._dispatcher.end_of(job, {keys[name]: left for name, left in tokens.items()})
        if end is None or job.deadline is None or end <= job.deadline:
            return False
        due, then = (moment.isoformat(timespec="seconds") for moment in (job.deadline, end))
        message = f"it should be done at {then}, but its deadline is {due}; submit it with a later one, or without"
        fail_job(ledger, job, self._world, DEADLINE_UNREACHABLE, message)
        self._dispatcher.failed(job.id)
        logger.info("job refused", job=job.id, reason=message)
        return True


def _reason(error: Exception) -> str:
    """One line without the message of what was not foreseen: that may hold a prompt."""
    return str(error) if isinstance(error, PlanningFailed) else type(error).__name__


def _trace(error: Exception) -> str:
    """Where it was raised, without messages; of another process, as that one said."""
    frames = error.trace if isinstance(error, PlanningFailed) and error.trace else None
    return frames or "".join(traceback.format_tb(error.__traceback__))
