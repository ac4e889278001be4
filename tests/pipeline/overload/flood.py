"""A simulated pool: workers with rows, a lane that gateways share, and a clock that only the test advances."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Final

from pipeline.adapters.memory.degradation import MemoryDegradationBoard
from pipeline.adapters.memory.heartbeats import MemoryHeartbeats
from pipeline.overload.controller import LANE_SECONDS, OverloadController, Overloaded
from pipeline.overload.forecast import Promises
from pipeline.ports import WorkerState
from schemas.jobs.job import Tier
from schemas.jobs.outcome import Usage
from schemas.settings.overload import OverloadOptions
from schemas.workers.lane import EndEvent, LaneRequest, TokensEvent
from schemas.workers.metrics import HistogramSample, TierMetrics, WorkerMetrics
from tests.pipeline.simulation import SimulatedClock

MODEL: Final = "model-key"
NAME: Final = "large"
TICK_SECONDS: Final = 0.01
REPORT_SECONDS: Final = 3.0
PROMISES: Final = Promises({Tier.INTERACTIVE: 1.0})
TOKENS: Final = 33
TOKEN_SECONDS: Final = 0.03
FIRST_SECONDS: Final = 0.05
SLOT_SECONDS: Final = FIRST_SECONDS + (TOKENS - 1) * TOKEN_SECONDS


@dataclass(slots=True)
class Sent:
    """A request on the lane. `refused`: seconds of its Retry-After; None: it was admitted."""

    request: LaneRequest
    gateway: OverloadController | None
    at: float
    refused: float | None = None
    began: float | None = None

    @property
    def ttft(self) -> float:
        assert self.began is not None
        return self.began + FIRST_SECONDS - self.at


@dataclass
class Pool:
    """Two workers of `slots` rows each, and gateways.

    Attributes:
        spread: answers take `SLOT_SECONDS`, up to this share more or less.
        sent: all requests that were admitted, or refused.
    """

    options: OverloadOptions
    num_gateways: int = 1
    slots: int = 8
    seed: int = 0
    spread: float = 0.3
    sent: list[Sent] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.clock = SimulatedClock()
        self.beats = MemoryHeartbeats(self.clock, 12.0)
        self.board = MemoryDegradationBoard(self.clock)
        self.random = random.Random(self.seed)
        self.gateways = [
            OverloadController(self.clock, self.beats, self, self.board, self.options, PROMISES)
            for _ in range(self.num_gateways)
        ]
        self._queue: deque[Sent] = deque()
        self._running: list[list[tuple[float, Sent]]] = [[], []]  # by worker: (end, request)
        self._first: list[tuple[float, Sent]] = []
        self._answered = [0, 0]
        self._next_report = [0.0, REPORT_SECONDS / 2]
        self._next_refresh = 0.0

    @property
    def capacity(self) -> float:
        """Requests a second."""
        return 2 * self.slots / SLOT_SECONDS

    def waiting(self, models: Collection[str]) -> Mapping[str, int]:
        """As `LaneMonitor.waiting`."""
        return {model: (len(self._queue) + len(self._first)) * (model == MODEL) for model in models}

    def send(
        self,
        gateway: OverloadController | None,
        tier: Tier = Tier.INTERACTIVE,
        tenant: str = "a",
        timeout: float = 600.0,
        **body: object,
    ) -> Sent:
        """Send a request; without a gateway it comes from one that refuses nothing and isn't observed."""
        deadline = self.clock.now() + timedelta(seconds=timeout)
        request = LaneRequest(f"r{len(self.sent)}", MODEL, dict(body), tier=tier, tenant=tenant, deadline=deadline)
        one = Sent(request, gateway, self.clock.monotonic())
        self.sent.append(one)
        if gateway is not None:
            try:
                gateway.admit(request)
            except Overloaded as error:
                one.refused = error.retry_seconds
                return one
        self._queue.append(one)
        return one

    def run(self, seconds: float, rate: float = 0.0, tiers: Sequence[Tier] = (Tier.INTERACTIVE,)) -> None:
        """Let time pass, while so many requests a second arrive at random times, at any gateway."""
        until = self.clock.monotonic() + seconds
        while self.clock.monotonic() < until:
            if rate:
                expected = rate * TICK_SECONDS
                arrivals = int(expected) + (self.random.random() < expected % 1)
                for _ in range(arrivals):
                    self.send(self.random.choice(self.gateways), self.random.choice(tiers))
            self._work()
            self.clock.sleep(TICK_SECONDS)

    def _work(self) -> None:
        now = self.clock.monotonic()
        for worker, running in enumerate(self._running):
            for _, one in [entry for entry in running if entry[0] <= now]:
                self._answered[worker] += 1
                if one.gateway is not None:
                    one.gateway.record(EndEvent(one.request.id, 1, 1, {}))
            running[:] = [entry for entry in running if entry[0] > now]
            while self._queue and len(running) < self.slots:
                one = self._queue.popleft()
                one.began = now
                running.append((now + SLOT_SECONDS * self.random.uniform(1 - self.spread, 1 + self.spread), one))
                self._first.append((now + FIRST_SECONDS, one))
            if now >= self._next_report[worker]:
                self._next_report[worker] = now + REPORT_SECONDS
                self._report(worker, len(running))
        for _, one in [entry for entry in self._first if entry[0] <= now]:
            if one.gateway is not None:
                one.gateway.record(TokensEvent(one.request.id, 1, 0, 0, (1,), "a"))
        self._first = [entry for entry in self._first if entry[0] > now]
        if now >= self._next_refresh:
            self._next_refresh = now + LANE_SECONDS
            for gateway in self.gateways:
                gateway.refresh()

    def _report(self, worker: int, running: int) -> None:
        name, answered = f"w{worker}", self._answered[worker]
        gaps = answered * (TOKENS - 1)
        tier = TierMetrics(
            running=running, answered=answered, usage=Usage(completion=answered * TOKENS),
            itl=HistogramSample(counts=(gaps,), seconds=gaps * TOKEN_SECONDS),
        )  # fmt: skip
        self.beats.send_heartbeat(
            WorkerState(name, frozenset({MODEL}), max_num_seqs=self.slots, takes_lane_requests=True)
        )
        metrics = WorkerMetrics(model=NAME, seconds=self.clock.monotonic(), tiers={Tier.INTERACTIVE: tier})
        self.beats.report_metrics(name, metrics)


def admitted(sent: Sequence[Sent]) -> list[Sent]:
    """Those that were admitted and have begun."""
    return [one for one in sent if one.refused is None and one.began is not None]


def share_in_time(sent: Sequence[Sent]) -> float:
    """Share of these admitted requests whose first token came within the promise."""
    found = admitted(sent)
    return sum(one.ttft <= PROMISES.ttft_seconds[Tier.INTERACTIVE] for one in found) / len(found)
