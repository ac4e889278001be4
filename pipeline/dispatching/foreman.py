"""All the open jobs of a root: each is found, planned, and driven to its end.

Several may run, on one machine or on many. A lease has one of them work at a time; where it fails they race for plan
segments and outcomes, each of which is written once, and shards are put twice, which may cost work done twice. A job
that can't be planned or contradicts itself is told of and left alone; the others go on.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from typing import Final

import structlog

from pipeline.active import Swept, is_open, marked_jobs, sweep, tidy
from pipeline.dispatching.dispatcher import Dispatcher
from pipeline.inputs import PinnedInput, open_pinned
from pipeline.leading import RENEW_SECONDS, Leading
from pipeline.ledger import JobLedger, LedgerError
from pipeline.planner import InputError, InputEstimate, InvalidInput
from pipeline.planning import fail_job, measure_job, plan_job
from pipeline.ports import Lease, PipelineError, World
from schemas.inputs import InputRef

INPUT_UNREADABLE: Final = "input_unreadable"
DEADLINE_UNREACHABLE: Final = "deadline_unreachable"

LOOKED_AT: Final = 5
"""Of the jobs that are known so many are asked in each look whether they are open still."""

logger = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class ForemanSettings:
    """How a root is looked after; times in seconds.

    Attributes:
        tick_every: between two looks at the open jobs.
        look_every: between two listings of which jobs are open.
        sweep_every: between two looks through all jobs that ever were, for markers that are missing or stale.
        planners: jobs planned at once.
        retry_after: a job that couldn't be planned or looked at now is tried again after this long.
        renew_every: between two renewals of the lease.
        taking_up: the time that a look may take for jobs that are new.
    """

    tick_every: float = 0.2
    look_every: float = 1.0
    sweep_every: float = 3_600.0
    planners: int = 2
    retry_after: float = 15.0
    renew_every: float = RENEW_SECONDS
    taking_up: float = 0.25


class _Unreadable(InputError):
    """The input of a job was never readable, and the job has ended as failed."""


@dataclass(slots=True)
class _Known:
    """A job that was found.

    Attributes:
        planning: under way; None: the plan stands, or it is to be tried again at `retry_at`.
        in_time: it can be done in time, or that doesn't matter.
    """

    ledger: JobLedger
    planned: bool = False
    planning: Future[InputEstimate | None] | None = None
    retry_at: float = 0.0
    in_time: bool = False

    @property
    def is_being_planned(self) -> bool:
        """Its turn has come."""
        return self.planning is not None and (self.planning.running() or self.planning.done())


class Foreman:
    """Plans and dispatches what is open in the root that `world.store` is.

    Args:
        open_input: how a job's input is opened for planning.
        lease: one that others contend for; None: nobody else is there.
        planners: where jobs are planned, instead of threads of its own; shut down by `close`.
    """

    def __init__(
        self,
        world: World,
        dispatcher: Dispatcher,
        open_input: Callable[[InputRef], PinnedInput] = open_pinned,
        settings: ForemanSettings | None = None,
        lease: Lease | None = None,
        planners: Executor | None = None,
    ) -> None:
        self._world = world
        self._dispatcher = dispatcher
        self._open_input = open_input
        self._settings = settings or ForemanSettings()
        self._known: dict[str, _Known] = {}
        self._planners = planners or ThreadPoolExecutor(self._settings.planners, thread_name_prefix="planner")
        self._sweeper = planners or ThreadPoolExecutor(1, thread_name_prefix="sweeper")
        self._leading = Leading(lease, world.clock, "dispatching", self._settings.renew_every)
        self._next_look = self._next_sweep = 0.0
        self._sweeping: Future[Swept] | None = None

    def run(self, stop: threading.Event) -> None:
        """Tick until `stop` is set. What the store or the broker fails to do now is logged and tried again."""
        try:
            while not stop.is_set():
                try:
                    self.tick()
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
        """Wait for what is being planned; the rest is left to the next one."""
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
            if known.planning is not None or (name in marked and is_open(known.ledger)):
                self._known[name] = known  # behind the others
            else:
                self._dispatcher.forget(name)
                logger.info("job ended", job=name)
        until = clock.monotonic() + self._settings.taking_up
        for name, ledger in marked.items():
            if name in self._known:
                continue
            if clock.monotonic() > until:
                self._next_look = 0.0  # those at work must not wait for this; the rest comes with the next tick
                return
            if not is_open(ledger):
                continue
            try:
                self._dispatcher.add(ledger)
            except LedgerError as error:
                self._known[name] = _Known(ledger, planned=True)
                logger.error("a job can't be read, and is left alone", job=name, reason=str(error))
            else:
                self._known[name] = _Known(ledger)
                logger.info("job taken up", job=name)

    def _sweep(self, now: float) -> None:
        """Have all jobs that ever were looked through when it is time; beside the loop, for there may be very many."""
        if self._sweeping is None and now >= self._next_sweep:
            self._sweeping = self._sweeper.submit(sweep, self._world.store)
        elif self._sweeping is not None and self._sweeping.done():
            sweeping, self._sweeping = self._sweeping, None
            self._next_sweep = now + self._settings.retry_after
            swept = sweeping.result()
            self._next_sweep = now + self._settings.sweep_every
            if swept.marked or swept.removed:
                logger.info("markers mended", marked=swept.marked, removed=swept.removed)

    def _plan(self, name: str, known: _Known, now: float) -> None:
        if known.planned or now < known.retry_at:
            return
        if known.planning is None:
            known.planning = self._planners.submit(self._plan_whole, known.ledger, known.in_time)
        elif known.planning.done():
            planning, known.planning = known.planning, None
            try:
                measured = planning.result()
                if measured is None:
                    known.planned = True
                else:
                    known.in_time = True
                    known.planned = self._refuse_late(known.ledger, measured)
            except (InvalidInput, _Unreadable) as error:  # it has ended as failed
                known.planned = True
                self._dispatcher.failed(name)
                logger.info("job refused", job=name, reason=str(error))
            except PipelineError as error:
                known.retry_at = now + self._settings.retry_after
                logger.warning("planning failed, and is tried again", job=name, reason=str(error))

    def _refuse_late(self, ledger: JobLedger, measured: InputEstimate) -> bool:
        """End a job as failed that would be late, by what is known now; whether it has ended so."""
        job = ledger.job()
        keys = {pin.name: pin.key for pin in job.models}
        end = self._dispatcher.end_of(job, {keys[name]: left for name, left in measured.tokens_of_models.items()})
        if end is None or job.deadline is None or end <= job.deadline:
            return False
        due, then = (moment.isoformat(timespec="seconds") for moment in (job.deadline, end))
        message = f"it should be done at {then}, but its deadline is {due}; submit it with a later one, or without"
        fail_job(ledger, job, self._world, DEADLINE_UNREACHABLE, message)
        self._dispatcher.failed(job.id)
        logger.info("job refused", job=job.id, reason=message)
        return True

    def _plan_whole(self, ledger: JobLedger, in_time: bool) -> InputEstimate | None:
        """On a planner's thread. A job that wants to be refused if it would be late is only measured, unless it is
        known to be in time. An input that was never readable ends the job as failed; one that can't be read any more,
        while a part of it is planned, is waited for: what is finished is kept."""
        job = ledger.job()
        try:
            if job.refuse_late and not in_time and ledger.manifest() is None and ledger.segment(0) is None:
                return measure_job(job, self._world, self._open_input)
            plan_job(ledger, job, self._world, open_input=self._open_input)
            return None
        except InvalidInput:
            raise
        except InputError as error:
            if ledger.segment(0) is not None:
                raise
            fail_job(ledger, job, self._world, INPUT_UNREADABLE, str(error))
            tidy(ledger)
            raise _Unreadable(str(error)) from error
