"""The shard queues inside one process: the dispatcher puts tasks again that were lost when the process ended."""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from collections.abc import Sequence

from pipeline.ports import ShardTask


class MemoryQueue:
    """`ShardQueue` for threads of one process, each queue first in, first out."""

    def __init__(self) -> None:
        self._queues: defaultdict[str, deque[ShardTask]] = defaultdict(deque)
        self._changed = threading.Condition()

    def put(self, queue: str, task: ShardTask) -> None:
        """Append the task to the queue."""
        with self._changed:
            self._queues[queue].append(task)
            self._changed.notify()

    def take(self, queues: Sequence[str], timeout: float) -> ShardTask | None:
        """The next task of the first of `queues` that has one, or None after `timeout` seconds (0: at once)."""
        with self._changed:
            self._changed.wait_for(lambda: any(self._queues[name] for name in queues), timeout)
            return next((self._queues[name].popleft() for name in queues if self._queues[name]), None)
