"""What sources tell in one scrape."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pipeline.observability.metric_definitions import BY_NAME, WORKER
from schemas.workers.metrics import LATENCY_BOUNDS


@dataclass(frozen=True, slots=True)
class Times:
    """Samples of a time: how many in each bucket (zeros at the end may be left out), the buckets' upper ends but for
    the last one's, and the sum. Seconds."""

    counts: Sequence[int]
    seconds: float
    bounds: Sequence[float] = LATENCY_BOUNDS


Value = float | Times


class Samples:
    """Values by name and labels. A name that isn't in the table, or other labels than it has there, are mistakes of
    ours.

    Attributes:
        values: name -> labels -> value.
        labels: name -> the labels' names.
    """

    def __init__(self) -> None:
        self.values: dict[str, dict[tuple[str, ...], Value]] = {}
        self.labels: dict[str, tuple[str, ...]] = {}

    def value(self, name: str, value: Value, *labels: str, worker: str | None = None) -> None:
        """One more. `worker`: whose it is, where one process tells of several."""
        names = BY_NAME[name].labels if worker is None else (WORKER, *BY_NAME[name].labels)
        given = labels if worker is None else (worker, *labels)
        if len(names) != len(given) or self.labels.setdefault(name, names) != names:
            raise ValueError(f"{name} has the labels {self.labels.get(name, names)}, not {len(given)} others")
        self.values.setdefault(name, {})[given] = value


Source = Callable[[Samples], None]
"""Tells what a part of the process knows. Called by the threads that answer scrapes; may take the time of a look at a
server, and raise `PipelineError` when that can't be had: then the rest is told without it."""
