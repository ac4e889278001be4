"""The waiting queue of an encoder, which selects the next batch.

The oldest prompt of the most urgent class is always selected, so no prompt starves; the batch is filled with the
prompts of its class that are closest in length, so that little is padded.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from dataclasses import dataclass, field

from engine.request import Request
from engine.scheduler.sequence import CLASSES, class_of


@dataclass(slots=True)
class _Class:
    """One class: the order of arrival, and (length, serial) in ascending order."""

    arrived: dict[int, None] = field(default_factory=dict)
    lengths: list[tuple[int, int]] = field(default_factory=list)


class WaitingPrompts:
    """Requests by class, age and length. `add`, `remove` and `take` are logarithmic but for moving list entries."""

    def __init__(self) -> None:
        self._classes: dict[int, _Class] = {}
        self._requests: dict[int, Request] = {}
        self._serials: dict[str, int] = {}
        self._deadlines: list[tuple[float, int]] = []
        self._next = 0

    def __len__(self) -> int:
        return len(self._requests)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._serials

    def by_class(self) -> list[int]:
        """Number of waiting prompts of each class (`engine.scheduler.sequence.class_of`)."""
        counts = [0] * CLASSES
        for priority, waiting in self._classes.items():
            counts[class_of(priority)] += len(waiting.arrived)
        return counts

    def add(self, request: Request) -> None:
        """Add a prompt as the youngest."""
        serial, self._next = self._next, self._next + 1
        self._requests[serial], self._serials[request.request_id] = request, serial
        waiting = self._classes.setdefault(request.priority, _Class())
        waiting.arrived[serial] = None
        insort(waiting.lengths, (len(request.prompt_token_ids), serial))
        if request.deadline is not None:
            heapq.heappush(self._deadlines, (request.deadline, serial))

    def remove(self, request_id: str) -> Request:
        """Remove a prompt."""
        serial = self._serials.pop(request_id)
        request = self._requests.pop(serial)
        waiting = self._classes[request.priority]
        del waiting.arrived[serial]
        del waiting.lengths[bisect_left(waiting.lengths, (len(request.prompt_token_ids), serial))]
        if not waiting.arrived:
            del self._classes[request.priority]
        return request

    def take_late(self, now: float) -> list[Request]:
        """Remove and return the prompts past their deadline."""
        late = []
        while self._deadlines and self._deadlines[0][0] <= now:
            _, serial = heapq.heappop(self._deadlines)
            if serial in self._requests:
                late.append(self.remove(self._requests[serial].request_id))
        return late

    def take(self, tokens: int, most: int) -> list[Request]:
        """Remove and return the next batch: at most `most` prompts, of at most `tokens` positions when they are padded
        (one prompt in any case)."""
        if not self._classes:
            return []
        waiting = self._classes[min(self._classes)]
        oldest = next(iter(waiting.arrived))
        lengths = waiting.lengths
        low = bisect_left(lengths, (len(self._requests[oldest].prompt_token_ids), oldest))
        high, middle = low + 1, lengths[low][0]
        while high - low < most:
            below = lengths[low - 1][0] if low else None
            above = lengths[high][0] if high < len(lengths) else None
            longer = above is not None and (below is None or above - middle <= middle - below)
            longest = above if longer and above is not None else lengths[high - 1][0]
            if (below is None and above is None) or longest * (high - low + 1) > tokens:
                break
            low, high = (low, high + 1) if longer else (low - 1, high)
        names = [self._requests[serial].request_id for _, serial in lengths[low:high]]
        return [self.remove(name) for name in names]
