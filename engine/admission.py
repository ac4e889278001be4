"""Who comes next, and how long its answer may get: the waiting queue and the length estimate."""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Callable
from math import ceil
from typing import Any, Generic, TypeVar

from engine.request import Request

T = TypeVar("T")

PRIOR_TOKENS = 256
"""Answer length assumed before any answer has been seen, tokens."""

PRIOR_WEIGHT = 4
"""Answers that the assumption is worth."""

MAX_GROUPS = 1024
"""Prefix groups whose answer lengths are remembered."""


class LazyHeap(Generic[T]):
    """A heap whose items can die inside it: `discard` is O(1), the dead are dropped when they surface or when
    they are the majority. Push and pop are O(log n).

    Args:
        alive: whether an item still counts.
    """

    __slots__ = ("_alive", "_dead", "_heap")

    def __init__(self, alive: Callable[[T], bool]) -> None:
        self._alive = alive
        self._heap: list[tuple[tuple[Any, int], T]] = []
        self._dead = 0

    def __len__(self) -> int:
        """Living items."""
        return len(self._heap) - self._dead

    def push(self, order: float, serial: int, item: T) -> None:
        """Add an item; smaller `order` first, then smaller `serial` (which is unique)."""
        heapq.heappush(self._heap, ((order, serial), item))

    def peek(self) -> T | None:
        """The first living item, left in place."""
        while self._heap:
            item = self._heap[0][1]
            if self._alive(item):
                return item
            heapq.heappop(self._heap)
            self._dead -= 1
        return None

    def first_order(self) -> float | None:
        """The `order` of the first living item."""
        return None if self.peek() is None else self._heap[0][0][0]

    def pop(self) -> T:
        """Take the item that `peek` showed."""
        return heapq.heappop(self._heap)[1]

    def discard(self) -> None:
        """Note that one item in the heap has just died."""
        self._dead += 1
        if self._dead > 32 and self._dead * 2 > len(self._heap):
            self._heap = [entry for entry in self._heap if self._alive(entry[1])]
            heapq.heapify(self._heap)
            self._dead = 0


class _Mean:
    """A running mean of a ratio that forgets: beyond `MEMORY` the past counts half."""

    __slots__ = ("of", "per")

    MEMORY = 1 << 20

    def __init__(self, of: float, per: float) -> None:
        self.of = of
        self.per = per

    def add(self, of: float, per: float) -> None:
        self.of += of
        self.per += per
        if self.of > self.MEMORY:
            self.of /= 2
            self.per /= 2

    @property
    def value(self) -> float:
        return self.of / self.per


class LengthEstimator:
    """Expected answer length, never above max_tokens.

    A request's own hint is scaled by how hinted answers have turned out so far. Without one it is the mean of
    finished answers, of its prefix group where there are some (drawn towards everybody's while they are few).
    """

    __slots__ = ("_all", "_groups", "_hinted")

    def __init__(self) -> None:
        self._all = _Mean(PRIOR_WEIGHT * PRIOR_TOKENS, PRIOR_WEIGHT)
        self._hinted = _Mean(PRIOR_TOKENS, PRIOR_TOKENS)
        self._groups: OrderedDict[int, _Mean] = OrderedDict()

    def observe(self, request: Request, tokens: int) -> None:
        """Learn from an answer of `tokens` tokens that came to its natural end."""
        if request.params.max_tokens == 0:
            return
        self._all.add(tokens, 1)
        if request.expected_tokens is not None:
            self._hinted.add(tokens, self._hint(request))
        if request.prefix_group is not None:
            mean = self._groups.pop(request.prefix_group, None) or _Mean(0, 0)
            mean.add(tokens, 1)
            self._groups[request.prefix_group] = mean
            if len(self._groups) > MAX_GROUPS:
                self._groups.popitem(last=False)

    def expect(self, request: Request) -> int:
        """Tokens that the answer is expected to have."""
        if request.expected_tokens is not None:
            expected = self._hint(request) * self._hinted.value
        else:
            expected = self._all.value
            group = None if request.prefix_group is None else self._groups.get(request.prefix_group)
            if group is not None:
                expected = (group.of + PRIOR_WEIGHT * expected) / (group.per + PRIOR_WEIGHT)
        return min(ceil(expected), request.params.max_tokens)

    @staticmethod
    def _hint(request: Request) -> int:
        return min(max(request.expected_tokens or 0, 1), request.params.max_tokens)
