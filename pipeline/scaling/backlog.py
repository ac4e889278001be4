"""How much work waits for each model, in seconds of one worker: what a fleet is scaled by.

How busy a GPU is says nothing of that: it is as busy with the last row of a night's job as with the first of a million.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass

from pipeline.lane.protocol import LaneMonitor
from pipeline.models.catalog import Catalog
from pipeline.ports import Heartbeats, WorkerState, World
from pipeline.scaling.open_work import OpenJobsIndex, OpenJobSummary


@dataclass(frozen=True, slots=True)
class ModelBacklog:
    """What waits for one model.

    Attributes:
        model: as requests call it.
        tokens: estimated, prompts and answers; a job of several models counts for each of them.
        workers: that live and have it loaded.  tokens_per_second: of one of them, measured or assumed.
    """

    model: str
    tokens: int
    workers: int
    tokens_per_second: float

    @property
    def seconds(self) -> float:
        """That one worker would need for it. However many there are: who scales by this mustn't be led by workers that
        are only just being started."""
        return self.tokens / self.tokens_per_second


@dataclass(frozen=True, slots=True)
class BacklogMetrics:
    """What a look has found: how many jobs are open, and what waits for each model of the catalog, by name."""

    open_jobs: int
    models: tuple[ModelBacklog, ...]


@dataclass(frozen=True, slots=True)
class Observation:
    """What a look has found: the figures, and what they were made of.

    Attributes:
        names: of models, by their `ModelPin.key`.
        callers: requests on the lane that no worker has begun to answer, by the name of their model.
    """

    figures: BacklogMetrics
    jobs: Sequence[OpenJobSummary]
    workers: Sequence[WorkerState]
    names: Mapping[str, str]
    callers: Mapping[str, int]


class BacklogReader:
    """Looks at the root that `world.store` is, and at its workers' heartbeats. Not for threads.

    Args:
        assumed: tokens per second of a worker, for models whose workers have measured nothing yet.
        lane: where requests wait whose callers wait; None: there is none.
        executor: reads many jobs at once, where that saves time.
    """

    def __init__(
        self,
        world: World,
        heartbeats: Heartbeats,
        assumed: float,
        lane: LaneMonitor | None = None,
        executor: Executor | None = None,
    ) -> None:
        self._work = OpenJobsIndex(world.store, max_jobs=None, executor=executor)
        self._lane = lane
        self._catalog = Catalog(world.store)
        self._heartbeats = heartbeats
        self._assumed = assumed
        self._speeds: dict[str, float] = {}  # the last that was measured, by name: it holds when the workers are gone

    @property
    def speeds(self) -> dict[str, float]:
        """What workers of each model measured last, tokens a second."""
        return dict(self._speeds)

    def remember(self, speeds: Mapping[str, float]) -> None:
        """What was measured before, by name; what is known here is newer."""
        self._speeds = {**speeds, **self._speeds}

    def look(self) -> BacklogMetrics:
        """How it stands. Raises as `observe`."""
        return self.observe().figures

    def observe(self) -> Observation:
        """How it stands. Raises `PipelineError` when the store, the heartbeats or the lane can't be read: a fleet whose
        heartbeats aren't heard is not a fleet of none."""
        workers = self._heartbeats.workers()
        names = {entry.pin.key: entry.pin.name for entry in self._catalog.entries()}
        work = self._work.look()
        tokens: Counter[str] = Counter()
        for one in work.jobs:
            for name in {pin.name for pin in one.job.models}:
                tokens[name] += one.left
        models = []
        for name in sorted({*names.values(), *tokens}):
            serving = [worker for worker in workers if any(names.get(key) == name for key in worker.models)]
            models.append(ModelBacklog(name, tokens[name], len(serving), self._speed(name, serving)))
        callers: Counter[str] = Counter()
        for key, waiting in (self._lane.waiting(names) if self._lane is not None else {}).items():
            callers[names[key]] += waiting
        return Observation(BacklogMetrics(len(work.jobs), tuple(models)), work.jobs, workers, names, callers)

    def _speed(self, name: str, serving: Collection[WorkerState]) -> float:
        measured = [worker.tokens_per_second for worker in serving if worker.tokens_per_second]
        if measured:
            self._speeds[name] = sum(measured) / len(measured)
        return self._speeds.get(name, self._assumed)
