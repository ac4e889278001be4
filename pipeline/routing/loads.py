"""The load and the price of each model's workers, from their heartbeats and metrics, seconds old."""

from __future__ import annotations

import math
import threading
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

import structlog

from pipeline.ports import Clock, Heartbeats, PipelineError, WorkerState
from schemas.workers.metrics import WorkerMetrics

REFRESH_SECONDS: Final = 2.0

logger = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class ModelLoad:
    """The live workers of one model; waiting work is the mean of a worker.

    Attributes:
        waiting_requests: outside the running batch: interactive ones and rows.
        waiting_tokens: expected tokens of shards that are not computed yet.
        price_per_million_tokens: at the measured speed; None: speed or price is unknown.
    """

    waiting_requests: float
    waiting_tokens: float
    price_per_million_tokens: float | None = None


Loads = Mapping[str, ModelLoad]
"""By `ModelPin.key`; a model without live workers is missing."""

NO_LOADS: Final[Loads] = {}


def model_loads(workers: Iterable[WorkerState], metrics: Mapping[str, WorkerMetrics]) -> Loads:
    """The loads of the models of these workers."""
    by_model: defaultdict[str, list[WorkerState]] = defaultdict(list)
    for worker in workers:
        for key in worker.models if not worker.draining else ():
            by_model[key].append(worker)
    return {key: _load(found, metrics) for key, found in by_model.items()}


def _load(workers: list[WorkerState], metrics: Mapping[str, WorkerMetrics]) -> ModelLoad:
    reported = [metrics[worker.name] for worker in workers if worker.name in metrics]
    requests = sum(one.lane_waiting + sum(tier.waiting for tier in one.tiers.values()) for one in reported)
    known = [
        (worker.price_per_hour, worker.tokens_per_second)
        for worker in workers
        if worker.price_per_hour is not None and worker.tokens_per_second
    ]
    tokens_per_hour = 3_600 * sum(speed for _, speed in known)
    return ModelLoad(
        waiting_requests=requests / len(workers),
        waiting_tokens=sum(worker.waiting_tokens for worker in workers) / len(workers),
        price_per_million_tokens=1e6 * sum(price for price, _ in known) / tokens_per_hour if known else None,
    )


class LoadReader:
    """Reads the loads at most every two seconds. Thread-safe."""

    def __init__(self, heartbeats: Heartbeats, clock: Clock) -> None:
        self._heartbeats = heartbeats
        self._clock = clock
        self._reading = threading.Lock()
        self._loads: Loads = NO_LOADS
        self._read_at = -math.inf

    def read(self) -> Loads:
        """The loads; none while the heartbeats can't be read, so that no condition on them holds. While one thread
        reads them the others get the last ones."""
        if self._clock.monotonic() - self._read_at < REFRESH_SECONDS or not self._reading.acquire(blocking=False):
            return self._loads
        try:
            self._loads = model_loads(self._heartbeats.workers(), self._heartbeats.metrics())
        except PipelineError as error:
            logger.warning("the load of the models' workers is not known", reason=str(error))
            self._loads = NO_LOADS
        finally:
            self._read_at = self._clock.monotonic()
            self._reading.release()
        return self._loads
