"""Supervision restarts a part of the process after an unexpected exception, so that the exception never ends the
process.

The part restarts after a pause. All its state is in the store, so only time is lost. Only an error that a retry can't
resolve (`ComponentStopped`) ends a part, and with it the process.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Final

import structlog

from pipeline.ports import ComponentStopped, PipelineError, World

FIRST_PAUSE_SECONDS: Final = 1.0
MAX_PAUSE_SECONDS: Final = 60.0
"""Pause between two attempts of a part that fails repeatedly; doubles from the first."""

logger = structlog.get_logger(__name__)


def supervise(
    part: str,
    work: Callable[[threading.Event], None],
    stop: threading.Event,
    world: World,
    pause_seconds: float = FIRST_PAUSE_SECONDS,
) -> None:
    """Run `work` until it returns. After an exception it is called again, after a pause.

    Raises:
        PartStopped: a retry can't help.
    """
    world.errors.expect(part)
    pause = pause_seconds
    while True:
        began = world.clock.monotonic()
        try:
            work(stop)
            return
        except ComponentStopped:
            raise
        except Exception as error:  # noqa: BLE001 - logged and counted; the other parts and the next attempt go on
            if world.clock.monotonic() - began > MAX_PAUSE_SECONDS:
                pause = pause_seconds
            if isinstance(error, PipelineError):  # the store or a broker is unavailable: no traceback
                logger.error("a part failed, and is tried again", part=part, reason=str(error), again_in=pause)
            else:
                world.errors.record(part, error, again_in=pause)
        if stop.wait(pause):
            return
        pause = min(2 * pause, MAX_PAUSE_SECONDS)


def reason_of(error: Exception, part: str, world: World, **context: object) -> str:
    """The reason for skipping one job, ingest source or endpoint, for the log. An unexpected exception is counted, and
    logged with its traceback."""
    if isinstance(error, PipelineError):
        return str(error)
    world.errors.record(part, error, **context)
    return f"unforeseen {type(error).__name__}; the log has its traceback"
