"""Ends a worker whose engine is stuck: a kernel that never returns can't be asked to stop.

A long step is no reason to take a worker's shards away: its heartbeats are repeated until `limit` seconds have passed
without progress (see `heartbeats`), and then this ends the process. It says where it hangs, and is started again by
whatever looks after it; others have its shards soon after. The attempt leaves no end behind, so the rows that were
running are suspects, as after any death (see `shard_worker`).
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

LOOKS: Final = 10
"""In the time after which a worker counts as stuck."""

logger = structlog.get_logger(__name__)


class Watchdog:
    """A `WorkerObserver` that ends the process when it hasn't been told of anything for `limit` seconds."""

    def __init__(self, limit: float) -> None:
        self._limit = limit
        self._heard = time.monotonic()

    def progress(self, progress: WorkerProgress) -> None:
        """The loop is alive."""
        self._heard = time.monotonic()

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watch from here on, until the block ends."""
        over = threading.Event()
        self._heard = time.monotonic()
        threading.Thread(target=self._watch, args=(over,), name="watchdog", daemon=True).start()
        try:
            yield
        finally:
            over.set()

    def _watch(self, over: threading.Event) -> None:
        while not over.wait(self._limit / LOOKS):
            silent = time.monotonic() - self._heard
            if silent > self._limit and not over.is_set():
                logger.error("the engine is stuck, and the worker ends", seconds=round(silent))
                faulthandler.dump_traceback(sys.__stderr__ or 2)
                os._exit(STUCK_EXIT_CODE)
