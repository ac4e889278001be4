"""`requests`: records become durable micro-batches, and each batch becomes jobs, whoever finds it.

The order of writes is the whole of it: dead letters, lines, the batch (which decides), the jobs' origins, the jobs;
then the offset may be committed. After a death at any point the next consumer begins at the same offset, finds what
stands and does what is missing. A batch is found by the offset where it begins, and by any that it covers: the log may
have been compacted or shortened in between.
"""

from __future__ import annotations

from collections.abc import Sequence

import structlog

from pipeline.ingest.intake import NO_MODEL, IntakeOptions, IntakeRefused
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
from pipeline.tracing import doors_span
from schemas.requests.limits import Limits

logger = structlog.get_logger(__name__)


class RecordMismatch(PipelineError):
    """Raised when a stored batch is not of the records that the topic holds now: the topic was made anew."""


class RequestBatches:
    """What the door does with partitions of requests: side by side, each of them by one thread at a time."""

    def __init__(
        self,
        world: World,
        intake: IntakeOptions,
        letters: KafkaDeadLetters,
        settings: KafkaIngestSettings,
        limits: Limits | None = None,
    ) -> None:
        self._world = world
        self._store = world.store
        self._intake = intake
        self._letters = letters
        self._settings = settings
        self._limits = limits or Limits()
        self._windows: dict[str, ResendWindow] = {}

    def begin(self, place: PartitionId, offset: int) -> int:
        """A partition was given to this consumer: finish what others stored of it from `offset` on, and say where to
        read on."""
        window = ResendWindow(self._world, self._settings.resend_window, self._settings.resend_records)
        self._windows[place.folder] = window
        batch = floor_batch(self._store, place, offset)
        if batch is None:
            return offset
        window.recall(batch)
        if batch.first == offset or batch.last < offset:
            return offset  # `store` compares a batch that begins here with the records
        self._finish(place, batch)
        return batch.last + 1

    def store(self, place: PartitionId, first: int, records: Sequence[Record]) -> int:
        """Make the records durable, with all that stands between `first` and them, and their jobs accepted. The offset
        behind what is safe, which may be committed: another consumer may have stored fewer records, or more."""
        key = batch_key(place, first)
        batch = load_batch(self._store, key)
        if batch is None:
            batch = self._create(key, place, first, records)
        _check_same(batch, records, place)
        self._finish(place, batch)
        window = self._windows[place.folder]
        if batch.first != window.latest:
            window.remember(batch)
        return batch.last + 1

    def _create(self, key: str, place: PartitionId, first: int, records: Sequence[Record]) -> KafkaBatch:
        window = self._windows[place.folder]
        rules = RecordRules(place.tenant, self._settings.most_value_bytes, self._settings.reply_topics, self._limits)
        found = sort_records(records, rules, window.seen())
        self._letters.write(place, found.refused)
        batch = KafkaBatch(
            cluster=place.cluster,
            topic=place.topic,
            partition=place.partition,
            tenant=place.tenant,
            first=first,
            last=records[-1].offset,
            at=self._world.clock.now(),
            groups=store_groups(self._store, place, first, found, traced=self._world.traces.on),
            previous=window.latest,
            sample=records[0].offset,
            sample_sha256=value_digest(records[0]),
            refused=len(found.refused),
            resent=len(found.resent),
        )
        if not self._store.create(key, batch.to_json()):
            standing = load_batch(self._store, key)
            if standing is None:
                raise PipelineError(
                    f"{self._store.locate(key)}: exists and can't be found; is something deleting here?"
                )
            return standing
        logger.info(
            "kafka_batch_stored",
            place=str(place),
            first=first,
            last=batch.last,
            jobs=len(batch.groups),
            refused=batch.refused,
            resent=batch.resent,
        )
        return batch

    def _finish(self, place: PartitionId, batch: KafkaBatch) -> None:
        """The batch's jobs, in order; all that are there already cost a look."""
        key = batch_key(place, batch.first)
        for index, draft in enumerate(drafts(self._store, batch)):
            origin = Origin(batch=key, group=index)
            self._store.create(origin_key(draft.job_id), origin.to_json())
            try:
                with doors_span(self._world.traces, "kafka batch", batch.groups[index].traces or ()) as span:
                    submitted = self._intake.accept(draft)
                    span.set(_told_of(place, batch, index) | {"tokenmill.job.id": submitted.job.id})
            except IntakeRefused as refused:
                if refused.code == NO_MODEL:
                    raise PipelineError(f"{place}: {refused}; the records wait") from refused
                self._refuse(place, batch, index, refused)
                self._store.delete(origin_key(draft.job_id))

    def _refuse(self, place: PartitionId, batch: KafkaBatch, index: int, refused: IntakeRefused) -> None:
        records = list(original_records(self._store, batch.groups[index]))
        self._letters.write(place, refuse_all(records, refused.code, str(refused)))


def _told_of(place: PartitionId, batch: KafkaBatch, index: int) -> dict[str, str | int]:
    """By OpenTelemetry's words for messaging."""
    return {
        "messaging.system": "kafka",
        "messaging.destination.name": place.topic,
        "messaging.destination.partition.id": str(place.partition),
        "messaging.kafka.offset": batch.first,
        "messaging.batch.message_count": batch.groups[index].rows,
    }


def _check_same(batch: KafkaBatch, records: Sequence[Record], place: PartitionId) -> None:
    """Raises `RecordMismatch` when the batch was made of another topic of this name."""
    for record in records:
        if record.offset == batch.sample and value_digest(record) != batch.sample_sha256:
            raise RecordMismatch(
                f"kafka: {place} holds another record at offset {record.offset} than when it was stored: the topic was "
                "made anew; give the door another epoch"
            )
