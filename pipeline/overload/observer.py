"""A worker's view of the degradation steps that gateways report."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import structlog

from pipeline.overload.ports import WORKER_STEPS, DegradationBoard
from pipeline.runtime.availability import ServiceUnavailable
from schemas.settings.overload import StepName

REFRESH_SECONDS: Final = 1.0

logger = structlog.get_logger(__name__)


class DegradationObserver:
    """Polls the active steps of one model, by its name. Where these can't be read there are none."""

    def __init__(self, board: DegradationBoard, model: str) -> None:
        self._board = board
        self._model = model
        self._steps: frozenset[StepName] = frozenset()

    def steps(self) -> frozenset[StepName]:
        """The active steps, as of the last poll."""
        return self._steps

    def refresh(self) -> None:
        """Poll the active steps."""
        try:
            steps = self._board.active(self._model, WORKER_STEPS)
        except ServiceUnavailable as error:
            logger.warning("degradation is not known: no step is active", reason=str(error))
            steps = frozenset()
        if steps != self._steps:
            logger.info("degradation changed", model=self._model, steps=sorted(steps))
        self._steps = steps

    @contextmanager
    def polling(self) -> Iterator[None]:
        """Poll each second, on a thread, until the block ends."""
        ended = threading.Event()

        def run() -> None:
            self.refresh()
            while not ended.wait(REFRESH_SECONDS):
                self.refresh()

        thread = threading.Thread(target=run, name="degradation", daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()
