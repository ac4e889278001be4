"""Sends a worker's heartbeats, and asks which of its shards it must stop computing.

Both run on threads of their own. Commits and checkpoints may wait minutes for the store, and a worker whose heartbeats
waited behind them would look dead: others would compute its shards a second time. A step of the engine may take longer
than a heartbeat lives, too. So the worker's loop sends each heartbeat with what is new, and a timer repeats the last
one while the loop is in a step. The repeats end when the loop has made no turn for `stuck_seconds`: whether a worker is
stuck is decided by that limit alone (see `watchdog`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future
from contextlib import AbstractContextManager, contextmanager
from typing import Final

from pipeline.ports import Clock
from pipeline.worker_client.protocol import HEARTBEAT_SECONDS, RevokedShards, ShardSink, ShardWork, WorkerLoad

HEARTBEAT_THREADS: Final = 2
"""One heartbeat and one question to the store may be under way at once, neither behind the other."""

TIMER_SECONDS: Final = 1.0
"""Between two calls of the timer: a repeat comes so much later than `HEARTBEAT_SECONDS` at most."""

Timer = Callable[[Callable[[], None]], AbstractContextManager[None]]
"""Calls a task every `TIMER_SECONDS`, beside the worker's loop, until the block ends."""


@contextmanager
def thread_timer(task: Callable[[], None]) -> Iterator[None]:
    """A `Timer` with a thread of its own, which has ended when the block ends."""
    over = threading.Event()

    def run() -> None:
        while not over.wait(TIMER_SECONDS):
            task()

    thread = threading.Thread(target=run, name="worker-heartbeat-timer", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


class HeartbeatSender:
    """Heartbeats of one worker. The worker's loop calls all but `repeat`, between two steps and while it waits.

    Args:
        executor: has `HEARTBEAT_THREADS` threads, or runs tasks at once.
        stuck_seconds: after so long without a turn of the loop no heartbeat is repeated.
    """

    def __init__(self, sink: ShardSink, clock: Clock, executor: Executor, stuck_seconds: float) -> None:
        self._sink = sink
        self._clock = clock
        self._executor = executor
        self._stuck_seconds = stuck_seconds
        self._lock = threading.Lock()  # the loop and the timer both send
        self._next = 0.0
        self._last_turn = clock.monotonic()
        self._last_sent = 0.0
        self._last_load: WorkerLoad | None = None
        self._sending: Future[None] | None = None
        self._asking: Future[RevokedShards] | None = None

    def note_turn(self) -> None:
        """The worker's loop makes progress."""
        self._last_turn = self._clock.monotonic()

    @property
    def due(self) -> bool:
        """Whether it is time for a heartbeat, and the last one is through. Raises what sending that one raised."""
        with self._lock:
            if self._sending is not None and self._sending.done():
                sent, self._sending = self._sending, None
                sent.result()
            return self._sending is None and self._clock.monotonic() >= self._next

    def send(self, held: Sequence[ShardWork], load: WorkerLoad) -> None:
        """Have one sent, and the store asked which shards are revoked, where no such question is under way."""
        with self._lock:
            self._next = self._clock.monotonic() + HEARTBEAT_SECONDS
            self._last_load = load
            self._send(held, load)
            if self._asking is None:
                self._asking = self._executor.submit(self._sink.find_revoked, held)

    def repeat(self) -> None:
        """Have the last one sent again, where it is `HEARTBEAT_SECONDS` old and through. Called by a timer.

        No shards are named: some may have been committed or released since. The sink adds those that are held.
        """
        with self._lock:
            now = self._clock.monotonic()
            is_new = now - self._last_sent < HEARTBEAT_SECONDS
            is_stuck = now - self._last_turn > self._stuck_seconds
            is_sending = self._sending is not None and not self._sending.done()
            if self._last_load is None or is_new or is_stuck or is_sending:
                return
            if self._sending is None or self._sending.exception() is None:  # else the loop has to raise it
                self._send((), self._last_load)

    def _send(self, held: Sequence[ShardWork], load: WorkerLoad) -> None:
        self._last_sent = self._clock.monotonic()
        self._sending = self._executor.submit(self._sink.send_heartbeat, held, load)

    def collect_revoked(self) -> RevokedShards:
        """Shards found to be revoked since the last call. Raises what finding them raised."""
        with self._lock:
            if self._asking is None or not self._asking.done():
                return RevokedShards()
            answered, self._asking = self._asking, None
        return answered.result()
