"""The worker's helper thread in the simulation: a second thread of its process, whose port calls fall between those of
the first. So a snapshot on its way to the disk races with steps, heartbeats, commits and the end of the process."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future
from contextlib import contextmanager
from threading import Condition
from typing import Any

from tests.simulation.machine import Process
from workers.shards.heartbeats import TIMER_SECONDS, Timer


class SteppedFuture(Future[Any]):
    """A future whose waiters let others go on instead of blocking the one real thread."""

    def __init__(self, process: Process) -> None:
        super().__init__()
        self._process = process
        self._condition = _SteppedCondition(self._wait)

    def result(self, timeout: float | None = None) -> Any:
        self._wait()
        return super().result(0)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        self._wait()
        return super().exception(0)

    def _wait(self) -> None:
        self._process.wait(self.done)


class _SteppedCondition(Condition):
    """`concurrent.futures.wait` acquires the condition of each future by name; nothing else does. When it has got them
    all here, all are done."""

    def __init__(self, wait: Callable[[], None]) -> None:
        super().__init__()
        acquire = self.acquire

        def acquire_when_done(*args: Any) -> bool:
            wait()
            return acquire(*args)

        self.acquire = acquire_when_done


class SecondThread(Executor):
    """Runs tasks one after the other, first come first served, on a thread that lives while there are any."""

    def __init__(self, process: Process) -> None:
        self._process = process
        self._tasks: deque[tuple[SteppedFuture, Callable[[], Any]]] = deque()
        self._busy = False
        self._begun: deque[float] = deque()
        self._longest = 0.0

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future = SteppedFuture(self._process)
        self._tasks.append((future, lambda: fn(*args, **kwargs)))
        self._begun.append(self._process.machine.now)
        if not self._busy:
            self._process.start(self._work)
            self._busy = True
        return future

    @property
    def longest(self) -> float:
        """Seconds from when a task was given to when it was done, or to now; of all tasks the most."""
        return max([self._longest, *(self._process.machine.now - begun for begun in self._begun)])

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        while cancel_futures and self._tasks:
            self._tasks.popleft()[0].cancel()
        if wait:
            self._process.wait(lambda: not self._busy)

    def _work(self) -> None:
        try:
            while self._tasks:
                future, task = self._tasks.popleft()
                try:
                    result = task()
                except Exception as error:  # noqa: BLE001 - the future's reader raises it
                    future.set_exception(error)
                else:
                    future.set_result(result)
                self._longest = self.longest
                self._begun.popleft()
        finally:
            self._busy = False


def timer_of(process: Process) -> Timer:
    """A worker's heartbeat timer, as one more thread of its process."""

    @contextmanager
    def timer(task: Callable[[], None]) -> Iterator[None]:
        over = False

        def run() -> None:
            process.sleep(TIMER_SECONDS)
            while not over:
                task()
                process.sleep(TIMER_SECONDS)

        process.start(run)
        try:
            yield
        finally:
            over = True

    return timer
