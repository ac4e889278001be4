"""A gateway's overload control: refuses requests that would be late, and moves along the ladder of degradation.

One thread reads the lane's waiting requests four times a second and the workers' reports each second. In between the
gateway counts its own requests, so it reacts to a flood at once. Without measurements nothing is refused, and no step
begins.
"""

from __future__ import annotations

import math
import threading
from collections import Counter
from collections.abc import Collection, Mapping
from typing import Final

import structlog

from pipeline.lane.ports import LaneMonitor
from pipeline.overload.forecast import PoolLoad, Promises, excess_seconds, forecast, requests_ahead
from pipeline.overload.ladder import DegradationLadder, LadderRules
from pipeline.overload.load_meter import LoadMeter
from pipeline.overload.ports import WORKER_STEPS, DegradationBoard
from pipeline.overload.queue_state import OwnRequest, QueueState
from pipeline.ports import Clock, Heartbeats, PipelineError
from pipeline.runtime.availability import ServiceUnavailable
from schemas.jobs.job import Tier
from schemas.requests.tokenizing import TOKENIZER_URLS
from schemas.settings.overload import CapMaxTokens, OverloadOptions, RouteSmall, StepName
from schemas.workers.lane import EndEvent, ErrorEvent, LaneEvent, LaneRequest

LANE_SECONDS: Final = 0.25
REPORT_SECONDS: Final = 1.0
_STALE_SECONDS: Final = 10.0
"""Loads that were read longer ago are not used."""

STEP_LIFETIME_SECONDS: Final = 5.0
"""After so long without a gateway's report workers end a step."""

logger = structlog.get_logger(__name__)


class Overloaded(PipelineError):
    """Raised when a request would be late. `retry_seconds`: until it would not be."""

    def __init__(self, message: str, retry_seconds: float) -> None:
        super().__init__(message)
        self.retry_seconds = retry_seconds


class OverloadController:
    """The overload control of one gateway, for all models. Thread-safe.

    Args:
        promises: the tiers' promised times to first token.
        max_requests: of a worker (`lane.max_requests`).
    """

    def __init__(
        self,
        clock: Clock,
        heartbeats: Heartbeats,
        lane: LaneMonitor,
        board: DegradationBoard,
        options: OverloadOptions,
        promises: Promises,
        max_requests: int | None = None,
    ) -> None:
        self._clock = clock
        self._heartbeats = heartbeats
        self._lane = lane
        self._board = board
        self._options = options
        self._promises = promises
        self._meter = LoadMeter(max_requests)
        self._rules = LadderRules.of(options)
        self._lock = threading.Lock()
        self._queues: dict[str, QueueState] = {}  # by `ModelPin.key`
        self._names: dict[str, str] = {}  # key -> name, of measured models
        self._served: frozenset[str] = frozenset()  # names of live workers' models
        self._ladders: dict[str, DegradationLadder] = {}  # by name
        self._requests: dict[str, OwnRequest] = {}
        self._refused: Counter[tuple[str, Tier]] = Counter()
        self._read_at = self._next_report = -math.inf

    # -- measuring, on its own thread

    def run(self, stop: threading.Event) -> None:
        """Refresh until `stop` is set."""
        while True:
            self.refresh()
            if stop.wait(LANE_SECONDS):
                return

    def refresh(self) -> None:
        """Read the lane, and each second the workers' reports; then update the ladders."""
        now = self._clock.monotonic()
        try:
            self._read_lane(now)
            if now >= self._next_report:
                self._next_report = now + REPORT_SECONDS
                self._read_reports(now)
        except ServiceUnavailable as error:
            logger.warning("the load is not known: nothing is refused after a while", reason=str(error))
        self._update_ladders()

    def _read_lane(self, now: float) -> None:
        with self._lock:
            models = list(self._queues)
            own = {model: self._queues[model].waiting.total() for model in models}
        waiting = self._lane.waiting(models) if models else {}
        with self._lock:
            for model in models:
                self._queues[model].set_total(waiting[model], own[model], now)

    def _read_reports(self, now: float) -> None:
        states, metrics = self._heartbeats.workers(), self._heartbeats.metrics()
        loads = self._meter.read(states, metrics, now)
        with self._lock:
            self._read_at = now
            self._served = frozenset(report.model for report in metrics.values())
            self._names = {key: name for key, (name, _) in loads.items()}
            for key in loads:
                self._queues.setdefault(key, QueueState())
            for key, queue in list(self._queues.items()):
                queue.reported = loads[key][1] if key in loads else None
                if queue.reported is None and not (queue.waiting or queue.running):
                    del self._queues[key]
            active = {name: self._active(name) for name in self._ladders}
        for name, steps in active.items():
            if shared := [step for step in steps if step in WORKER_STEPS]:
                self._board.report(name, shared, STEP_LIFETIME_SECONDS)

    def _update_ladders(self) -> None:
        now = self._clock.monotonic()
        with self._lock:
            loads = dict.fromkeys(self._ladders, 0.0)
            for key, name in self._names.items():
                queue = self._queues[key]
                loads[name] = max(loads.get(name, 0.0), queue.peak, self._load_of(queue, now))
                queue.peak = 0.0
            for name, load in loads.items():
                steps = self._options.steps
                ladder = self._ladders.setdefault(name, DegradationLadder(self._rules, len(steps), now))
                change = ladder.update(load, now)
                if change > 0:
                    step = steps[ladder.depth - 1].name
                    logger.warning("a degradation step begins", model=name, step=step, load=round(load, 2))
                elif change < 0:
                    step = steps[ladder.depth].name
                    logger.warning("a degradation step ends", model=name, step=step, load=round(load, 2))
            self._ladders = {name: one for name, one in self._ladders.items() if one.depth or name in loads}

    def _load_of(self, queue: QueueState, now: float) -> float:
        """The forecast wait of a further request, as a share of what the interactive promise allows."""
        load = self._load(queue, now)
        if load is None:
            return 0.0
        return forecast(load, queue.total_waiting, 1).wait_seconds / self._promises.allowed_wait(load)

    def _load(self, queue: QueueState, now: float) -> PoolLoad | None:
        return None if now - self._read_at > _STALE_SECONDS else queue.load(now)

    # -- requests

    def admit(self, request: LaneRequest) -> None:
        """Count the request, which is sent now, until its end (`record`, `forget`). Raises `Overloaded`."""
        if request.url in TOKENIZER_URLS:
            return
        with self._lock:
            now = self._clock.monotonic()
            queue = self._queues.setdefault(request.model, QueueState())
            is_unhindered = self._check(request, queue, now)
            own = OwnRequest(request.model, request.tenant, now, is_unhindered)
            self._requests[request.id] = own
            queue.enter(own)

    def _check(self, request: LaneRequest, queue: QueueState, now: float) -> bool:
        """Whether the request needn't wait for a row. Raises `Overloaded`."""
        load = self._load(queue, now)
        if load is None:
            return False
        ahead = requests_ahead(queue.waiting, queue.total_waiting, request.tenant)
        expected = forecast(load, ahead, min(_max_tokens(request.body), load.answer_tokens))
        allowed = self._promises.allowed_wait(load)
        queue.peak = max(queue.peak, expected.wait_seconds / allowed)
        name = self._names.get(request.model, "")
        if request.tier is Tier.BULK and "pause_bulk" in self._active(name):
            to_leave = max(0.0, expected.wait_seconds - self._options.leave_load * allowed)
            self._refuse(name, request.tier, "bulk work is paused", to_leave + self._options.leave_seconds)
        if self._options.shed:
            left = math.inf
            if request.deadline is not None:
                left = (request.deadline - self._clock.now()).total_seconds()
            excess = excess_seconds(expected, load, ahead, self._promises, request.tier, left)
            if excess > 0:
                why = f"the first token is expected after {expected.ttft_seconds:.2f} s, later than promised"
                self._refuse(name, request.tier, why, excess)
        return expected.wait_seconds == 0

    def _refuse(self, name: str, tier: Tier, why: str, retry_seconds: float) -> None:
        self._refused[name, tier] += 1
        raise Overloaded(f"{why}; try again in {retry_seconds:.2f} s", retry_seconds)

    def record(self, event: LaneEvent) -> None:
        """Process an event of an answer."""
        with self._lock:
            own = self._requests.get(event.request)
            if own is None:
                return
            if not own.has_begun and not isinstance(event, ErrorEvent):
                self._queues[own.model].begin(event.request, own, self._clock.monotonic())
        if isinstance(event, EndEvent | ErrorEvent):
            self.forget(event.request)

    def forget(self, request_id: str) -> None:
        """The request has ended, if it was counted."""
        with self._lock:
            own = self._requests.pop(request_id, None)
            if own is not None:
                self._queues[own.model].end(request_id, own)

    # -- degradation

    def max_tokens(self, model: str) -> int | None:
        """The limit of new answers of a model, by its name; None: no step limits them now."""
        with self._lock:
            active = self._active(model)
            return next((s.max_tokens for s in self._options.steps if isinstance(s, CapMaxTokens) and s.name in active),
                        None)  # fmt: skip

    def small_model(self, model: str) -> str | None:
        """The name of the model that answers in its place; None: it answers by itself. Only a model of a live worker
        replaces another."""
        with self._lock:
            active = self._active(model)
            found = next((s.models.get(model) for s in self._options.steps
                          if isinstance(s, RouteSmall) and s.name in active), None)  # fmt: skip
            return found if found in self._served else None

    def _active(self, name: str) -> Collection[StepName]:
        ladder = self._ladders.get(name)
        return [] if ladder is None else [step.name for step in self._options.steps[: ladder.depth]]

    # -- metrics

    def refused(self) -> Mapping[tuple[str, Tier], int]:
        """Number of refused requests by tier and model (name), of models that are or were measured."""
        with self._lock:
            return {(name, tier): 0 for name in self._ladders for tier in Tier} | self._refused

    def waits(self) -> Mapping[str, float]:
        """The forecast wait for a row of a further request, in seconds, by model (name)."""
        now, found = self._clock.monotonic(), dict[str, float]()
        with self._lock:
            for key, name in self._names.items():
                load = self._load(self._queues[key], now)
                if load is not None:
                    wait = forecast(load, self._queues[key].total_waiting, 1).wait_seconds
                    found[name] = max(found.get(name, 0.0), wait)
        return found

    def steps(self) -> Mapping[tuple[str, StepName], bool]:
        """Whether each step of each measured model is active, by name."""
        with self._lock:
            return {
                (name, step.name): step.name in self._active(name)
                for name in self._ladders
                for step in self._options.steps
            }


def _max_tokens(body: Mapping[str, object]) -> float:
    named = body.get("max_completion_tokens") or body.get("max_tokens")
    return float(named) if isinstance(named, int) else math.inf
