"""The backlog of each model, in seconds of one worker: the input of autoscaling.

GPU utilisation is no measure of it: a GPU is as busy with the last row of a night's job as with the first of a million.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass

from pipeline.lane.ports import NO_ANSWERS, AnswerCounts, LaneMonitor
from pipeline.models.catalog import Catalog
from pipeline.ports import Heartbeats, WorkerState, World
from pipeline.scaling.open_work import OpenJobsIndex, OpenJobSummary


@dataclass(frozen=True, slots=True)
class ModelBacklog:
    """The backlog of one model and its adapters.

    Attributes:
        model: its name in requests.
        tokens: estimated tokens of prompts and answers; a job of several models counts for each of them.
        workers: live workers that have it loaded.
        tokens_per_second: of one of these workers, measured or assumed.
    """

    model: str
    tokens: int
    workers: int
    tokens_per_second: float

    @property
    def seconds(self) -> float:
        """Time that one worker needs for the backlog, independent of the number of workers: workers that are starting
        must not influence scaling by this value."""
        return self.tokens / self.tokens_per_second


@dataclass(frozen=True, slots=True)
class BacklogMetrics:
    """The number of open jobs, and the backlog of each model of the catalog, by name."""

    open_jobs: int
    models: tuple[ModelBacklog, ...]


@dataclass(frozen=True, slots=True)
class Observation:
    """Backlog metrics, and the data that they were computed from.

    Attributes:
        names: `ModelPin.key` -> name of the model; of an adapter, of the model that it is of.
        callers: name of the model -> requests on the lane that no worker has begun to answer.
        answers: name of the model -> answers by latency.
    """

    metrics: BacklogMetrics
    jobs: Sequence[OpenJobSummary]
    workers: Sequence[WorkerState]
    names: Mapping[str, str]
    callers: Mapping[str, int]
    answers: Mapping[str, AnswerCounts]


class BacklogReader:
    """Reads the backlog from the root `world.store` and its workers' heartbeats. Not thread-safe.

    Args:
        assumed: tokens per second of a worker, for models whose workers have measured nothing yet.
        lane: the lane of online requests; None: there is none.
        executor: reads jobs concurrently; None: one after the other.
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
        self._speeds: dict[str, float] = {}  # last measurement, by name: still valid when the workers are gone

    @property
    def speeds(self) -> dict[str, float]:
        """Model name -> last measured throughput of a worker, tokens per second."""
        return dict(self._speeds)

    def remember(self, speeds: Mapping[str, float]) -> None:
        """Add earlier measurements, by name; measurements of this reader are newer and win."""
        self._speeds = {**speeds, **self._speeds}

    def read(self) -> BacklogMetrics:
        """Read the backlog metrics. Raises as `observe`."""
        return self.observe().metrics

    def observe(self) -> Observation:
        """Read backlog, workers and callers. Raises `PipelineError` when the store, the heartbeats or the lane can't be
        read: missing heartbeats don't mean that there are no workers."""
        workers = self._heartbeats.workers()
        names = {entry.pin.key: entry.pin.loaded_name for entry in self._catalog.entries()}
        work = self._work.read()
        tokens: Counter[str] = Counter()
        for one in work.jobs:
            for name in {pin.loaded_name for pin in one.job.models}:
                tokens[name] += one.left
        models = []
        for name in sorted({*names.values(), *tokens}):
            serving = [worker for worker in workers if any(names.get(key) == name for key in worker.models)]
            models.append(ModelBacklog(name, tokens[name], len(serving), self._speed(name, serving)))
        callers: Counter[str] = Counter()
        answers: dict[str, AnswerCounts] = {}
        if self._lane is not None:
            for key, waiting in self._lane.waiting(names).items():
                callers[names[key]] += waiting
            for key, counts in self._lane.answers(names).items():
                answers[names[key]] = answers.get(names[key], NO_ANSWERS) + counts
        metrics = BacklogMetrics(len(work.jobs), tuple(models))
        return Observation(metrics, work.jobs, workers, names, callers, answers)

    def _speed(self, name: str, serving: Collection[WorkerState]) -> float:
        measured = [worker.tokens_per_second for worker in serving if worker.tokens_per_second]
        if measured:
            self._speeds[name] = sum(measured) / len(measured)
        return self._speeds.get(name, self._assumed)
