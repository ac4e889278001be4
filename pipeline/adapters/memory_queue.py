"""The shard queue inside one process: what it loses when the process ends, the dispatcher puts again."""

from __future__ import annotations

import queue

from pipeline.ports import ShardTask


class MemoryQueue:
    """`ShardQueue` for threads of one process, first in, first out."""

    def __init__(self) -> None:
        self._tasks: queue.SimpleQueue[ShardTask] = queue.SimpleQueue()

    def put(self, task: ShardTask) -> None:
        """Hand the task to whoever takes next."""
        self._tasks.put(task)

    def take(self, timeout: float) -> ShardTask | None:
        """The next task, or None after `timeout` seconds (0: at once)."""
        try:
            return self._tasks.get(block=timeout > 0, timeout=timeout if timeout > 0 else None)
        except queue.Empty:
            return None
