"""Publishes release events to a topic, at least once: each repeat is identical to the byte, and has the same id."""

from __future__ import annotations

import threading
from typing import Final

import structlog

from pipeline.models.registry import ModelRegistry, ReleaseState
from pipeline.ports import Message, Messages, ObjectStore, PipelineError
from schemas.jobs.events import ReleaseEnded

ANNOUNCED: Final = "announced/releases/"
POLL_INTERVAL_SECONDS: Final = 10.0

logger = structlog.get_logger(__name__)


class ReleaseEventPublisher:
    """A `Part`. Several may run: each sends unmarked events, so an event may be sent by each of them."""

    def __init__(self, store: ObjectStore, messages: Messages, topic: str) -> None:
        self._store = store
        self._registry = ModelRegistry(store)
        self._messages = messages
        self._topic = topic
        self._published: set[str] = set()

    def run(self, stop: threading.Event) -> None:
        """Publish until `stop` is set; failures are retried."""
        while not stop.is_set():
            try:
                self.poll()
            except PipelineError as error:
                logger.error("release not announced", reason=str(error))
            stop.wait(POLL_INTERVAL_SECONDS)

    def poll(self) -> None:
        """Publish new events. Raises `PipelineError` when an object can't be read or an event can't be sent."""
        for last in self._registry.all_last():
            for standing in self._registry.history(last.release.name) if last.release.number > 1 else [last]:
                if standing.release.id not in self._published and standing.outcome is not None:
                    self._publish(standing)

    def _publish(self, standing: ReleaseState) -> None:
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
        self._published.add(release.id)
