"""What becomes of an exception that was never foreseen: it ends one turn of one part, and never the process.

A part that was interrupted by one begins anew after a pause. All that it needs to know lies in the store, so nothing is
lost but time. Only what can't be mended by trying again (`PartStopped`) ends a part, and with it the process.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Final

import structlog

from pipeline.ports import PartStopped, PipelineError, World

FIRST_PAUSE_SECONDS: Final = 1.0
MAX_PAUSE_SECONDS: Final = 60.0
"""Between two tries of a part that fails each time; doubles from the first."""

logger = structlog.get_logger(__name__)


def supervise(
    part: str,
    work: Callable[[threading.Event], None],
    stop: threading.Event,
    world: World,
    pause_seconds: float = FIRST_PAUSE_SECONDS,
) -> None:
    """Run `work` until it returns. After an exception it is called again, when a pause has passed.

    Raises:
        PartStopped: the work can't go on.
    """
    world.errors.expect(part)
    pause = pause_seconds
    while True:
        began = world.clock.monotonic()
        try:
            work(stop)
            return
        except PartStopped:
            raise
        except Exception as error:  # noqa: BLE001 - logged and counted; the other parts and the next turn go on
            if world.clock.monotonic() - began > MAX_PAUSE_SECONDS:
                pause = pause_seconds
            if isinstance(error, PipelineError):  # the store or a broker is away: one line says so
                logger.error("a part failed, and is tried again", part=part, reason=str(error), again_in=pause)
            else:
                world.errors.note(part, error, again_in=pause)
        if stop.wait(pause):
            return
        pause = min(2 * pause, MAX_PAUSE_SECONDS)


def reason_of(error: Exception, part: str, world: World, **context: object) -> str:
    """What is wrong with one job, door or endpoint that a part passes over, for its log. An exception that was never
    foreseen is counted, and logged with its traceback."""
    if isinstance(error, PipelineError):
        return str(error)
    world.errors.note(part, error, **context)
    return f"unforeseen {type(error).__name__}; the log has its traceback"
