"""The job controller finds, plans and drives all open jobs of a root.

Several controllers may run, on one machine or on many. A lease lets one of them work at a time. Where the lease fails,
controllers race: plan segments and outcomes are written once each, and a shard that is queued twice may be computed
twice. A job that can't be planned, or whose objects contradict each other, is reported and paused; the other jobs go
on. An exception that planning raises concerns one job: it is logged, counted in the job's ledger, and planning is
retried a few times before the job ends as failed. A failure that can't be recorded stays in memory, and the job is not
planned again until it is recorded.
"""

from __future__ import annotations

import threading
import traceback
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import nullcontext
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
    OpenAnswers,
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
from pipeline.ports import ComponentStopped, Lease, PipelineError, World
from pipeline.routing.rules import RuleRouter
from pipeline.runtime.leader_election import RENEW_SECONDS, LeaderElection
from schemas.jobs.inputs import InputRef
from schemas.jobs.outcome import JobStatus

PLANNING_FAILED: Final = "planning_failed"
DEADLINE_UNREACHABLE: Final = "deadline_unreachable"

MAX_OPEN_CHECKS: Final = 5
"""Tracked jobs whose openness is checked in one refresh."""

MAX_PLANNING_FAILURES: Final = 3
"""Unexpected planning failures after which a job ends as failed."""

logger = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class JobControllerSettings:
    """Intervals and limits of the controller; times in seconds.

    Attributes:
        tick_interval_seconds: interval between two ticks.
        refresh_interval_seconds: interval between two listings of the markers of open jobs.
        sweep_interval_seconds: interval between two sweeps over all jobs, open or ended, for missing and stale markers.
        planners: jobs that are planned concurrently; one tenant occupies at most all planners but one
            (`planning_order`).
        retry_delay_seconds: delay before planning that failed temporarily is retried; doubles with each retry.
        max_retry_delay_seconds: upper bound of that delay.
        renew_interval_seconds: interval between two renewals of the lease.
        max_adding_seconds: longest time that one refresh spends on adding new jobs.
    """

    tick_interval_seconds: float = 0.2
    refresh_interval_seconds: float = 1.0
    sweep_interval_seconds: float = 3_600.0
    planners: int = 2
    retry_delay_seconds: float = 15.0
    max_retry_delay_seconds: float = 300.0
    renew_interval_seconds: float = RENEW_SECONDS
    max_adding_seconds: float = 0.25


class JobPlanner(Protocol):
    """Plans jobs of the root. Thread-safe."""

    def plan(self, ledger: JobLedger, *, in_time: bool) -> PlanOutcome:
        """Plan one job, as `plan_open_job` does. Any other exception counts as a planning failure of this job."""
        ...

    def cancel(self, job: str) -> None:
        """Cancel the job's planning, if it is running and can be stopped immediately; returns before planning has
        ended. `plan` then raises `PlanningCancelled`. Idempotent."""
        ...

    def end_stuck(self) -> None:
        """Stop planning that has made no progress for too long; `plan` then raises. Called at each tick."""
        ...

    def close(self) -> None:
        """Stop running plans that can be stopped immediately."""
        ...


class InProcessPlanner:
    """Plans on the calling thread, without isolation between jobs."""

    def __init__(
        self,
        world: World,
        open_input: Callable[[InputRef], PinnedInput],
        router: RuleRouter | None = None,
        open_answers: OpenAnswers = lambda _: nullcontext(),
    ) -> None:
        self._open_answers = open_answers
        self._world = world
        self._open_input = open_input
        self._router = router

    def plan(self, ledger: JobLedger, *, in_time: bool) -> PlanOutcome:
        """See `JobPlanner`."""
        return plan_open_job(
            ledger, self._world, self._open_input, in_time=in_time, router=self._router, open_answers=self._open_answers
        )

    def cancel(self, job: str) -> None:
        """A thread can't be ended."""

    def end_stuck(self) -> None:
        """A thread can't be ended."""

    def close(self) -> None:
        """A thread can't be ended."""


@dataclass(slots=True)
class _Failure:
    """An unexpected planning failure.

    Attributes:
        number: planning failures of the job so far; None: this one is not recorded yet.
    """

    error: Exception
    number: int | None = None


@dataclass(slots=True)
class _TrackedJob:
    """An open job and the state of its planning.

    Attributes:
        tenant, created_at: of the job; they decide the planning order.
        is_planned: the job needs no more planning: the plan is complete, or the job has ended.
        planning: the plan that is queued or running; None: none is, and planning is retried at `retry_at`.
        failure: of the last attempt, until it is recorded and, after the last attempt, the job has ended as failed.
        is_begun: the first segment of the plan is committed.
        tries: temporary planning failures in a row.
        is_in_time: the deadline can be met, or need not be checked.
    """

    ledger: JobLedger
    tenant: str
    created_at: datetime
    is_planned: bool = False
    planning: Future[PlanOutcome] | None = None
    failure: _Failure | None = None
    is_begun: bool = False
    tries: int = 0
    retry_at: float = 0.0
    is_in_time: bool = False

    @property
    def is_being_planned(self) -> bool:
        """Whether the job's plan has left the planning queue."""
        return self.planning is not None and (self.planning.running() or self.planning.done())


class JobController:
    """Plans and dispatches the open jobs of the root `world.store`.

    Args:
        open_input: opens a job's input for planning.
        lease: the lease that controllers contend for; None: this is the only controller.
        planners: executor that plans run on; None: threads of its own. `close` shuts it down.
        planner: plans the jobs on that executor; None: in this process. `close` closes it.
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
        self._tracked: dict[str, _TrackedJob] = {}
        self._planners = planners or ThreadPoolExecutor(self._settings.planners, thread_name_prefix="planner")
        self._planning = PlanningQueue(self._planners, self._settings.planners)
        self._sweeper = planners or ThreadPoolExecutor(1, thread_name_prefix="sweeper")
        self._leadership = LeaderElection(lease, world.clock, "dispatching", self._settings.renew_interval_seconds)
        self._next_refresh = self._next_sweep = 0.0
        self._sweeping: Future[SweepResult] | None = None

    def run(self, stop: threading.Event) -> None:
        """Tick until `stop` is set. Temporary failures of the store and the broker are logged and retried. Raises
        `ComponentStopped` when a retry can't help."""
        try:
            while not stop.is_set():
                try:
                    self.tick()
                except ComponentStopped:
                    raise
                except PipelineError as error:
                    logger.warning("a controller tick failed", reason=str(error))
                    self._world.clock.sleep(self._settings.refresh_interval_seconds)
                self._world.clock.sleep(self._settings.tick_interval_seconds)
        finally:
            self.close()

    def tick(self) -> None:
        """Refresh the open jobs, plan those without a plan, and dispatch. Raises `PipelineError` when the store or the
        broker can't be reached."""
        now = self._world.clock.monotonic()
        self._planner.end_stuck()
        if not self._leadership.now():
            self._dispatcher.stand_by()
            return
        self._sweep(now)
        if now >= self._next_refresh:
            self._next_refresh = now + self._settings.refresh_interval_seconds
            self._refresh_open_jobs()
        for name, tracked in self._tracked.items():
            self._plan(name, tracked, now)
        planning = {name for name, tracked in self._tracked.items() if tracked.is_planned or tracked.is_being_planned}
        self._dispatcher.tick(planning, self._leadership.now)

    def close(self) -> None:
        """Wait for plans that can't be stopped. The next controller plans the other jobs."""
        self._planning.close()
        self._planner.close()
        self._planners.shutdown(wait=True, cancel_futures=True)
        self._sweeper.shutdown(wait=True, cancel_futures=True)
        self._leadership.give_up()

    def _refresh_open_jobs(self) -> None:
        """Add new jobs and remove ended ones, by the markers of open jobs. A marker may outlive its job, so new jobs,
        and a few tracked jobs in rotation, are also checked for being open."""
        clock = self._world.clock
        marked = {ledger.name: ledger for ledger in marked_jobs(self._world.store)}
        checked = set(islice(self._tracked, MAX_OPEN_CHECKS))
        for name in [name for name in self._tracked if name not in marked or name in checked]:
            tracked = self._tracked.pop(name)
            if tracked.planning is not None or (name in marked and self._is_open(tracked.ledger)):
                self._tracked[name] = tracked  # at the end of the rotation
            else:
                self._dispatcher.forget(name)
                logger.info("job ended", job=name)
        until = clock.monotonic() + self._settings.max_adding_seconds
        for name, ledger in marked.items():
            if name in self._tracked or self._dispatcher.is_paused(name):
                continue
            if clock.monotonic() > until:
                self._next_refresh = 0.0  # tracked jobs must not wait; the next tick adds the remaining jobs
                return
            if self._is_open(ledger):
                self._add_job(name, ledger)

    def _is_open(self, ledger: JobLedger) -> bool:
        """Whether the job is open. A job that can't be read counts as open."""
        try:
            return is_open(ledger)
        except Exception as error:  # noqa: BLE001 - a failure of one job must not block the others
            logger.warning("a job's state can't be read now", job=ledger.name, reason=_reason(error))
            return True

    def _add_job(self, name: str, ledger: JobLedger) -> None:
        try:
            job = self._dispatcher.get_job(name) if self._dispatcher.add(ledger) else None
        except ComponentStopped:
            raise
        except PipelineError as error:  # the next refresh retries
            logger.warning("a job can't be read now", job=name, reason=str(error))
            return
        if job is not None:
            self._tracked[name] = _TrackedJob(ledger, job.tenant, job.created_at)
            logger.info("job added", job=name)

    def _sweep(self, now: float) -> None:
        """Start a sweep over all jobs when it is due. It runs on its own thread, since there may be very many jobs."""
        if self._sweeping is None and now >= self._next_sweep:
            self._sweeping = self._sweeper.submit(sweep, self._world.store)
        elif self._sweeping is not None and self._sweeping.done():
            sweeping, self._sweeping = self._sweeping, None
            self._next_sweep = now + self._settings.retry_delay_seconds
            try:
                swept = sweeping.result()
            except PipelineError:
                raise
            except Exception as error:  # noqa: BLE001 - a later sweep repairs the markers; open jobs go on
                logger.error("the marker sweep failed", reason=_reason(error), traceback=_trace(error))
                return
            self._next_sweep = now + self._settings.sweep_interval_seconds
            if swept.marked or swept.removed:
                logger.info("markers repaired", marked=swept.marked, removed=swept.removed)

    def _plan(self, name: str, tracked: _TrackedJob, now: float) -> None:
        if tracked.is_planned or self._dispatcher.is_paused(name):
            return
        self._end_unplanned(name, tracked, now)
        if (
            tracked.is_planned
            or tracked.failure is not None
            or now < tracked.retry_at
            or self._dispatcher.is_paused(name)
        ):
            return
        try:
            self._submit_or_apply(name, tracked)
        except ComponentStopped:
            raise
        except PlanningCancelled:
            logger.info("planning cancelled", job=name)  # the next tick ends the job
        except PipelineError as error:
            pause = min(
                self._settings.max_retry_delay_seconds,
                self._settings.retry_delay_seconds * 2.0 ** min(tracked.tries, 32),
            )
            tracked.tries, tracked.retry_at = tracked.tries + 1, now + pause
            logger.warning("planning failed and will be retried", job=name, reason=str(error), seconds=pause)
        except Exception as error:  # noqa: BLE001 - an exception of planning concerns one job
            tracked.failure = _Failure(error)
            self._end_unplanned(name, tracked, now)

    def _end_unplanned(self, name: str, tracked: _TrackedJob, now: float) -> None:
        """End a job that needs no more planning: a closed one, or one whose planning failed too often. A job that can't
        be ended is paused, for longer each time, and is not planned meanwhile."""
        try:
            self._end_closed(name, tracked)
            if tracked.failure is not None and not tracked.is_planned:
                self._count_failure(name, tracked, tracked.failure, now)
        except ComponentStopped:
            raise
        except Exception as error:  # noqa: BLE001 - a failure of one job; the others go on
            self._dispatcher.pause(name, error)

    def _submit_or_apply(self, name: str, tracked: _TrackedJob) -> None:
        """Submit the job for planning, or apply the outcome of its plan; raises the exception that planning raised."""
        if tracked.planning is None:
            plan = partial(self._planner.plan, tracked.ledger, in_time=tracked.is_in_time)
            tracked.planning = self._planning.submit(tracked.tenant, tracked.created_at, plan)
        elif tracked.planning.done():
            planning, tracked.planning = tracked.planning, None
            outcome = planning.result()
            if outcome.refused is not None:
                tracked.is_planned = True
                self._dispatcher.remove_ended(name)
                logger.info("job refused", job=name, reason=outcome.refused)
            elif outcome.closed is not None:
                self._report_closed(name, tracked, outcome.closed)
            elif outcome.tokens_of_models is not None:
                tracked.is_in_time = True
                tracked.is_planned = self._fail_if_late(tracked.ledger, outcome.tokens_of_models)
            else:
                tracked.is_planned = True

    def _end_closed(self, name: str, tracked: _TrackedJob) -> None:
        """End a job that was closed before a segment of its plan was committed, and cancel its planning. A plan that
        has begun is completed, so that each row of the input gets a result."""
        closing = self._dispatcher.get_closing(name)
        if closing is None or tracked.is_begun:
            return
        tracked.is_begun = tracked.ledger.segment(0) is not None
        if tracked.is_begun:
            return
        if tracked.planning is not None and not tracked.planning.cancel():
            self._planner.cancel(name)
            return
        tracked.planning = None
        self._report_closed(name, tracked, end_unplanned(tracked.ledger, tracked.ledger.job(), closing, self._world))

    def _report_closed(self, name: str, tracked: _TrackedJob, status: JobStatus) -> None:
        tracked.is_planned = True
        self._dispatcher.remove_ended(name, status)
        logger.info("job ended before it was planned", job=name, status=status.value)

    def _count_failure(self, name: str, tracked: _TrackedJob, failure: _Failure, now: float) -> None:
        """Count an unexpected planning failure in the job's ledger, so that the count survives restarts. Raises when
        the ledger can't be written; a repeated call doesn't repeat writes that succeeded."""
        reason, at = _reason(failure.error), self._world.clock.now()
        if failure.number is None:
            failure.number = tracked.ledger.record_planning_failure(
                lambda number: PlanningFailure(attempt=number, error=reason, at=at)
            )
            trace = _trace(failure.error)
            logger.error("planning failed", job=name, attempt=failure.number, reason=reason, traceback=trace)
        if failure.number < MAX_PLANNING_FAILURES:
            tracked.failure, tracked.retry_at = None, now + self._settings.retry_delay_seconds
            return
        message = f"planning failed {failure.number} times, the last time with: {reason}; the log says where"
        fail_job(tracked.ledger, tracked.ledger.job(), self._world, PLANNING_FAILED, message)
        tracked.is_planned, tracked.failure = True, None
        self._dispatcher.remove_ended(name)
        logger.info("job refused", job=name, reason=message)

    def _fail_if_late(self, ledger: JobLedger, tokens: Mapping[str, int]) -> bool:
        """End a job as failed if the forecast says that it misses its deadline; returns whether it was ended."""
        job = ledger.job()
        keys, by_model = {pin.name: pin.base_key for pin in job.models}, Counter[str]()
        for name, left in tokens.items():
            by_model[keys[name]] += left
        end = self._dispatcher.forecast_end(job, by_model)
        if end is None or job.deadline is None or end <= job.deadline:
            return False
        due, then = (moment.isoformat(timespec="seconds") for moment in (job.deadline, end))
        message = f"it should be done at {then}, but its deadline is {due}; submit it with a later one, or without"
        fail_job(ledger, job, self._world, DEADLINE_UNREACHABLE, message)
        self._dispatcher.remove_ended(job.id)
        logger.info("job refused", job=job.id, reason=message)
        return True


def _reason(error: Exception) -> str:
    """One line that describes the error, without the message of an unexpected one: that may contain a prompt."""
    return str(error) if isinstance(error, PlanningFailed) else type(error).__name__


def _trace(error: Exception) -> str:
    """The error's stack frames, without messages; for an error of another process, the frames that it reported."""
    frames = error.trace if isinstance(error, PlanningFailed) and error.trace else None
    return frames or "".join(traceback.format_tb(error.__traceback__))
