"""The state of one assigned partition: its gathered records, and its one running task."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Literal, Protocol

from pipeline.ingest.kafka.micro_batches import PartitionId
from pipeline.ingest.kafka.records import Record
from pipeline.ingest.kafka.settings import KafkaIngestSettings


class Handler(Protocol):
    """Processes a topic's records. Called from the consumer's threads, for one partition never from two at a time."""

    def begin(self, partition_id: PartitionId, offset: int) -> int:
        """Start an assigned partition, to be read from `offset` on; returns the offset to read from, which is higher if
        other consumers stored more. Raises `PipelineError`: try again."""
        ...

    def store(self, partition_id: PartitionId, first: int, records: Sequence[Record]) -> int:
        """Make everything from `first` up to these records durable. Returns the offset after the durable records: it
        may be committed, and reading continues there. Raises `PipelineError`: try again with the same records."""
        ...


@dataclass(slots=True)
class PartitionTask:
    """A task for a partition, retried until it is done. `end`: the offset after it, as far as the consumer knows."""

    kind: Literal["begin", "store"]
    first: int
    end: int
    records: Sequence[Record] = ()
    future: Future[int] | None = None


@dataclass(slots=True, eq=False)
class Partition:
    """Offsets, in order: committed offset <= `durable` <= `work.first` < `work.end` = `first` <= `next`.

    Attributes:
        first: first offset of the batch that is being gathered.
        next: offset of the next record, or a lower one where the log has gaps.
        since: when the first of `records` was received.
        durable: the offset that may be committed, if it isn't committed yet.
    """

    partition_id: PartitionId
    first: int
    next: int
    records: list[Record] = field(default_factory=list)
    size: int = 0
    since: float = 0.0
    work: PartitionTask | None = None
    failures: int = 0
    retry_at: float = 0.0
    durable: int | None = None

    def gather(self, records: Sequence[Record], now: float) -> None:
        """Add received records."""
        if not self.records:
            self.since = now
        self.records.extend(records)
        self.size += sum(record.size for record in records)
        self.next = records[-1].offset + 1

    def restart(self, offset: int) -> None:
        """Discard the gathered records; the next record is at `offset`."""
        self.records, self.size = [], 0
        self.first = self.next = offset

    def safe(self) -> int | None:
        """The offset that may be committed, including the running task if it has just finished."""
        future = None if self.work is None else self.work.future
        if self.work is None or future is None or not future.done() or future.exception() is not None:
            return self.durable
        end = future.result()
        return end if end > self.work.first else self.durable

    def is_full(self, settings: KafkaIngestSettings) -> bool:
        return len(self.records) >= settings.batch_records or self.size >= settings.batch_bytes

    def is_due(self, settings: KafkaIngestSettings, now: float) -> bool:
        """Whether the batch is due to be stored."""
        return bool(self.records) and (self.is_full(settings) or now - self.since >= settings.batch_seconds)

    def cut(self, settings: KafkaIngestSettings, now: float) -> PartitionTask:
        """Cut the batch that is due; records beyond its limits begin the next one."""
        count = size = 0
        for record in self.records:
            if count and (count >= settings.batch_records or size + record.size > settings.batch_bytes):
                break
            count, size = count + 1, size + record.size
        taken, left = self.records[:count], self.records[count:]
        work = PartitionTask("store", self.first, taken[-1].offset + 1, taken)
        self.records, self.size, self.first, self.since = left, self.size - size, work.end, now
        return work
