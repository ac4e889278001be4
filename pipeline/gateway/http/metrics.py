"""What a gateway counts of its requests and of the answers that go through it. Written on the event loop, read by any
thread."""

from __future__ import annotations

import threading
from collections import Counter
from typing import Final

from pipeline.observability.histogram import LatencyRecorder
from pipeline.ports import Clock
from schemas.jobs.job import Tier
from schemas.workers.lane import EndEvent, ErrorEvent, LaneEvent, LaneRequest, TokensEvent

METHODS: Final = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
NOWHERE: Final = "none"
"""What is told as the route of a request for which there is none."""


class HttpMetrics:
    """Requests and answers of one gateway."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._requests: Counter[tuple[str, str, str]] = Counter()
        self._answers: Counter[tuple[str, str]] = Counter()
        self._active = 0
        self._open: dict[str, tuple[Tier, float]] = {}
        self._unheard: set[str] = set()  # of those, the ones of which no token has come
        self.first_tokens = {tier: LatencyRecorder() for tier in Tier}
        self.wholes = {tier: LatencyRecorder() for tier in Tier}

    # -- requests

    def began(self) -> None:
        """A request or a socket is under way."""
        self._active += 1

    def over(self) -> None:
        """It is no more."""
        self._active -= 1

    def answered(self, method: str, route: str | None, status: int) -> None:
        """A request was answered. `route`: its path as the application has it; None: there is no such path."""
        labels = (method if method in METHODS else "other", route or NOWHERE, str(status))
        with self._lock:
            self._requests[labels] += 1

    def in_progress(self) -> int:
        """Requests and sockets that are under way."""
        return self._active

    def requests(self) -> dict[tuple[str, str, str], int]:
        """(method, route, status) -> requests that were answered."""
        with self._lock:
            return dict(self._requests)

    # -- answers

    def sent(self, request: LaneRequest) -> None:
        """A request goes to the workers."""
        with self._lock:
            self._open[request.id] = request.tier, self._clock.monotonic()
            self._unheard.add(request.id)

    def heard(self, event: LaneEvent) -> None:
        """Something of an answer has come."""
        known = self._open.get(event.request)
        if known is None:
            return
        tier, began = known
        seconds = self._clock.monotonic() - began
        if isinstance(event, TokensEvent) and event.request in self._unheard:
            with self._lock:
                self._unheard.discard(event.request)
            self.first_tokens[tier].add(seconds)
        if isinstance(event, EndEvent):
            self.wholes[tier].add(seconds)
            self.ended(event.request, "answered")
        elif isinstance(event, ErrorEvent):
            self.ended(event.request, "failed")

    def ended(self, request: str, result: str) -> None:
        """An answer comes no more, if that isn't known: it is "answered", "failed" or "cancelled"."""
        with self._lock:
            self._unheard.discard(request)
            known = self._open.pop(request, None)
            if known is not None:
                self._answers[known[0].value, result] += 1

    def found(self, tier: Tier) -> None:
        """An answer was there already."""
        with self._lock:
            self._answers[tier.value, "cached"] += 1

    def answers(self) -> dict[tuple[str, str], int]:
        """(tier, result) -> answers that have ended."""
        with self._lock:
            return dict(self._answers)

    def callers(self) -> dict[str, int]:
        """How many wait for an answer or its end ("open"), and of those for its first token ("waiting")."""
        with self._lock:
            return {"open": len(self._open), "waiting": len(self._unheard)}
