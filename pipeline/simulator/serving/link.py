"""Transfers of keys and values between simulated workers, which share the links of both ends."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from math import inf
from typing import Generic, TypeVar

Payload = TypeVar("Payload")

ROUNDING_SECONDS = 1e-9
"""A transfer that would end so soon has ended: the clock's rounding leaves some bytes."""


@dataclass(frozen=True, slots=True)
class LinkSettings:
    """The network between workers.

    Attributes:
        bytes_per_second: of each worker's link, in each direction.
        latency_seconds: from the first token to the first byte: the lane, and a round trip.
        round_trip_seconds, window_bytes: a transfer has at most a window in flight, so it moves at most one in a round
            trip; None: no bound.
        max_fetches: transfers that a decode worker receives at a time (`workers/lane/handover.py`).
    """

    bytes_per_second: float = 12.5e9
    latency_seconds: float = 0.005
    round_trip_seconds: float = 0.0002
    window_bytes: float | None = 64 * 2**20
    max_fetches: int = 4

    @property
    def bytes_per_second_of_one(self) -> float:
        """Bytes that one transfer moves in a second if it is alone."""
        by_window = inf
        if self.window_bytes is not None and self.round_trip_seconds > 0:
            by_window = self.window_bytes / self.round_trip_seconds
        return min(self.bytes_per_second, by_window)


@dataclass(slots=True, eq=False)
class _Transfer(Generic[Payload]):
    payload: Payload
    source: int
    target: int
    left_bytes: float
    rate: float = 0.0

    @property
    def seconds_left(self) -> float:
        return self.left_bytes / self.rate


@dataclass(slots=True)
class SharedLinks(Generic[Payload]):
    """Running transfers. Each gets an equal part of its source's link and of its target's, the smaller of the two;
    what the other end then has free stays unused, so busy links are a little slower than with max-min fairness.

    Attributes:
        moved_bytes: of ended transfers.  busy_seconds: added up over all transfers.
    """

    settings: LinkSettings
    moved_bytes: float = 0.0
    _running: list[_Transfer[Payload]] = field(default_factory=list)
    _now: float = 0.0

    def start(self, now: float, payload: Payload, source: int, target: int, num_bytes: float) -> None:
        """Begin a transfer between two workers."""
        self._advance(now)
        self._running.append(_Transfer(payload, source, target, num_bytes))
        self.moved_bytes += num_bytes
        self._share()

    def next_end(self) -> float:
        """The time at which the next transfer ends; infinite without one."""
        return self._now + min((one.seconds_left for one in self._running), default=inf)

    def ended(self, now: float) -> list[Payload]:
        """Remove the transfers that have ended until now, and return what they carried, in the order of their begin."""
        self._advance(now)
        done = [one for one in self._running if one.seconds_left <= ROUNDING_SECONDS]
        self._running = [one for one in self._running if one.seconds_left > ROUNDING_SECONDS]
        self._share()
        return [one.payload for one in done]

    def waiting_bytes(self) -> float:
        """Bytes of running transfers that are not moved yet."""
        return sum(one.left_bytes for one in self._running)

    def _advance(self, now: float) -> None:
        for one in self._running if now > self._now else ():
            one.left_bytes = max(0.0, one.left_bytes - one.rate * (now - self._now))
        self._now = now

    def _share(self) -> None:
        sources = Counter(one.source for one in self._running)
        targets = Counter(one.target for one in self._running)
        whole, alone = self.settings.bytes_per_second, self.settings.bytes_per_second_of_one
        for one in self._running:
            one.rate = min(alone, whole / sources[one.source], whole / targets[one.target])
