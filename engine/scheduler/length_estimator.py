"""Inputs of admission: a heap with lazy deletion, and the estimator of answer lengths."""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Callable
from math import ceil
from typing import Any, Generic, TypeVar

from engine.request import Request

T = TypeVar("T")
K = TypeVar("K")

PRIOR_TOKENS = 256
"""Answer length assumed before any answer has been seen, tokens."""

PRIOR_WEIGHT = 4
"""Weight of the assumption, in answers."""

MAX_GROUPS = 1024
"""Prefix groups whose answer lengths are tracked."""


class LazyHeap(Generic[T, K]):
    """A heap with lazy deletion: `discard` is O(1); dead items are removed when they reach the top or are the majority.
    Push and pop are O(log n).

    Args:
        alive: whether an item still counts.
    """

    __slots__ = ("_alive", "_dead", "_heap")

    def __init__(self, alive: Callable[[T], bool]) -> None:
        self._alive = alive
        self._heap: list[tuple[tuple[Any, int], T]] = []  # K, but mypy can't know that it is ordered
        self._dead = 0

    def __len__(self) -> int:
        """Number of live items."""
        return len(self._heap) - self._dead

    def push(self, order: K, serial: int, item: T) -> None:
        """Add an item; smaller `order` first, then smaller `serial` (which is unique)."""
        heapq.heappush(self._heap, ((order, serial), item))

    def peek(self) -> T | None:
        """Return the first live item without removing it."""
        while self._heap:
            item = self._heap[0][1]
            if self._alive(item):
                return item
            heapq.heappop(self._heap)
            self._dead -= 1
        return None

    def first_order(self) -> K | None:
        """Return the `order` of the first live item."""
        return None if self.peek() is None else self._heap[0][0][0]

    def drain(self) -> list[tuple[K, T]]:
        """Remove and return all live items, in order, each with its `order`."""
        entries = sorted(self._heap, key=lambda entry: entry[0])
        self._heap, self._dead = [], 0
        return [(key[0], item) for key, item in entries if self._alive(item)]

    def pop(self) -> T:
        """Remove and return the item that `peek` returned."""
        return heapq.heappop(self._heap)[1]

    def discard(self) -> None:
        """Count one item of the heap as dead."""
        self._dead += 1
        if self._dead > 32 and self._dead * 2 > len(self._heap):
            self._heap = [entry for entry in self._heap if self._alive(entry[1])]
            heapq.heapify(self._heap)
            self._dead = 0


class _Mean:
    """A running mean of a ratio with decay: sums beyond `MEMORY` are halved."""

    __slots__ = ("count", "total")

    MEMORY = 1 << 20

    def __init__(self, total: float, count: float) -> None:
        self.total = total
        self.count = count

    def add(self, total: float, count: float) -> None:
        self.total += total
        self.count += count
        if self.total > self.MEMORY:
            self.total /= 2
            self.count /= 2

    @property
    def value(self) -> float:
        return self.total / self.count


class _Group:
    """Statistics of a prefix group's answers: their mean length, and their ratio to the hinted lengths."""

    __slots__ = ("hinted", "lengths")

    def __init__(self) -> None:
        self.lengths = _Mean(0, 0)
        self.hinted = _Mean(0, 0)


class LengthEstimator:
    """Estimates the length of answers, never above max_tokens.

    A request's own hint is scaled by the ratio of hinted answers to their hints so far. Without a hint the estimate is
    the mean of finished answers. Either is taken over the request's prefix group where it has finished answers (drawn
    towards the overall mean while they are few).
    """

    __slots__ = ("_all", "_groups", "_hinted")

    def __init__(self) -> None:
        self._all = _Mean(PRIOR_WEIGHT * PRIOR_TOKENS, PRIOR_WEIGHT)
        self._hinted = _Mean(PRIOR_TOKENS, PRIOR_TOKENS)
        self._groups: OrderedDict[int, _Group] = OrderedDict()

    def observe(self, request: Request, tokens: int) -> None:
        """Record an answer of `tokens` tokens that came to its natural end."""
        if request.params.max_tokens == 0:
            return
        group = _Group() if request.prefix_group is None else self._group(request.prefix_group)
        for mean in (self._all, group.lengths):
            mean.add(tokens, 1)
        if request.expected_tokens is not None:
            for mean in (self._hinted, group.hinted):
                mean.add(tokens, self._hint(request))

    def _group(self, name: int) -> _Group:
        group = self._groups.pop(name, None) or _Group()
        self._groups[name] = group
        if len(self._groups) > MAX_GROUPS:
            self._groups.popitem(last=False)
        return group

    def expect(self, request: Request) -> int:
        """Return the expected number of tokens of the answer."""
        if request.params.max_tokens == 0:
            return 0
        group = None if request.prefix_group is None else self._groups.get(request.prefix_group)
        if request.expected_tokens is not None:
            hint = self._hint(request)
            expected = hint * self._hinted.value
            if group is not None:
                weight = PRIOR_WEIGHT * hint
                expected = hint * (group.hinted.total + PRIOR_WEIGHT * expected) / (group.hinted.count + weight)
        else:
            expected = self._all.value
            if group is not None:
                expected = (group.lengths.total + PRIOR_WEIGHT * expected) / (group.lengths.count + PRIOR_WEIGHT)
        return min(ceil(expected), request.params.max_tokens)

    @staticmethod
    def _hint(request: Request) -> int:
        return min(max(request.expected_tokens or 0, 1), request.params.max_tokens)
