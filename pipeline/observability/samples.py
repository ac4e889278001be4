"""The samples that sources report in one scrape."""

from __future__ import annotations

from collections.abc import Callable

from pipeline.observability.histogram import Histogram
from pipeline.observability.metric_definitions import BY_NAME, WORKER

Value = float | Histogram


class Samples:
    """Values by metric name and labels. A name that isn't in `METRICS`, or labels that differ from its definition, are
    programming errors.

    Attributes:
        values: name -> label values -> value.
        labels: name -> label names.
    """

    def __init__(self) -> None:
        self.values: dict[str, dict[tuple[str, ...], Value]] = {}
        self.labels: dict[str, tuple[str, ...]] = {}

    def value(self, name: str, value: Value, *labels: str, worker: str | None = None) -> None:
        """Add a sample. `worker`: the worker that it is of, where one process reports several."""
        names = BY_NAME[name].labels if worker is None else (WORKER, *BY_NAME[name].labels)
        given = labels if worker is None else (worker, *labels)
        if len(names) != len(given) or self.labels.setdefault(name, names) != names:
            raise ValueError(f"{name} has the labels {self.labels.get(name, names)}, not {len(given)} others")
        self.values.setdefault(name, {})[given] = value


Source = Callable[[Samples], None]
"""Adds the samples of one part of the process. The threads that answer scrapes call it. It may take one request to a
server, and raise `PipelineError` when the server can't be reached: the other sources are reported all the same."""
