"""How a dead letter gets back to its door from the command line."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pipeline.dead_letters import DeadLetter, Send
    from schemas.settings import Settings


@contextmanager
def sender(letter: DeadLetter, settings: Settings) -> Iterator[Send | None]:
    """What sends the letter's original again; None where removing a marker is enough, or where no way leads."""
    from pipeline.dead_letters import BUCKET_EVENTS

    if letter.door == BUCKET_EVENTS:
        from pipeline.adapters.sqs import SqsQueue, SqsSettings

        queue = SqsQueue(SqsSettings(letter.place, region=settings.s3.region, endpoint=settings.s3.endpoint))
        yield lambda _, original: f"sent to {letter.place} as {queue.send(original.decode())}"
        return
    yield None
