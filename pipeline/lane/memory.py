"""The lane inside one process: an implementation of `pipeline.lane.ports` under one lock."""

from __future__ import annotations

import math
import threading
from collections import Counter, deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from pipeline.lane.ports import (
    ADDRESSED_TO_ANY,
    NO_ANSWERS,
    NO_SHARES,
    AnswerCounts,
    LaneFull,
    LaneQueue,
    TenantShares,
    full_message,
)
from pipeline.ports import Clock, PipelineError
from schemas.settings.lane import LaneSettings
from schemas.workers.lane import (
    EndEvent,
    ErrorEvent,
    LaneEvent,
    LaneRequest,
    Position,
    closes_attempt,
    is_addressed,
    position_of,
    request_json,
)


@dataclass(slots=True)
class _Call:
    """A known request. `owner`: the worker that took it; `answering`: its answer has begun, so no other worker gets
    it."""

    request: LaneRequest
    sent_at: float
    wanted_until: float
    events: deque[LaneEvent]
    owner: str | None = None
    alive_until: float = 0.0
    answering: bool = False
    ended: bool = False

    @property
    def is_waiting(self) -> bool:
        return not self.answering and not self.ended

    @property
    def queue(self) -> str:
        """The sub-queue where it waits: it is addressed to no worker any more once one has taken it."""
        return "" if self.owner is not None and is_addressed(self.request.queue) else self.request.queue

    def waits_in(self, queue: LaneQueue) -> bool:
        """Whether it waits in this queue when it has no worker."""
        names = (ADDRESSED_TO_ANY, self.queue) if is_addressed(self.queue) else (self.queue,)
        return self.request.model == queue.model and queue.name in names


class MemoryLane:
    """`Lane` for threads of one process; `worker` returns a worker's side."""

    def __init__(self, clock: Clock, settings: LaneSettings | None = None) -> None:
        self._clock = clock
        self._settings = settings or LaneSettings()
        self._calls: dict[str, _Call] = {}  # by request, the oldest first
        self._turns: dict[str, int] = {}  # by tenant with known requests: when one was taken last
        self._last_turn = 0
        self._answers: dict[str, AnswerCounts] = {}  # by model, since the start: one process has few models
        self._changed = threading.Condition()

    def worker(self, name: str) -> MemoryLaneWorker:
        """The side of the worker of this name."""
        return MemoryLaneWorker(self, name)

    # -- Lane

    def send(self, request: LaneRequest) -> None:
        """Send the request to the workers of its model. Raises `LaneFull`."""
        if len(request_json(request)) > self._settings.max_bytes:
            raise PipelineError(f"request {request.id}: is larger than {self._settings.max_bytes} bytes; send less")
        with self._changed:
            now = self._forget_old()
            known = self._calls.get(request.id)
            if known is not None and known.request.attempt >= request.attempt:
                return
            if request.attempt == 1:
                self._check_room(request)
            events: deque[LaneEvent] = known.events if known is not None else deque(maxlen=self._settings.max_events)
            self._calls.pop(request.id, None)
            tenants = {call.request.tenant for call in self._calls.values()}
            self._turns = {tenant: turn for tenant, turn in self._turns.items() if tenant in tenants}
            self._turns.setdefault(request.tenant, self._next_turn())
            self._calls[request.id] = _Call(request, now, now + self._wanted_for(request), events)
            self._changed.notify_all()

    def read(self, after: Mapping[str, Position], timeout: float) -> list[LaneEvent]:
        """Events after these positions; waits up to `timeout` seconds for the first. An answer that was read to its end
        is dropped: its one reader is in this process, and a response with log-probabilities takes many megabytes."""
        with self._changed:
            self._changed.wait_for(lambda: any(True for _ in self._events_after(after)), timeout)
            events = list(self._events_after(after))
            for event in events:
                is_last = isinstance(event, EndEvent | ErrorEvent)
                if is_last and event.attempt == self._calls[event.request].request.attempt:
                    del self._calls[event.request]
            return events

    def cancel(self, request: LaneRequest) -> None:
        """Cancel the request: its answer is not wanted any more."""
        with self._changed:
            self._calls.pop(request.id, None)

    def lost(self, requests: Collection[LaneRequest]) -> frozenset[str]:
        """The requests that no worker will answer."""
        with self._changed:
            now = self._forget_old()
            return frozenset(request.id for request in requests if self._is_lost(request, now))

    def add_answers(self, counts: Mapping[str, AnswerCounts]) -> None:
        """Add to the counts of answers by model."""
        with self._changed:
            for model, added in counts.items():
                self._answers[model] = self._answers.get(model, NO_ANSWERS) + added

    # -- LaneMonitor

    def waiting(self, models: Collection[str]) -> Mapping[str, int]:
        """Requests for each of these models that no worker has begun to answer."""
        with self._changed:
            self._forget_old()
            found = Counter(call.request.model for call in self._calls.values() if call.is_waiting)
            return {model: found[model] for model in models}

    def answers(self, models: Collection[str]) -> Mapping[str, AnswerCounts]:
        """Answers for each of these models."""
        with self._changed:
            return {model: self._answers.get(model, NO_ANSWERS) for model in models}

    # -- the workers' side

    def take(
        self, worker: str, queues: Sequence[LaneQueue], most: int, timeout: float, shares: TenantShares
    ) -> list[LaneRequest]:
        """See `LaneWorker.take`."""
        with self._changed:
            until = self._clock.monotonic() + timeout
            while (due := self._seconds_until_due(queues, shares)) > 0:
                if (left := until - self._clock.monotonic()) <= 0:
                    break
                self._changed.wait(min(left, due))
            now = self._clock.monotonic()
            taken = self._choose(queues, most, shares)
            for call in taken:
                call.owner, call.alive_until = worker, now + self._settings.worker_timeout_seconds
            return [call.request for call in taken]

    def emit(self, worker: str, events: Sequence[LaneEvent]) -> frozenset[str]:
        """See `LaneWorker.emit`."""
        with self._changed:
            self._forget_old()
            unwanted = frozenset(event.request for event in events if not self._add(worker, event))
            self._changed.notify_all()
            return unwanted

    def hold(self, worker: str, requests: Collection[str]) -> frozenset[str]:
        """See `LaneWorker.hold`."""
        with self._changed:
            now = self._forget_old()
            unwanted = set()
            for request in requests:
                call = self._calls.get(request)
                if call is None or call.ended or call.owner != worker:
                    unwanted.add(request)
                else:
                    call.alive_until = now + self._settings.worker_timeout_seconds
            return frozenset(unwanted)

    # -- inside, under the lock

    def _add(self, worker: str, event: LaneEvent) -> bool:
        """Add the event, unless it was added before; returns whether this worker's events are still wanted."""
        call = self._calls.get(event.request)
        if call is None or call.owner != worker or call.request.attempt < event.attempt:
            return False
        # Sent twice, or late: the request itself is still this worker's.
        if call.ended or event.attempt < call.request.attempt:
            return True
        now = self._clock.monotonic()
        if not call.events or position_of(call.events[-1]) < position_of(event):
            call.events.append(event)
        call.answering, call.alive_until = True, now + self._settings.worker_timeout_seconds
        if closes_attempt(event):
            call.ended, call.wanted_until = True, now + self._settings.retention_seconds
        return True

    def _free(self) -> list[_Call]:
        """Requests without a worker, or whose worker fell silent before it began to answer."""
        now = self._forget_old()
        return [call for call in self._calls.values() if call.is_waiting and (not call.owner or call.alive_until < now)]

    def _check_room(self, request: LaneRequest) -> None:
        """Raise `LaneFull` when no further request of the tenant may wait for the model."""
        tenants = Counter(
            call.request.tenant
            for call in self._calls.values()
            if call.is_waiting and call.request.model == request.model
        )
        own, bounds = tenants[request.tenant], self._settings
        if tenants.total() >= bounds.max_waiting or own >= bounds.max_waiting_per_tenant:
            raise LaneFull(full_message(request, bounds, own))

    def _seconds_until_due(self, queues: Sequence[LaneQueue], shares: TenantShares) -> float:
        """Seconds until a request that is there now may be taken; 0: one may be now."""
        now, seconds = self._clock.monotonic(), math.inf
        for call in self._free():
            if shares.held.get(call.request.tenant, 0) >= shares.max_each:
                continue
            waits = (queue.min_wait_seconds for queue in queues if call.waits_in(queue))
            seconds = min(seconds, call.sent_at + min(waits, default=math.inf) - now)
            if seconds <= 0:
                return 0.0
        return seconds

    def _choose(self, queues: Sequence[LaneQueue], most: int, shares: TenantShares) -> list[_Call]:
        """Choose up to `most` free requests: see `TenantShares`, and `LaneWorker.take` for the order of the queues."""
        held, now = Counter(shares.held), self._clock.monotonic()
        waiting: dict[tuple[int, str], deque[_Call]] = {}  # by queue and tenant, in the first queue that has it
        for call in self._free():
            for order, queue in enumerate(queues):
                if call.waits_in(queue) and call.sent_at + queue.min_wait_seconds <= now:
                    waiting.setdefault((order, call.request.tenant), deque()).append(call)
                    break
        chosen: list[_Call] = []
        while len(chosen) < most:
            ready = [(held[of], order, self._turns[of], of) for order, of in waiting if held[of] < shares.max_each]
            if not ready:
                break
            _, order, _, tenant = min(ready)
            chosen.append(waiting[order, tenant].popleft())
            held[tenant] += 1
            self._turns[tenant] = self._next_turn()
            if not waiting[order, tenant]:
                del waiting[order, tenant]
        return chosen

    def _next_turn(self) -> int:
        self._last_turn += 1
        return self._last_turn

    def _events_after(self, after: Mapping[str, Position]) -> Iterator[LaneEvent]:
        for request, position in after.items():
            if (call := self._calls.get(request)) is not None:
                yield from (event for event in call.events if position_of(event) > position)

    def _is_lost(self, request: LaneRequest, now: float) -> bool:
        call = self._calls.get(request.id)
        if call is None or call.request.attempt < request.attempt:
            return True
        return call.answering and not call.ended and call.alive_until < now

    def _wanted_for(self, request: LaneRequest) -> float:
        """Seconds for which the request is wanted."""
        if request.deadline is None:
            return self._settings.default_deadline_seconds
        return max(0.0, (request.deadline - self._clock.now()).total_seconds())

    def _forget_old(self) -> float:
        """Drop requests that are not wanted any more; returns the time."""
        now = self._clock.monotonic()
        for name in [name for name, call in self._calls.items() if call.wanted_until <= now]:
            del self._calls[name]
        return now


class MemoryLaneWorker:
    """`LaneWorker` of one worker."""

    def __init__(self, lane: MemoryLane, name: str) -> None:
        self._lane = lane
        self.name = name

    def take(
        self, queues: Sequence[LaneQueue], most: int, timeout: float, shares: TenantShares = NO_SHARES
    ) -> list[LaneRequest]:
        """Up to `most` requests, or none after `timeout` seconds; see `LaneWorker.take`."""
        return self._lane.take(self.name, queues, most, timeout, shares)

    def emit(self, events: Sequence[LaneEvent]) -> frozenset[str]:
        """Send events; returns the requests that are no longer wanted from this worker."""
        return self._lane.emit(self.name, events)

    def hold(self, requests: Collection[str]) -> frozenset[str]:
        """Report that the worker lives and holds these; returns those that are no longer wanted from it."""
        return self._lane.hold(self.name, requests)

    def close(self) -> None:
        """Nothing to close."""
