"""Replay of dead letters to their ingest source, from the command line."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from tokenmill.errors import UserError

if TYPE_CHECKING:
    from pipeline.ingest.dead_letters import DeadLetter, Send
    from schemas.settings.settings import Settings

KAFKA = "kafka"


@contextmanager
def sender(dead_letter: DeadLetter, settings: Settings) -> Iterator[Send | None]:
    """A function that sends the dead letter's original to its source; None where removing a marker is enough, or where
    replay isn't possible.

    Raises:
        UserError: Kafka's brokers are not named.
    """
    from pipeline.ingest.dead_letters import BUCKET_EVENTS

    if dead_letter.ingest_source == BUCKET_EVENTS:
        yield _to_queue(dead_letter, settings)
    elif dead_letter.ingest_source == KAFKA:
        with _to_topic(dead_letter, settings) as send:
            yield send
    else:
        yield None


def _to_queue(dead_letter: DeadLetter, settings: Settings) -> Send:
    from pipeline.adapters.sqs import SqsQueue, SqsSettings

    endpoint = settings.bucket.queue_endpoint or settings.s3.endpoint
    queue = SqsQueue(SqsSettings(dead_letter.place, region=settings.s3.region, endpoint=endpoint))
    return lambda _, original: f"sent to {dead_letter.place} as {queue.send(original.decode())}"


@contextmanager
def _to_topic(dead_letter: DeadLetter, settings: Settings) -> Iterator[Send]:
    if not settings.kafka.bootstrap_servers:
        raise UserError(f"{dead_letter.id}: came from Kafka; name its brokers in TOKENMILL_KAFKA__BOOTSTRAP_SERVERS")
    from pipeline.adapters.kafka.producer import KafkaSender, ProducerSettings
    from pipeline.ingest.kafka.dead_letters import replay
    from tokenmill.services.intake import kafka_connection

    connection = kafka_connection(settings.kafka)
    topic = KafkaSender(ProducerSettings(connection, idempotence=settings.kafka.idempotence))
    try:
        yield replay(topic)
    finally:
        topic.close()
