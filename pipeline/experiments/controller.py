"""The experiment controller ends the open experiment: when each arm has its verdict, or when the time is over.

Several may run: each computes the same verdicts from the same objects, and the first stored outcome counts.
"""

from __future__ import annotations

import threading
from typing import Final

import structlog

from pipeline.experiments.comparison import compare_arms
from pipeline.experiments.registry import ExperimentRegistry
from pipeline.ports import PipelineError, World
from schemas.experiments import Experiment, ExperimentOutcome, SliceReport

POLL_INTERVAL_SECONDS: Final = 30.0

logger = structlog.get_logger(__name__)


class ExperimentController:
    """A `Part`."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._registry = ExperimentRegistry(world.store)
        self._known: dict[str, SliceReport | None] = {}  # of the open experiment, by their keys

    def run(self, stop: threading.Event) -> None:
        """Check the open experiment until `stop` is set. Read errors are logged and retried."""
        while not stop.is_set():
            try:
                self.poll()
            except PipelineError as error:
                logger.warning("experiments can't be read", reason=str(error))
            stop.wait(POLL_INTERVAL_SECONDS)

    def poll(self) -> None:
        """Check the open experiment once."""
        last = self._registry.last()
        if last is None or last.outcome is not None:
            self._known.clear()
        else:
            self._end_if_due(last.experiment)

    def _end_if_due(self, experiment: Experiment) -> None:
        now = self._world.clock.now()
        compared = compare_arms(experiment, self._registry.reports(experiment, self._known), now)
        if not compared.is_decided:
            return
        is_clear = all(one.verdict != "no difference shown" for one in compared.comparisons)
        outcome = self._registry.end(
            experiment,
            ExperimentOutcome(
                by="comparison" if is_clear else "time",
                reasons=tuple(one.reason for one in compared.comparisons),
                at=now,
            ),
        )
        logger.info("experiment ended", name=experiment.name, by=outcome.by, reasons="; ".join(outcome.reasons))
