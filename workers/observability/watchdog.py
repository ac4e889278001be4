"""Ends the process of a worker whose engine is stuck: a kernel that never returns can't be stopped otherwise.

A long step must not cost a worker its shards: its heartbeats are repeated until `limit_seconds` have passed without
progress (see `workers.shards.heartbeats`). Then the watchdog dumps the threads' stacks and ends the process. The
supervisor restarts the process, and other workers take its shards soon after. The attempt records no end, so the rows
that were running are suspects, as after any death (see `workers.shards.isolation`).
"""

from __future__ import annotations

import faulthandler
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

import structlog

if TYPE_CHECKING:
    from workers.observability.progress import WorkerProgress

STUCK_EXIT_CODE: Final = 70
"""EX_SOFTWARE of sysexits.h."""

CHECKS_PER_LIMIT: Final = 10
"""How often the watchdog checks within the time after which a worker counts as stuck."""

logger = structlog.get_logger(__name__)


class Watchdog:
    """A `WorkerObserver` that ends the process after `limit_seconds` seconds without progress."""

    def __init__(self, limit_seconds: float) -> None:
        self._limit_seconds = limit_seconds
        self._last_progress = time.monotonic()

    def progress(self, progress: WorkerProgress) -> None:
        """Record progress of the loop."""
        self._last_progress = time.monotonic()

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watch until the block ends."""
        ended = threading.Event()
        self._last_progress = time.monotonic()
        threading.Thread(target=self._watch, args=(ended,), name="watchdog", daemon=True).start()
        try:
            yield
        finally:
            ended.set()

    def _watch(self, ended: threading.Event) -> None:
        while not ended.wait(self._limit_seconds / CHECKS_PER_LIMIT):
            silent_seconds = time.monotonic() - self._last_progress
            if silent_seconds > self._limit_seconds and not ended.is_set():
                logger.error("the engine is stuck, and the worker ends", seconds=round(silent_seconds))
                faulthandler.dump_traceback(sys.__stderr__ or 2)
                os._exit(STUCK_EXIT_CODE)
