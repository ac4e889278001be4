"""What an engine computes beside the rows of shards: requests whose callers wait.

The worker's loop owns the engine, so all that enters it goes through the loop; what comes in, and what is told of it,
is the business of threads of its own (`workers.lane.server`). The loop asks once a turn.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Protocol

from engine.embedding.embedder import StepEngine
from engine.request import Completion
from pipeline.ports import Clock
from workers.observability.metrics import SideWorkMetrics

_REST_SECONDS: Final = 0.02


class SideWork(Protocol):
    """Called by the thread that steps the engine, between two steps. Nothing here may wait, but `rest`."""

    @property
    def busy(self) -> bool:
        """Whether something of it is in the engine, or about to enter."""
        ...

    @property
    def grace(self) -> float:
        """Seconds that requests have to come to their end when the worker is told to stop."""
        ...

    def figures(self) -> SideWorkMetrics:
        """How it stands, and what it has counted."""
        ...

    def turn(self, *, admit: bool) -> None:
        """Pass on what is new of the requests in the engine, cancel those that nobody wants, and add those that have
        come, unless rows are being tried that nothing may join (`admit` false)."""
        ...

    def take(self, completion: Completion) -> bool:
        """Whether the completion belongs to a request of its own; then it is dealt with."""
        ...

    def rest(self, seconds: float) -> None:
        """There is nothing to compute: wait so long, or until something comes."""
        ...

    def close(self) -> None:
        """Nothing new comes in from now on."""
        ...

    def hand_back(self) -> None:
        """No more steps will come: cancel in the engine what is left, and have others go on with it."""
        ...


class NoSideWork:
    """Beside the shards there is nothing."""

    busy = False
    grace = 0.0

    def __init__(self, clock: Clock) -> None:
        self._clock = clock

    def figures(self) -> SideWorkMetrics:
        """All is zero."""
        return SideWorkMetrics()

    def turn(self, *, admit: bool) -> None:
        """Nothing comes."""

    def take(self, completion: Completion) -> bool:
        """Nothing is its own."""
        return False

    def rest(self, seconds: float) -> None:
        """Sleep."""
        self._clock.sleep(seconds)

    def close(self) -> None:
        """Nothing comes anyway."""

    def hand_back(self) -> None:
        """Nothing is left."""


def run_out(
    beside: SideWork, engine: StepEngine, step: Callable[[], None], tell: Callable[[], None], clock: Clock
) -> None:
    """Let what is beside come to its end if that is soon enough, and hand back the rest. The worker takes no more
    shards, and has none."""
    beside.close()
    until = clock.monotonic() + beside.grace
    while beside.busy and clock.monotonic() < until:
        beside.turn(admit=True)
        if engine.has_work:
            step()
        else:
            beside.rest(_REST_SECONDS)
        tell()
    beside.hand_back()
