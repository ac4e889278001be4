"""A member of the Kafka consumer group: polls continuously, stores in other threads, and commits only durable offsets.

Storage may be slow or unavailable, so the poll loop never waits for it: a few threads store batches, and a partition
whose next batch is full meanwhile is paused. A revoked partition is forgotten at once; batches that a thread still
stores are found by the partition's next consumer.

kafka-python runs rebalance callbacks on its own thread, while this one waits in `poll`. They only record the change,
and commit. kafka-python also retains a partition's position over a rebalance, so a position is never trusted: each
assigned partition's offset is read and sought again.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any

import structlog
from kafka import AsyncConsumerRebalanceListener, KafkaConsumer, OffsetAndMetadata, TopicPartition
from kafka.errors import KafkaConfigurationError, KafkaError, NoOffsetForPartitionError, OffsetOutOfRangeError

from pipeline.adapters.kafka.connection import KafkaSettingsError
from pipeline.ingest.kafka.micro_batches import PartitionId
from pipeline.ingest.kafka.partition import Handler, Partition, PartitionTask
from pipeline.ingest.kafka.records import Record
from pipeline.ingest.kafka.settings import KafkaIngestSettings
from pipeline.ingest.kafka.topic_ids import TopicIds
from pipeline.ports import Clock, ComponentStopped, PipelineError

_ROOM_INTERVAL_SECONDS = 1.0
_CLOSE_SECONDS = 10.0

logger = structlog.get_logger(__name__)


class KafkaIngestStopped(ComponentStopped):
    """Raised when ingest can't go on without a decision: the offset is out of the topic's range, and the settings say
    stop."""


@dataclass(slots=True)
class IngestCounters:
    """Counters of the consumer since its start."""

    records: int = 0
    batches: int = 0
    rebalances: int = 0
    failures: int = 0
    pauses: int = 0


class _Listener(AsyncConsumerRebalanceListener):  # type: ignore[misc]
    """Records rebalances in order, and commits durable offsets before partitions are revoked."""

    def __init__(self, commit: Callable[[set[Any]], Any]) -> None:
        self.events: deque[tuple[bool, set[Any]]] = deque()
        self._commit = commit

    async def on_partitions_revoked(self, revoked: set[Any]) -> None:
        self.events.append((False, set(revoked)))
        future = self._commit(revoked)
        if future is not None:
            try:
                await future
            except KafkaError as error:
                logger.warning("kafka_commit_failed", when="revoked", reason=repr(error))

    async def on_partitions_assigned(self, assigned: set[Any]) -> None:
        self.events.append((True, set(assigned)))

    async def on_partitions_lost(self, lost: set[Any]) -> None:
        self.events.append((False, set(lost)))


class KafkaIngest:
    """One member of the group. `run` it on a thread of its own; `close` is part of that.

    Args:
        handlers: topic -> handler of its records.
        room_for: whether a tenant may have more work queued; called on another thread.
    """

    def __init__(
        self,
        settings: KafkaIngestSettings,
        handlers: Mapping[str, Handler],
        room_for: Callable[[str], bool],
        clock: Clock,
    ) -> None:
        self.counts = IngestCounters()
        self._settings = settings
        self._handlers = handlers
        self._room_for = room_for
        self._clock = clock
        self._ids = TopicIds(settings)
        self._consumer: Any = None
        self._listener = _Listener(self._commit_revoked)
        self._pool = ThreadPoolExecutor(settings.store_threads + 1, "kafka-ingest")
        self._partitions: dict[Any, Partition] = {}
        self._unstarted: dict[Any, int | None] = {}
        self._room = dict.fromkeys(settings.topics.values(), True)
        self._room_refresh: Future[dict[str, bool]] | None = None
        self._room_at = self._start_at = self._commit_at = float("-inf")

    def run(self, stop: threading.Event) -> None:
        """Ingest records until `stop` is set. An unreachable cluster is retried. Raises `KafkaIngestStopped`."""
        try:
            while not stop.is_set():
                self.step()
        finally:
            self.close()

    def step(self) -> None:
        """One poll, with the work that it causes; takes at most some seconds, even when storage is slow."""
        if self._consumer is None and not self._connect():
            return
        polled = self._poll()
        fresh = self._rebalanced()
        for tp, records in polled.items():
            partition = self._partitions.get(tp)
            if partition is not None and tp not in fresh:
                self._take(tp, partition, [_record(record) for record in records])
        self._refresh_room()
        now = self._clock.monotonic()
        for tp, partition in list(self._partitions.items()):
            self._advance(tp, partition, now)
        self._commit(now)
        self._pause_or_resume()

    def close(self) -> None:
        """Wait a little for batches that are being stored, commit them, and leave the group."""
        running = [part.work.future for part in self._partitions.values() if part.work and part.work.future]
        wait(running, _CLOSE_SECONDS)
        consumer = self._consumer
        if consumer is not None:
            for partition in self._partitions.values():
                work = partition.work
                if work is not None and work.future is not None and work.future.done():
                    self._collect(partition, work, self._clock.monotonic())
            self._commit(float("inf"))
            try:
                consumer.close(timeout_ms=int(self._settings.call_timeout_seconds * 1000))
            except KafkaError as error:
                logger.warning("kafka_close_failed", reason=repr(error))
            self._consumer = None
        self._partitions.clear()
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._ids.close()

    def _connect(self) -> bool:
        try:
            consumer = KafkaConsumer(**self._settings.consumer_options())
        except KafkaConfigurationError as error:
            raise KafkaSettingsError(f"kafka: {error}; correct the settings") from error
        except KafkaError as error:
            logger.error("kafka_unreachable", brokers=self._settings.connection.bootstrap_servers, reason=repr(error))
            self._clock.sleep(self._settings.first_retry_seconds)
            return False
        consumer.subscribe(topics=sorted(self._settings.topics), listener=self._listener)
        self._consumer = consumer
        return True

    def _poll(self) -> Mapping[Any, list[Any]]:
        try:
            found: Mapping[Any, list[Any]] = self._consumer.poll(timeout_ms=int(self._settings.poll_seconds * 1000))
        except (NoOffsetForPartitionError, OffsetOutOfRangeError) as error:
            raise KafkaIngestStopped(
                f"kafka: no valid offset for group {self._settings.group_id} ({error!r}); records may be gone: set "
                "start to earliest or latest to go on"
            ) from error
        except KafkaError as error:
            logger.error("kafka_poll_failed", reason=repr(error))
            self.counts.failures += 1
            self._clock.sleep(self._settings.first_retry_seconds)
            return {}
        return found

    # -- assigned partitions

    def _rebalanced(self) -> set[Any]:
        """Apply the recorded rebalances. Returns the partitions whose records of this poll are of another position."""
        events = self._listener.events
        while events:
            assigned, changed = events.popleft()
            self.counts.rebalances += assigned
            for tp in changed:
                self._partitions.pop(tp, None)
                self._unstarted.pop(tp, None)
                if assigned:
                    self._unstarted[tp] = None
        fresh = set(self._unstarted)
        now = self._clock.monotonic()
        if self._unstarted and now >= self._start_at:
            try:
                for tp, offset in sorted(self._unstarted.items()):
                    self._begin(tp, self._offset_of(tp) if offset is None else offset)
                    del self._unstarted[tp]
            except (KafkaSettingsError, KafkaIngestStopped):
                raise
            except (KafkaError, PipelineError) as error:
                logger.warning("kafka_partition_not_begun", reason=str(error) or repr(error))
                self._start_at = now + self._settings.first_retry_seconds
        return fresh

    def _offset_of(self, tp: Any) -> int:
        """The start offset of a partition: the committed offset, else by the settings."""
        consumer = self._consumer
        offset: int | None = consumer.committed(tp, timeout_ms=self._timeout_ms)
        if offset is None:
            if self._settings.start == "stop":
                raise KafkaIngestStopped(
                    f"kafka: group {self._settings.group_id} has no offset for {tp.topic}/{tp.partition}; set start to "
                    "earliest or latest to begin"
                )
            (consumer.seek_to_beginning if self._settings.start == "earliest" else consumer.seek_to_end)(tp)
            offset = consumer.position(tp, timeout_ms=self._timeout_ms)
            if offset is None:
                raise PipelineError(
                    f"kafka: the brokers don't say where {tp.topic}/{tp.partition} begins; trying again"
                )
        return offset

    def _begin(self, tp: Any, offset: int) -> None:
        partition_id = PartitionId(
            self._ids.cluster_of(tp.topic), tp.topic, tp.partition, self._settings.topics[tp.topic]
        )
        self._consumer.seek(tp, offset)
        self._partitions[tp] = partition = Partition(partition_id, offset, offset)
        self._submit(partition, PartitionTask("begin", offset, offset))

    def _take(self, tp: Any, partition: Partition, records: list[Record]) -> None:
        first = records[0].offset
        if first < partition.next:
            logger.warning(
                "kafka_offset_out_of_range", partition=str(partition.partition_id), was=partition.next, now=first
            )
            self._partitions.pop(tp)  # another log than before: start again at the client's new position
            self._unstarted[tp] = first
            return
        if first > partition.next:
            logger.warning(
                "kafka_records_missing", partition=str(partition.partition_id), first=partition.next, last=first - 1,
                why="compacted, expired, or marks of transactions",
            )  # fmt: skip
        self.counts.records += len(records)
        partition.gather(records, self._clock.monotonic())

    # -- storing

    def _advance(self, tp: Any, partition: Partition, now: float) -> None:
        work = partition.work
        if work is not None:
            if work.future is None:
                if now >= partition.retry_at:
                    self._submit(partition, work)
            elif work.future.done():
                end = self._collect(partition, work, now)
                if end is not None and end != work.end:
                    partition.restart(end)
                    self._consumer.seek(tp, end)
        if partition.work is None and partition.is_due(self._settings, now):
            self._submit(partition, partition.cut(self._settings, now))

    def _submit(self, partition: Partition, work: PartitionTask) -> None:
        handler = self._handlers[partition.partition_id.topic]
        if work.kind == "begin":
            work.future = self._pool.submit(handler.begin, partition.partition_id, work.first)
        else:
            work.future = self._pool.submit(handler.store, partition.partition_id, work.first, work.records)
        partition.work = work

    def _collect(self, partition: Partition, work: PartitionTask, now: float) -> int | None:
        """The end offset of a finished task; None when it failed, and is retried."""
        assert work.future is not None
        try:
            end = work.future.result()
        except PipelineError as error:
            delay = min(self._settings.first_retry_seconds * 2**partition.failures, self._settings.max_retry_seconds)
            partition.failures += 1
            partition.retry_at = now + delay
            work.future = None
            self.counts.failures += 1
            logger.warning("kafka_not_stored", partition=str(partition.partition_id), first=work.first, again_in=delay,
                           reason=str(error))  # fmt: skip
            return None
        partition.work, partition.failures = None, 0
        if end > work.first:
            partition.durable = end
        self.counts.batches += work.kind == "store"
        return end

    # -- offsets

    @property
    def _timeout_ms(self) -> int:
        return int(self._settings.call_timeout_seconds * 1000)

    def _commit(self, now: float) -> None:
        ready = {tp: part.durable for tp, part in self._partitions.items() if part.durable is not None}
        if not ready or now < self._commit_at:
            return
        try:
            self._consumer.commit(_offsets(ready), timeout_ms=self._timeout_ms)
        except KafkaError as error:
            logger.warning("kafka_commit_failed", when="stored", reason=repr(error))
            self.counts.failures += 1
            self._commit_at = now + self._settings.first_retry_seconds
            return
        for tp in ready:
            self._partitions[tp].durable = None

    def _commit_revoked(self, revoked: set[Any]) -> Any:
        """Commit durable offsets, on the client's thread while this one waits for it; the future, if there is
        anything."""
        ready: dict[Any, int] = {}
        for tp in revoked:
            partition = self._partitions.get(tp)
            durable = None if partition is None else partition.safe()
            if durable is not None:
                ready[tp] = durable
        return self._consumer.commit_async(_offsets(ready)) if ready else None

    # -- backpressure

    def _refresh_room(self) -> None:
        refresh = self._room_refresh
        if refresh is not None and refresh.done():
            self._room_refresh = None
            try:
                self._room = refresh.result()
            except PipelineError as error:
                logger.warning("kafka_room_unknown", reason=str(error))
        now = self._clock.monotonic()
        if self._room_refresh is None and now - self._room_at >= _ROOM_INTERVAL_SECONDS:
            self._room_at = now
            self._room_refresh = self._pool.submit(self._read_room)

    def _read_room(self) -> dict[str, bool]:
        return {tenant: self._room_for(tenant) for tenant in set(self._settings.topics.values())}

    def _pause_or_resume(self) -> None:
        """Pause partitions without room, in memory or for their tenant, and resume the others. The member stays in the
        group: leaving it would only move the problem."""
        assigned = self._consumer.assignment()
        wanted = {tp for tp, part in self._partitions.items()
                  if part.is_full(self._settings) or not self._room[part.partition_id.tenant]}  # fmt: skip
        wanted = (wanted | self._unstarted.keys()) & assigned
        paused = self._consumer.paused()
        if wanted - paused:
            self.counts.pauses += len(wanted - paused)
            self._consumer.pause(*(wanted - paused))
        if paused - wanted:
            self._consumer.resume(*(paused - wanted))


def _offsets(ready: Mapping[Any, int]) -> dict[Any, Any]:
    return {TopicPartition(*tp): OffsetAndMetadata(offset, "", -1) for tp, offset in ready.items()}


def _record(found: Any) -> Record:
    return Record(found.offset, found.timestamp, found.key, found.value, tuple(found.headers))
