"""The deduplication window of a partition: a producer that missed a confirmation may resend a request, batches later.

The window is rebuilt from stored batches, so the next consumer of a partition has the same. It only decides which
requests a new batch leaves out; the stored batch records them.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection
from datetime import timedelta

from pipeline.ingest.kafka.micro_batches import KafkaBatch, PartitionId, batch_key, group_records, load_batch
from pipeline.ports import World


class ResendWindow:
    """The recent requests of one partition.

    Args:
        seconds: how long a request is remembered, counted from its batch.  records: maximum number; 0: none.
    """

    def __init__(self, world: World, seconds: float, records: int) -> None:
        self._world = world
        self._span = timedelta(seconds=seconds)
        self._max_records = records
        self._batches: OrderedDict[int, tuple[KafkaBatch, frozenset[bytes]]] = OrderedDict()
        self.latest: int | None = None

    def seen(self) -> Collection[bytes]:
        """Digests of the requests in the window."""
        self._forget()
        return frozenset().union(*(digests for _, digests in self._batches.values()))

    def remember(self, batch: KafkaBatch) -> None:
        """Add the partition's latest batch."""
        self.latest = batch.first
        self._batches[batch.first] = (batch, self._digests(batch) if self._max_records else frozenset())
        self._forget()

    def recall(self, batch: KafkaBatch) -> None:
        """Rebuild the window from the latest batch and those before it."""
        found, count = [batch], 0
        while self._max_records and count < self._max_records and self._is_recent(found[-1]):
            count += sum(group.rows for group in found[-1].groups)
            previous = self._load_previous(found[-1])
            if previous is None:
                break
            found.append(previous)
        for one in reversed(found):
            self.remember(one)

    def _load_previous(self, batch: KafkaBatch) -> KafkaBatch | None:
        if batch.previous is None or batch.previous >= batch.first:
            return None
        partition_id = PartitionId(batch.cluster, batch.topic, batch.partition, batch.tenant)
        return load_batch(self._world.store, batch_key(partition_id, batch.previous))

    def _digests(self, batch: KafkaBatch) -> frozenset[bytes]:
        if not self._is_recent(batch):
            return frozenset()
        store, found = self._world.store, set[bytes]()
        for group in batch.groups:
            found.update(group_records(store, group, ["digest"])["digest"].to_pylist())
        found.discard(b"")
        return frozenset(found)

    def _is_recent(self, batch: KafkaBatch) -> bool:
        return self._world.clock.now() - batch.at < self._span

    def _forget(self) -> None:
        while self._batches:
            oldest, _ = next(iter(self._batches.values()))
            count = sum(len(digests) for _, digests in self._batches.values())
            if count <= self._max_records and self._is_recent(oldest):
                return
            self._batches.popitem(last=False)
