"""Metrics of a gateway's HTTP requests and model responses. Written on the event loop, read by any thread."""

from __future__ import annotations

import threading
from collections import Counter
from typing import Final

from pipeline.gateway.http.goodput import GoodputMetrics
from pipeline.observability.histogram import LatencyRecorder
from pipeline.ports import Clock
from schemas.jobs.job import Tier
from schemas.workers.lane import EndEvent, ErrorEvent, LaneEvent, LaneRequest, TokensEvent

METHODS: Final = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
NOWHERE: Final = "none"
"""The route label of requests that match no route."""


class HttpMetrics:
    """Counters and latencies of the requests and model responses of one gateway."""

    def __init__(self, clock: Clock, goodput: GoodputMetrics) -> None:
        self.goodput = goodput
        self._clock = clock
        self._lock = threading.Lock()
        self._requests: Counter[tuple[str, str, str]] = Counter()
        self._answers: Counter[tuple[str, str]] = Counter()
        self._active = 0
        self._open: dict[str, tuple[Tier, float]] = {}
        self._without_tokens: set[str] = set()  # those of `_open` that have no token yet
        self.first_tokens = {tier: LatencyRecorder() for tier in Tier}
        self.response_times = {tier: LatencyRecorder() for tier in Tier}

    # -- requests

    def request_started(self) -> None:
        """Count a request or WebSocket in progress."""
        self._active += 1

    def request_finished(self) -> None:
        """End a request or WebSocket that `request_started` counted."""
        self._active -= 1

    def count_response(self, method: str, route: str | None, status: int) -> None:
        """Count the HTTP response of a request. `route`: the path template of its route; None: no route matches."""
        labels = (method if method in METHODS else "other", route or NOWHERE, str(status))
        with self._lock:
            self._requests[labels] += 1

    def in_progress(self) -> int:
        """The number of requests and WebSockets in progress."""
        return self._active

    def requests(self) -> dict[tuple[str, str, str], int]:
        """(method, route, status) -> number of HTTP responses."""
        with self._lock:
            return dict(self._requests)

    # -- model responses

    def inference_started(self, request: LaneRequest) -> None:
        """Start to measure a request that is sent to the workers."""
        now = self._clock.monotonic()
        self.goodput.started(request, now)
        with self._lock:
            self._open[request.id] = request.tier, now
            self._without_tokens.add(request.id)

    def record_event(self, event: LaneEvent) -> None:
        """Record an event of a model response."""
        entry = self._open.get(event.request)
        if entry is None:
            return
        tier, began = entry
        now = self._clock.monotonic()
        seconds = now - began
        if isinstance(event, TokensEvent):
            self.goodput.record_tokens(event, now)
            if event.request in self._without_tokens:
                with self._lock:
                    self._without_tokens.discard(event.request)
                self.first_tokens[tier].add(seconds)
        elif isinstance(event, EndEvent | ErrorEvent):
            self.goodput.ended(event.request, event, now)
        if isinstance(event, EndEvent):
            self.response_times[tier].add(seconds)
            self.inference_finished(event.request, "answered")
        elif isinstance(event, ErrorEvent):
            self.inference_finished(event.request, "failed")

    def inference_finished(self, request: str, result: str) -> None:
        """Count the result of a request unless it is counted already: "answered", "failed" or "cancelled"."""
        self.goodput.ended(request, None, self._clock.monotonic())
        with self._lock:
            self._without_tokens.discard(request)
            entry = self._open.pop(request, None)
            if entry is not None:
                self._answers[entry[0].value, result] += 1

    def count_cache_hit(self, tier: Tier) -> None:
        """Count a request that is answered from the answer store."""
        with self._lock:
            self._answers[tier.value, "cached"] += 1

    def answers(self) -> dict[tuple[str, str], int]:
        """(tier, result) -> number of finished model responses."""
        with self._lock:
            return dict(self._answers)

    def callers(self) -> dict[str, int]:
        """The number of unfinished inference requests ("open"), and of those without a first token ("waiting")."""
        with self._lock:
            return {"open": len(self._open), "waiting": len(self._without_tokens)}
