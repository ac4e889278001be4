"""Topics of requests: records become durable micro-batches, and each batch becomes jobs; any consumer can finish one.

The order of writes ensures correctness: dead letters, lines, the batch (which decides), the jobs' origins, the jobs;
then the offset may be committed. After a crash at any point the next consumer starts at the same offset, finds the
existing objects and creates the missing ones. A batch is found by its first offset, and by any offset that it covers:
the log may have been compacted or truncated in between.
"""

from __future__ import annotations

from collections.abc import Sequence

import structlog

from pipeline.ingest.intake import NO_MODEL, IntakePort, IntakeRefused
from pipeline.ingest.kafka.dead_letters import KafkaDeadLetters, refuse_all
from pipeline.ingest.kafka.dedup_window import ResendWindow
from pipeline.ingest.kafka.micro_batches import (
    KafkaBatch,
    Origin,
    PartitionId,
    batch_key,
    drafts,
    floor_batch,
    load_batch,
    origin_key,
    original_records,
    store_groups,
    value_digest,
)
from pipeline.ingest.kafka.records import Record, RecordRules, sort_records
from pipeline.ingest.kafka.settings import KafkaIngestSettings
from pipeline.ports import PipelineError, World
from pipeline.tracing import ingest_span
from schemas.requests.limits import Limits

logger = structlog.get_logger(__name__)


class RecordMismatch(PipelineError):
    """Raised when a stored batch doesn't match the topic's current records: the topic was recreated."""


class RequestBatches:
    """Handler of partitions of requests: concurrent partitions, one thread at a time for each."""

    def __init__(
        self,
        world: World,
        intake: IntakePort,
        dead_letters: KafkaDeadLetters,
        settings: KafkaIngestSettings,
        limits: Limits | None = None,
    ) -> None:
        self._world = world
        self._store = world.store
        self._intake = intake
        self._dead_letters = dead_letters
        self._settings = settings
        self._limits = limits or Limits()
        self._windows: dict[str, ResendWindow] = {}

    def begin(self, partition_id: PartitionId, offset: int) -> int:
        """Start an assigned partition: finish the batches that other consumers stored from `offset` on; returns the
        offset to read from."""
        window = ResendWindow(self._world, self._settings.resend_window_seconds, self._settings.resend_records)
        self._windows[partition_id.folder] = window
        batch = floor_batch(self._store, partition_id, offset)
        if batch is None:
            return offset
        window.recall(batch)
        if batch.first == offset or batch.last < offset:
            return offset  # `store` compares a batch that begins here with the records
        self._finish(partition_id, batch)
        return batch.last + 1

    def store(self, partition_id: PartitionId, first: int, records: Sequence[Record]) -> int:
        """Make the records, and everything between `first` and them, durable, and submit their jobs. Returns the offset
        after the durable records, which may be committed: another consumer may have stored fewer records, or more."""
        key = batch_key(partition_id, first)
        batch = load_batch(self._store, key)
        if batch is None:
            batch = self._create(key, partition_id, first, records)
        _check_same(batch, records, partition_id)
        self._finish(partition_id, batch)
        window = self._windows[partition_id.folder]
        if batch.first != window.latest:
            window.remember(batch)
        return batch.last + 1

    def _create(self, key: str, partition_id: PartitionId, first: int, records: Sequence[Record]) -> KafkaBatch:
        window = self._windows[partition_id.folder]
        rules = RecordRules(
            partition_id.tenant, self._settings.max_value_bytes, self._settings.reply_topics, self._limits
        )
        found = sort_records(records, rules, window.seen())
        self._dead_letters.write(partition_id, found.refused)
        batch = KafkaBatch(
            cluster=partition_id.cluster,
            topic=partition_id.topic,
            partition=partition_id.partition,
            tenant=partition_id.tenant,
            first=first,
            last=records[-1].offset,
            at=self._world.clock.now(),
            groups=store_groups(self._store, partition_id, first, found, traced=self._world.traces.is_enabled),
            previous=window.latest,
            sample=records[0].offset,
            sample_sha256=value_digest(records[0]),
            refused=len(found.refused),
            resent=len(found.resent),
        )
        if not self._store.create(key, batch.to_json()):
            existing = load_batch(self._store, key)
            if existing is None:
                raise PipelineError(
                    f"{self._store.locate(key)}: exists and can't be found; is something deleting here?"
                )
            return existing
        logger.info(
            "kafka_batch_stored",
            partition=str(partition_id),
            first=first,
            last=batch.last,
            jobs=len(batch.groups),
            refused=batch.refused,
            resent=batch.resent,
        )
        return batch

    def _finish(self, partition_id: PartitionId, batch: KafkaBatch) -> None:
        """Submit the batch's jobs, in order; a job that exists already costs one existence check."""
        key = batch_key(partition_id, batch.first)
        for index, draft in enumerate(drafts(self._store, batch)):
            origin = Origin(batch=key, group=index)
            self._store.create(origin_key(draft.job_id), origin.to_json())
            try:
                with ingest_span(self._world.traces, "kafka batch", batch.groups[index].traces or ()) as span:
                    submitted = self._intake.accept(draft)
                    span.set(_span_attributes(partition_id, batch, index) | {"tokenmill.job.id": submitted.job.id})
            except IntakeRefused as refused:
                if refused.code == NO_MODEL:
                    raise PipelineError(f"{partition_id}: {refused}; the records wait") from refused
                self._refuse(partition_id, batch, index, refused)
                self._store.delete(origin_key(draft.job_id))

    def _refuse(self, partition_id: PartitionId, batch: KafkaBatch, index: int, refused: IntakeRefused) -> None:
        records = list(original_records(self._store, batch.groups[index]))
        self._dead_letters.write(partition_id, refuse_all(records, refused.code, str(refused)))


def _span_attributes(partition_id: PartitionId, batch: KafkaBatch, index: int) -> dict[str, str | int]:
    """Span attributes by OpenTelemetry's semantic conventions for messaging."""
    return {
        "messaging.system": "kafka",
        "messaging.destination.name": partition_id.topic,
        "messaging.destination.partition.id": str(partition_id.partition),
        "messaging.kafka.offset": batch.first,
        "messaging.batch.message_count": batch.groups[index].rows,
    }


def _check_same(batch: KafkaBatch, records: Sequence[Record], partition_id: PartitionId) -> None:
    """Raise `RecordMismatch` when the batch was stored from another topic of this name."""
    for record in records:
        if record.offset == batch.sample and value_digest(record) != batch.sample_sha256:
            raise RecordMismatch(
                f"kafka: {partition_id} holds another record at offset {record.offset} than when it was stored: the "
                "topic was made anew; set another epoch"
            )
