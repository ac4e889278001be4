"""Tells a topic how releases ended, at least once: each repeat is the same to the byte, and carries the same id."""

from __future__ import annotations

import threading
from typing import Final

import structlog

from pipeline.models.registry import ModelRegistry, ReleaseState
from pipeline.ports import Message, Messages, ObjectStore, PipelineError
from schemas.jobs.events import ReleaseEnded

ANNOUNCED: Final = "announced/releases/"
LOOK_SECONDS: Final = 10.0

logger = structlog.get_logger(__name__)


class ReleaseEventPublisher:
    """A `Part`. Several may run: one that finds no marker sends, so some news may come from each of them."""

    def __init__(self, store: ObjectStore, messages: Messages, topic: str) -> None:
        self._store = store
        self._book = ModelRegistry(store)
        self._messages = messages
        self._topic = topic
        self._told: set[str] = set()

    def run(self, stop: threading.Event) -> None:
        """Until `stop`; what fails is tried again."""
        while not stop.is_set():
            try:
                self.look()
            except PipelineError as error:
                logger.error("release not announced", reason=str(error))
            stop.wait(LOOK_SECONDS)

    def look(self) -> None:
        """Tell what is new. Raises `PipelineError` when it can't be read or sent."""
        for last in self._book.all_last():
            for standing in self._book.history(last.release.name) if last.release.number > 1 else [last]:
                if standing.release.id not in self._told and standing.outcome is not None:
                    self._tell(standing)

    def _tell(self, standing: ReleaseState) -> None:
        release, outcome = standing.release, standing.outcome
        assert outcome is not None
        marker = ANNOUNCED + release.id
        if self._store.info(marker) is None:
            event = ReleaseEnded(
                id=f"{release.id}/ended", at=outcome.at, model=release.name, release=release.number,
                stable=release.stable.pin.digest, candidate=release.candidate.pin.digest, verdict=outcome.verdict,
                by=outcome.by, reasons=outcome.reasons,
            )  # fmt: skip
            value = event.model_dump_json(exclude_none=True).encode()
            headers = (("event_id", event.id.encode()),)
            self._messages.send([Message(self._topic, value, release.name.encode(), headers)])
            self._store.create(marker, b"")
        self._told.add(release.id)
