"""Assembly of Kafka ingest."""

from __future__ import annotations

from pipeline.ingest.intake import IntakePort
from pipeline.ingest.kafka.consumer import KafkaIngest
from pipeline.ingest.kafka.dead_letters import KafkaDeadLetters
from pipeline.ingest.kafka.job_references import JobRecords
from pipeline.ingest.kafka.partition import Handler
from pipeline.ingest.kafka.request_batches import RequestBatches
from pipeline.ingest.kafka.settings import KafkaIngestSettings
from pipeline.inputs.open import Pin
from pipeline.ports import Messages, World
from schemas.requests.limits import Limits


def kafka_handlers(
    settings: KafkaIngestSettings,
    world: World,
    intake: IntakePort,
    messages: Messages,
    pin: Pin,
    limits: Limits | None = None,
) -> dict[str, Handler]:
    """The handler of each topic.

    Args:
        messages: producer of dead letters' messages.  pin: pins the input of a job by reference.
        limits: of the lines; the same with which jobs are planned.
    """
    dead_letters = KafkaDeadLetters(
        world, messages, settings.deadletter_topic, settings.deadletter_retry_timeout_seconds
    )
    requests = RequestBatches(world, intake, dead_letters, settings, limits)
    jobs = JobRecords(world, intake, dead_letters, settings, pin)
    return {**dict.fromkeys(settings.requests, requests), **dict.fromkeys(settings.jobs, jobs)}


def build_kafka_ingest(
    settings: KafkaIngestSettings,
    world: World,
    intake: IntakePort,
    messages: Messages,
    pin: Pin,
    limits: Limits | None = None,
) -> KafkaIngest:
    """A member of the group, ready to `run`; see `kafka_handlers`."""
    handlers = kafka_handlers(settings, world, intake, messages, pin, limits)
    return KafkaIngest(settings, handlers, intake.room_for, world.clock)
