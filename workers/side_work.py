"""The interface of work that an engine computes in the same batch as the rows of shards: requests of waiting callers.

Only the worker's loop may add requests to the engine, because its thread steps it. The loop therefore polls the side
work in each iteration. The threads of the side work receive requests and emit events (`workers.lane.server`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Protocol

from engine.request import Completion
from engine.step_engine import StepEngine
from pipeline.ports import Clock
from workers.observability.metrics import SideWorkMetrics

_IDLE_SECONDS: Final = 0.02


class SideWork(Protocol):
    """Called by the thread that steps the engine, between two steps. Only `wait` may block."""

    @property
    def busy(self) -> bool:
        """Whether a request is in the engine, or about to enter it."""
        ...

    @property
    def grace_seconds(self) -> float:
        """How long requests may take to end after the worker's stop."""
        ...

    def metrics(self) -> SideWorkMetrics:
        """Its gauges and counters."""
        ...

    def poll(self, *, admit: bool) -> None:
        """Pass on new tokens of the requests in the engine, cancel the requests that are unwanted, and add those that
        have arrived. `admit` false: add none, because isolated rows are in the engine."""
        ...

    def take(self, completion: Completion) -> bool:
        """Process the completion of one of its own requests. False: the request is not its own."""
        ...

    def wait(self, seconds: float) -> None:
        """Block until a request arrives, `seconds` at most. The engine has nothing to compute."""
        ...

    def close(self) -> None:
        """Accept no new requests."""
        ...

    def hand_back(self) -> None:
        """Cancel the remaining requests in the engine, and hand them back for other workers. No more steps follow."""
        ...


class NoSideWork:
    """Side work without requests."""

    busy = False
    grace_seconds = 0.0

    def __init__(self, clock: Clock) -> None:
        self._clock = clock

    def metrics(self) -> SideWorkMetrics:
        """All are zero."""
        return SideWorkMetrics()

    def poll(self, *, admit: bool) -> None:
        """Does nothing."""

    def take(self, completion: Completion) -> bool:
        """No request is its own."""
        return False

    def wait(self, seconds: float) -> None:
        """Sleep."""
        self._clock.sleep(seconds)

    def close(self) -> None:
        """Does nothing."""

    def hand_back(self) -> None:
        """Does nothing."""


def drain_side_work(
    side_work: SideWork, engine: StepEngine, step: Callable[[], None], report: Callable[[], None], clock: Clock
) -> None:
    """Compute the side work's requests for `grace_seconds` at most, and hand back the remaining ones. The worker has no
    shards and takes none. `step`: steps the engine.  `report`: called after each iteration."""
    side_work.close()
    until = clock.monotonic() + side_work.grace_seconds
    while side_work.busy and clock.monotonic() < until:
        side_work.poll(admit=True)
        if engine.has_work:
            step()
        else:
            side_work.wait(_IDLE_SECONDS)
        report()
    side_work.hand_back()
