"""The step loop: synchronous, or asynchronous: the next step is planned while the device computes the last one.

    one by one     plan n | compute n | take n | plan n+1 | compute n+1 | take n+1
    overlapped     plan n | submit n | plan n+1 | submit n+1 | take n | plan n+2 | submit n+2 | take n+1
                            device:   compute n | compute n+1              | compute n+2

Overlapped, a device that works from a queue is never idle while the host plans, reads tokens and ends sequences. The
cost is one position for every sequence that ends at a stop token. The next step is not planned ahead where the host
needs the results of the last one first (`Scheduler.promise`): then host and device alternate, and that is counted.

A step that runs out of device memory fails no request: its sequences are preempted, and steps become smaller.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from engine.errors import EngineError, EngineLost
from engine.logs import get_logger
from engine.plan import StepOutput, StepPlan
from engine.runner.collect import CompletionCollector
from engine.runner.runner import AheadRunner, StepRunner, SubmittedStep
from engine.scheduler.latency import LatencyHistogram
from engine.scheduler.scheduler import Scheduler
from engine.scheduler.sequence import FinishedSequence

logger = get_logger(__name__)


@dataclass(slots=True)
class LoopStats:
    """Steps since the start.

    Attributes:
        ahead: planned before the results of the step before.
        awaited: whose results were needed before the next one could be planned, where the loop overlaps them.
        out_of_memory: that ran out of device memory.
    """

    ahead: int = 0
    awaited: int = 0
    out_of_memory: int = 0


@dataclass(frozen=True, slots=True)
class _Flight:
    """A submitted step, and its start time (seconds)."""

    plan: StepPlan
    submitted: SubmittedStep
    begun: float


_NO_MEMORY = ("CUBLAS_STATUS_ALLOC_FAILED", "CUDA error: out of memory", "Triton Error [CUDA]: out of memory")
"""Messages of libraries that allocate memory themselves, and of loading kernels."""


def lacks_memory(error: BaseException) -> bool:
    """Whether a step failed only because the device's memory was exhausted."""
    return isinstance(error, torch.OutOfMemoryError) or any(words in str(error) for words in _NO_MEMORY)


def make_health_check(device: torch.device) -> Callable[[], str | None]:
    """Return a health check of a device: None, or why it is unusable. After some errors (an illegal address, an
    assertion in a kernel) CUDA answers every call of the process with the same error."""

    def check_health() -> str | None:
        if device.type != "cuda":
            return None
        try:
            torch.cuda.synchronize(device)
        except RuntimeError as error:
            return str(error).partition("\n")[0]
        return None

    return check_health


class StepLoop:
    """Runs the steps of a scheduler.

    Args:
        clock: seconds.
        overlapped: plan a step ahead; needs an `AheadRunner`.
        recover: called when a step ran out of device memory.
        check_health: health check of the device (`make_health_check`), called when a step failed otherwise.
        after_step: called when a step's results were processed, before the next one is submitted that is planned then.

    Attributes:
        step_times: seconds from step to step, while there is work.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        collector: CompletionCollector,
        clock: Callable[[], float],
        *,
        overlapped: bool = False,
        recover: Callable[[], None] = lambda: None,
        check_health: Callable[[], str | None] = lambda: None,
        after_step: Callable[[], None] = lambda: None,
    ) -> None:
        self.stats = LoopStats()
        self.step_times = LatencyHistogram()
        self._scheduler = scheduler
        self._collector = collector
        self._clock = clock
        self._overlapped = overlapped
        self._recover = recover
        self._check_health = check_health
        self._after_step = after_step
        self._flight: _Flight | None = None
        self._taken_at = 0.0
        self._pending: list[FinishedSequence] = []

    @property
    def busy(self) -> bool:
        """Whether a step is in flight, or ended sequences were not returned by `step` yet."""
        return self._flight is not None or bool(self._pending)

    def take_pending(self) -> list[FinishedSequence]:
        """Take the sequences that ended with a step whose following step failed."""
        pending, self._pending = self._pending, []
        return pending

    def step(self, runner: StepRunner) -> list[FinishedSequence]:
        """Compute one step, or take the results of the one in flight.

        Returns:
            The sequences that ended with it.

        Raises:
            EngineError: it could not be computed; its sequences have ended (`Scheduler.fail`).
            EngineLost: no other step can be computed either.
        """
        if self._overlapped:
            assert isinstance(runner, AheadRunner), "overlapped steps need an AheadRunner"
            return self._overlap(runner)
        begun = time.perf_counter()
        plan = self._scheduler.schedule(self._clock())
        if plan is None:
            return []
        self._collector.begin(plan)
        try:
            output = runner.execute(plan)
        except BaseException as error:  # noqa: BLE001 - raised again, unless memory was exhausted
            self._handle_failure(plan, error)
            return []
        return self._process(plan, output, begun)

    def _overlap(self, runner: AheadRunner) -> list[FinishedSequence]:
        flight, self._flight = self._flight, None
        if flight is None:
            begun = time.perf_counter()
            plan = self._scheduler.schedule(self._clock())
            if plan is None:
                return []
            self._collector.begin(plan)
            try:
                flight = _Flight(plan, runner.submit(plan), begun)
            except BaseException as error:  # noqa: BLE001
                self._handle_failure(plan, error)
                return []
        following, broken = self._submit_next(runner, flight)
        try:
            output = runner.result(flight.submitted)
        except BaseException as error:  # noqa: BLE001
            self._handle_failure(flight.plan, error)  # and the steps planned after it
            return []
        finished = self._process(flight.plan, output, flight.begun)
        if isinstance(following, _Flight):
            self._collector.begin(following.plan)
            self._flight = following
        elif following is not None and broken is not None:
            self._pending += finished
            self._collector.begin(following)
            self._handle_failure(following, broken)
            return self.take_pending()
        return finished

    def _submit_next(
        self, runner: AheadRunner, flight: _Flight
    ) -> tuple[_Flight | StepPlan | None, BaseException | None]:
        """Plan and submit the step after the one in flight. A plan that could not be submitted is returned with its
        error, which is raised after the step before it was processed."""
        if not self._scheduler.promise():
            self.stats.awaited += 1
            return None, None
        begun = time.perf_counter()
        plan = self._scheduler.schedule(self._clock())
        if plan is None:
            return None, None
        self.stats.ahead += 1
        try:
            return _Flight(plan, runner.submit(plan), begun), None
        except BaseException as error:  # noqa: BLE001
            if not isinstance(error, Exception):
                self._handle_failure(flight.plan, error)  # an interrupt of the process is raised at once
            return plan, error

    def _process(self, plan: StepPlan, output: StepOutput, begun: float) -> list[FinishedSequence]:
        """Pass a step's results to the collector and the scheduler."""
        self._collector.take(output)
        finished = self._scheduler.update(
            plan, output.token_ids, output.failed, self._clock(), output.reasons, output.accepted, output.tainted
        )
        self._after_step()
        now = time.perf_counter()
        seconds = now - max(begun, self._taken_at)
        self._taken_at = now
        self.step_times.add(seconds)
        self._scheduler.record_step_time(plan, seconds, 0 if output.accepted is None else int(output.accepted.sum()))
        return finished

    def _handle_failure(self, plan: StepPlan, error: BaseException) -> None:
        """Handle the failure of the oldest step in flight. Its sequences are preempted if a smaller step can be tried;
        else they end, and this raises."""
        lost = isinstance(error, EngineLost)
        if lacks_memory(error) and not lost:
            self.stats.out_of_memory += 1
            tokens = plan.num_tokens
            if self._scheduler.retract(plan, self._clock()):
                self._recover()
                if self.stats.out_of_memory == 1:
                    logger.warning(
                        "the device has no room for a step: steps become smaller, and its sequences are computed again",
                        tokens=tokens, rows=len(plan.rows), step_tokens=self._scheduler.step_tokens, error=str(error),
                    )  # fmt: skip
                return
            reason = (
                "the device has no room for a step of one token; give the cache less memory, or lower max_num_seqs: "
                f"{error}"
            )
        else:
            reason = f"the step failed: {type(error).__name__}: {error}"
            defect = self._check_health() if isinstance(error, Exception) and not lost else None
            if defect is not None:
                reason = f"the device computes no more, and neither does this process on it: {defect}"
                self._scheduler.fail(plan, reason, self._clock())
                raise EngineLost(reason) from error
        self._scheduler.fail(plan, reason, self._clock())
        if lost or not isinstance(error, Exception):
            raise error  # an interrupt or exit of the process; not a failure of the step
        raise EngineError(reason) from error
