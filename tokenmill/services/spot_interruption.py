"""Amazon's notice that a spot instance will be taken away, two minutes before: the worker then ends in order.

The notice stands at the instance's metadata service, which is asked every few seconds (Amazon EC2 User Guide, "Spot
Instance interruption notices").
"""

from __future__ import annotations

import threading
from typing import Final

import structlog

from tokenmill.services.instance_metadata import ask

NOTICE: Final = "spot/instance-action"
LOOK_SECONDS: Final = 5.0

logger = structlog.get_logger(__name__)


def watch_for_notice(stop: threading.Event, look_seconds: float = LOOK_SECONDS) -> None:
    """Set `stop` once the notice stands. Returns when it is set, by whomever."""
    heard = True
    while not stop.is_set():
        try:
            (notice,) = ask(NOTICE)
        except OSError as error:
            if heard:  # once: it may be so for months
                logger.warning("the metadata service can't be asked for a spot notice", reason=str(error))
            heard, notice = False, None
        else:
            heard = True
        if notice is not None:
            logger.warning("the instance will be taken away", notice=notice)
            stop.set()
        stop.wait(look_seconds)
