"""Ingest and publishing services of an installation, by its settings: bucket events, Kafka and Celery."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pipeline.ingest.files.source import FileIngestSource
from pipeline.ingest.files.watcher import FileIngestWatcher, WatchSettings
from tokenmill.errors import UserError
from tokenmill.root import S3, Root, open_intake
from tokenmill.services.backends import publisher_lease

if TYPE_CHECKING:
    import threading
    from collections.abc import Mapping

    from pipeline.adapters.kafka.connection import KafkaConnection
    from schemas.settings.ingest import KafkaOptions
    from schemas.settings.settings import Settings
    from tokenmill.processes.runtime import Part


def ingest_services(root: Root, settings: Settings) -> dict[str, Part]:
    """The services by name. Raises `UserError` if the settings name none, or contradict each other."""
    parts: dict[str, Part] = {}
    if root.url.startswith(S3):
        parts["bucket"] = _bucket(root, settings)
    elif settings.bucket.queue_url:
        raise UserError(f"TOKENMILL_BUCKET__QUEUE_URL is set, but {root.url} is no bucket; name an s3:// root")
    if settings.kafka.bootstrap_servers:
        parts |= _kafka(root, settings)
    if settings.celery.queues:
        parts["celery"] = _celery(root, settings)
    if not parts:
        raise UserError(
            "no ingest source is configured; name an s3:// root, Kafka's brokers in "
            "TOKENMILL_KAFKA__BOOTSTRAP_SERVERS, or a queue in TOKENMILL_CELERY__QUEUES. "
            "For a folder of dropped files use 'tokenmill serve'"
        )
    return parts


def _bucket(root: Root, settings: Settings) -> Part:
    from pipeline.adapters.s3.url import split_url
    from pipeline.adapters.sqs import SqsQueue, SqsSettings
    from pipeline.ingest.files.s3_events import BucketEvents
    from pipeline.ingest.files.s3_inbox import BucketInbox

    bucket, prefix = split_url(root.url)
    above = prefix.rstrip("/") + "/" if prefix.rstrip("/") else ""
    assert root.s3 is not None  # an s3:// root has one
    intake, connection = open_intake(root, settings), root.s3
    inboxes = [
        BucketInbox(connection, bucket, f"{above}{below}", tenant) for below, tenant in settings.bucket.prefixes.items()
    ]
    sources = [FileIngestSource(inbox, intake, root.world) for inbox in inboxes]
    events = None
    if settings.bucket.queue_url:
        queue = SqsQueue(
            SqsSettings(
                settings.bucket.queue_url,
                region=settings.s3.region,
                endpoint=settings.bucket.queue_endpoint or settings.s3.endpoint,
            )
        )
        events = BucketEvents(queue, list(zip(inboxes, sources, strict=True)), root.world)
    watch = WatchSettings(sweep_interval_seconds=settings.bucket.sweep_interval_seconds)
    return FileIngestWatcher(sources, root.world, watch, events).run


def _kafka(root: Root, settings: Settings) -> Mapping[str, Part]:
    from pipeline.adapters.kafka.producer import KafkaSender, ProducerSettings
    from pipeline.egress.publisher import Publisher, PublisherSettings
    from pipeline.egress.release_events import ReleaseEventPublisher
    from pipeline.ingest.kafka.settings import KafkaIngestSettings
    from pipeline.ingest.kafka.source import build_kafka_ingest

    options = settings.kafka
    prefix, reply_topics = options.topic_prefix, frozenset(options.reply_topics)
    reading = KafkaIngestSettings(
        kafka_connection(options),
        requests=options.requests or {f"{prefix}.requests": "default"},
        jobs=options.jobs or {f"{prefix}.jobs": "default"},
        deadletter_topic=f"{prefix}.deadletter",
        group_id=options.group_id,
        epoch=options.epoch,
        start=options.start,
        batch_records=options.batch_records,
        batch_seconds=options.batch_seconds,
        max_value_bytes=settings.limits.max_line_bytes,
        reply_topics=reply_topics,
        uri_prefixes=options.uri_prefixes,
        session_timeout_seconds=options.session_timeout_seconds,
    )
    sender = KafkaSender(ProducerSettings(reading.connection, idempotence=options.idempotence))
    intake = open_intake(root, settings)

    def ingest(stop: threading.Event) -> None:  # an ended source can't be used again
        build_kafka_ingest(reading, root.world, intake, sender, root.pin, settings.limits).run(stop)

    publishing = PublisherSettings(
        f"{prefix}.results",
        f"{prefix}.events",
        reading.deadletter_topic,
        reply_topics=reply_topics,
        all_jobs=options.announce_all,
    )

    def publish(stop: threading.Event) -> None:
        with publisher_lease(settings, root.world) as lease:
            Publisher(root.world, sender, publishing, lease).run(stop)

    releases = ReleaseEventPublisher(root.world.store, sender, publishing.events_topic)
    return {"kafka": ingest, "publisher": publish, "release events": releases.run}


def kafka_connection(options: KafkaOptions) -> KafkaConnection:
    """The connection to Kafka by the settings."""
    from pipeline.adapters.kafka.connection import KafkaConnection

    return KafkaConnection(
        bootstrap_servers=options.bootstrap_servers,
        security_protocol=options.security_protocol,
        sasl_mechanism=options.sasl_mechanism,
        username=options.username,
        password=None if options.password is None else options.password.get_secret_value(),
        ca_file=options.ca_file,
        cert_file=options.cert_file,
        key_file=options.key_file,
        key_password=None if options.key_password is None else options.key_password.get_secret_value(),
    )


def _celery(root: Root, settings: Settings) -> Part:
    from pipeline.adapters.redis.connection import RedisSettings
    from pipeline.adapters.redis.heartbeats import RedisHeartbeats
    from pipeline.ingest.celery.generate_task import GenerateCalls, GenerateSettings
    from pipeline.ingest.celery.ingest_worker import CeleryIngestSettings, CeleryIngestWorker
    from pipeline.ingest.celery.tasks import CeleryTasks, TaskSettings
    from pipeline.lane.redis import RedisLane
    from tokenmill.services.backends import SILENCE
    from tokenmill.services.virtual_models import model_resolver

    broker = settings.broker_url or settings.redis_url
    if broker is None:
        raise UserError(
            "TOKENMILL_CELERY__QUEUES is set, but no broker; set TOKENMILL_BROKER_URL or TOKENMILL_REDIS_URL"
        )
    options = settings.celery
    tasks = CeleryTasks(
        root.world,
        open_intake(root, settings),
        root.pin,
        TaskSettings(uri_prefixes=options.uri_prefixes),
    )
    ingest = CeleryIngestSettings(
        broker.get_secret_value(),
        None if options.result_url is None else options.result_url.get_secret_value(),
        queues=options.queues,
    )
    if settings.redis_url is None:
        return lambda stop: CeleryIngestWorker(tasks, ingest, root.world).run(stop)
    connection = RedisSettings(settings.redis_url.get_secret_value())
    lane = RedisLane(connection, root.world.clock, settings.lane.limits)
    heartbeats = RedisHeartbeats(connection, lifetime=SILENCE)
    models = model_resolver(root.world, heartbeats, lane)
    limits = GenerateSettings(
        max_timeout_seconds=options.generate_timeout_seconds,
        max_waiting=options.max_concurrent_generates,
        default_model=settings.default_model,
        limits=settings.limits,
    )
    generating = GenerateCalls(lane, models, root.world.clock, limits, root.world.traces)

    def run(stop: threading.Event) -> None:
        try:
            CeleryIngestWorker(tasks, ingest, root.world, generating).run(stop)
        finally:
            heartbeats.close()
            lane.close()

    return run
