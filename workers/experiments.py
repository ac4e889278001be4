"""A worker's part in an experiment with the scheduler's weights (`pipeline.experiments`).

It wraps the side work, which is polled between two steps of the engine. There the current slice's arm is applied, and
the engine's counters are read. A thread of its own reads the store, and writes a report after each slice; neither the
store nor another worker is needed to know the arm of a slice.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Final, NamedTuple

import structlog

from engine.engine import EngineStats
from engine.request import Completion
from engine.scheduler.slo_control import SloStats, SloTerms
from engine.step_engine import StepEngine
from pipeline.experiments.assignment import Slice, slice_at
from pipeline.experiments.registry import ExperimentRegistry, ExperimentState
from pipeline.ports import Clock, PipelineError
from schemas.experiments import ArmWeights, Experiment, SliceCounts, SliceReport
from schemas.workers.metrics import ExperimentMetrics
from workers.observability.metrics import SideWorkMetrics
from workers.side_work import SideWork

POLL_SECONDS: Final = 10.0
"""Interval in which the store is read. An experiment's begin and end are seen so much later at most."""

MAX_PENDING: Final = 100
"""Reports that wait for the store; the oldest are dropped."""

MIN_TOLERANCE_SECONDS: Final = 1.0
TOLERANCE: Final = 0.05
"""Share of a slice by which its begin, and those of its measurement and its end, may be seen late, because a step was
long; else the slice is not reported."""

logger = structlog.get_logger(__name__)


class _Reading(NamedTuple):
    """The engine's counters at a moment."""

    at: datetime
    stats: EngineStats
    slo: SloStats


class ExperimentSideWork:
    """`SideWork` that passes all calls on to another one.

    Args:
        side_work: the other one.  model: name of the model that the engine computes.  worker: this worker's name.
        machine: see `SliceReport`.
    """

    def __init__(
        self,
        side_work: SideWork,
        engine: StepEngine,
        model: str,
        clock: Clock,
        registry: ExperimentRegistry,
        worker: str,
        machine: str,
    ) -> None:
        self._side_work = side_work
        self._engine = engine
        self._model = model
        self._clock = clock
        self._registry = registry
        self._worker = worker
        self._machine = machine
        slo = self._engine.stats().slo
        self._own_weights = None if slo is None else slo.weights  # None: there is nothing to control
        # Shared with the thread.
        self._experiment: Experiment | None = None
        self._pending: deque[tuple[Experiment, SliceReport]] = deque(maxlen=MAX_PENDING)
        # The thread's.
        self._last: ExperimentState | None = None
        self._has_listed = False
        self._logged_error: str | None = None
        # The loop's.
        self._slice: Slice | None = None
        self._is_whole = False  # the slice was seen from its begin
        self._begun: _Reading | None = None  # at the begin of the slice's measurement
        self._measured: dict[str, SliceCounts] = {}

    @contextmanager
    def running(self) -> Iterator[ExperimentSideWork]:
        """Follow the root's experiments until the block ends; then the engine has its own weights again."""
        if self._own_weights is None:
            yield self
            return
        ended = threading.Event()
        thread = threading.Thread(target=self._refresh_until, args=(ended,), name="experiments")
        thread.start()
        try:
            yield self
        finally:
            ended.set()
            thread.join()
            self._engine.set_slo_weights(self._own_weights)

    # -- on the thread

    def _refresh_until(self, ended: threading.Event) -> None:
        seconds = 0.0
        while not ended.wait(seconds):
            self.refresh()
            seconds = POLL_SECONDS
        if self._pending:
            self.refresh()

    def refresh(self) -> None:
        """Find the open experiment, and store reports. Failures are logged and retried with the next call: the work
        of the worker doesn't depend on it."""
        try:
            self._last = last = self._find_last()
            is_open = last is not None and last.outcome is None and last.experiment.model in (None, self._model)
            self._experiment = last.experiment if last is not None and is_open else None
            while self._pending:
                self._registry.report(*self._pending[0])
                self._pending.popleft()
            self._logged_error = None
        except PipelineError as error:
            if str(error) != self._logged_error:
                self._logged_error = str(error)
                logger.warning("experiments can't be followed", reason=str(error))
        except Exception:
            logger.exception("experiments can't be followed")

    def _find_last(self) -> ExperimentState | None:
        """The last experiment. After the first call there is no listing, which costs as much as a dozen reads."""
        if not self._has_listed:
            self._last, self._has_listed = self._registry.last(), True
        last = self._last
        while (found := self._registry.find(1 if last is None else last.experiment.number + 1)) is not None:
            last = found
        if last is not None and last.outcome is None:
            last = replace(last, outcome=self._registry.outcome(last.experiment.number))
        return last

    # -- on the loop's thread

    def poll(self, *, admit: bool) -> None:
        """See `SideWork.poll`."""
        if self._own_weights is not None and (self._experiment is not None or self._slice is not None):
            self._follow(self._own_weights, self._clock.now())
        self._side_work.poll(admit=admit)

    def _follow(self, own_weights: SloTerms, now: datetime) -> None:
        """Apply the arm of the present slice, and measure."""
        current, experiment = self._slice, self._experiment
        is_same = current is not None and current.experiment is experiment
        if current is None or not is_same or not current.starts_at <= now < current.ends_at:
            if current is not None:
                self._end(current, now)
            if not is_same:
                self._measured = {}
            current = None if experiment is None else slice_at(experiment, self._machine, now)
            self._slice, self._begun = current, None
            self._is_whole = current is not None and _is_in_time(current, current.starts_at, now)
            self._engine.set_slo_weights(own_weights if current is None else _terms(current.arm.weights))
            if current is not None:
                logger.info(
                    "slice of an experiment begins", experiment=current.experiment.name, arm=current.arm.name,
                    slice=current.number,
                )  # fmt: skip
        if current is not None and self._begun is None and self._is_whole and now >= current.measured_at:
            self._is_whole = _is_in_time(current, current.measured_at, now)
            self._begun = self._read(now)

    def _end(self, ended: Slice, now: datetime) -> None:
        """Report the slice, if all of it was measured."""
        begun, reading = self._begun, self._read(now)
        if begun is None or reading is None or not self._is_whole or not _is_in_time(ended, ended.ends_at, now):
            return
        counts, arm = _counts(begun, reading), ended.arm.name
        self._measured[arm] = self._measured.get(arm, SliceCounts()) + counts
        report = SliceReport(
            slice=ended.number, arm=arm, worker=self._worker, machine=self._machine, model=self._model, counts=counts
        )
        self._pending.append((ended.experiment, report))

    def _read(self, now: datetime) -> _Reading | None:
        stats = self._engine.stats()
        return None if stats.slo is None else _Reading(now, stats, stats.slo)

    def metrics(self) -> SideWorkMetrics:
        """See `SideWork.metrics`."""
        found, current = self._side_work.metrics(), self._slice
        if current is None:
            return found
        arms = {arm.name: self._measured.get(arm.name, SliceCounts()) for arm in current.experiment.arms}
        return replace(
            found, experiment=ExperimentMetrics(name=current.experiment.name, arm=current.arm.name, arms=arms)
        )

    # -- passed on

    @property
    def busy(self) -> bool:
        """See `SideWork.busy`."""
        return self._side_work.busy

    @property
    def grace_seconds(self) -> float:
        """See `SideWork.grace_seconds`."""
        return self._side_work.grace_seconds

    def take(self, completion: Completion) -> bool:
        """See `SideWork.take`."""
        return self._side_work.take(completion)

    def wait(self, seconds: float) -> None:
        """See `SideWork.wait`."""
        self._side_work.wait(seconds)

    def close(self) -> None:
        """See `SideWork.close`."""
        self._side_work.close()

    def hand_back(self) -> None:
        """See `SideWork.hand_back`."""
        self._side_work.hand_back()


def _is_in_time(of: Slice, due: datetime, now: datetime) -> bool:
    tolerance = max(MIN_TOLERANCE_SECONDS, TOLERANCE * of.experiment.slice_seconds)
    return timedelta() <= now - due <= timedelta(seconds=tolerance)


def _counts(begun: _Reading, ended: _Reading) -> SliceCounts:
    before, after = begun.slo, ended.slo
    tokens = [one.stats.prompt + one.stats.generated for one in (begun, ended)]
    return SliceCounts(
        first_tokens=after.first_tokens - before.first_tokens,
        late_first_tokens=after.late_first_tokens - before.late_first_tokens,
        later_tokens=after.later_tokens - before.later_tokens,
        late_tokens=after.late_tokens - before.late_tokens,
        steps=after.steps - before.steps,
        throttled_steps=after.throttled_steps - before.throttled_steps,
        drops=after.drops - before.drops,
        tokens=tokens[1] - tokens[0],
        seconds=(ended.at - begun.at).total_seconds(),
    )


def _terms(weights: ArmWeights) -> SloTerms:
    return SloTerms(weights.ttft, weights.itl, weights.utilisation, weights.drops)
