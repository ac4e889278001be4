"""The experiment controller closes the blocks of the open experiment, and ends it: when each arm has its verdict, or
when the time is over.

Several may run: the first stored sums of a block count, so each computes the same verdicts, and the first stored
outcome counts.
"""

from __future__ import annotations

import threading
from typing import Final

import structlog

from pipeline.experiments.blocks import close_block, due_blocks
from pipeline.experiments.comparison import RunningComparison
from pipeline.experiments.registry import ExperimentRegistry
from pipeline.ports import PipelineError, World
from schemas.experiments import ExperimentOutcome

POLL_INTERVAL_SECONDS: Final = 30.0

logger = structlog.get_logger(__name__)


class ExperimentController:
    """A `Part`."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._registry = ExperimentRegistry(world.store)
        self._running: RunningComparison | None = None  # of the open experiment

    def run(self, stop: threading.Event) -> None:
        """Check the open experiment until `stop` is set. Read errors are logged and retried."""
        while not stop.is_set():
            try:
                self.poll(stop)
            except PipelineError as error:
                logger.warning("experiments can't be read", reason=str(error))
            stop.wait(POLL_INTERVAL_SECONDS)

    def poll(self, stop: threading.Event | None = None) -> None:
        """Check the open experiment once. `stop`: ends it between two blocks."""
        last = self._registry.last()
        if last is None or last.outcome is not None:
            self._running = None
            return
        if self._running is None or self._running.experiment != last.experiment:
            self._running = RunningComparison(last.experiment)
        self._add_blocks(self._running, stop)
        if self._running.is_decided:
            self._end(self._running)

    def _add_blocks(self, running: RunningComparison, stop: threading.Event | None) -> None:
        """Add all blocks that are due, which are closed if no one has yet, up to the one that decides."""
        experiment = running.experiment
        due = due_blocks(experiment, self._world.clock.now())
        while running.blocks < due and not running.is_decided and (stop is None or not stop.is_set()):
            closed = self._registry.closed(experiment, running.blocks)
            running.add(closed or close_block(self._registry, experiment, running.blocks))

    def _end(self, running: RunningComparison) -> None:
        experiment, comparisons = running.experiment, running.result().comparisons
        is_clear = all(one.verdict != "no difference shown" for one in comparisons)
        outcome = self._registry.end(
            experiment,
            ExperimentOutcome(
                by="comparison" if is_clear else "time",
                reasons=tuple(one.reason for one in comparisons),
                at=self._world.clock.now(),
            ),
        )
        logger.info("experiment ended", name=experiment.name, by=outcome.by, reasons="; ".join(outcome.reasons))
