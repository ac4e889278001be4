"""Sends a worker's heartbeats, and polls the store for revoked shards, which the worker must stop computing.

Both run on threads of their own. Commits and checkpoints may wait minutes for the store; if heartbeats waited behind
them, the worker would count as dead, and others would compute its shards a second time. A step of the engine may also
take longer than a heartbeat is valid. The worker's loop therefore sends heartbeats with its current load, and a timer
repeats the last one while the loop is in a step. The repeats end when the loop has made no iteration for
`stuck_seconds`: only that limit decides whether a worker is stuck (see `workers.observability.watchdog`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future
from contextlib import AbstractContextManager, contextmanager
from typing import Final

from pipeline.ports import Clock
from pipeline.worker_client.ports import HEARTBEAT_SECONDS, RevokedShards, ShardSink, ShardWork, WorkerLoad

HEARTBEAT_THREADS: Final = 2
"""One heartbeat and one poll of the store run at the same time, neither behind the other."""

TIMER_SECONDS: Final = 1.0
"""Interval of the timer: a repeat is late by this at most."""

Timer = Callable[[Callable[[], None]], AbstractContextManager[None]]
"""Calls a task every `TIMER_SECONDS` on another thread, until the block ends."""


@contextmanager
def thread_timer(task: Callable[[], None]) -> Iterator[None]:
    """A `Timer` with a thread of its own. The thread has ended when the block has."""
    ended = threading.Event()

    def run() -> None:
        while not ended.wait(TIMER_SECONDS):
            task()

    thread = threading.Thread(target=run, name="worker-heartbeat-timer", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


class HeartbeatSender:
    """Sends the heartbeats of one worker. Its loop calls all methods but `repeat`, between steps and while it waits.

    Args:
        executor: has `HEARTBEAT_THREADS` threads, or runs tasks inline.
        stuck_seconds: after so long without an iteration of the loop no heartbeat is repeated.
    """

    def __init__(self, sink: ShardSink, clock: Clock, executor: Executor, stuck_seconds: float) -> None:
        self._sink = sink
        self._clock = clock
        self._executor = executor
        self._stuck_seconds = stuck_seconds
        self._lock = threading.Lock()  # the loop and the timer both send
        self._next = 0.0
        self._last_progress = clock.monotonic()
        self._last_sent = 0.0
        self._last_load: WorkerLoad | None = None
        self._sending: Future[None] | None = None
        self._polling: Future[RevokedShards] | None = None

    def record_progress(self) -> None:
        """Record that the worker's loop has made an iteration."""
        self._last_progress = self._clock.monotonic()

    @property
    def is_due(self) -> bool:
        """Whether the interval has passed and the last heartbeat has been sent. Raises what sending that one raised."""
        with self._lock:
            if self._sending is not None and self._sending.done():
                sent, self._sending = self._sending, None
                sent.result()
            return self._sending is None and self._clock.monotonic() >= self._next

    def send(self, held: Sequence[ShardWork], load: WorkerLoad) -> None:
        """Send a heartbeat, and poll the store for revoked shards unless a poll is running."""
        with self._lock:
            self._next = self._clock.monotonic() + HEARTBEAT_SECONDS
            self._last_load = load
            self._send(held, load)
            if self._polling is None:
                self._polling = self._executor.submit(self._sink.find_revoked, held)

    def repeat(self) -> None:
        """Send the last heartbeat again, if it is `HEARTBEAT_SECONDS` old and has been sent. Called by a timer.

        The repeat names no shards: some may have been committed or released since. The sink adds the held ones.
        """
        with self._lock:
            now = self._clock.monotonic()
            is_new = now - self._last_sent < HEARTBEAT_SECONDS
            is_stuck = now - self._last_progress > self._stuck_seconds
            is_sending = self._sending is not None and not self._sending.done()
            if self._last_load is None or is_new or is_stuck or is_sending:
                return
            if self._sending is None or self._sending.exception() is None:  # else the loop raises it
                self._send((), self._last_load)

    def _send(self, held: Sequence[ShardWork], load: WorkerLoad) -> None:
        self._last_sent = self._clock.monotonic()
        self._sending = self._executor.submit(self._sink.send_heartbeat, held, load)

    def collect_revoked(self) -> RevokedShards:
        """The shards of a poll that has ended since the last call. Raises what the poll raised."""
        with self._lock:
            if self._polling is None or not self._polling.done():
                return RevokedShards()
            polled, self._polling = self._polling, None
        return polled.result()
