"""Amazon's notice of a spot instance's interruption, two minutes before it; the worker then stops gracefully.

The instance's metadata service has the notice, and is polled every few seconds (Amazon EC2 User Guide, "Spot Instance
interruption notices").
"""

from __future__ import annotations

import threading
from typing import Final

import structlog

from tokenmill.services.instance_metadata import ask

NOTICE: Final = "spot/instance-action"
POLL_SECONDS: Final = 5.0

logger = structlog.get_logger(__name__)


def watch_for_notice(stop: threading.Event, poll_seconds: float = POLL_SECONDS) -> None:
    """Poll for the notice and set `stop` then. Returns when `stop` is set."""
    reachable = True
    while not stop.is_set():
        try:
            (notice,) = ask(NOTICE)
        except OSError as error:
            if reachable:  # only once: the state may last for months
                logger.warning("the metadata service can't be reached for a spot notice", reason=str(error))
            reachable, notice = False, None
        else:
            reachable = True
        if notice is not None:
            logger.warning("the instance will be taken away", notice=notice)
            stop.set()
        stop.wait(poll_seconds)
