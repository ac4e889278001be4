"""Who comes next, and how long its answer may get: the waiting queue and the length estimate."""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Callable
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


class LengthEstimator:
    """Expected answer length: the request's own hint, else the mean of finished answers, of its prefix group where
    there are some, and never above max_tokens."""

    __slots__ = ("_all", "_groups")

    def __init__(self) -> None:
        self._all = (PRIOR_WEIGHT, PRIOR_WEIGHT * PRIOR_TOKENS)
        self._groups: OrderedDict[int, tuple[int, int]] = OrderedDict()

    def observe(self, request: Request, tokens: int) -> None:
        """Learn from an answer of `tokens` tokens that came to its natural end."""
        count, total = self._all
        self._all = (count + 1, total + tokens)
        group = request.prefix_group
        if group is not None:
            count, total = self._groups.pop(group, (0, 0))
            self._groups[group] = (count + 1, total + tokens)
            if len(self._groups) > MAX_GROUPS:
                self._groups.popitem(last=False)

    def expect(self, request: Request) -> int:
        """Tokens that the answer is expected to have."""
        most = request.params.max_tokens
        if request.expected_tokens is not None:
            return min(max(request.expected_tokens, 0), most)
        count, total = self._all
        group = request.prefix_group
        if group is not None and group in self._groups:
            seen, tokens = self._groups[group]
            # the group's own mean, drawn towards everybody's while it has few answers
            count, total = seen + PRIOR_WEIGHT, tokens + PRIOR_WEIGHT * total // count
        return min(-(-total // count), most)
