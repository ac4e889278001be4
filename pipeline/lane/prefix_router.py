"""Addresses requests to the workers that probably have their prefixes cached.

Workers are a model's live ones, by their heartbeats. All that can be wrong with these is harmless: a request that is
addressed to a worker that is dead, slow or full is taken by another one after `steal_after_seconds` (`LaneQueue`).

Where there are prefill and decode workers, a request that a decode worker should compute whole
(`pipeline.lane.placement`) goes to any of these.
"""

from __future__ import annotations

import math
import threading
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Final, Literal

import structlog

from pipeline.lane.placement import LatencyTargets
from pipeline.lane.pool_loads import PoolObserver
from pipeline.lane.prefix_key import prefix_key
from pipeline.lane.rendezvous import choose_worker
from pipeline.ports import Clock, Heartbeats, WorkerState
from pipeline.runtime.availability import ServiceUnavailable
from schemas.workers.lane import DECODE, LaneRequest, addressed_to, is_queue_name

_REFRESH_SECONDS: Final = 1.0
_STALE_SECONDS: Final = 5.0
"""Workers that were read longer ago than this don't count any more."""

MIN_WORKERS: Final = 2
"""With fewer there is nothing to choose."""

Route = Literal["prefix", "bound", "general", "decode"]
"""Where a request was sent: to its prefix's worker; to another one, because that one had its share; to any worker; to
any decode worker."""

ROUTES: Final[tuple[Route, ...]] = ("prefix", "bound", "general", "decode")

DEFAULT_TARGETS: Final = LatencyTargets()

logger = structlog.get_logger(__name__)


class PrefixRouter:
    """Chooses the workers of one caller's requests. Thread-safe.

    Args:
        max_load_ratio: no worker gets more than this multiple of the mean of the caller's open requests at the model's
            workers, rounded up.
        targets: of prefill and decode workers; None: no request is sent to a decode worker as a whole.
    """

    def __init__(
        self,
        clock: Clock,
        heartbeats: Heartbeats,
        max_load_ratio: float,
        targets: LatencyTargets | None = DEFAULT_TARGETS,
    ) -> None:
        self._pools = PoolObserver(clock, heartbeats)
        self._targets = targets
        self._clock = clock
        self._heartbeats = heartbeats
        self._max_load_ratio = max_load_ratio
        self._lock = threading.Lock()
        self._workers: dict[str, list[str]] = {}  # by model
        self._read_at = -math.inf
        self._open: dict[str, str] = {}  # request -> worker
        self._loads: Counter[str] = Counter()
        self._routes: Counter[Route] = Counter()

    def run(self, stop: threading.Event) -> None:
        """Read the heartbeats each second until `stop` is set. On a thread of its own: those of hundreds of workers
        take tens of milliseconds, and an unreachable server its time-out."""
        while True:
            self.refresh()
            if stop.wait(_REFRESH_SECONDS):
                return

    def refresh(self) -> None:
        """Read the heartbeats."""
        self._pools.refresh()
        try:
            states = self._heartbeats.workers()
        except ServiceUnavailable as error:
            logger.warning("workers are not known: requests go to any", reason=str(error))
            return
        workers: dict[str, list[str]] = {}
        for state in filter(_is_addressable, states):
            for model in state.models:
                workers.setdefault(model, []).append(state.name)
        with self._lock:
            self._workers, self._read_at = workers, self._clock.monotonic()

    def route(self, request: LaneRequest) -> LaneRequest:
        """The request, addressed to a worker or as it is. A later attempt stays as it is: it goes to any worker, so
        that it starts at once. `release` ends the count of an addressed one."""
        if request.attempt > 1 or request.queue:
            return request
        if self._targets is not None and self._pools.prefers_decode(request, self._targets):
            with self._lock:
                self._routes["decode"] += 1
            return replace(request, queue=DECODE)
        key = prefix_key(request)
        with self._lock:
            workers = self._workers.get(request.model, [])
            is_stale = self._clock.monotonic() - self._read_at > _STALE_SECONDS
            if key is None or is_stale or len(workers) < MIN_WORKERS or request.id in self._open:
                self._routes["general"] += 1
                return request
            choice = choose_worker(key, {name: self._loads[name] for name in workers}, self._max_load_ratio)
            self._routes["prefix" if choice.is_preferred else "bound"] += 1
            self._open[request.id] = choice.worker
            self._loads[choice.worker] += 1
        return replace(request, queue=addressed_to(choice.worker))

    def release(self, request_id: str) -> None:
        """The request has ended, or is not its worker's any more."""
        with self._lock:
            worker = self._open.pop(request_id, None)
            if worker is not None:
                self._loads[worker] -= 1
                if not self._loads[worker]:
                    del self._loads[worker]

    def routes(self) -> Mapping[Route, int]:
        """Number of requests by where they were sent."""
        with self._lock:
            return {route: self._routes[route] for route in ROUTES}


def _is_addressable(state: WorkerState) -> bool:
    return state.takes_lane_requests and not state.draining and is_queue_name(addressed_to(state.name))
